"""Loader of blobs from the running Flux instance, by a helper process in Flux's interpreter (flux_helper.py).

zarrfs has a Python environment of its own, which cannot import Flux's binding, and `flux content load` starts a
process for each read. The helper has one connection to the broker and many requests in flight. Sources: RFC 10,
flux_helper.py.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import signal
import struct
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

import trio
from trio.lowlevel import FdStream

from zarrfs.archives.blobrefs import wrong_length
from zarrfs.concurrency.tasks import in_background
from zarrfs.errors import ReadError, TargetMissing, reason_of
from zarrfs.system.buffers import Buffer

_HELPER = str(Path(__file__).with_name("flux_helper.py"))
_ANSWER = struct.Struct("!II")
_IN_FLIGHT = 64  # requests, whose lines fit in a pipe, so that writing them does not block
_READ = 1 << 20  # bytes of one read
_MESSAGE_MAX = 300  # characters quoted of a message of the helper


@dataclass(slots=True)
class _Request:
    blobref: str
    size: int
    done: trio.Event = field(default_factory=trio.Event)
    answer: tuple[int, Buffer | int] | None = None  # (errno, the blob, its length if that is not `size`, or a reason)


class FluxBlobs:
    """The blobs of the running instance, loaded by one helper, which starts now. All methods run on one trio loop."""

    def __init__(self) -> None:
        self._limit = trio.CapacityLimiter(_IN_FLIGHT)
        self._requests: deque[_Request] = deque()  # without an answer; answers come in their order
        self._process: trio.Process | None = None
        self._received = bytearray()
        self._reads = 0
        self.ended = ""  # why all loads fail
        in_background(self._run)

    async def load(self, blobref: str, size: int, timeout: float) -> Buffer:
        """Load a blob of `size` bytes; its hash is not verified. Raise TargetMissing, OutOfRange or ReadError.

        The helper is killed if nothing arrives from it for `timeout` seconds.
        """
        where, request = f"flux:{blobref}", _Request(blobref, size)
        async with self._limit:
            if not self.ended:
                self._requests.append(request)
                self._send(request)
            while not (request.done.is_set() or self.ended):
                before = self._reads
                with trio.move_on_after(timeout):
                    await request.done.wait()
                    break
                if self._reads == before:
                    self._kill(f"no answer within {timeout:g} s")
        if request.answer is None:
            raise ReadError(where, self.ended)
        code, data = request.answer
        if code == errno.ENOENT:
            raise TargetMissing(where, "no such blob")
        if isinstance(data, int):
            raise wrong_length(where, data, size)
        if code:
            raise ReadError(where, f"content.load: {bytes(data).decode(errors='replace')[:_MESSAGE_MAX]}")
        return data

    async def aclose(self) -> None:
        """Kill the helper. Loads fail."""
        self._kill("the reader is closed")

    def _kill(self, why: str) -> None:
        """Kill the helper with the processes of its group, because `flux` may be a script. Loads fail."""
        self.ended = self.ended or why
        if self._process is not None:
            with contextlib.suppress(OSError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def _send(self, request: _Request) -> None:
        """Send a request, unless the helper is still being started; _run() sends those that came before."""
        if self._process is None:
            return
        assert isinstance(self._process.stdin, FdStream)
        try:
            os.write(self._process.stdin.fileno(), f"{request.blobref.partition('-')[2]} {request.size}\n".encode())
        except BlockingIOError:  # after many loads that were cancelled
            self._kill("the helper does not answer")
        except OSError:
            pass  # _run() finds out why the helper has ended

    async def _run(self) -> None:
        """Start the helper, and receive its answers until it ends."""
        messages = os.memfd_create("flux")  # not a pipe, because nobody reads it before the end
        try:
            self._process = await trio.lowlevel.open_process(
                ["flux", "python", _HELPER], stdin=-1, stdout=-1, stderr=messages, start_new_session=True,
                env=os.environ | {"LC_ALL": "C"},
            )  # fmt: skip
            output = self._process.stdout
            assert isinstance(output, FdStream)
            with contextlib.suppress(OSError):  # beyond the user's limit
                fcntl.fcntl(output.fileno(), fcntl.F_SETPIPE_SZ, _READ)
            for request in self._requests:
                self._send(request)
            while not self.ended:
                code, length = _ANSWER.unpack(await self._next(output, _ANSWER.size))
                request = self._requests[0]
                blob = await self._next(output, length) if code or length == request.size else length
                self._requests.popleft().answer = code, blob
                request.done.set()
        except (EOFError, trio.BrokenResourceError):
            await self._wait()
            message = os.pread(messages, 1 << 16, 0).decode(errors="replace")
            self.ended = self.ended or " ".join(message.split())[-_MESSAGE_MAX:] or "the helper ended"
        except OSError as exc:
            self.ended = f"flux python: cannot run flux: {reason_of(exc)}"
        finally:
            self._kill("interrupted")
            os.close(messages)
            await self._wait()
            self._process = None  # its ID may be that of another process from now on
            for request in self._requests:
                request.done.set()

    async def _wait(self) -> None:
        """Wait for the end of the helper, and close its pipes."""
        with trio.CancelScope(deadline=trio.current_time() + 5, shield=True):
            if self._process is not None:
                await self._process.wait()
                for pipe in self._process.stdin, self._process.stdout:
                    if pipe is not None:
                        await pipe.aclose()

    async def _next(self, output: FdStream, count: int) -> bytes:
        while len(self._received) < count:
            data = await output.receive_some(_READ)
            if not data:
                raise EOFError
            self._reads += 1
            self._received += data
        with memoryview(self._received) as view:
            found = bytes(view[:count])
        del self._received[:count]
        return found

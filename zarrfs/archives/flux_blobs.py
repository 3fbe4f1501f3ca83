"""Loader of blobs from the running Flux instance, by a helper process in Flux's interpreter (flux_helper.py).

zarrfs has a Python environment of its own, which cannot import Flux's binding, and `flux content load` starts a
process for each read. The helper has one connection to the broker and many requests in flight. It is started for the
first blob, and again after it has ended. Sources: RFC 10, flux_helper.py.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import signal
import struct
from collections import deque
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


class FluxBlobs:
    """The blobs of the running instance. All methods run on one trio loop."""

    def __init__(self) -> None:
        self._limit = trio.CapacityLimiter(_IN_FLIGHT)
        self._starting = trio.Lock()
        self._helper: _Helper | None = None

    async def load(self, blobref: str, size: int, timeout: float) -> Buffer:
        """Load a blob of `size` bytes; its hash is not verified. Raise TargetMissing, OutOfRange or ReadError.

        The helper is killed if nothing arrives from it for `timeout` seconds.
        """
        where = f"flux:{blobref}"
        async with self._limit:
            try:
                async with self._starting:
                    if self._helper is None or self._helper.ended:
                        self._helper = await _Helper.start()
                code, data = await self._helper.load(blobref, size, timeout)
            except OSError as exc:
                raise ReadError(where, f"flux python: cannot run flux: {reason_of(exc)}") from None
            except _Ended as exc:
                raise ReadError(where, f"flux: {exc}") from None
        if code == errno.ENOENT:
            raise TargetMissing(where, "no such blob")
        if code:
            raise ReadError(where, f"content.load: {bytes(data).decode(errors='replace')[:_MESSAGE_MAX]}")
        if isinstance(data, int):
            raise wrong_length(where, data, size)
        return data

    async def aclose(self) -> None:
        """Kill the helper. Loads fail."""
        if self._helper is not None:
            self._helper.kill("the reader is closed")


class _Ended(Exception):
    """The end of the helper, with the reason."""


class _Request:
    __slots__ = ("answer", "done", "size")

    def __init__(self, size: int) -> None:
        self.size, self.done = size, trio.Event()
        self.answer: tuple[int, Buffer | int] | None = None  # (errno, the blob, its length if that differs, or why)


class _Helper:
    """A running helper, with a task that receives its answers, which come in the order of the requests."""

    def __init__(self, process: trio.Process, messages: int) -> None:
        assert isinstance(process.stdin, FdStream)
        assert isinstance(process.stdout, FdStream)
        self._process, self._messages = process, messages
        self._input, self._output = process.stdin, process.stdout
        self._requests: deque[_Request] = deque()  # without an answer
        self._received = bytearray()
        self._reads = 0
        self.ended = ""  # the reason, once it has ended

    @classmethod
    async def start(cls) -> _Helper:
        """Start a helper. Raise OSError."""
        messages = os.memfd_create("flux")  # not a pipe, because nobody reads it before the end
        try:
            process = await trio.lowlevel.open_process(
                ["flux", "python", _HELPER], stdin=-1, stdout=-1, stderr=messages, start_new_session=True,
                env=os.environ | {"LC_ALL": "C"},
            )  # fmt: skip
        except BaseException:
            os.close(messages)
            raise
        found = cls(process, messages)
        with contextlib.suppress(OSError):  # beyond the user's limit
            fcntl.fcntl(found._output.fileno(), fcntl.F_SETPIPE_SZ, _READ)
        in_background(found._receive)
        return found

    async def load(self, blobref: str, size: int, timeout: float) -> tuple[int, Buffer | int]:
        """Return (errno, the blob, its length if that is not `size`, or the reason of a failure). Raise _Ended."""
        if self.ended:
            raise _Ended(self.ended)
        request = _Request(size)
        self._requests.append(request)
        try:
            os.write(self._input.fileno(), f"{blobref.partition('-')[2]} {size}\n".encode())
        except BlockingIOError:  # after many loads that were cancelled
            self.kill("the helper does not answer")
        except OSError:
            pass  # _receive() finds out why the helper has ended
        while not request.done.is_set():
            before = self._reads
            with trio.move_on_after(timeout):
                await request.done.wait()
                break
            if self._reads == before:
                self.kill(f"no answer within {timeout:g} s")
                break
        if request.answer is None:
            raise _Ended(self.ended)
        return request.answer

    def kill(self, why: str) -> None:
        """Kill the helper with the processes of its group, because `flux` may be a script. Loads fail."""
        self.ended = self.ended or why
        with contextlib.suppress(OSError):
            os.killpg(self._process.pid, signal.SIGKILL)

    async def _receive(self) -> None:
        try:
            while True:
                code, length = _ANSWER.unpack(await self._next(_ANSWER.size))
                request, answer = self._requests[0], length
                if code or length == request.size:
                    answer = await self._next(length)
                self._requests.popleft()
                request.answer = code, answer
                request.done.set()
        except (EOFError, trio.ClosedResourceError, trio.BrokenResourceError):
            with trio.move_on_after(1):
                await self._process.wait()
            message = os.pread(self._messages, 1 << 16, 0).decode(errors="replace")
            self.kill(" ".join(message.split())[-_MESSAGE_MAX:] or "the helper ended")
        finally:
            self.kill("interrupted")
            os.close(self._messages)
            for request in self._requests:
                request.done.set()
            with trio.CancelScope(deadline=trio.current_time() + 5, shield=True):
                await self._process.wait()
                await self._input.aclose()
                await self._output.aclose()

    async def _next(self, count: int) -> bytes:
        while len(self._received) < count:
            data = await self._output.receive_some(_READ)
            if not data:
                raise EOFError
            self._reads += 1
            self._received += data
        with memoryview(self._received) as view:
            found = bytes(view[:count])
        del self._received[:count]
        return found

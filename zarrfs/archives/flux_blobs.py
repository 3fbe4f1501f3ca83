"""Client of a helper process that loads blobs from the running Flux instance, in Flux's interpreter (flux_helper.py).

zarrfs has a Python environment of its own, which cannot import Flux's binding, and running a command for each blob
would take longer than loading the blob. The helper keeps many requests in flight over one connection, and sends blobs
over a pipe. It is started for the first blob and replaced when it dies. Its standard input is a pipe, so it ends when
this process ends, even if that is killed.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import signal
import struct
import subprocess

import trio

from zarrfs.archives.blobrefs import LARGEST
from zarrfs.archives.source_kinds import HELPER, PROTOCOL, other_version
from zarrfs.concurrency.tasks import in_background
from zarrfs.errors import ReadError, TargetMissing, reason_of
from zarrfs.system.buffers import Buffer

_GREETING = re.compile(rb"zarrfs-flux-blobs (\d+)\n")
_GREETING_MAX = 64  # bytes
_REQUEST, _ANSWER = struct.Struct("!IB"), struct.Struct("!III")
_NUMBERS = 1 << 20  # the numbers of requests are below this
_START = 30.0  # seconds that the helper has to send its greeting
_READ = 128 << 10  # bytes of one read, which may return many small answers
_PATIENCE = 5.0  # seconds that a process has to end
_PIPE = 1 << 20  # bytes of a pipe that an unprivileged process may have by default
_REASON_MAX = 300  # characters


class FluxBlobs:
    """The blobs of the running instance. All methods run on one trio loop."""

    def __init__(self) -> None:
        self._helper: _Helper | None = None
        self._closed = False

    async def load(self, blobref: str, timeout: float) -> Buffer:
        """Load a blob, without verifying its hash. Raise TargetMissing or ReadError.

        A request has `timeout` seconds, in addition to the start of a helper, if there is none. If the helper dies
        while the blob is in flight, request it once more from the next helper.
        """
        where = f"flux:{blobref}"
        digest = bytes.fromhex(blobref.partition("-")[2])
        try:
            try:
                code, data = await self._running().load(digest, timeout)
            except _Ended:
                code, data = await self._running().load(digest, timeout)
        except trio.TooSlowError:
            raise ReadError(where, f"content.load: no answer within {timeout:g} s") from None
        except _Ended as exc:
            raise ReadError(where, str(exc)) from None
        if code == errno.ENOENT:
            raise TargetMissing(where, "no such blob")
        if code:
            raise ReadError(where, f"content.load: {_text(data) or os.strerror(code).lower()}")
        return data

    def _running(self) -> _Helper:
        """Return the helper that runs or is being started, which concurrent callers share."""
        if self._closed:
            raise _Ended("the reader is closed")
        if self._helper is None or self._helper.ended:
            self._helper = _Helper()
            in_background(self._helper.run)
        return self._helper

    async def aclose(self) -> None:
        """Kill the helper, and wait up to 5 s for its end."""
        self._closed = True
        if self._helper is not None:
            self._helper.kill("the reader is closed")
            with trio.move_on_after(_PATIENCE):
                await self._helper.gone.wait()


class _Ended(Exception):
    """The end of a helper, or a failure to start one, with the reason."""


class _Request:
    """A request in flight. When `done` is set, `answer` is set as well, unless the helper has ended."""

    __slots__ = ("answer", "done")

    def __init__(self) -> None:
        self.done = trio.Event()
        self.answer: tuple[int, Buffer] | None = None  # (0, the blob) or (errno, the reason)


class _Helper:
    """A helper process. run() starts it, and receives its answers until it ends."""

    def __init__(self) -> None:
        self.ended = ""  # why the helper has ended; "" while it starts or runs
        self.gone = trio.Event()
        self._ready = trio.Event()  # it has sent its greeting, or has ended
        self._process: trio.Process | None = None
        self._to = -1  # descriptor of its standard input
        self._requests: dict[int, _Request] = {}
        self._number = self._answers = 0
        self._rest = memoryview(b"")  # bytes received and not used yet
        self._reason = ""  # why the helper ends, as the helper or the caller of kill() says
        self._killed = False

    async def load(self, digest: bytes, timeout: float) -> tuple[int, Buffer]:
        """Return (0, blob) or (errno, reason). Raise _Ended, or trio.TooSlowError after `timeout` seconds."""
        await self._ready.wait()
        if self.ended:
            await self.gone.wait()  # the full reason is known only with the exit status
            raise _Ended(self.ended)
        self._number = self._number % (_NUMBERS - 1) + 1
        while self._number in self._requests:
            self._number = self._number % (_NUMBERS - 1) + 1
        number, answers = self._number, self._answers
        request = self._requests[number] = _Request()
        try:
            with trio.fail_after(timeout):
                await self._send(_REQUEST.pack(number, len(digest)) + digest)
                await request.done.wait()
        except trio.TooSlowError:
            if self._answers == answers:
                self.kill(f"no answer at all within {timeout:g} s")  # the next load() starts another helper
            raise
        finally:
            self._requests.pop(number, None)
        if request.answer is None:
            raise _Ended(self.ended)
        return request.answer

    def kill(self, reason: str) -> None:
        """Kill the process, also one that is being started. run() then ends."""
        if not self._killed:
            self._killed, self._reason = True, self._reason or reason
        if self._process is not None and self._process.returncode is None:  # otherwise its pid may have been reused
            with contextlib.suppress(OSError):  # kill the group, because `flux` may be a script
                os.killpg(self._process.pid, signal.SIGKILL)

    async def run(self) -> None:
        """Start the process, and receive its answers until it ends or breaks the protocol."""
        errors = -1
        try:
            errors = os.memfd_create("zarrfs-flux-helper")
            self._process = process = await trio.lowlevel.open_process(
                ["flux", "python", HELPER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors,
                start_new_session=True, cwd="/",
            )  # fmt: skip
            if self._killed:
                self.kill(self._reason)
            assert isinstance(process.stdin, trio.lowlevel.FdStream)
            assert isinstance(process.stdout, trio.lowlevel.FdStream)
            async with process.stdin, process.stdout:
                self._to = process.stdin.fileno()
                for pipe in self._to, process.stdout.fileno():
                    with contextlib.suppress(OSError):  # more than this user may have
                        fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, _PIPE)
                try:
                    await self._receive(process.stdout)
                finally:
                    self._to = -1  # the number may soon be that of another file
            self.ended = "has ended"  # from now on, another helper is started
            with trio.move_on_after(_PATIENCE):
                await process.wait()
            if process.returncode is None:
                self.kill("it has closed its pipe, and goes on")
            self.ended = f"the helper in Flux's Python {self._why(await process.wait(), errors)}"
        except OSError as exc:
            self.ended = f"flux python: cannot run flux: {reason_of(exc)}"
        finally:
            self.ended = self.ended or "the reader is closed"
            self.kill(self.ended)
            if errors >= 0:
                os.close(errors)
            for request in self._requests.values():
                request.done.set()
            self._ready.set()
            self.gone.set()

    async def _send(self, request: bytes) -> None:
        """Write a request, which the pipe takes as a whole."""
        while self._to >= 0:
            try:
                os.write(self._to, request)
            except BlockingIOError:
                await trio.sleep(0.01)
                continue
            except OSError:  # the helper has ended, and run() handles that
                pass
            return

    async def _receive(self, output: trio.abc.ReceiveStream) -> None:
        with trio.move_on_after(_START) as waiting:
            said = bytes(await self._greeting(output))
        if waiting.cancelled_caught:
            self.kill(f"no greeting within {_START:g} s")
            return
        found = _GREETING.match(said)
        if found is None or int(found[1]) != PROTOCOL:
            if said:
                self.kill(other_version(int(found[1])) if found else f"it greets with {said[:_GREETING_MAX]!r}")
            return
        self._rest = memoryview(said)[found.end() :]
        self._ready.set()
        with contextlib.suppress(EOFError):
            while True:
                number, code, length = _ANSWER.unpack(await self._take(output, _ANSWER.size))
                if length > LARGEST:
                    self.kill(f"it answers with {length} bytes, which no blob has")
                    return
                data = await self._take(output, length)
                # a small slice would keep in memory all that was received with it
                self._answered(number, code, data if length > _READ else bytes(data))

    async def _greeting(self, output: trio.abc.ReceiveStream) -> bytes:
        said = b""
        while b"\n" not in said and len(said) < _GREETING_MAX and (chunk := await output.receive_some(_READ)):
            said += chunk
        return said

    async def _take(self, output: trio.abc.ReceiveStream, count: int) -> memoryview:
        """Return the next `count` bytes. Raise EOFError if the pipe has ended."""
        parts, length = [self._rest], len(self._rest)
        while length < count:
            chunk = await output.receive_some(min(max(_READ, count - length), _PIPE))
            if not chunk:
                raise EOFError
            parts.append(memoryview(chunk))
            length += len(chunk)
        data = memoryview(b"".join(parts)) if len(parts) > 1 else self._rest
        self._rest = data[count:]
        return data[:count]

    def _answered(self, number: int, code: int, data: Buffer) -> None:
        self._answers += 1
        if not number:
            self._reason = _text(data)
        elif request := self._requests.get(number):  # otherwise its reader timed out or was cancelled
            request.answer = code, data
            request.done.set()

    def _why(self, status: int, errors: int) -> str:
        said = os.pread(errors, _REASON_MAX, max(0, os.fstat(errors).st_size - _REASON_MAX))
        last = self._reason or next(iter(_text(said).splitlines()[-1:]), "")
        by = "" if self._killed else f" by signal {-status}"
        how = f"was killed{by}" if status < 0 else f"has ended with status {status}"
        return f"{how}{': ' if last else ''}{last}"


def _text(data: Buffer) -> str:
    return bytes(data).decode(errors="replace").strip()

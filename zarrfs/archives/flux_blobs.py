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
from zarrfs.archives.source_kinds import FLUX, HELPER, PROTOCOL, other_version
from zarrfs.concurrency.tasks import in_background
from zarrfs.errors import ReadError, TargetMissing, reason_of
from zarrfs.system.buffers import Buffer

_GREETING = re.compile(rb"zarrfs-flux-blobs (\d+)")
_GREETING_MAX = 64  # bytes
_REQUEST, _ANSWER = struct.Struct("!IB"), struct.Struct("!III")
_NUMBERS = 1 << 20  # the numbers of requests are below this
_START = 30.0  # seconds that the helper has to send its greeting
_BUFFER = 128 << 10  # bytes of one read, which may return many small answers
_ROUND = 4 << 20  # bytes read before a checkpoint lets other tasks run
_PATIENCE = 5.0  # seconds that a process has to end
_PIPE = 1 << 20  # bytes of a pipe that an unprivileged process may have by default
_REASON_MAX = 300  # characters


class FluxBlobs:
    """The blobs of the running instance. All methods run on one trio loop."""

    shown = FLUX

    def __init__(self) -> None:
        self._helper: _Helper | None = None
        self._starting: _Start | None = None
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
                code, data = await (await self._running()).load(digest, timeout)
            except _Ended:
                code, data = await (await self._running()).load(digest, timeout)
        except trio.TooSlowError:
            raise ReadError(where, f"content.load: no answer within {timeout:g} s") from None
        except _Ended as exc:
            raise ReadError(where, str(exc)) from None
        if code == errno.ENOENT:
            raise TargetMissing(where, "no such blob")
        if code:
            raise ReadError(where, f"content.load: {_text(data) or os.strerror(code).lower()}")
        return data

    async def aclose(self) -> None:
        """End the helper."""
        self._closed = True
        if self._helper is not None:
            await self._helper.aclose()

    async def _running(self) -> _Helper:
        """Return a running helper; concurrent callers share one start. Raise _Ended if that fails, or if closed."""
        if self._closed:
            raise _Ended("the reader is closed")
        if self._helper is not None and not self._helper.ended:
            return self._helper
        start = self._starting
        if start is None:
            start = self._starting = _Start()
            in_background(self._start, start)  # so that the start survives a cancelled reader
        await start.done.wait()
        if start.helper is None:
            raise _Ended(start.reason)
        return start.helper

    async def _start(self, start: _Start) -> None:
        try:
            self._helper = await _Helper.started()
            if self._closed:
                await self._helper.aclose()
            start.helper, start.reason = self._helper, self._helper.ended
        except OSError as exc:
            start.reason = f"flux python: cannot run flux: {reason_of(exc)}"
        finally:
            self._starting = None
            start.done.set()


class _Ended(Exception):
    """The end of a helper, or a failure to start one, with the reason."""


class _Start:
    """The start of a helper in progress, for which tasks wait."""

    def __init__(self) -> None:
        self.done = trio.Event()
        self.helper: _Helper | None = None
        self.reason = "interrupted"


class _Request:
    """A request in flight. When `done` is set, `answer` is set as well, unless the helper has ended."""

    __slots__ = ("answer", "done")

    def __init__(self) -> None:
        self.done = trio.Event()
        self.answer: tuple[int, Buffer] | None = None  # (0, the blob) or (errno, the reason)


class _Helper:
    """A helper process, with a task that receives its answers until the process ends."""

    def __init__(self, process: subprocess.Popen[bytes], errors: int) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._process, self._errors = process, errors
        self._to, self._from = process.stdin.fileno(), process.stdout.fileno()
        self._requests: dict[int, _Request] = {}
        self._number = 0
        self._unsent = bytearray()
        self._answers = 0
        self._greeted, self._gone = trio.Event(), trio.Event()
        self._reason = ""  # why the helper ends, as the helper or the caller of kill() says
        self._killed = False
        self.ended = ""  # why the helper has ended; "" while it runs

    @classmethod
    async def started(cls) -> _Helper:
        """Start a process, and wait for its greeting or its end. Raise OSError if it cannot be started."""
        helper = cls(*await trio.to_thread.run_sync(_spawn))
        in_background(helper._receive)
        with trio.move_on_after(_START) as waiting:
            await helper._greeted.wait()
        if waiting.cancelled_caught:
            helper.kill(f"no greeting within {_START:g} s")
            await helper._gone.wait()
        return helper

    async def load(self, digest: bytes, timeout: float) -> tuple[int, Buffer]:
        """Return (0, blob) or (errno, reason). Raise _Ended, or trio.TooSlowError after `timeout` seconds."""
        if self.ended:
            await self._gone.wait()  # the full reason is known only with the exit status
            raise _Ended(self.ended)
        while True:
            self._number = self._number % (_NUMBERS - 1) + 1
            if self._number not in self._requests:
                break
        number, answers = self._number, self._answers
        request = self._requests[number] = _Request()
        self._send(_REQUEST.pack(number, len(digest)) + digest)
        try:
            with trio.fail_after(timeout):
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
        """Kill the process. The receiving task then ends."""
        if not self._killed:
            self._killed, self._reason = True, self._reason or reason
        if self._process.returncode is None:  # otherwise its pid may have been reused
            with contextlib.suppress(OSError):  # kill the group, because `flux` may be a script
                os.killpg(self._process.pid, signal.SIGKILL)

    async def aclose(self) -> None:
        """Kill the process, and wait up to 5 s for its end."""
        self.kill("the reader is closed")
        with trio.move_on_after(_PATIENCE):
            await self._gone.wait()

    def _send(self, data: bytes) -> None:
        """Send a request in a background task, together with those of other tasks in the same scheduler pass."""
        if not self._unsent:
            in_background(self._send_all)
        self._unsent += data

    async def _send_all(self) -> None:
        while self._unsent and not self._gone.is_set():
            try:
                count = os.write(self._to, self._unsent)
            except BlockingIOError:
                with contextlib.suppress(trio.ClosedResourceError):
                    await trio.lowlevel.wait_writable(self._to)
                    continue
                return
            except OSError:  # the helper has ended, and the receiving task handles that
                return
            del self._unsent[:count]

    async def _receive(self) -> None:
        try:
            await self._receive_all()
            self.ended = "has ended"  # from now on, _running() starts another helper
            status = await trio.to_thread.run_sync(self._wait, abandon_on_cancel=True)
            self.ended = f"the helper in Flux's Python {self._why(status)}"
        finally:
            self.ended = self.ended or "the reader is closed"
            self.kill(self.ended)
            for descriptor in (self._to, self._from):
                trio.lowlevel.notify_closing(descriptor)
            for stream in (self._process.stdin, self._process.stdout):
                assert stream is not None
                stream.close()
            os.close(self._errors)
            for request in self._requests.values():
                request.done.set()
            self._greeted.set()
            self._gone.set()

    async def _receive_all(self) -> None:
        """Receive answers until the pipe ends, or an answer breaks the protocol."""
        head = memoryview(bytearray(_BUFFER))
        filled = number = code = 0
        data: memoryview | None = None  # the data of an incomplete answer; then `head` is empty
        got = taken = 0
        while True:
            if taken > _ROUND:
                taken = 0
                await trio.lowlevel.checkpoint()
            try:
                count = os.readv(self._from, [head[filled:]] if data is None else [data[got:], head])
            except BlockingIOError:
                taken = 0
                await trio.lowlevel.wait_readable(self._from)
                continue
            if not count:
                return
            taken += count
            if data is not None:
                got += count
                if got < len(data):
                    continue
                filled = got - len(data)
                self._answered(number, code, data)
                data = None
            else:
                filled += count
            at = 0
            if not self._greeted.is_set():
                at = self._greeting(head[:filled])
                if at < 0:
                    return
                if not at:
                    continue
            while filled - at >= _ANSWER.size:
                number, code, length = _ANSWER.unpack_from(head, at)
                at += _ANSWER.size
                if length > LARGEST:
                    self.kill(f"it answers with {length} bytes, which no blob has")
                    return
                if filled - at < length:
                    data, got = memoryview(bytearray(length)), filled - at
                    data[:got] = head[at:filled]
                    at = filled
                    break
                self._answered(number, code, bytes(head[at : at + length]))
                at += length
            head[: filled - at] = head[at:filled]
            filled -= at

    def _greeting(self, said: memoryview) -> int:
        """Return the length of the greeting; 0 if it is incomplete, -1 if it is not the expected one."""
        line, end, _ = bytes(said[:_GREETING_MAX]).partition(b"\n")
        found = _GREETING.fullmatch(line) if end else None
        if found is not None and int(found[1]) == PROTOCOL:
            self._greeted.set()
            return len(line) + 1
        if not end and len(said) < _GREETING_MAX:
            return 0
        if found is not None:
            self.kill(other_version(int(found[1])))
        elif said:
            self.kill(f"it greets with {line[:_GREETING_MAX]!r}")
        return -1

    def _answered(self, number: int, code: int, data: Buffer) -> None:
        self._answers += 1
        if not number:
            self._reason = _text(data)
            return
        request = self._requests.get(number)
        if request is not None:  # None: its reader timed out or was cancelled
            request.answer = code, data
            request.done.set()

    def _wait(self) -> int:
        """Wait for the process and return its exit status. Kill it if it still runs 5 s after its pipe was closed."""
        try:
            return self._process.wait(_PATIENCE)
        except subprocess.TimeoutExpired:
            self.kill("it has closed its pipe, and goes on")
            return self._process.wait()

    def _why(self, status: int) -> str:
        said = os.pread(self._errors, _REASON_MAX, max(0, os.fstat(self._errors).st_size - _REASON_MAX))
        last = self._reason or next(iter(_text(said).splitlines()[-1:]), "")
        by = "" if self._killed else f" by signal {-status}"
        how = f"was killed{by}" if status < 0 else f"has ended with status {status}"
        return f"{how}{': ' if last else ''}{last}"


def _spawn() -> tuple[subprocess.Popen[bytes], int]:
    """Start a helper; return its process and a descriptor of its standard error. Blocks. Raise OSError."""
    errors = os.memfd_create("zarrfs-flux-helper")
    try:
        process = subprocess.Popen(
            ["flux", "python", HELPER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, bufsize=0,
            start_new_session=True, cwd="/",
        )  # fmt: skip
    except BaseException:
        os.close(errors)
        raise
    for stream in (process.stdin, process.stdout):
        assert stream is not None
        os.set_blocking(stream.fileno(), False)
        with contextlib.suppress(OSError):  # more than this user may have
            fcntl.fcntl(stream, fcntl.F_SETPIPE_SZ, _PIPE)
    return process, errors


def _text(data: Buffer) -> str:
    return bytes(data).decode(errors="replace").strip()

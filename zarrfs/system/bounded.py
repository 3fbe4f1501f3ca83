"""Child processes with bounded memory, for packages that may allocate all memory of the machine, or abort.

A child runs the function answer(header, body) of one module for one request after the other, and returns its header
and body. answer() calls limit_memory() once it has imported what it needs. A request and an answer are a line of JSON
each, followed by as many bytes as the line announces.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from typing import IO, Any

from zarrfs.errors import reason_of
from zarrfs.system.buffers import Buffer
from zarrfs.system.processes import no_bytecode, readable

TIMEOUT = 60.0  # seconds per request
IDLE = 60.0  # seconds after which an idle child ends itself
_IDLE_MAX = 4  # idle child processes of a module
_PROGRAM = (
    "import sys; module, idle, *sys.path = sys.argv[1:]; from zarrfs.system import bounded; "
    "bounded.serve(module, float(idle))"
)

Header = dict[str, Any]


class ChildError(Exception):
    """A child that cannot be started, ended, did not answer in time, ran out of memory, or answered with an error."""


class OutOfMemory(ChildError):
    """A child that needs more memory than it may allocate."""


def call(module: str, header: Header, data: Buffer | None, limit: int) -> tuple[Header, bytearray]:
    """Run `module`.answer() in a child process and return its answer, of at most `limit` bytes. Blocks.

    `header` gets the members "size" and "timeout". Thread-safe. Raise ChildError.
    """
    try:
        child = _take(module)
    except OSError as exc:
        raise ChildError(f"cannot start a process for it: {reason_of(exc)}") from exc
    try:
        found, body = child.request(header, data, limit)
    except BaseException:
        child.end()
        raise
    with _lock:
        idle = _idle.setdefault(module, [])
        keep = len(idle) < _IDLE_MAX
        if keep:
            idle.append(child)
    if not keep:
        child.end()
    if "error" in found:
        raise (ChildError if found["error"] else OutOfMemory)(found["error"])
    return found, body


class _Child:
    """A child process of this one."""

    def __init__(self, module: str) -> None:
        self.parent, self._used = os.getpid(), 0.0
        self._process = subprocess.Popen(
            [sys.executable, "-I", *no_bytecode(), "-c", _PROGRAM, module, str(IDLE), *filter(None, sys.path)],
            bufsize=0, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd="/",
            start_new_session=True,  # Ctrl-C is for this process
        )  # fmt: skip

    @property
    def usable(self) -> bool:
        """Return whether the child is one of this process, not of the one that forked it, and goes on running."""
        due = self._used + IDLE / 2 < time.monotonic()  # it may end at any time
        return self.parent == os.getpid() and not due and self._process.poll() is None

    def request(self, header: Header, data: Buffer | None, limit: int) -> tuple[Header, bytearray]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        late = threading.Timer(TIMEOUT, self._process.kill)  # a child that is stopped takes no request either
        late.daemon = True
        began = time.monotonic()
        late.start()
        try:
            with contextlib.suppress(BrokenPipeError):  # the child has ended: reading its answer reports that
                # the child ends itself only if this process has ended, else its status would be the reason
                _send(self._process.stdin, header | {"timeout": TIMEOUT + 1}, data)
            found = _received(self._process.stdout, limit)
        finally:
            late.cancel()
        self._used = time.monotonic()
        if found is None:
            self._process.kill()
            status = self._process.wait()
            ended = f"the process that decoded has ended with status {status}"
            raise ChildError(f"no answer within {TIMEOUT:g} s" if self._used - began >= TIMEOUT else ended)
        return found

    def end(self) -> None:
        """Kill the process and close its pipes."""
        if self.parent == os.getpid():
            self._process.kill()
            self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()


_idle: dict[str, list[_Child]] = {}  # by module
_lock = threading.Lock()


def _take(module: str) -> _Child:
    with _lock:
        idle = _idle.get(module, [])
        while idle:
            child = idle.pop()
            if child.usable:
                return child
            child.end()
    return _Child(module)


def _send(stream: IO[bytes], header: Header, data: Buffer | None) -> None:
    view = memoryview(b"" if data is None else data).cast("B")
    stream.write(json.dumps(header | {"size": -1 if data is None else len(view)}).encode() + b"\n")
    while view:
        view = view[stream.write(view) :]


def _received(stream: IO[bytes], limit: int) -> tuple[Header, bytearray] | None:
    """Receive a header and the bytes that follow it; None if the stream ends.

    Raise ChildError for more than `limit` bytes.
    """
    line = stream.readline(1 << 20)
    if not line.endswith(b"\n"):
        return None
    header = json.loads(line)
    size = max(header["size"], 0)
    if size > limit:
        raise ChildError(f"decodes to {size} bytes, not {limit}")
    body = bytearray(size)
    view = memoryview(body)
    while view:
        count = stream.readinto(view)  # type: ignore[attr-defined]
        if not count:
            return None
        view = view[count:]
    return header, body


def limit_memory(more: int | None) -> None:
    """Let this process allocate at most `more` bytes beyond what it has; None raises the limit to the hard limit."""
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    limit = hard
    if more is not None:
        with open("/proc/self/statm") as file:
            limit = int(file.read().split()[0]) * resource.getpagesize() + more
        limit = hard if 0 <= hard < limit else limit
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))


def serve(module: str, idle: float) -> None:
    """Answer requests on standard input until it ends, or for `idle` seconds none comes: a child's main function."""
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # the output of a package that prints must not reach the answers
    answer = importlib.import_module(module).answer
    while readable(requests.fileno(), idle) and (request := _received(requests, sys.maxsize)) is not None:
        found: Buffer | None = None
        signal.setitimer(signal.ITIMER_REAL, request[0]["timeout"])  # ends this process, even if the parent has ended
        try:
            header, found = answer(*request)
        except MemoryError:
            header = {"error": ""}
        except Exception as exc:
            header = {"error": str(exc) or type(exc).__name__}
        signal.setitimer(signal.ITIMER_REAL, 0)
        request = None
        _send(answers, header, found)
        found = None
        limit_memory(None)  # the next request may be larger, and is received before its limit is set

"""A server that has imported zarrfs and forks a child for each command of the tests, which saves Python's start-up.

It also forks the children that make plans for commands and stores in the test process itself (zarrfs.sources.child).
Start-up and imports take nine tenths of the processor time of a short command. A forked command is a process of its
own, with its own streams, environment, working directory and exit status, and so are its daemons. Tests of what a fork
does not reset start PROGRAM itself; so do tests with other users, systemd units and batch jobs. Commands that decode
arrays are forked by a second server, which has imported numpy as well; other mounts fork without it, as in reality.

run() returns None, and the caller executes the program, if a child would inherit another state than a program that
this process starts, while coverage is measured, and with ZARRFS_TESTS_EXEC=1.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import importlib.util
import json
import os
import pkgutil
import resource
import select
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

_READ_ONCE = ("LD_", "MALLOC_", "GLIBC_", "PYTHON", "COVERAGE_", "SQLITE_", "LC_", "LANG")
_ROOM = 8192  # bytes for a command line
_STARTING = threading.Lock()
# by process id (a fork inherits the entries of its parents), the variables that are read only once, and with numpy
_SERVERS: dict[tuple[int, tuple[str, ...], bool], _Server] = {}


def run(
    command: Sequence[str], cwd: Path | str | None, environment: Mapping[str, str], seconds: float
) -> subprocess.CompletedProcess[str] | None:
    """Run zarrfs, as subprocess.run() does; return None if the program must be started instead."""
    decodes = any(word in ("check", "info") or "view=" in word for word in command)
    server = _usable(environment, decodes)
    if server is None:
        return None
    asked = {"command": command, "cwd": os.fspath(cwd or os.getcwd()), "environment": dict(environment)}
    link, its = socket.socketpair()
    (out, its_out), (err, its_err) = os.pipe(), os.pipe()
    with link, its, open(out, "rb") as output, open(err, "rb") as errors:
        server.send([its.fileno(), 0, its_out, its_err])
        os.close(its_out)
        os.close(its_err)
        its.close()
        link.sendall(json.dumps(asked).encode())
        link.shutdown(socket.SHUT_WR)
        pid, deadline = _number(link), time.monotonic() + seconds
        said: dict[int, bytes] = {out: b"", err: b""}
        with selectors.DefaultSelector() as waiting:
            for each in (output, errors, link):
                waiting.register(each, selectors.EVENT_READ)
            while waiting.get_map():
                ready = waiting.select(deadline - time.monotonic())
                if not ready:
                    os.kill(pid, signal.SIGKILL)
                    raise subprocess.TimeoutExpired(command, seconds)
                for key, _events in ready:
                    if key.fileobj is link:
                        status, part = _number(link), b""
                    else:
                        part = os.read(key.fd, 1 << 16)
                        said[key.fd] += part
                    if not part:
                        waiting.unregister(key.fileobj)
        return subprocess.CompletedProcess(command, status, _text(said[out]), _text(said[err]))


class Planner:
    """A child that makes a plan, forked by the server; it has the methods of subprocess.Popen that its caller uses."""

    def __init__(self, server: _Server, request: bytes) -> None:
        asked = {
            "command": [sys.executable, "-I", "-m", "zarrfs.sources.prepare"], "request": request.decode(),
            "cwd": os.getcwd(), "environment": dict(os.environ),
            "blocked": [*signal.pthread_sigmask(signal.SIG_BLOCK, ())],
        }  # fmt: skip
        self._link, its = socket.socketpair()
        answers, its_out = os.pipe()
        self.stdout = os.fdopen(answers, "rb")
        with its:
            server.send([its.fileno(), 0, its_out, 2])
        os.close(its_out)
        self._link.sendall(json.dumps(asked).encode())
        self._link.shutdown(socket.SHUT_WR)
        self._pid = _number(self._link)

    def terminate(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGTERM)

    def wait(self) -> int:
        """Wait for the child to exit; return its exit status, as Popen.wait() does."""
        with self._link:
            return _number(self._link)


def plan(request: bytes) -> Planner | None:
    """Start a child that answers `request` (zarrfs.sources.child); None if it must be a new interpreter instead."""
    server = _usable(os.environ)
    return None if server is None else Planner(server, request)


def descriptors() -> set[str]:
    """Return the numbers of the descriptors by which this process is connected to its servers."""
    with _STARTING:
        return {str(server.requests.fileno()) for (pid, *_), server in _SERVERS.items() if pid == os.getpid()}


def _usable(environment: Mapping[str, str], numpy: bool = False) -> _Server | None:
    """Return the server if its children inherit the same as this process' children with this environment would."""
    if any(name == "ZARRFS_TESTS_EXEC" or name.startswith("COVERAGE_") for name in os.environ):
        return None
    with _STARTING:
        key = os.getpid(), _read_once(os.environ), numpy
        if key not in _SERVERS or _SERVERS[key].process.poll() is not None:
            _SERVERS[key] = _Server(numpy)
        server = _SERVERS[key]
    return server if server.state == _state(environment) else None


class _Server:
    """The client's side of the server, which exits when this process does."""

    def __init__(self, numpy: bool) -> None:
        blocked = signal.pthread_sigmask(signal.SIG_SETMASK, ())  # callers of plan() have blocked some signals
        self.state = _state(os.environ)
        self._lock = threading.Lock()
        self.requests, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        code = f"from tests import forkserver; forkserver.serve({numpy})"
        with its:
            self.process = subprocess.Popen(
                [sys.executable, "-c", code, "-" * _ROOM], stdin=its, stdout=subprocess.DEVNULL,
                cwd=Path(__file__).parents[1],
            )  # fmt: skip
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)

    def send(self, descriptors: Sequence[int]) -> None:
        with self._lock:
            socket.send_fds(self.requests, [b"start"], descriptors)


def _read_once(environment: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(sorted(f"{name}={text}" for name, text in environment.items() if name.startswith(_READ_ONCE)))


def _state(environment: Mapping[str, str]) -> tuple[object, ...]:
    """Return what a forked command inherits or reads only once, besides streams and working directory."""
    with open("/proc/thread-self/status") as file:
        status = dict(line.split(":") for line in file)
    limits = [resource.getrlimit(number) for name, number in vars(resource).items() if name.startswith("RLIMIT_")]
    spaces = [os.readlink(f"/proc/thread-self/ns/{name}") for name in ("mnt", "net", "user", "cgroup")]
    found = [status[name] for name in ("Umask", "Uid", "Gid", "Groups", "SigIgn", "CapEff", "Cpus_allowed")]
    return found, limits, spaces, _read_once(environment), os.getpgrp(), os.getpriority(os.PRIO_PROCESS, 0)


def _number(link: socket.socket) -> int:
    found = link.recv(4)
    assert found, "the server has ended"
    return int.from_bytes(found, "little", signed=True)


def _text(said: bytes) -> str:
    return said.decode().replace("\r\n", "\n").replace("\r", "\n")


# -- the server


def serve(numpy: bool) -> NoReturn:
    """Serve requests from standard input until it is closed."""
    requests = socket.socket(fileno=os.dup(0))
    with open(os.devnull) as null:
        os.dup2(null.fileno(), 0)
    _import_all(numpy)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal is for pytest
    gc.collect()
    gc.freeze()
    poll, links = select.poll(), dict[int, tuple[int, socket.socket]]()  # by the pidfd of the child
    poll.register(requests, select.POLLIN)
    while True:
        for descriptor, _events in poll.poll():
            if descriptor in links:
                poll.unregister(descriptor)
                _tell_end(descriptor, *links.pop(descriptor))
                continue
            said, descriptors, _flags, _address = socket.recv_fds(requests, 16, 4)
            if not said:
                os._exit(0)
            link = socket.socket(fileno=descriptors.pop(0))
            pid = os.fork()
            if not pid:
                for each in (requests, *(other for _pid, other in links.values())):
                    each.detach()
                _be_asked_for(link, descriptors)
            for stream in descriptors:
                os.close(stream)
            with contextlib.suppress(OSError):
                link.sendall(pid.to_bytes(4, "little"))
            ended = os.pidfd_open(pid)
            links[ended] = pid, link
            poll.register(ended, select.POLLIN)


def _show(command: Sequence[str]) -> None:
    """Overwrite the command line of this process, as /proc/PID/cmdline shows it (proc_pid_cmdline(5))."""
    with open("/proc/self/stat", "rb") as file:
        start, end = map(int, file.read().rpartition(b")")[2].split()[45:47])
    room = end - start
    ctypes.memmove(start, b"\0".join(map(os.fsencode, command))[: room - 1].ljust(room, b"\0"), room)


def _import_all(numpy: bool) -> None:
    """Import zarrfs and what its HTTP client needs, but no module that starts threads: they do not survive a fork."""
    import zarrfs

    os.environ["OPENBLAS_NUM_THREADS"] = "1"  # numpy starts no threads then; children get an environment of their own
    left_out = dict.fromkeys(("pyarrow", "zarr") if numpy else ("numpy", "pyarrow", "zarr"))
    sys.modules.update(left_out)  # type: ignore[arg-type]
    for module in pkgutil.walk_packages(zarrfs.__path__, "zarrfs."):
        if not module.name.endswith(".__main__"):
            with contextlib.suppress(ModuleNotFoundError):
                importlib.import_module(module.name)
    for name in left_out:
        del sys.modules[name]
    for name in ("yarl", "fsspec.implementations.local"):
        importlib.import_module(name)
    assert len(os.listdir("/proc/self/task")) == 1, "a module of zarrfs imports what starts threads: leave it out"


def _tell_end(ended: int, pid: int, link: socket.socket) -> None:
    os.close(ended)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with contextlib.suppress(OSError), link:
        link.sendall(status.to_bytes(4, "little", signed=True))


def _be_asked_for(link: socket.socket, streams: Sequence[int]) -> NoReturn:
    """Become the program that a request on `link` describes: call main() as its script does, and exit."""
    with link:
        asked = json.loads(b"".join(iter(lambda: link.recv(1 << 16), b"")))
    signal.pthread_sigmask(signal.SIG_SETMASK, asked.get("blocked", ()))
    os.chdir(asked["cwd"])
    for number, (stream, name) in enumerate(zip(streams, ("stdin", "stdout", "stderr"), strict=True)):
        os.dup2(stream, number)
        mode, errors = ("w" if number else "r"), getattr(sys, name).errors
        text = os.fdopen(number, mode, encoding=sys.stdout.encoding, errors=errors, newline="\n", closefd=False)
        setattr(sys, name, text)
        setattr(sys, f"__{name}__", text)
    sys.stderr.reconfigure(line_buffering=True)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(asked["environment"])
    time.tzset()
    with open("/proc/self/comm", "w") as file:
        file.write("zarrfs")
    sys.argv = [*asked["command"]]
    _show([sys.executable, *sys.argv])
    if "request" in asked:
        _plan(json.loads(asked["request"]))
    sys.path[0] = os.path.dirname(sys.argv[0])
    from zarrfs.cli import main

    try:
        main()
    except SystemExit as end:
        if isinstance(end.code, int) and len(os.listdir("/proc/self/task")) == 1:
            # Skip Python's finalisation, which takes longer than most commands. A process with a library's threads
            # does finalise, because such threads may crash during it and the tests should see that.
            atexit._run_exitfuncs()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(end.code)
        raise
    raise AssertionError("click ends programs")


def _plan(request: dict[str, Any]) -> NoReturn:
    """Become the program zarrfs.sources.prepare."""
    from zarrfs.sources import prepare

    request["parent"] = os.getppid()
    try:
        sys.stdout.buffer.write(prepare.answer(json.dumps(request).encode()))
        sys.stdout.flush()
    except SystemExit:
        os._exit(130)
    os._exit(0)

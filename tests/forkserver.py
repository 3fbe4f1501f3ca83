"""A server that has imported zarrfs and forks for each command of the tests, which saves the start of Python.

It also forks the children in which commands and stores of the tests' own process plan (zarrfs.sources.child).

Of the processor time of a short command nine tenths are the start of Python and imports. What is forked is a process
of its own with its own streams, environment, working directory and end, and its daemons are, too. It differs from a
program that is started in what execve(2) does and in what is imported already; tests that are about these start
PROGRAM. Those of the documentation's commands, of users and of units do in any case.

Whatever else a process inherits has to be as it was when the server was started, and so have variables that Python, C
and SQLite read once; else run() says that it cannot. So it does where coverage is measured, and with
ZARRFS_TESTS_EXEC=1, with which every test starts programs.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import gc
import importlib
import importlib.util
import json
import os
import pkgutil
import re
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

_READ_ONCE = ("LANG", "LC_", "LD_", "MALLOC_", "GLIBC_", "PYTHON", "COVERAGE_", "SQLITE_")
_INHERITED = ("Umask", "Uid", "Gid", "Groups", "SigBlk", "SigIgn", "CapEff", "NoNewPrivs", "Cpus_allowed")
_ROOM = 8192  # bytes for a command line
_STARTING = threading.Lock()
_STARTED: set[int] = set()  # processes that have a server: this one, and those that it is a fork of


def run(
    command: Sequence[str], cwd: Path | str | None, environment: Mapping[str, str], seconds: float
) -> subprocess.CompletedProcess[str] | None:
    """As subprocess.run, of `command`, which is zarrfs and its arguments; None where the program has to be started."""
    server = _usable(environment)
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
    """A child that plans sources: a zarrfs.sources.child.Child that the server has forked."""

    def __init__(self, server: _Server, request: bytes) -> None:
        asked = {
            "command": [sys.executable, "-I", "-m", "zarrfs.sources.prepare"], "request": request.decode(),
            "cwd": os.getcwd(), "environment": dict(os.environ),
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
        """Implement Child.terminate."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGTERM)

    def wait(self) -> int:
        """Implement Child.wait."""
        with self._link:
            return _number(self._link)


def plan(request: bytes, environment: Mapping[str, str]) -> Planner | None:
    """Start a child that answers `request` (zarrfs.sources.child); None where that has to be a new interpreter."""
    server = None if environment else _usable(os.environ)
    return None if server is None else Planner(server, request)


def descriptors() -> set[str]:
    """Return the numbers of this process' descriptors that are the server's."""
    with _STARTING:
        return {str(_server(os.getpid()).fileno())} if os.getpid() in _STARTED else set()


def _usable(environment: Mapping[str, str]) -> _Server | None:
    """Return the server, if a child of it is as one of this process would be with this environment."""
    if "ZARRFS_TESTS_EXEC" in os.environ or any(name.startswith("COVERAGE_") for name in os.environ):
        return None
    with _STARTING:
        server = _server(os.getpid())
    return server if _state(environment) == server.state else None


def _number(link: socket.socket) -> int:
    found = link.recv(4)
    assert found, "the server has ended"
    return int.from_bytes(found, "little", signed=True)


def _text(said: bytes) -> str:
    return said.decode().replace("\r\n", "\n").replace("\r", "\n")


class _Server:
    """The client's side of the server."""

    def __init__(self) -> None:
        self.state = _state(os.environ)
        self._lock = threading.Lock()
        self._requests, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with its:
            self._process = subprocess.Popen(
                [sys.executable, "-c", "from tests import forkserver; forkserver.serve()", "-" * _ROOM], stdin=its,
                stdout=subprocess.DEVNULL, cwd=Path(__file__).parents[1],
            )  # fmt: skip

    def fileno(self) -> int:
        """Return the descriptor of the socket."""
        return self._requests.fileno()

    def send(self, descriptors: Sequence[int]) -> None:
        with self._lock:
            socket.send_fds(self._requests, [b"start"], descriptors)


@functools.cache
def _server(pid: int) -> _Server:
    """The server of the process `pid`, which is this one; it ends with it."""
    _STARTED.add(pid)
    return _Server()


def _state(environment: Mapping[str, str]) -> object:
    """Return all that a forked command inherits or reads once, other than streams and working directory."""
    with open("/proc/thread-self/status") as file:
        found = [line for line in file if line.partition(":")[0] in _INHERITED]
    spaces = [os.readlink(f"/proc/self/ns/{name}") for name in ("mnt", "pid", "net", "user", "cgroup")]
    limits = [resource.getrlimit(number) for name, number in vars(resource).items() if name.startswith("RLIMIT_")]
    named = sorted((name, text) for name, text in environment.items() if name.startswith(_READ_ONCE))
    return found, spaces, limits, named, os.getpriority(os.PRIO_PROCESS, 0)


# -- the server


def serve() -> None:
    """Serve requests that come on standard input, until it is closed. Returns in no process."""
    requests = socket.socket(fileno=os.dup(0))
    with open(os.devnull) as null:
        os.dup2(null.fileno(), 0)
    _import_all()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal is for pytest
    gc.collect()
    gc.freeze()
    poll, links = select.poll(), dict[int, tuple[int, socket.socket]]()  # by the descriptor that tells the end
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
            pid = os.fork()
            if not pid:
                for each in (requests, *(link for _pid, link in links.values())):
                    each.detach()
                _be_program(descriptors)
            link = socket.socket(fileno=descriptors[0])
            for stream in descriptors[1:]:
                os.close(stream)
            with contextlib.suppress(OSError):
                link.sendall(pid.to_bytes(4, "little"))
            ended = os.pidfd_open(pid)
            links[ended] = pid, link
            poll.register(ended, select.POLLIN)


def _show(command: Sequence[str]) -> None:
    """Let /proc/PID/cmdline be `command`, written over that of the server (proc_pid_cmdline(5))."""
    with open("/proc/self/stat", "rb") as file:
        start, end = map(int, file.read().rpartition(b")")[2].split()[45:47])
    room = end - start
    ctypes.memmove(start, b"\0".join(map(os.fsencode, command))[: room - 1].ljust(room, b"\0"), room)


def _import_all() -> None:
    """Import zarrfs, and what its HTTP takes; but for what starts threads (numpy): a fork has those of nobody."""
    import zarrfs

    for module in pkgutil.walk_packages(zarrfs.__path__, "zarrfs."):
        spec = importlib.util.find_spec(module.name)
        assert spec is not None
        text = Path(str(spec.origin)).read_text()
        threads = re.search(r"(?m)^(?:import|from) (?:numpy|pyarrow|zarr)\b", text)
        if not module.name.endswith(".__main__") and not threads:
            importlib.import_module(module.name)
    for name in ("yarl", "fsspec.implementations.local"):
        importlib.import_module(name)
    assert len(os.listdir("/proc/self/task")) == 1, "a module of zarrfs imports what starts threads: leave it out"


def _tell_end(ended: int, pid: int, link: socket.socket) -> None:
    os.close(ended)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with contextlib.suppress(OSError), link:
        link.sendall(status.to_bytes(4, "little", signed=True))


def _be_program(descriptors: Sequence[int]) -> NoReturn:
    """Be the program: what its script does, sys.exit(main())."""
    with socket.socket(fileno=descriptors[0]) as link:
        asked = json.loads(b"".join(iter(lambda: link.recv(1 << 16), b"")))
    for number, (stream, name) in enumerate(zip(descriptors[1:], ("stdin", "stdout", "stderr"), strict=True)):
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
    os.chdir(asked["cwd"])
    with open("/proc/self/comm", "w") as file:
        file.write("zarrfs")
    sys.argv = asked["command"]
    _show([sys.executable, *sys.argv])
    if "request" in asked:
        _plan(json.loads(asked["request"]))
    sys.path[0] = os.path.dirname(sys.argv[0])
    from zarrfs.cli import main

    try:
        main()
    except SystemExit as end:
        if isinstance(end.code, int) and len(os.listdir("/proc/self/task")) == 1:
            # To take the modules apart takes longer than most commands. Where a library has threads, which may crash
            # meanwhile, it is done.
            atexit._run_exitfuncs()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(end.code)
        raise
    raise AssertionError("click ends programs")


def _plan(request: dict[str, Any]) -> NoReturn:
    """Be the program zarrfs.sources.prepare."""
    from zarrfs.sources import prepare

    request["parent"] = os.getppid()
    try:
        sys.stdout.buffer.write(prepare.answer(json.dumps(request).encode()))
        sys.stdout.flush()
    except prepare.End:
        os._exit(130)
    os._exit(0)

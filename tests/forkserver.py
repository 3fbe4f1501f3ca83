"""A server that has imported zarrfs and forks a child for each command of the tests, which saves Python's start-up.

It also forks the children that make plans for commands and stores in the test process itself (zarrfs.sources.child).

Start-up and imports take nine tenths of the processor time of a short command. A forked command is a process of its
own, with its own streams, environment, working directory and exit status, and so are its daemons. It differs from an
executed program in what execve(2) resets and in the modules already imported; tests of these differences start
PROGRAM. So do all tests with other users, systemd units and batch jobs.

A shell with variables() in its environment finds tests/forked/zarrfs in PATH, which has the server run the command in
the shell's mount, pid and network namespaces. A signal to that process alone does not reach the command; a signal to
its process group does. A shell's background job ignores signals, so it is the program itself that runs there.

Everything else that a process inherits must be as it was when the server was started, and so must the variables that
Python, C and SQLite read only once. Otherwise run() returns None, and tests/forked/zarrfs executes the program. This
is also the case while coverage is measured, and with ZARRFS_TESTS_EXEC=1, which makes every test start programs.
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
import re
import resource
import select
import selectors
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

_READ_ONCE = ("LD_", "MALLOC_", "GLIBC_", "PYTHON", "COVERAGE_", "SQLITE_")
_LIKE_C = ("C", "POSIX", "C.UTF-8", "C.utf8")  # equivalent locales: Python uses UTF-8 in all of them
_INHERITED = ("Umask", "Uid", "Gid", "Groups", "SigIgn", "CapEff", "NoNewPrivs", "Cpus_allowed")
_SPACES = {"mnt": 0x20000, "pid": 0x20000000, "net": 0x40000000}  # flags of setns(2)
_ROOM = 8192  # bytes for a command line
_SERVE = "from tests import forkserver; forkserver.serve({}, {!r})"
FORKED = Path(__file__).with_name("forked")  # the directory of the zarrfs that uses the server
_Named = tuple[tuple[str, str], ...]
_STARTING = threading.Lock()
# by process id (a fork inherits the entries of its parents) and the variables that are read only once
_SERVERS: dict[tuple[int, _Named], _Server] = {}


def run(
    command: Sequence[str], cwd: Path | str | None, environment: Mapping[str, str], seconds: float
) -> subprocess.CompletedProcess[str] | None:
    """Run zarrfs, as subprocess.run() does; return None if the program must be started instead."""
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


def plan(request: bytes, environment: Mapping[str, str]) -> Planner | None:
    """Start a child that answers `request` (zarrfs.sources.child); None if it must be a new interpreter instead."""
    server = None if environment else _usable(os.environ, blocks=True)
    return None if server is None else Planner(server, request)


def variables(path: str, server: Path | None = None) -> dict[str, str]:
    """Return variables for shells in which the server runs zarrfs and PATH is otherwise `path`.

    `server`: the path of the server's socket as the shell sees it, if it is not address().
    """
    return {"PATH": f"{FORKED}:{path}", "TESTS_ZARRFS_SERVER": str(server or address(os.environ))}


def address(environment: Mapping[str, str]) -> Path:
    """Return the path of the socket of a server for shells with this environment."""
    return _server(environment).address


def descriptors() -> set[str]:
    """Return the numbers of the descriptors by which this process is connected to its servers."""
    with _STARTING:
        return {str(server.fileno()) for (pid, _named), server in _SERVERS.items() if pid == os.getpid()}


def _usable(environment: Mapping[str, str], blocks: bool = False) -> _Server | None:
    """Return the server if its children inherit the same as this process' children with this environment would.

    `blocks`: the signals that this thread blocks may differ.
    """
    if _excluded(os.environ):
        return None
    server = _server(os.environ)
    *others, blocked = _state(environment)
    *its, its_blocked = server.state
    return server if others == its and (blocks or blocked == its_blocked) else None


def _excluded(environment: Mapping[str, str]) -> bool:
    return any(name == "ZARRFS_TESTS_EXEC" or name.startswith("COVERAGE_") for name in environment)


def _number(link: socket.socket) -> int:
    found = link.recv(4)
    assert found, "the server has ended"
    return int.from_bytes(found, "little", signed=True)


def _text(said: bytes) -> str:
    return said.decode().replace("\r\n", "\n").replace("\r", "\n")


class _Server:
    """The client's side of the server."""

    def __init__(self, named: _Named) -> None:
        others = {name: text for name, text in os.environ.items() if not name.startswith(_READ_ONCE)}
        blocked = signal.pthread_sigmask(signal.SIG_SETMASK, ())  # callers of plan() have blocked some signals
        self.state = _state(os.environ)
        self._lock = threading.Lock()
        # not in TMPDIR, which may be too long for the address of a socket; the server removes the directory
        self.address = Path(tempfile.mkdtemp(prefix="zarrfs-tests-", dir="/tmp"), "server")
        self._requests, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with its, socket.socket(socket.AF_UNIX) as programs:
            programs.bind(str(self.address))
            programs.listen(64)
            self._process = subprocess.Popen(
                [sys.executable, "-c", _SERVE.format(programs.fileno(), str(self.address)), "-" * _ROOM], stdin=its,
                stdout=subprocess.DEVNULL, cwd=Path(__file__).parents[1], pass_fds=[programs.fileno()],
                env={**others, **dict(named)},
            )  # fmt: skip
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)

    def fileno(self) -> int:
        return self._requests.fileno()

    def has_ended(self) -> bool:
        """Return whether the server process has exited, for instance because it was killed."""
        return self._process.poll() is not None

    def send(self, descriptors: Sequence[int]) -> None:
        with self._lock:
            socket.send_fds(self._requests, [b"start"], descriptors)


def _server(environment: Mapping[str, str]) -> _Server:
    """Return a running server of this process; the server exits when this process does."""
    with _STARTING:
        key = os.getpid(), _named(environment)
        if key not in _SERVERS or _SERVERS[key].has_ended():
            _SERVERS[key] = _Server(key[1])
        return _SERVERS[key]


def _named(environment: Mapping[str, str]) -> _Named:
    """Return the variables that are read only once."""
    return tuple(sorted((name, text) for name, text in environment.items() if name.startswith(_READ_ONCE)))


def _state(environment: Mapping[str, str], pid: int = 0, but: Collection[str] = ()) -> tuple[object, ...]:
    """Return everything that a forked command inherits or reads only once, other than streams and working directory.

    The blocked signals come last. The state is that of process `pid`, or of this thread if it is 0, without the
    namespaces `but`.
    """
    with open(f"/proc/{pid or 'thread-self'}/status") as file:
        status = dict(line.split(":") for line in file)
    found = [status[name] for name in _INHERITED]
    kinds = [name for name in ("mnt", "pid", "net", "user", "cgroup", "uts", "ipc") if name not in but]
    spaces = [os.readlink(f"/proc/{pid or 'self'}/ns/{name}") for name in kinds]
    limits = [resource.prlimit(pid, number) for name, number in vars(resource).items() if name.startswith("RLIMIT_")]
    locale = [_locale(environment, name) for name in ("LC_CTYPE", "LC_MESSAGES")]
    group = os.getsid(pid), os.getpgid(pid), os.getpriority(os.PRIO_PROCESS, pid)
    return found, spaces, limits, _named(environment), locale, group, status["SigBlk"]


def _locale(environment: Mapping[str, str], category: str) -> str:
    found = environment.get("LC_ALL") or environment.get(category) or environment.get("LANG") or "C"
    return "C" if found in _LIKE_C else found


# -- the server


def serve(number: int, address: str) -> None:
    """Serve requests from standard input, until it is closed, and connections of tests/forked/zarrfs. Never returns.

    `number` is the descriptor of the socket that listens for these connections, `address` its path.
    """
    state = _state(os.environ, but=_SPACES)
    requests, programs = socket.socket(fileno=os.dup(0)), socket.socket(fileno=number)
    with open(os.devnull) as null:
        os.dup2(null.fileno(), 0)
    _import_all()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal is for pytest
    gc.collect()
    gc.freeze()
    poll, links = select.poll(), dict[int, tuple[int, socket.socket]]()  # by the pidfd of the child
    poll.register(requests, select.POLLIN)
    poll.register(programs, select.POLLIN)
    while True:
        for descriptor, _events in poll.poll():
            if descriptor in links:
                poll.unregister(descriptor)
                _tell_end(descriptor, *links.pop(descriptor))
                continue
            program, descriptors = descriptor == programs.fileno(), list[int]()
            if program:
                link = programs.accept()[0]
            else:
                said, descriptors, _flags, _address = socket.recv_fds(requests, 16, 4)
                if not said:
                    shutil.rmtree(os.path.dirname(address))
                    os._exit(0)
                link = socket.socket(fileno=descriptors.pop(0))
            pid = os.fork()
            if not pid:
                for each in (requests, programs, *(other for _pid, other in links.values())):
                    each.detach()
                if program:
                    _be_like(link, state)
                _be_asked_for(link, descriptors)
            for stream in descriptors:
                os.close(stream)
            if not program:
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


def _import_all() -> None:
    """Import zarrfs and what its HTTP client needs, but no module that starts threads: they do not survive a fork."""
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


def _be_asked_for(link: socket.socket, streams: Sequence[int]) -> NoReturn:
    """Become the program that a request on `link` describes."""
    with link:
        asked = json.loads(b"".join(iter(lambda: link.recv(1 << 16), b"")))
    signal.pthread_sigmask(signal.SIG_SETMASK, asked.get("blocked", ()))
    os.chdir(asked["cwd"])
    _be_program(asked["command"], asked["environment"], streams, asked.get("request"))


def _be_like(link: socket.socket, state: tuple[object, ...]) -> NoReturn:
    """Become the program in place of the process at the other end of `link`, or have that process execute it."""
    _said, streams, _flags, _address = socket.recv_fds(link, 16, 3)
    pid = struct.unpack("iII", link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]
    its = Path(f"/proc/{pid}")
    pairs = (os.fsdecode(pair).partition("=") for pair in (its / "environ").read_bytes().split(b"\0") if pair)
    environment = {name: text for name, _, text in pairs}
    alike = len(streams) == 3 and not _excluded(environment) and _state(environment, pid, but=_SPACES) == state
    if not alike or len(os.listdir(its / "fd")) != 4:  # three streams and the link
        link.sendall(b"n")
        os._exit(0)
    _python, _options, _script, *words = (its / "cmdline").read_bytes().split(b"\0")[:-1]
    command = [os.path.join(os.path.dirname(sys.executable), "zarrfs"), *map(os.fsdecode, words)]
    spaces = {kind for kind in _SPACES if os.readlink(its / "ns" / kind) != os.readlink(f"/proc/self/ns/{kind}")}
    directory, process = os.open(its / "cwd", os.O_PATH), os.pidfd_open(pid)
    if spaces and ctypes.CDLL(None).setns(process, sum(_SPACES[kind] for kind in spaces)):
        raise OSError("setns")
    os.fchdir(directory)
    if "pid" in spaces and (inside := os.fork()):
        os.closerange(0, os.sysconf("SC_OPEN_MAX"))
        _end_like(inside)
    link.sendall(b"y")
    _be_program(command, environment, streams)


def _end_like(pid: int) -> NoReturn:
    """Wait for the child `pid`, and exit with its status or die by its signal."""
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if status < 0:
        if -status != signal.SIGKILL:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


def _be_program(
    command: Sequence[str], environment: Mapping[str, str], streams: Sequence[int], request: str | None = None
) -> NoReturn:
    """Become the program: call main() as its script does, and exit."""
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
    os.environ.update(environment)
    time.tzset()
    with open("/proc/self/comm", "w") as file:
        file.write("zarrfs")
    sys.argv = [*command]
    _show([sys.executable, *sys.argv])
    if request is not None:
        _plan(json.loads(request))
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
    except prepare.End:
        os._exit(130)
    os._exit(0)

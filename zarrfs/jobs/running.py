"""Running a command with a source that is mounted only for this command (`zarrfs run`)."""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from typing import IO, NamedTuple, NoReturn

from zarrfs.config.options import Parsed
from zarrfs.errors import MountError, reason_of
from zarrfs.jobs import keeper, nodelocal, processes, stagein
from zarrfs.jobs.processes import Process
from zarrfs.jobs.records import Record
from zarrfs.jobs.unstage import UnstageOptions, unstage
from zarrfs.system.processes import shown

FAILED, NOT_EXECUTABLE, NOT_FOUND = 125, 126, 127  # exit statuses, as of env(1) and timeout(1)
VARIABLE = "ZARRFS_MOUNT"
_FORWARDED = (
    signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM,
)  # fmt: skip
_AWAITED = {*_FORWARDED, signal.SIGCHLD}
_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h


class Command(NamedTuple):
    """A command, with its source and mount point."""

    source: str
    words: Sequence[str]  # {} is replaced by the mount point
    at: str | None  # the mount point; None: one in a private node-local directory
    wait: float  # seconds to wait for processes that the command leaves behind


def run(command: Command, parsed: Parsed, notify: Callable[[str], None]) -> int:
    """Mount, run the command, unmount; return the exit status of the command, or 128 + N if signal N ended it.

    Return 126 or 127 if it cannot be executed, and 125 instead of 0 if it leaves processes behind, or the mount busy;
    the mount then stays as long as it is in use. Raise UsageError, SourceError, MountError if mounting fails.
    """
    dest = command.at
    if dest is None:
        local = nodelocal.directory("", f"zarrfs-run-{secrets.token_hex(8)}", True, bool(parsed.options.upperdir))
        dest = os.path.join(local, "mnt")
    others = processes.children()  # children of a shell that was replaced by this process (exec)
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # processes left behind become children of this one
    request = stagein.StageRequest(command.source, dest, "run", owner=os.getpid())
    record, pipe = stagein.mount(request, parsed, notify, pipe=True)
    assert pipe is not None
    with _signals_kept() as before:
        status = _run(record, pipe, command.words, before, notify)
        left = _wait_for(_find_left(record, others), command.wait, notify)
        record.owners = left
        if not record.update():  # another process has unstaged it meanwhile
            return status
        if not left:
            try:
                unstage(record, UnstageOptions(command.wait, notify=notify))
            except MountError as exc:
                notify(f"{exc}; it stays mounted as long as that is so")
                return status or FAILED
            return status
        for process in left:
            keeper.add_owner(pipe, process)
        notify(f"{record.place}: stays mounted as long as there is {', '.join(shown(one.pid) for one in left)}")
        return status or FAILED


def _run(
    record: Record, pipe: IO[bytes], words: Sequence[str], before: set[int], notify: Callable[[str], None]
) -> int:
    """Start the command, forward signals to it until it ends, and return its exit status."""
    def add_owner(process: Process) -> None:
        keeper.add_owner(pipe, process)
        record.owners.append(process)
        record.update()

    words = [word.replace("{}", record.place) for word in words]
    try:
        pid = _start(words, {**os.environ, VARIABLE: record.place}, before, add_owner)
    except FileNotFoundError:
        notify(f"{words[0]}: no such command")
        return NOT_FOUND
    except (OSError, ValueError) as exc:
        notify(f"{words[0]}: cannot be run: {reason_of(exc)}")
        return NOT_EXECUTABLE
    while True:
        for ended, status in _reap():
            if ended == pid:
                code = os.waitstatus_to_exitcode(status)
                return code if code >= 0 else 128 - code
        got = signal.sigwaitinfo(_AWAITED)
        # forward only signals that a process has sent: a terminal sends its signals to the command as well
        if got.si_signo != signal.SIGCHLD and got.si_code <= 0:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, got.si_signo)


def _start(
    words: Sequence[str], environment: dict[str, str], mask: set[int], add_owner: Callable[[Process], None]
) -> int:
    """Fork a process, call `add_owner` with it, and let it execute a command. Return its pid. Raise OSError."""
    go, let_go = os.pipe()
    failed, fail = os.pipe()
    pid = os.fork()
    if pid == 0:
        _become(words, environment, mask, (go, let_go, fail))
    os.close(go)
    os.close(fail)
    with open(failed, "rb") as reason, open(let_go, "wb") as start:
        process = processes.process(pid)
        if process is not None:
            add_owner(process)
            start.write(b".")
            start.close()
        error = reason.read()
    if error:
        os.waitpid(pid, 0)
        raise OSError(int(error), os.strerror(int(error)), words[0])
    return pid


def _become(
    words: Sequence[str], environment: dict[str, str], mask: set[int], pipes: tuple[int, int, int]
) -> NoReturn:
    """Execute the command in the child process, once the keeper knows it; exit if the parent process dies before."""
    go, let_go, fail = pipes
    try:
        os.close(let_go)
        if os.read(go, 1):
            for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores these signals
                signal.signal(number, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            os.execvpe(words[0], list(words), environment)
    except OSError as exc:
        os.write(fail, str(exc.errno).encode())
    finally:
        os._exit(FAILED)


def _reap() -> list[tuple[int, int]]:
    """Return (pid, status) of child processes that have ended, including adopted ones."""
    found = []
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            found.append(ended)
    return found


def _find_left(record: Record, others: list[Process]) -> Callable[[], list[Process]]:
    known = {record.daemon, record.keeper, *others}
    return lambda: [process for process in processes.children() if process not in known]


def _wait_for(left: Callable[[], list[Process]], wait: float, notify: Callable[[str], None]) -> list[Process]:
    """Wait until no process is left, for at most `wait` seconds or until a signal; return the processes left."""
    deadline, notified = time.monotonic() + wait, False
    while True:
        _reap()
        found = left()
        remaining = deadline - time.monotonic()
        if not found or remaining <= 0:
            return found
        if not notified:
            notify(f"the command has ended, but has left behind {', '.join(shown(one.pid) for one in found)}; waiting")
            notified = True
        got = signal.sigtimedwait(_AWAITED, remaining)
        if got is not None and got.si_signo != signal.SIGCHLD:
            return left()


@contextlib.contextmanager
def _signals_kept() -> Iterator[set[int]]:
    """Block the signals of _AWAITED during the block; yield the signal mask as it was before."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    before = {int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, _AWAITED)}
    try:
        yield before
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)

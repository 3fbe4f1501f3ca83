"""One command with a source mounted for it alone."""

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
from zarrfs.errors import MountError
from zarrfs.jobs import keeper, nodelocal, processes, stagein
from zarrfs.jobs.processes import Process
from zarrfs.jobs.records import Record
from zarrfs.jobs.unstage import Taking, unstage

FAILED, NOT_EXECUTABLE, NOT_FOUND = 125, 126, 127  # as env(1), timeout(1) and others have it
VARIABLE = "ZARRFS_MOUNT"
_FORWARDED = (
    signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM,
)  # fmt: skip
_AWAITED = {*_FORWARDED, signal.SIGCHLD}
_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h


class Command(NamedTuple):
    """What is to be run, and how."""

    source: str
    words: Sequence[str]  # {} in them is the mount point
    at: str | None  # the mount point; None: one in a directory of this node that nobody else can enter
    wait: float  # seconds for what the command leaves behind


def run(command: Command, parsed: Parsed, tell: Callable[[str], None]) -> int:
    """Mount, run the command, unmount; gives the exit status: the command's, 128 + N where signal N ended it.

    126 and 127 where it cannot be run, 125 where it has ended well but what it left behind uses the mount. Then that
    stays mounted as long as it is used. UsageError, SourceError, MountError where it cannot be mounted.
    """
    dest = command.at
    if dest is None:
        local = nodelocal.directory("", f"zarrfs-run-{secrets.token_hex(8)}", True, bool(parsed.options.upperdir))
        dest = os.path.join(local, "mnt")
    others = processes.children()  # of a shell that has become this process
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # what the command leaves behind becomes our child
    wish = stagein.Wish(command.source, dest, "run", owner=os.getpid())
    record, pipe = stagein.mount(wish, parsed, tell, pipe=True)
    assert pipe is not None
    with _signals_kept() as before:
        status = _run(record, pipe, command.words, before, tell)
        left = _wait_for(_left_behind(record, others), command.wait, tell)
        record.owners = left
        record.save()
        if not left:
            try:
                unstage(record, Taking(command.wait, tell=tell))
            except MountError as exc:
                tell(f"{exc}; it stays mounted as long as that is so")
                return status or FAILED
            return status
        for who in left:
            keeper.tell(pipe, who)
        tell(f"{record.place}: stays mounted as long as there is {', '.join(map(processes.shown, left))}")
        return status or FAILED


def _run(
    record: Record, pipe: IO[bytes], words: Sequence[str], before: set[int], tell: Callable[[str], None]
) -> int:
    """Start the command, hand signals on to it until it ends, and give its exit status."""
    def kept(who: Process) -> None:
        keeper.tell(pipe, who)
        record.owners.append(who)
        record.save()

    words = [word.replace("{}", record.place) for word in words]
    try:
        pid = _start(words, {**os.environ, VARIABLE: record.place}, before, kept)
    except FileNotFoundError:
        tell(f"{words[0]}: no such command")
        return NOT_FOUND
    except (OSError, ValueError) as exc:
        tell(f"{words[0]}: cannot be run: {(getattr(exc, 'strerror', None) or str(exc)).lower()}")
        return NOT_EXECUTABLE
    while True:
        for ended, status in _reap():
            if ended == pid:
                code = os.waitstatus_to_exitcode(status)
                return code if code >= 0 else 128 - code
        got = signal.sigwaitinfo(_AWAITED)
        if got.si_signo != signal.SIGCHLD and got.si_code <= 0:  # from a process; the terminal tells both of us
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, got.si_signo)


def _start(
    words: Sequence[str], environment: dict[str, str], mask: set[int], kept: Callable[[Process], None]
) -> int:
    """Start a command, with this mask of signals, after `kept` was called with it; gives its number. OSError."""
    go, let_go = os.pipe()
    failed, fail = os.pipe()
    pid = os.fork()
    if pid == 0:
        _become(words, environment, mask, (go, let_go, fail))
    os.close(go)
    os.close(fail)
    with open(failed, "rb") as reason, open(let_go, "wb") as start:
        who = processes.process(pid)
        if who is not None:
            kept(who)
            start.write(b".")
            start.close()
        said = reason.read()
    if said:
        os.waitpid(pid, 0)
        raise OSError(int(said), os.strerror(int(said)), words[0])
    return pid


def _become(
    words: Sequence[str], environment: dict[str, str], mask: set[int], pipes: tuple[int, int, int]
) -> NoReturn:
    """In the child: wait until it is known to the keeper, and be the command; should we die before, end."""
    go, let_go, fail = pipes
    try:
        os.close(let_go)
        if os.read(go, 1):
            for number in (signal.SIGPIPE, signal.SIGXFSZ):  # which Python ignores
                signal.signal(number, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            os.execvpe(words[0], list(words), environment)
    except OSError as exc:
        os.write(fail, str(exc.errno).encode())
    finally:
        os._exit(FAILED)


def _reap() -> list[tuple[int, int]]:
    """(number, status) of children that have ended, ours or inherited."""
    found = []
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            found.append(ended)
    return found


def _left_behind(record: Record, others: list[Process]) -> Callable[[], list[Process]]:
    known = {record.daemon, record.keeper, *others}
    return lambda: [who for who in processes.children() if who not in known]


def _wait_for(left: Callable[[], list[Process]], wait: float, tell: Callable[[str], None]) -> list[Process]:
    """Wait until nothing is left, at most `wait` seconds or until a signal says so; gives what is."""
    deadline, told = time.monotonic() + wait, False
    while True:
        _reap()
        found = left()
        remaining = deadline - time.monotonic()
        if not found or remaining <= 0:
            return found
        if not told:
            tell(f"the command has ended, but has left behind {', '.join(map(processes.shown, found))}; waiting")
            told = True
        got = signal.sigtimedwait(_AWAITED, remaining)
        if got is not None and got.si_signo != signal.SIGCHLD:
            return left()


@contextlib.contextmanager
def _signals_kept() -> Iterator[set[int]]:
    """Keep the signals that are awaited from doing anything; gives the mask that was before."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    before = {int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, _AWAITED)}
    try:
        yield before
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)

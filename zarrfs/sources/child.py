"""The short-lived child that makes a plan: a fork where this process is a program of ours and has one thread.

A fork has most modules that it takes; a new interpreter imports them for as long as our start takes. But a fork has
locks, too, that other threads hold, so beside those it is a new interpreter; and with cache=none, as SQLite asks the
environment where its temporary files go when it is imported.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from typing import IO, NoReturn, Protocol

from zarrfs.system.processes import close_descriptors

_ENDS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGALRM)


class Child(Protocol):
    """A child that answers one request; as much of subprocess.Popen as is used."""

    @property
    def stdout(self) -> IO[bytes] | None:
        """What it answers."""
        ...

    def terminate(self) -> None:
        """Ask it to end."""
        ...

    def wait(self) -> int:
        """Wait until it has ended: its exit status, or minus the number of the signal that ended it."""
        ...


def start(request: bytes, forks: bool, environment: dict[str, str]) -> Child:
    """A child for `request` (prepare.answer()), with `environment` besides; `forks`: it may be a fork. OSError."""
    alone = len(os.listdir("/proc/self/task")) == 1
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    child: Child | None = None
    try:
        signal.pthread_sigmask(signal.SIG_BLOCK, _ENDS)  # until the child has handlers, and we have the child
        # SQLite reads its environment once, and that may have been
        child = _Fork(request) if forks and alone and not environment else _program(request, environment)
        return child
    finally:
        try:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        except BaseException:  # a signal that came meanwhile
            if child is not None:
                child.terminate()
                child.wait()
            raise


def _program(request: bytes, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    child = subprocess.Popen(
        [sys.executable, "-I", "-m", "zarrfs.sources.prepare"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        env={**os.environ, **environment} if environment else None,
    )  # fmt: skip
    assert child.stdin is not None
    with contextlib.suppress(BrokenPipeError), child.stdin:  # what it has not read, its status tells
        child.stdin.write(request)
    return child


class _Fork:
    """A fork of this process; while it is made, signals that would end it are held."""

    def __init__(self, request: bytes) -> None:
        read, write = os.pipe()
        self.stdout = os.fdopen(read, "rb")
        try:
            self._pid = os.fork()
            if not self._pid:
                _serve(request, write)
        except OSError:
            self.stdout.close()
            raise
        finally:
            os.close(write)

    def terminate(self) -> None:
        """As Child.terminate."""
        with contextlib.suppress(ProcessLookupError):  # where whoever has started us ignores SIGCHLD
            os.kill(self._pid, signal.SIGTERM)

    def wait(self) -> int:
        """As Child.wait; 0 where whoever has started us ignores SIGCHLD, as nobody can tell then."""
        try:
            return os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])
        except ChildProcessError:
            return 0


def _serve(request: bytes, answers: int) -> NoReturn:
    """Be the child."""
    status = 1
    try:
        signal.set_wakeup_fd(-1)
        for number in signal.valid_signals():
            if callable(signal.getsignal(number)):
                signal.signal(number, signal.SIG_DFL)  # as for a new program
        close_descriptors({2, answers})  # locks are our parent's alone
        from zarrfs.sources import prepare

        reply = prepare.answer(request)
        with open(answers, "wb") as file:
            file.write(reply)
        status = 0
    except SystemExit as exc:
        os._exit(exc.code if isinstance(exc.code, int) else 1)  # here: see signals.End
    except BaseException:
        sys.excepthook(*sys.exc_info())
        os._exit(1)
    finally:
        os._exit(status)

"""The short-lived child that makes a plan: a fork of a single-threaded zarrfs program, else a new interpreter.

A fork already has most modules it needs; importing them in a new interpreter takes as long as our own start. But a
fork inherits locks that other threads hold, so a process with threads starts a new interpreter. So does cache=none:
SQLite reads the directory of its temporary files from the environment once, when it is imported.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from typing import NoReturn

from zarrfs.system.processes import close_descriptors, python

_ENDS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGALRM)


def start(request: bytes, forks: bool, environment: dict[str, str]) -> subprocess.Popen[bytes] | Fork:
    """Start a child that answers `request` (prepare.answer()), with the variables of `environment` added.

    `forks`: the child may be a fork. Raises OSError.
    """
    alone = len(os.listdir("/proc/self/task")) == 1
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    child: subprocess.Popen[bytes] | Fork | None = None
    try:
        signal.pthread_sigmask(signal.SIG_BLOCK, _ENDS)  # until the child has handlers and this process knows its id
        # SQLite reads its environment once, perhaps before the fork
        child = Fork(request) if forks and alone and not environment else _program(request, environment)
        return child
    finally:
        try:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        except BaseException:  # a signal arrived meanwhile
            if child is not None:
                child.terminate()
                child.wait()
            raise


def _program(request: bytes, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    child = subprocess.Popen(
        python("zarrfs.sources.prepare"), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        env={**os.environ, **environment} if environment else None,
    )  # fmt: skip
    assert child.stdin is not None
    with contextlib.suppress(BrokenPipeError), child.stdin:  # the exit status says what went wrong
        child.stdin.write(request)
    return child


class Fork:
    """A fork of this process, with what its caller uses of subprocess.Popen.

    The caller blocks the signals that would end it until it has handlers.
    """

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
        """Send SIGTERM."""
        with contextlib.suppress(ProcessLookupError):  # with SIGCHLD ignored by our parent, it may be gone
            os.kill(self._pid, signal.SIGTERM)

    def wait(self) -> int:
        """As Popen.wait(); return 0 if our parent made us ignore SIGCHLD, as the kernel then keeps no status."""
        try:
            return os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])
        except ChildProcessError:
            return 0


def _serve(request: bytes, answers: int) -> NoReturn:
    """Answer the request in the forked child and exit."""
    status = 1
    try:
        signal.set_wakeup_fd(-1)
        for number in signal.valid_signals():
            if callable(signal.getsignal(number)):
                signal.signal(number, signal.SIG_DFL)  # as execve(2) does
        close_descriptors({2, answers})  # close lock files, whose locks belong to the parent alone
        from zarrfs.sources import prepare

        reply = prepare.answer(request)
        with open(answers, "wb") as file:
            file.write(reply)
        status = 0
    except SystemExit as exc:
        os._exit(exc.code if isinstance(exc.code, int) else 1)  # end here: see signals.End
    except BaseException:
        sys.excepthook(*sys.exc_info())
        os._exit(1)
    finally:
        os._exit(status)

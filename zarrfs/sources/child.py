"""The short-lived child process that makes a plan: a fork of a single-threaded zarrfs program, or a new interpreter.

A fork has already imported most modules it needs; importing them in a new interpreter takes as long as the start of
this process. But a fork inherits locks that other threads hold, so a process with threads starts a new interpreter.
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


def start(request: bytes, forks: bool) -> subprocess.Popen[bytes] | Fork:
    """Start a child that answers `request` by prepare.answer().

    `forks`: the child may be a fork of this process. Raise OSError if the child cannot be started.
    """
    alone = len(os.listdir("/proc/self/task")) == 1
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    child: subprocess.Popen[bytes] | Fork | None = None
    try:
        # Signals stay blocked until the child has its own handlers and this process knows the child.
        signal.pthread_sigmask(signal.SIG_BLOCK, _ENDS)
        child = Fork(request) if forks and alone else _program(request)
        return child
    finally:
        try:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        except BaseException:  # raised by the handler of a signal that was blocked
            if child is not None:
                child.terminate()
                child.wait()
            raise


def _program(request: bytes) -> subprocess.Popen[bytes]:
    child = subprocess.Popen(python("zarrfs.sources.prepare"), stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdin is not None
    with contextlib.suppress(BrokenPipeError), child.stdin:  # the exit status shows the failure
        child.stdin.write(request)
    return child


class Fork:
    """A forked child, with the part of the interface of subprocess.Popen that plan_source() uses.

    The caller must block the signals that end the child; the child unblocks them once it has handlers.
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
        with contextlib.suppress(ProcessLookupError):  # if SIGCHLD is ignored, an ended child leaves no zombie
            os.kill(self._pid, signal.SIGTERM)

    def wait(self) -> int:
        """Return the exit status, as Popen.wait() does; 0 if SIGCHLD is ignored: the kernel then keeps no status."""
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
        close_descriptors({2, answers})  # also lock files: their locks are the parent's
        from zarrfs.sources import prepare

        reply = prepare.answer(request)
        with open(answers, "wb") as file:
            file.write(reply)
        status = 0
    except SystemExit as exc:
        os._exit(exc.code if isinstance(exc.code, int) else 1)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        os._exit(1)
    finally:
        os._exit(status)

"""zarrfs run SOURCE -- COMMAND: run a command while a source is mounted for it."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import errno
import os
import re
import signal
import sys
import tempfile
from collections.abc import Sequence

import click

from zarrfs.cli import common
from zarrfs.config.options import Parsed
from zarrfs.config.redaction import without_secrets
from zarrfs.errors import MountError, UsageError, ZarrfsError
from zarrfs.system import mounts
from zarrfs.system.processes import children, shown
from zarrfs.system.signals import orderly_end

EPILOG = """\b
Examples:
  zarrfs run refs.json -- python analyse.py {}/air
  zarrfs run s3://bucket/store.zarr -o s3.anon=true -- sh -c 'ls "$ZARRFS_MOUNT"'
  zarrfs run archive.json -o upperdir=changes -- make -C {}
\b
The exit status is that of COMMAND; 128 + N if signal N has ended it, 127 if there is no such command, 126 if it
cannot be run, 125 if SOURCE cannot be mounted, or if something else still uses the mount at the end."""
FAILED, NOT_EXECUTABLE, NOT_FOUND = 125, 126, 127  # exit statuses, as of env(1) and timeout(1)
_FORWARDED = (
    signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM,
)  # fmt: skip
_AWAITED = {*_FORWARDED, signal.SIGCHLD}
_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h


@click.command(context_settings=common.SETTINGS, epilog=EPILOG)
@click.argument("source")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
@common.source_options(log_level="warning")
def run(source: str, command: tuple[str, ...], parsed: Parsed) -> None:
    """Mount SOURCE, run COMMAND, unmount, and exit as COMMAND did.

    {} in the words of COMMAND, and ZARRFS_MOUNT in its environment, stand for the directory where SOURCE is mounted: a
    new one in TMPDIR, which no other user can enter. COMMAND has the terminal, and gets the signals that zarrfs gets.
    Processes that it leaves behind are waited for.
    """
    from zarrfs.daemon import session

    if parsed.options.foreground or parsed.options.owner:
        raise UsageError("options foreground, owner: not for run, which ends the mount with COMMAND")
    name = re.sub(r"[^A-Za-z0-9._-]", "_", os.path.basename(without_secrets(source).rstrip("/")))[-100:].lstrip(".")
    place = os.path.join(tempfile.mkdtemp(prefix="zarrfs-"), name or "source")
    os.mkdir(place)
    child, go, failed = _prepare([word.replace("{}", place) for word in command], place)
    # the daemon logs to standard error, and stays while this process or COMMAND lives
    owners = os.getpid(), child
    parsed.options = dataclasses.replace(parsed.options, temporary=True, hold=True, owner=owners)
    quiet = parsed.options.log_level == "error"
    try:
        with orderly_end():
            session.mount(source, place, parsed, lambda text: None if quiet else common.say(text))
    except (ZarrfsError, OSError) as exc:
        common.say(str(exc))
        session.remove_temporary(place)
        sys.exit(FAILED)
    except BaseException:
        session.remove_temporary(place)
        raise
    daemons = {*children()} - {child}
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_BLOCK, _AWAITED)
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # adopt what COMMAND leaves behind
    with contextlib.suppress(BrokenPipeError):  # it was killed
        os.write(go, b".")
    error = os.read(failed, 16)
    status = _wait(child, daemons)
    if error:
        absent = int(error) == errno.ENOENT
        common.say(f"{command[0]}: {'no such command' if absent else f'cannot be run: {os.strerror(int(error))}'}")
        status = NOT_FOUND if absent else NOT_EXECUTABLE
    try:
        mounts.unmount_and_wait(place)
    except MountError as exc:
        common.say(str(exc))
        status = status or FAILED
    session.remove_temporary(place)
    sys.exit(status)


def _prepare(words: Sequence[str], place: str) -> tuple[int, int, int]:
    """Fork the process that becomes COMMAND, so that it can own the mount.

    Return its pid, the pipe whose first byte lets it go on, and the pipe with the errno if it cannot be executed.
    """
    wait, go = os.pipe()
    failed, fail = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(go)
            if os.read(wait, 1):
                for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them
                    signal.signal(number, signal.SIG_DFL)
                os.execvpe(words[0], list(words), {**os.environ, "ZARRFS_MOUNT": place})
        except OSError as exc:
            os.write(fail, str(exc.errno).encode())
        finally:
            os._exit(FAILED)
    os.close(wait)
    os.close(fail)
    return pid, go, failed


def _wait(child: int, daemons: set[int]) -> int:
    """Wait for COMMAND and all that it leaves behind, and forward signals to them; return the status of COMMAND."""
    status, left = 0, [child]
    while True:
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if ended[0] == child:
                    code = os.waitstatus_to_exitcode(ended[1])
                    status = code if code >= 0 else 128 - code
        here = [pid for pid in children() if pid not in daemons]
        if not here:
            return status
        if child not in here and child in left:
            common.say(f"the command has ended, and has left behind {', '.join(map(shown, here))}: waiting")
        left = [child] if child in here else here
        got = signal.sigwaitinfo(_AWAITED)
        # forward only signals that a process has sent: a terminal sends its signals to the command as well
        if got.si_signo != signal.SIGCHLD and got.si_code <= 0:
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, got.si_signo)

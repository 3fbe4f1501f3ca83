"""The start of a mount: checks, the plan of the source, the fork of the daemon, and errors back to the terminal.

The order of the steps matters: other orders hang (docs/design.md, "Starting"). This module is imported before the
fork and must stay light, so all code that needs pyfuse3 and trio is in serve.py.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from importlib import import_module
from typing import NoReturn

from zarrfs.config.options import Options, Parsed
from zarrfs.config.redaction import without_secrets
from zarrfs.documents.plan import Plan
from zarrfs.errors import MountError, UsageError, ZarrfsError, reason_of
from zarrfs.metrics import logs
from zarrfs.sources import absolute_options, absolute_source, discard, plan_source
from zarrfs.system import fusemount, mounts, requirements
from zarrfs.system.processes import close_descriptors, end_with_parent, leave_directory, readable

log = logging.getLogger(__name__)

READY = b"\n"
_ENDS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_STARTS = 300.0  # seconds for the daemon to answer
_UNMOUNTS = 10.0  # seconds for the daemon to unmount when the command that started it is interrupted


def mount(
    source: str,
    mountpoint: str,
    parsed: Parsed,
    tell: Callable[[str], None] = lambda text: None,
    ready: Callable[[], None] = lambda: None,
) -> None:
    """Mount `source`; return when the mount answers, or with foreground=, when it has ended.

    Raise UsageError, MountError or SourceError for the options, the mount point or the source before anything is
    mounted. `tell` is called with warnings, one line each, and with foreground=, `ready` when the mount answers.
    """
    options = parsed.options
    encoding = sys.getfilesystemencoding()
    if encoding != "utf-8":  # names in stores are UTF-8, and would not match the decoded names of requests
        raise UsageError(f"this Python reads file names as {encoding}: start it with PYTHONUTF8=1, or LC_ALL=C.UTF-8")
    if parsed.writable and options.view is not None and options.upperdir is None:
        raise UsageError("option view: views are read-only; with upperdir=DIR changes are stored in DIR")
    if options.foreground:
        with contextlib.suppress(ValueError):  # not the main thread, in a program that uses the library
            signal.signal(signal.SIGHUP, signal.SIG_IGN)  # until serve() handles it as a refresh
    _check_order(source, mountpoint)
    mountpoint = mounts.canonical(mountpoint)
    if mounts.check_mountpoint(mountpoint):
        if mounts.beneath(mounts.resolved(source), mountpoint):  # planning would read the dead mount
            mounts.clear_dead(mountpoint)
        else:
            tell(f"{mountpoint}: the daemon of the mount there has died: it will be replaced")
    owners = [_open_owner(mountpoint, pid) for pid in options.owner]
    if (options.guard or options.hold) and mounts.mount_at(mountpoint) is None:
        fusemount.guard(mountpoint)  # first of all, so that it is guarded if the mount fails, too
    requirements.check(mountpoint, options)
    if options.log_file is not None:
        _check_log_file(options.log_file, mountpoint)
    plan = plan_source(source, options, meanwhile=lambda: import_module("zarrfs.daemon.serve"), forks=True)
    try:
        _mount_plan(plan, source, mountpoint, parsed, tell, ready, owners)
    except BaseException:
        discard(plan)
        raise


def _open_owner(mountpoint: str, pid: int) -> int:
    """Return a pidfd of a running process. Raise MountError if there is none of this pid."""
    try:
        descriptor = os.pidfd_open(pid)
    except OSError:
        descriptor = -1
    if descriptor < 0 or readable(descriptor, 0):
        raise MountError(f"{mountpoint}: owner={pid}: no such process is running: give the pid of one that is, as $$")
    return descriptor


def _mount_plan(
    plan: Plan, source: str, mountpoint: str, parsed: Parsed, tell: Callable[[str], None], ready: Callable[[], None],
    owners: Sequence[int],
) -> None:  # fmt: skip
    """Make the checks that need a plan, and mount that plan. After an error the caller discards the plan."""
    options = parsed.options
    if plan.path is not None and mountpoint.startswith(os.path.realpath(plan.path).rstrip("/") + "/"):
        raise MountError(f"{mountpoint}: lies inside the source {plan.source}: the mount would contain itself")
    for warning in plan.warnings:
        tell(f"warning: {plan.source}: {warning}")
    for_others = os.geteuid() == 0 and options.allow_other
    if for_others and plan.kind == "references" and not (plan.origin or options.allow_path):
        tell(f"warning: {plan.source}: local targets are refused, as root mounts for others: give allow_path=")
    if parsed.writable and options.upperdir is None and plan.path is not None and plan.kind == "zarr":
        options = dataclasses.replace(options, upperdir=os.path.realpath(plan.path))  # the source is its own upper
    if options.upperdir is not None:
        _check_upper(options.upperdir, mountpoint)
    elif parsed.writable:
        tell(f"{mountpoint}: mounted read-only: rw needs a directory for the changes (upperdir=DIR)")
    options = dataclasses.replace(absolute_options(options), fsname=options.fsname or without_secrets(source))
    plan = dataclasses.replace(plan, named=absolute_source(source))
    if options.foreground:
        mount_foreground(plan, mountpoint, options, parsed.kernel, ready, owners)
    else:
        mount_background(plan, mountpoint, options, parsed.kernel, owners)
    discard(plan)


def _check_order(source: str, mountpoint: str) -> None:
    """Raise MountError if the arguments seem to be swapped: MOUNTPOINT looks like a source."""
    swapped = "the source comes first, then the mount point"
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]+://", mountpoint) and not os.path.lexists(mountpoint):
        raise MountError(f"{without_secrets(mountpoint)}: a URL is not a mount point: {swapped}")
    if not os.path.isdir(source) or mounts.mount_at(mounts.canonical(mountpoint)) is not None:
        return  # other checks report an existing mount, which may not answer
    if os.path.isfile(mountpoint):
        raise MountError(f"{mountpoint}: not a directory: {swapped}")
    try:
        with os.scandir(source) as entries:
            if os.path.samefile(source, mountpoint) or next(entries, None) is not None:
                return
    except OSError:
        return  # later checks report the error
    from zarrfs.sources.zarrstore import is_zarr

    if is_zarr(mountpoint):
        raise MountError(f"{mountpoint}: is a Zarr store, and {source} is empty: {swapped}")


def _check_upper(upper: str, mountpoint: str) -> None:
    """Raise MountError for an upper directory that overlaps the mount point."""
    if mounts.beneath(mountpoint, upper):
        raise MountError(f"{mountpoint}: lies inside upperdir={upper}: the mount would contain itself")
    if mounts.beneath(upper, mountpoint):
        raise MountError(f"{mountpoint}: upperdir={upper} lies inside the mount point, which would hide it")


def _check_log_file(path: str, mountpoint: str) -> None:
    """Raise UsageError for a log file that the daemon cannot use."""
    if any(mounts.beneath(os.path.realpath(place), mountpoint) for place in (os.path.dirname(path), path)):
        raise UsageError(f"option log_file={path}: lies beneath the mount point, which would hide it")
    # O_NONBLOCK, so that a FIFO without a reader is an error and does not block
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOCTTY | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        try:
            os.close(os.open(path, flags | os.O_EXCL, 0o666))
            os.unlink(path)  # a mount that fails leaves no log, which would look like one of a running daemon
        except FileExistsError:
            os.close(os.open(path, flags, 0o666))
    except OSError as exc:
        raise UsageError(f"option log_file={path}: {reason_of(exc)}") from None


def mount_background(
    plan: Plan, mountpoint: str, options: Options, kernel: Sequence[str], owners: Sequence[int]
) -> None:
    """Fork a daemon that mounts; return once the mount answers. Raise MountError with the daemon's reason.

    Before any other exception, as from Ctrl-C, is raised, the daemon and its mount are ended.
    """
    read_end, write_end = os.pipe()
    parent, there = os.getpid(), mounts.mount_at(mountpoint)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _ENDS)  # until both processes can handle them
    pid = os.fork()
    if pid == 0:
        _daemon(plan, mountpoint, options, kernel, write_end, parent, before, owners)
    try:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        os.close(write_end)
        with os.fdopen(read_end, "rb", buffering=0) as pipe:
            report = _await_report(pipe.fileno(), _STARTS)
    except BaseException:
        _end_daemon(pid, mountpoint, there, _UNMOUNTS)
        raise
    if report == READY:
        return
    if report is None:
        _end_daemon(pid, mountpoint, there, 0)
        report = f"not ready after {_STARTS:g} s".encode()
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, 0)
    _clear(mountpoint, there)
    reason = report.decode(errors="replace").strip() or "the daemon ended before the mount was ready"
    raise MountError(f"{mountpoint}: {reason}")


def _clear(mountpoint: str, there: mounts.Mount | None) -> None:
    """Remove the mount of a daemon that has failed, if it has mounted, but not a dead one that was `there` before."""
    with contextlib.suppress(MountError):
        if there is None:
            mounts.clear_dead(mountpoint)
        elif mounts.is_dead(mountpoint):
            mounts.thin(mountpoint)


def _end_daemon(pid: int, mountpoint: str, there: mounts.Mount | None, patience: float) -> None:
    """End a daemon that is not ready, and its mount. After `patience` seconds kill the daemon and unmount lazily.

    With a dead mount that was `there` before, kill it at once, because it would unmount that one, too.
    """
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGTERM if there is None else signal.SIGKILL)
    if there is None and not mounts.wait_for_end(pid, patience):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(MountError):
            if mounts.mount_at(mountpoint) is not None:
                mounts.unmount(mountpoint, lazy=True)
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, 0)
    _clear(mountpoint, there)


def mount_foreground(
    plan: Plan, mountpoint: str, options: Options, kernel: Sequence[str], ready: Callable[[], None],
    owners: Sequence[int],
) -> None:  # fmt: skip
    """Mount in this process and serve until the unmount, SIGTERM or SIGINT."""
    from zarrfs.daemon.serve import serve

    logs.configure(options, True, mountpoint)
    there, is_ready = mounts.mount_at(mountpoint), False

    def announce() -> None:
        nonlocal is_ready
        is_ready = True
        log.info("mounted on %s; %s unmounts", mountpoint, "zarrfs umount" if options.hold else "Ctrl-C")
        ready()

    try:
        serve(plan, mountpoint, options, kernel, announce, owners)
    except BaseException:
        if not is_ready:  # later, a dead mount is an error to its readers, and an empty directory is none
            _clear(mountpoint, there)
        raise
    finally:
        logs.finish()


def _await_report(descriptor: int, timeout: float) -> bytes | None:
    """Read from the daemon until READY or the end of the pipe; return None after `timeout` seconds."""
    report, deadline = b"", time.monotonic() + timeout
    while report != READY:
        if not readable(descriptor, deadline - time.monotonic()):
            return None
        part = os.read(descriptor, 4096)
        if not part:
            break
        report += part
    return report


def _daemon(
    plan: Plan, mountpoint: str, options: Options, kernel: Sequence[str], pipe: int, parent: int,
    mask: Iterable[int], owners: Sequence[int],
) -> NoReturn:  # fmt: skip
    """Serve the mount in the child; never return."""
    from zarrfs.daemon.serve import serve

    reported = False

    def ready() -> bool:
        nonlocal reported
        reported = True
        end_with_parent(None)
        if os.getppid() != parent:  # it was killed, and nobody knows of this mount
            os.kill(os.getpid(), signal.SIGTERM)
            return False
        if not options.temporary:
            os.dup2(1, 2)  # closes stderr, because a shell's $(mount ...) waits until it is closed
        with contextlib.suppress(OSError):  # our parent was interrupted and ends this process with a signal
            os.write(pipe, READY)
        os.close(pipe)
        return True

    status = 1
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # until serve() blocks it, to unmount when it comes
        end_with_parent(parent, signal.SIGTERM)  # until the mount is ready
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        leave_directory()
        close_descriptors(keep={2, pipe, *owners})
        logs.configure(options, options.temporary, mountpoint)
        serve(plan, mountpoint, options, kernel, ready, owners, detach=True)
        status = 0
    except BaseException as exc:
        text = str(exc) if isinstance(exc, ZarrfsError) else "".join(traceback.format_exception(exc))
        if reported:
            log.critical("%s: the daemon ends: %s", mountpoint, text)
        else:
            with contextlib.suppress(OSError):
                os.write(pipe, text.encode(errors="replace"))
    finally:
        logs.finish()
        if options.temporary:
            remove_temporary(mountpoint)
        os._exit(status)


def remove_temporary(mountpoint: str) -> None:
    """Remove the mount point of `zarrfs run` and the directory that holds it, unless it is still mounted."""
    with contextlib.suppress(OSError):
        os.rmdir(mountpoint)
        os.rmdir(os.path.dirname(mountpoint))

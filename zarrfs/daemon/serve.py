"""The life of one mount: readiness, signals, unmount."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import pyfuse3
import trio

from zarrfs.concurrency.tasks import CONTROL, in_background
from zarrfs.config import urls
from zarrfs.config.options import Options
from zarrfs.daemon import notify
from zarrfs.daemon.hold import Hold
from zarrfs.daemon.refreshing import Refresher
from zarrfs.documents.plan import Plan
from zarrfs.errors import MountError, reason_of
from zarrfs.failures import log_suppressed
from zarrfs.fuse import pagecache, sessionloop
from zarrfs.fuse.operations import Operations
from zarrfs.fuse.xattrs import Control
from zarrfs.sources import open_plan
from zarrfs.store.api import Store
from zarrfs.store.indexfile import first_target
from zarrfs.system import fusemount, mounts
from zarrfs.system.memory import freeze_garbage_collector, trim
from zarrfs.system.own_mount import OWN_MOUNT
from zarrfs.system.processes import allow_descriptors, end_with_parent

log = logging.getLogger(__name__)

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
# The daemon's niceness, if permitted: with 64 readers on 2 cores, it would otherwise get a thirtieth of the CPU time.
_NICE = -5


def serve(
    plan: Plan,
    mountpoint: str,
    options: Options,
    kernel: Sequence[str],
    ready: Callable[[], bool | None],
    owners: Sequence[int],
    detach: bool = False,
) -> None:
    """Mount and serve until the mount is gone; call `ready` once it answers. Raise MountError or SourceError.

    `owners` are pidfds of the processes with whose end the mount ends; see Hold.
    Threads, sockets and the event loop are created only here and later, because they do not survive the fork.
    """
    allow_descriptors()  # a directory source needs one per open file
    _set_priority()
    of_store = dataclasses.replace(options, wait_for_outages="all")
    writable = options.upperdir is not None and not options.ro
    about = {"pid": os.getpid(), "source": plan.source, "kind": plan.kind, "writable": writable}
    announce = functools.partial(_announce, ready)
    target = plan.url or (first_target(plan.index) if plan.index else "")
    operations = _operations(open_plan(plan, of_store), options, about, announce)
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)  # until _signals() handles them: they would leave a dead mount
    try:
        device_file = fusemount.attach(options.fsname or plan.source, mountpoint, options, kernel, writable)
        try:
            pyfuse3.init(operations, f"/dev/fd/{device_file}", {"allow_root"} if options.allow_root else set())
        except BaseException:
            os.close(device_file)  # so that the mount is dead, and the caller unmounts it
            raise
    except BaseException:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        raise
    try:
        mount = mounts.mount_at(mountpoint)
        device = os.makedev(*map(int, mount.device.split(":"))) if mount is not None else None
        OWN_MOUNT.serve(device)
        if owners:
            end_with_parent(None)  # the parent-death signal would also come when only a thread of the owner ends
        hold = Hold(mountpoint, device, owners, options.hold)
        if detach:
            os.setsid()  # only after the mount: autofs lets accesses of the mounting process group pass
        refresher = Refresher(operations, plan, of_store, device)
        gc.collect()
        freeze_garbage_collector()
        trio.run(_main, operations, refresher, mountpoint, hold, target if "://" in target else plan.base)
    finally:
        pyfuse3.close(unmount=False)


def _set_priority() -> None:
    """Raise the priority of the daemon, which many readers would starve, unless our parent has chosen one.

    Call it before any thread starts.
    """
    if os.getpriority(os.PRIO_PROCESS, 0) == 0:
        with contextlib.suppress(PermissionError):
            os.setpriority(os.PRIO_PROCESS, 0, _NICE)


def _operations(store: Store, options: Options, about: dict[str, Any], ready: Callable[[], bool | None]) -> Operations:
    """Return the handlers for a store; lock its upper directory. Raise SourceError if another mount uses that."""
    if options.upperdir is None:
        return Operations(store, options, about, ready)
    from zarrfs.fuse.writable import WritableOperations
    from zarrfs.store.overlay import Overlay

    assert isinstance(store, Overlay)
    store.upper.lock(exclusive=not options.ro)
    if options.ro:
        return Operations(store, options, about, ready)
    os.umask(0)  # the kernel has already applied the umask of the client that creates a file
    sys.dont_write_bytecode = True  # with this umask, imports would create world-writable directories
    return WritableOperations(store, options, about, ready)


def _announce(ready: Callable[[], bool | None]) -> bool | None:
    """Notify all processes that wait for the mount; return False if none does any more. Must not raise."""
    notify.notify_manager("READY=1")
    return ready()


async def _main(
    operations: Operations, refresher: Refresher, mountpoint: str, hold: Hold, target: str
) -> None:  # fmt: skip
    began = time.monotonic()
    try:
        async with trio.open_nursery() as nursery:
            operations.background = nursery
            operations.control = Control(nursery, refresher.refresh, hold.release)
            await nursery.start(_signals, operations, refresher, mountpoint, hold)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
            nursery.start_soon(_widen, operations, mountpoint)
            if not urls.is_here(target):
                in_background(_preload, operations, target)
            nursery.start_soon(log_suppressed)
            nursery.start_soon(hold.run)
            await sessionloop.run()
            nursery.cancel_scope.cancel()
    finally:
        notify.notify_manager("STOPPING=1")
        with trio.CancelScope(deadline=trio.current_time() + 5, shield=True):
            await operations.aclose()
        log.info("%s: unmounted after %.1f s: %s", mountpoint, time.monotonic() - began, _summary(operations))


def _summary(operations: Operations) -> str:
    found = operations.stats()
    served = "{read_bytes_total} bytes served in {reads_total} reads".format_map(found)
    requests = "{requests_total} requests ({requests_failed_total} failed)".format_map(found)
    return f"{served}, {requests}, {sum(found['errors'].values())} errors"


async def _preload(operations: Operations, url: str) -> None:
    """Import the modules that the first read of the target `url` needs, once the mount is announced."""
    await operations.started.wait()

    def run() -> None:
        import zarrfs.store.remotefiles  # noqa: F401
        from zarrfs.net.openers import preload

        preload(url)

    await trio.to_thread.run_sync(run, limiter=CONTROL, abandon_on_cancel=True)


async def _widen(operations: Operations, mountpoint: str) -> None:
    """Raise the kernel's read-ahead window, for large requests; if that is not permitted, push pages if possible."""
    await operations.started.wait()
    try:
        await trio.to_thread.run_sync(pagecache.raise_background, mountpoint, limiter=CONTROL)
        raised = await pagecache.raise_read_ahead(mountpoint)
    except (OSError, RuntimeError) as exc:  # out of descriptors or threads: the mount works, but slower
        log.warning("%s: the kernel's read-ahead stays as it is: %s", mountpoint, reason_of(exc))
        return
    operations.pushes = not raised and operations.store.immutable and operations.may_push


async def _signals(
    operations: Operations,
    refresher: Refresher,
    mountpoint: str,
    hold: Hold,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Handle signals: TERM and INT unmount, HUP refreshes, USR1 logs statistics and tasks."""
    with trio.open_signal_receiver(*_SIGNALS) as received:
        task_status.started()
        async for number in received:
            try:
                if number == signal.SIGHUP:
                    if refresher.refusal is not None:
                        log.warning("%s", refresher.refusal)
                    elif operations.background is not None and not refresher.pending:
                        operations.background.start_soon(refresher.refresh)
                elif number == signal.SIGUSR1:
                    await trio.to_thread.run_sync(trim, limiter=CONTROL)
                    log.info("statistics: %s", json.dumps(operations.stats()))
                elif hold.held and operations.started.is_set():
                    log.warning("%s: is held: %s is ignored", mountpoint, signal.Signals(number).name)
                else:
                    hold.release()  # not announced yet: the command that has started this daemon is ending it
                    await _stop(mountpoint, refresher.device)
            except Exception:  # out of threads, for example: it must not end the mount
                log.exception("%s has failed", signal.Signals(number).name)


async def _stop(mountpoint: str, device: int | None) -> None:
    """Unmount. If the mount is busy, stay: the log names its users.

    A lazy unmount would leave an empty directory under running readers, and a Zarr reader returns the fill value
    for a missing chunk: silently wrong data.
    """
    try:
        await trio.to_thread.run_sync(mounts.unmount_own, mountpoint, device, limiter=CONTROL)
    except MountError as exc:
        log.error("%s", exc)

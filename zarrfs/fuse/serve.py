"""The life of one mount: libfuse's options, readiness, signals, unmount."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import json
import logging
import os
import resource
import signal
import socket
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pyfuse3
import trio

from zarrfs.errors import MountError
from zarrfs.fuse import logs, mounts, pagecache
from zarrfs.fuse.operations import Operations
from zarrfs.options import Options
from zarrfs.sources import Plan, check_view, open_plan
from zarrfs.sources.parquet import ParquetStore
from zarrfs.store.api import PrefetchStore, Store
from zarrfs.store.index import IndexStore
from zarrfs.store.recording import Record, Recorder, records_to_warm, warm_mount

log = logging.getLogger("zarrfs")

_NICE = -5  # the daemon, where it may: with 64 readers on 2 cores it would have a share of a thirtieth


def serve(
    plan: Plan,
    mountpoint: str,
    options: Options,
    kernel: Sequence[str],
    ready: Callable[[], None],
    detach: bool = False,
) -> None:
    """Mount and serve until the mount is gone. Threads, sockets and loops are made from here on."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # one descriptor for each open file of a directory
    _set_priority(options.nice)
    check_view(plan, options)
    # whoever lists a directory looks names up: then is soon enough to ask for each chunk
    store = open_plan(plan, dataclasses.replace(options, grid=options.grid or "list"))
    records = records_to_warm(options)
    writable = options.upperdir is not None and not options.ro
    about = {"pid": os.getpid(), "source": plan.source, "kind": plan.kind, "writable": writable}
    operations = _operations(store, options, about, lambda: _announce(options, ready))
    operations.recorder = Recorder(options.record, plan.source) if options.record is not None else None
    with _guarded(mountpoint) if options.guard else contextlib.nullcontext():
        try:
            pyfuse3.init(operations, mountpoint, _libfuse_options(plan, options, kernel, writable))
        except RuntimeError as exc:
            raise MountError(_why_not_mounted(exc)) from exc
    mount = mounts.mount_at(mountpoint)
    source = store
    while (lower := getattr(source, "lower", None)) is not None:  # of an overlay, or of a view
        source = lower
    if mount is not None and isinstance(source, IndexStore | ParquetStore):
        source.forbid_device(os.makedev(*map(int, mount.device.split(":"))))
    if detach:
        os.setsid()  # not before the mount: an automount waits for its own process group
    gc.collect()
    gc.freeze()  # what is there now stays for as long as the mount
    gc.set_threshold(10_000, 20, 20)
    try:
        trio.run(_main, operations, store, mountpoint, options, records)
    finally:
        pyfuse3.close(unmount=False)


def _set_priority(nice: int | None) -> None:
    """Before there are threads, which inherit it; else many readers take the processor from their own daemon."""
    if nice is None and os.getpriority(os.PRIO_PROCESS, 0) != 0:
        return  # whoever started us has decided
    try:
        os.setpriority(os.PRIO_PROCESS, 0, _NICE if nice is None else nice)
    except PermissionError:
        if nice is not None:
            log.warning("-o nice=%d: not permitted", nice)


def _operations(store: Store, options: Options, about: dict[str, Any], ready: Callable[[], None]) -> Operations:
    """The handlers for a store; an upper is locked. SourceError where another mount uses it."""
    if options.upperdir is None:
        return Operations(store, options, about, ready)
    from zarrfs.fuse.writes import WritableOperations
    from zarrfs.store.overlay import Overlay

    assert isinstance(store, Overlay)
    store.upper.lock(exclusive=not options.ro)
    if options.ro:
        return Operations(store, options, about, ready)
    os.umask(0)  # the kernel has applied that of who makes a file
    return WritableOperations(store, options, about, ready)


@contextlib.contextmanager
def _guarded(mountpoint: str) -> Iterator[None]:
    """Leave the directory at `mountpoint` with mode 000 beneath what gets mounted on it.

    A user's mount needs write permission there, so an earlier guard is lifted first.
    """
    descriptor = os.open(mountpoint, os.O_PATH | os.O_DIRECTORY)
    beneath = f"/proc/self/fd/{descriptor}"
    try:
        os.chmod(beneath, 0o700)
        yield
        os.chmod(beneath, 0)
    except OSError as exc:
        raise MountError(f"cannot guard the mount point: {exc.strerror}") from exc
    finally:
        os.close(descriptor)


def _announce(options: Options, ready: Callable[[], None]) -> None:
    """Tell everybody who waits that the mount answers; must not raise."""
    try:
        if options.pid_file is not None:
            with open(options.pid_file, "w") as file:
                file.write(f"{os.getpid()}\n")
        if options.notify_pipe is not None:
            os.write(options.notify_pipe, b"\n")
            os.close(options.notify_pipe)
        address = os.environ.pop("NOTIFY_SOCKET", None)
        if address is not None:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
                sock.sendto(b"READY=1", "\0" + address[1:] if address.startswith("@") else address)
    except OSError as exc:
        log.warning("cannot tell that the mount is ready: %s", exc)
    ready()


async def _main(
    operations: Operations, store: Store, mountpoint: str, options: Options, records: Iterator[Record] | None
) -> None:
    try:
        async with trio.open_nursery() as nursery:
            await nursery.start(_signals, operations, mountpoint, options)
            nursery.start_soon(_widen, operations, mountpoint, options)
            operations.background = nursery
            if isinstance(store, PrefetchStore):
                nursery.start_soon(store.get_ready)
            if operations.recorder is not None:
                nursery.start_soon(operations.recorder.run)
            if records is not None and options.warm is not None:
                nursery.start_soon(warm_mount, store, options.warm, records)
            await pyfuse3.main(min_tasks=64, max_tasks=128)
            nursery.cancel_scope.cancel()
    finally:
        with trio.CancelScope(deadline=trio.current_time() + 5, shield=True):
            await operations.aclose()
            await store.aclose()
        if operations.recorder is not None:
            operations.recorder.close()
        _remove_pid_file(options)


def _remove_pid_file(options: Options) -> None:
    if options.pid_file is not None:
        with contextlib.suppress(OSError):
            os.unlink(options.pid_file)


async def _widen(operations: Operations, mountpoint: str, options: Options) -> None:
    """Get large requests out of the kernel; where that is not permitted, push pages ahead of them."""
    raised = await pagecache.raise_read_ahead(mountpoint, options.read_ahead, operations.started)
    await trio.to_thread.run_sync(pagecache.raise_background, mountpoint)
    if not raised and operations.store.immutable and operations.may_push:
        operations.pusher = pagecache.Pusher(operations.store)


async def _signals(
    operations: Operations,
    mountpoint: str,
    options: Options,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """TERM and INT unmount, HUP reopens the log, USR1 logs statistics."""
    caught = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
    with trio.open_signal_receiver(*caught) as received:
        task_status.started()
        async for number in received:
            if number == signal.SIGHUP:
                logs.reopen()
            elif number == signal.SIGUSR1:
                log.info("statistics: %s", json.dumps(operations.stats()))
            else:
                await _stop(mountpoint, options)


async def _stop(mountpoint: str, options: Options) -> None:
    """Unmount. While somebody uses the mount: refuse, or with on_exit=abort leave a dead endpoint.

    A lazy unmount would leave an empty directory under running readers, and a Zarr reader takes the absence
    of a chunk for the fill value: silently wrong data. A dead endpoint is an error that everybody sees.
    """
    try:
        await trio.to_thread.run_sync(mounts.unmount, mountpoint)
    except MountError as exc:
        if options.on_exit != "abort":
            log.error("%s (on_exit=abort would leave a dead endpoint)", exc)
            return
        log.error("%s; on_exit=abort: leaving a dead endpoint", exc)
        _remove_pid_file(options)
        os._exit(1)


def _libfuse_options(plan: Plan, options: Options, kernel: Sequence[str], writable: bool) -> set[str]:
    """What goes to libfuse and, through it, to the kernel."""
    name = (options.fsname or plan.source).replace("\\", "\\\\").replace(",", "\\,")
    chosen = {f"fsname={name}", "subtype=zarrfs", "default_permissions", *kernel}
    chosen |= set() if writable else {"ro"}
    chosen |= {"nosuid"} if "suid" not in kernel else set()
    chosen |= {"nodev"} if "dev" not in kernel else set()
    if options.allow_other:
        chosen.add("allow_other")
    elif options.allow_root:
        chosen.add("allow_root")
    if options.auto_unmount:
        chosen.add("auto_unmount")
    return chosen


def _why_not_mounted(exc: Exception) -> str:
    """A reason for what libfuse has only printed."""
    if not os.path.exists("/dev/fuse"):
        return "there is no /dev/fuse here: load the fuse module, or give the container the device"
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        return "no permission to use /dev/fuse"
    return f"libfuse refused the mount ({exc}); its reason is the line above"

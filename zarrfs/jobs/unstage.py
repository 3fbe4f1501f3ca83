"""Taking away what was staged: the mount, the link, the directories, the record."""

from __future__ import annotations

import contextlib
import os
import stat
import time
from collections.abc import Callable
from typing import NamedTuple

from zarrfs.errors import MountError
from zarrfs.jobs import keeper, nodelocal, processes, records
from zarrfs.jobs.records import Record
from zarrfs.system import mounts
from zarrfs.system.machine import boot

_POLL, _SLOWEST = 0.05, 2.0  # seconds between two attempts to unmount: at first, and when it takes long


class Taking(NamedTuple):
    """How to take something away."""

    timeout: float = 0.0  # seconds to wait for who uses the mount
    lazy: bool = False  # detach the mount although it is in use
    copies: bool = False  # remove copies, too
    upper: bool = False  # and the directory with the job's changes
    tell: Callable[[str], None] = lambda text: None
    again: bool = False  # the same is copied again, and takes up what is there


def unstage(record: Record, how: Taking) -> None:
    """Take away what `record` tells of, and the record. MountError where the mount is in use, naming by whom.

    Then all is as before, and the mount is still kept in use.
    """
    if not _claimed(record, how.timeout):
        return
    if record.keeper == record.maker:  # it has become this very process
        record.keeper = None
    elif record.keeper is None and (record.mounted or record.owners):
        record.keeper = keeper.of(record.id)
    try:
        if record.boot == boot():  # else its processes are others now
            _end_mount(record, how) if record.mounted else processes.kill(record.keeper)
        _remove(record, how)
    except BaseException:
        if record.exists():
            record.state = records.READY
            record.save()
        raise
    record.remove()


def mount_of(record: Record) -> mounts.Mount | None:
    """The mount that belongs to a record, also where a directory above it was renamed; no other one at its place.

    MountError for one that only another mount namespace has, such as that of a job with a /tmp of its own.
    """
    found = mounts.mount_at(record.place)
    if found is not None and found.fstype == mounts.FSTYPE and record.device in ("", found.device):
        return found
    if record.daemon is None or not processes.alive(record.daemon):
        return None
    if (moved := _moved(record, record.daemon.pid)) is not None:
        return moved
    if processes.elsewhere(record.daemon):
        who = processes.shown(record.daemon)
        raise MountError(f"{record.dest}: is mounted in another mount namespace, that of {who}")
    return None


def _moved(record: Record, pid: int) -> mounts.Mount | None:
    """The mount of the daemon `pid` that is on record, wherever it is: numbers of devices are given again."""
    for mount in mounts.mounts():
        if (mount.fstype, mount.device) == (mounts.FSTYPE, record.device):
            about = mounts.daemon_of(mount.mountpoint) or {}
            if about.get("pid") == pid:
                return mount
    return None


def at(dest: str, among: list[Record]) -> list[Record]:
    """Those that are staged at `dest`: by that name, where they really are, or where their mounts are by now."""
    path = records.resolved(dest)
    named = [record for record in among if path in (record.dest, record.place)]
    if named or (mount := mounts.mount_at(path)) is None:
        return named
    there = [record for record in among if record.daemon is not None and record.device == mount.device]
    return [record for record in there if record.daemon and _moved(record, record.daemon.pid) == mount]


def why_stale(record: Record) -> str:
    """Why nobody needs what a record tells of any more; "" where somebody may.

    A mount whose daemon has died is an error to whoever reads it; without it they would read fill values. So it stays
    as long as the process or the job that it is for.
    """
    if record.boot != boot():
        return "the node has been started anew since"
    if record.state != records.READY:
        return "" if processes.alive(record.maker) else "whoever staged it has died"
    try:
        if record.mounted and mount_of(record) is None:
            return "it is not mounted any more"
    except MountError:
        return ""
    if record.owners:
        return "" if any(map(processes.alive, record.owners)) else "the process that it was for has ended"
    if record.manager:
        return "its job has ended" if processes.job_is_gone(record.manager, record.job) else ""
    if not record.mounted and not os.path.lexists(record.place):
        return "it is not there any more"
    return why_dead(record)


def why_dead(record: Record) -> str:
    """That nobody can read a mount any more; "" where somebody may. Who stages again at its place replaces it."""
    return "its daemon has died" if record.mounted and mounts.is_dead(record.place) else ""


def keep(record: Record) -> None:
    """Start a keeper where there is none; the mount is in use when this returns. MountError."""
    if not record.mounted or processes.alive(record.keeper):
        return
    mount = mount_of(record)
    root = keeper.hold(record.place if mount is None else mount.mountpoint)
    try:
        record.keeper = keeper.start(record.id, root, record.owners)[0]
    finally:
        os.close(root)


def _claimed(record: Record, timeout: float) -> bool:
    """Whether it is ours to take away; False when another process has done that meanwhile."""
    deadline = time.monotonic() + timeout
    while not records.claim(record):
        if not record.exists():
            return False
        if time.monotonic() >= deadline:
            raise MountError(f"{record.dest}: process {record.maker.pid} is staging it, or taking it away")
        time.sleep(_POLL)
    return True


def _end_mount(record: Record, how: Taking) -> None:
    mount = mount_of(record)
    if mount is None:
        processes.kill(record.keeper)
        return
    if mounts.is_dead(mount.mountpoint):
        processes.kill(record.keeper)
        mounts.unmount(mount.mountpoint, lazy=True)
        return
    root = keeper.hold(mount.mountpoint)
    processes.kill(record.keeper)
    record.keeper = None
    deadline, told, pause = time.monotonic() + how.timeout, False, _POLL
    try:
        while True:
            os.close(root)
            root = -1
            try:
                mounts.unmount(mount.mountpoint, how.lazy)
            except MountError as exc:
                root = keeper.hold(mount.mountpoint)
                if time.monotonic() >= deadline:
                    raise
                if not told:
                    how.tell(f"{exc}; waiting")
                    told = True
                time.sleep(pause)
                pause = min(1.5 * pause, _SLOWEST)
            else:
                break
    except BaseException:
        keep(record)
        raise
    finally:
        if root >= 0:
            os.close(root)
    if record.daemon is not None and not how.lazy and not mounts.wait_for_end(record.daemon.pid, 10.0):
        how.tell(f"{record.dest}: unmounted, but its daemon (pid {record.daemon.pid}) has not ended")


def _remove(record: Record, how: Taking) -> None:
    """Links, copies, directories: only what is as the record says, and nothing that something is mounted on."""
    if record.link and os.path.islink(record.dest) and os.readlink(record.dest) == record.place:
        os.unlink(record.dest)
        if record.replaced is not None:
            with contextlib.suppress(OSError):
                os.mkdir(record.dest)
                os.chmod(record.dest, record.replaced)
    if record.manifest:  # what a killed command had of it
        with contextlib.suppress(OSError):
            os.unlink(record.unfinished(record.manifest))
    if not record.mounted and (record.local or how.copies):
        _remove_copy(record, how.tell)
    elif how.again and record.note:
        from zarrfs.copying.destination_journal import put

        with contextlib.suppress(OSError):  # then it is in the way, as any other file
            put(record.place, record.note)
    if how.upper and record.upper:
        from zarrfs.copying.changes import discard

        if os.path.isdir(record.upper):
            discard(record.upper, lambda count: True)
            os.rmdir(record.upper)
    if record.made_upper:  # nobody could write to it yet
        with contextlib.suppress(OSError):
            os.rmdir(record.upper)
    for path in reversed([*record.made, *([record.local] if record.local else [])]):
        with contextlib.suppress(OSError):  # not empty: something else is in it, and stays
            os.rmdir(path)


def _remove_copy(record: Record, tell: Callable[[str], None]) -> None:
    """Remove a directory of the node; of any other what the copy has written, and nobody has changed since."""
    from zarrfs.store.destination import remove_tree

    place = os.path.realpath(record.place)
    inside = [mount.mountpoint for mount in mounts.mounts() if nodelocal.beneath(mount.mountpoint, place)]
    if inside:
        raise MountError(f"{record.place}: {inside[0]} is mounted in it; it stays")
    try:
        status = os.lstat(record.place)
        if stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid():
            remove_tree(record.place) if record.local else _remove_written(record, tell)
        if record.told:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(record.manifest)
    except FileNotFoundError:
        pass
    except OSError as exc:
        raise MountError(f"{exc.filename or record.place}: {(exc.strerror or str(exc)).lower()}") from None


def _remove_written(record: Record, tell: Callable[[str], None]) -> None:
    from zarrfs.copying.destination_journal import forget, kept
    from zarrfs.copying.removal import remove_written

    note = record.note or kept(record.place, record.mark)  # the latter where the copy was killed
    if note is not None and note != record.note:
        record.note = note
        record.save()
    if note is None or not forget(record.place, record.mark):
        raise MountError(f"{record.place}: another run is writing to it; it stays")
    if left := remove_written(record.place, record.note.get("spans", [])):
        tell(f"{record.place}: {left:,} files that the copy has not written, or that have changed since, stay")

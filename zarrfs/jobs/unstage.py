"""Unstaging: removing the mount, the link, the directories and the record of staged sources.

unstage() removes one, unstage_stale() all that nobody needs any more; root does so for every user.
"""

from __future__ import annotations

import contextlib
import json
import os
import pwd
import re
import stat
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from zarrfs.config.shares import share_of
from zarrfs.errors import MountError, ZarrfsError, reason_of
from zarrfs.jobs import keeper, processes, records
from zarrfs.jobs.records import READY, Record, StillOwned
from zarrfs.system import mounts
from zarrfs.system.processes import boot, shown

_POLL, _POLL_MAX = 0.05, 2.0  # seconds between attempts to unmount, at first and at most
_USER_TIMEOUT = 120.0  # seconds for the records of one user, besides --timeout
_OURS = re.compile(r"zarrfs-(run|stage)-[0-9a-f]{16}")  # names of node-local directories


class UnstageOptions(NamedTuple):
    """Options of unstaging."""

    timeout: float = 0.0  # seconds to wait while the mount is busy
    lazy: bool = False  # detach the mount even if it is busy
    copies: bool = False  # remove copies, too
    upper: bool = False  # remove the upper directory, too
    notify: Callable[[str], None] = lambda text: None
    again: bool = False  # the same source will be copied again, and reuses the files
    unless_owned: bool = False  # leave what is staged for another running process as well
    leaving: int | None = None  # pid of an owner that is none any more


def unstage(record: Record, options: UnstageOptions) -> bool:
    """Remove what a record describes, and the record; False if it stays, for other owners (`unless_owned`).

    Raises MountError, which names the processes, if the mount is busy; then everything stays, and so does the keeper.
    """
    try:
        if not _claimed(record, options):
            return True
    except StillOwned:  # its keeper waits for the end of the one that leaves, too
        return False
    if record.keeper == record.maker:  # the keeper has become this process
        record.keeper = None
    elif record.keeper is None and (record.mounted or record.owners):
        record.keeper = keeper.find(record.id)
    try:
        if record.boot == boot():  # after a reboot, its pids are those of other processes
            _end_mount(record, options) if record.mounted else processes.kill(record.keeper)
        _remove(record, options)
    except BaseException:
        if record.exists():
            record.state = READY
            record.save()
        raise
    record.remove()
    return True


def mount_of(record: Record) -> mounts.Mount | None:
    """Return the mount of a record, even if a directory above it was renamed; None for another mount at its path.

    Raises MountError if it is in another mount namespace, such as that of a job with a private /tmp.
    """
    found = mounts.mount_at(record.place)
    if found is not None and found.fstype == mounts.FSTYPE and record.device in ("", found.device):
        return found
    if record.daemon is None or not processes.alive(record.daemon):
        return None
    if (moved := _moved(record, record.daemon.pid)) is not None:
        return moved
    if processes.elsewhere(record.daemon):
        who = shown(record.daemon.pid)
        raise MountError(f"{record.dest}: is mounted in another mount namespace, that of {who}")
    return None


def _moved(record: Record, pid: int) -> mounts.Mount | None:
    """Find the mount of a daemon at any path. The daemon is asked for its pid, as device numbers are reused."""
    for mount in mounts.mounts():
        if (mount.fstype, mount.device) == (mounts.FSTYPE, record.device):
            about = mounts.daemon_of(mount.mountpoint) or {}
            if about.get("pid") == pid:
                return mount
    return None


def at(dest: str, among: list[Record]) -> list[Record]:
    """Return the records staged at `dest`: their DEST, their node-local path, or the present path of their mount."""
    path = mounts.resolved(dest)
    named = [record for record in among if path in (record.dest, record.place)]
    if named or (mount := mounts.mount_at(path)) is None:
        return named
    there = [record for record in among if record.daemon is not None and record.device == mount.device]
    return [record for record in there if record.daemon and _moved(record, record.daemon.pid) == mount]


def why_stale(record: Record) -> str:
    """Return why a staged source is not needed any more, or "".

    A mount whose daemon has died stays as long as its owner process or job: its readers get an error, and once
    unmounted a Zarr reader would return fill values.
    """
    if record.boot != boot():
        return "the node was rebooted since"
    if record.foreign:  # whether its processes are alive, and its mount is there, cannot be seen from here
        return _job_ended(record)
    if record.state != READY:
        return "" if processes.alive(record.maker) else "the process that staged it has died"
    try:
        if record.mounted and mount_of(record) is None:
            return "it is not mounted any more"
    except MountError:
        return ""
    if record.owners:
        return "" if any(map(processes.alive, record.owners)) else "the process that it was for has ended"
    if record.manager:
        return _job_ended(record)
    if not record.mounted and not os.path.lexists(record.place):
        return "it is not there any more"
    return why_dead(record)


def _job_ended(record: Record) -> str:
    return "its job has ended" if processes.job_is_gone(record.manager, record.job) else ""


def why_dead(record: Record) -> str:
    """Return why a mount cannot be read any more, or "". The same job staging there again replaces it."""
    return "its daemon has died" if record.mounted and mounts.is_dead(record.place) else ""


def ensure_keeper(record: Record) -> None:
    """Start a keeper of a mount that has none; the mount is busy when this returns. Raises MountError."""
    if not record.mounted or processes.alive(record.keeper):
        return
    mount = mount_of(record)
    root = keeper.open_root(record.place if mount is None else mount.mountpoint)
    try:
        record.keeper = keeper.start(record.id, root, record.owners)[0]
    finally:
        os.close(root)


def _claimed(record: Record, options: UnstageOptions) -> bool:
    """Claim a record, waiting for another process that does; False if that one has unstaged it."""
    deadline = time.monotonic() + options.timeout
    while not records.claim(record, options.unless_owned, options.leaving):
        if not record.exists():
            return False
        if time.monotonic() >= deadline:
            raise MountError(f"{record.dest}: process {record.maker.pid} is staging or unstaging it")
        time.sleep(_POLL)
    return True


def _end_mount(record: Record, options: UnstageOptions) -> None:
    mount = mount_of(record)
    if mount is None:
        processes.kill(record.keeper)
        return
    if mounts.is_dead(mount.mountpoint):
        processes.kill(record.keeper)
        mounts.unmount(mount.mountpoint, lazy=True)
        return
    root = keeper.open_root(mount.mountpoint)
    processes.kill(record.keeper)
    record.keeper = None
    deadline, notified, pause = time.monotonic() + options.timeout, False, _POLL
    try:
        while True:
            os.close(root)
            root = -1
            try:
                mounts.unmount(mount.mountpoint, options.lazy)
            except MountError as exc:
                root = keeper.open_root(mount.mountpoint)
                if time.monotonic() >= deadline:
                    raise
                if not notified:
                    options.notify(f"{exc}; waiting")
                    notified = True
                time.sleep(pause)
                pause = min(1.5 * pause, _POLL_MAX)
            else:
                break
    except BaseException:
        ensure_keeper(record)
        raise
    finally:
        if root >= 0:
            os.close(root)
    if record.daemon is not None and not options.lazy and not mounts.wait_for_end(record.daemon.pid, 10.0):
        options.notify(f"{record.dest}: unmounted, but its daemon (pid {record.daemon.pid}) has not ended")


def _remove(record: Record, options: UnstageOptions) -> None:
    """Remove links, copies and directories that are as the record says, and nothing with a mount below it."""
    if record.link and _remove_link(record.dest, record.place) and record.replaced is not None:
        with contextlib.suppress(OSError):
            os.mkdir(record.dest)
            _set_mode(record.dest, record.replaced)
    if record.manifest:  # the unfinished one of a killed command
        with contextlib.suppress(OSError):
            os.unlink(record.unfinished(record.manifest))
    if not record.mounted and (record.local or options.copies):
        _remove_copy(record, options.notify)
    elif options.again and record.note and not record.share:  # the journal of a share has stayed
        from zarrfs.copying.destination_journal import put

        with contextlib.suppress(OSError):  # the next copy then finds the files in its way
            put(record.place, record.note)
    if options.upper and record.upper:
        from zarrfs.copying.changes import discard

        if os.path.isdir(record.upper):
            discard(record.upper, lambda count: True)
            os.rmdir(record.upper)
    if record.made_upper:  # no job can have written to it yet
        with contextlib.suppress(OSError):
            os.rmdir(record.upper)
    for path in reversed([*record.made, *([record.local] if record.local else [])]):
        with contextlib.suppress(OSError):  # not empty: files of others stay
            os.rmdir(path)


def _set_mode(directory: str, mode: int) -> None:
    """Set the mode of a directory of this user. Others may put a link there meanwhile, which is not followed."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if os.fstat(descriptor).st_uid == os.geteuid():
            os.fchmod(descriptor, mode)
    finally:
        os.close(descriptor)


def _remove_copy(record: Record, notify: Callable[[str], None]) -> None:
    """Remove a node-local directory; in others, the files that the copy wrote and nobody has changed since."""
    from zarrfs.store.destination import remove_tree

    place = os.path.realpath(record.place)
    inside = [mount.mountpoint for mount in mounts.mounts() if mounts.beneath(mount.mountpoint, place)]
    if inside:
        raise MountError(f"{record.place}: {inside[0]} is mounted in it: not removed")
    try:
        status = os.lstat(record.place)
        if stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid():
            remove_tree(record.place) if record.local else _remove_written(record, notify)
        if record.manifest_written:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(record.manifest)
    except FileNotFoundError:
        pass
    except OSError as exc:
        raise MountError(f"{exc.filename or record.place}: {reason_of(exc)}") from None


def _remove_written(record: Record, notify: Callable[[str], None]) -> None:
    from zarrfs.copying.destination_journal import forget, kept
    from zarrfs.copying.removal import remove_written

    share = share_of(record.share or None, {})
    note = record.note or kept(record.place, record.mark, share)  # in the journal, if the copy was killed
    if note is not None and note != record.note:
        record.note = note
        record.save()
    if note is None or not forget(record.place, record.mark, share):
        raise MountError(f"{record.place}: another run is writing to it: not removed")
    who = f"the share {record.share}" if record.share else "the copy"
    if left := remove_written(record.place, record.note.get("spans", [])):
        notify(f"{record.place}: {left:,} files that {who} has not written, or that have changed since, stay")


def unstage_all(chosen: Iterable[tuple[Record, str]], options: UnstageOptions) -> list[dict[str, Any]]:
    """Unstage records, each for a reason; return an object for each, ready for JSON, with `error` if that failed."""
    results = []
    for record, reason in chosen:
        result = {"dest": record.dest, "source": record.source, "how": record.how, "reason": reason, "error": None}
        try:
            ended = unstage(record, options)
        except (ZarrfsError, OSError) as exc:
            options.notify(str(exc))
            result["error"], ended = str(exc), True
        if ended:
            results.append(result)
    return results


def unstage_stale(options: UnstageOptions) -> list[dict[str, Any]]:
    """Unstage what is not needed any more, for this user or, as root, for every user. Returns as unstage_all()."""
    results = _unstage_own_stale(options)
    _report_damaged(results, options)
    if os.geteuid() == 0 and not os.environ.get(records.VARIABLE):
        for user in records.users_with_records():
            found = _as_user(user, lambda: _unstage_own_stale(options), options.timeout + _USER_TIMEOUT)
            _report_damaged(found, options)
            results += found
    return results


def damaged_results(damaged: Iterable[MountError]) -> list[dict[str, Any]]:
    """Return results, as of unstage_all(), for damaged records."""
    return [_nothing(str(exc)) for exc in damaged]


def _report_damaged(results: list[dict[str, Any]], options: UnstageOptions) -> None:
    """Report failures that belong to no DEST; the others are reported already."""
    for result in results:
        if result["dest"] is None:
            options.notify(result["error"])


def _unstage_own_stale(options: UnstageOptions) -> list[dict[str, Any]]:
    chosen, damaged = [], list[MountError]()
    for record in records.found(damaged):
        reason = why_stale(record)
        if reason:
            chosen.append((record, reason))
        elif record.state == READY and not record.foreign:  # a keeper here would not see its owners
            _replace_keeper(record, options.notify)
    results = unstage_all(chosen, options)
    if not damaged:  # otherwise a directory may belong to a damaged record
        _remove_leftovers(options.notify)
    return results + damaged_results(damaged)


def _replace_keeper(record: Record, notify: Callable[[str], None]) -> None:
    """Replace the killed keeper of a mount that is still needed."""
    if not record.mounted or processes.alive(record.keeper) or mounts.is_dead(record.place):
        return
    try:
        with records.locked():
            now = records.current(record)
            if now is not None and now.state == READY:  # otherwise it is being unstaged
                ensure_keeper(now)
                now.save()
    except MountError as exc:
        notify(str(exc))


def _remove_leftovers(notify: Callable[[str], None]) -> None:
    """Remove node-local directories of an earlier boot without a record: root's records are gone with /run."""
    known = {path for record in records.found() for path in (record.local, record.place, *record.made)}
    for parent in ("/tmp", "/var/tmp", os.environ.get("TMPDIR", "/tmp")):
        with contextlib.suppress(OSError):
            for entry in os.scandir(parent):
                if not _OURS.fullmatch(entry.name) or entry.path in known:
                    continue
                status = entry.stat(follow_symlinks=False)
                if status.st_uid == os.geteuid() and status.st_ctime < processes.booted():
                    _remove_leftover(entry.path, notify)


def _remove_link(link: str, place: str) -> bool:
    """Remove a link to `place`; return whether it was there: another node of the job may have removed it."""
    try:
        if os.readlink(link) != place:
            return False
    except OSError:
        return False
    with contextlib.suppress(FileNotFoundError):
        os.unlink(link)
        return True
    return False


def _remove_leftover(path: str, notify: Callable[[str], None]) -> None:
    from zarrfs.store.destination import remove_tree

    if os.path.islink(path) or any(mounts.beneath(mount.mountpoint, path) for mount in mounts.mounts()):
        return
    try:
        remove_tree(path)
    except OSError as exc:
        notify(f"{path}: {reason_of(exc)}")


def _as_user(user: int, body: Callable[[], list[dict[str, Any]]], timeout: float) -> list[dict[str, Any]]:
    """Return the result of `body` from a child process of `user`, as root must not follow paths of a user.

    A child is killed after `timeout` seconds: the user may have mounted a file system there that does not answer, or
    may have stopped the child.
    """

    def answer(pipe: int) -> None:
        _become(user)
        with open(pipe, "w") as file:
            try:
                done = body()
            except (ZarrfsError, OSError) as exc:
                done = [_failed(user, str(exc))]
            json.dump(done, file)

    output, _ended = mounts.from_child(answer, timeout)
    try:
        found: list[dict[str, Any]] = json.loads(output)
    except ValueError:  # it was killed, perhaps by its user, before it had written everything
        found = [_failed(user)]
    return found


def _failed(user: int, why: str = "the child that does it was ended") -> dict[str, Any]:
    return _nothing(f"records of user {user}: not looked at: {why}")


def _nothing(error: str) -> dict[str, Any]:
    return {"dest": None, "source": None, "how": None, "reason": "", "error": error}


def _become(user: int) -> None:
    """Become `user` for good, with the groups of that user alone."""
    try:
        entry = pwd.getpwuid(user)
        group, name, home = entry.pw_gid, entry.pw_name, entry.pw_dir
    except KeyError:
        group, name, home = user, "", "/"
    os.setgroups([])
    if name:
        with contextlib.suppress(OSError):
            os.initgroups(name, group)
    os.setresgid(group, group, group)
    os.setresuid(user, user, user)
    os.environ.update(HOME=home)
    for variable in ("XDG_RUNTIME_DIR", "XDG_CACHE_HOME", "TMPDIR"):
        os.environ.pop(variable, None)
    os.chdir("/")

"""Unstaging: removing the mount, the link, the directories and the record of staged sources.

unstage() removes one source; unstage_stale() removes all sources that are not needed any more, as root of all users.
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

_POLL, _POLL_MAX = 0.05, 2.0  # seconds between attempts to unmount: the first pause, and the longest
_USER_TIMEOUT = 120.0  # seconds for the records of one user, in addition to --timeout
_OURS = re.compile(r"zarrfs-(run|stage)-[0-9a-f]{16}")  # names of node-local directories


class UnstageOptions(NamedTuple):
    """Options for unstaging."""

    timeout: float = 0.0  # seconds to wait while the mount is busy
    lazy: bool = False  # detach the mount even if it is busy
    copies: bool = False  # remove copies, too
    upper: bool = False  # remove the upper directory, too
    notify: Callable[[str], None] = lambda text: None
    again: bool = False  # the source will be staged again: the copy reuses the files, the mount replaces the dead one
    unless_owned: bool = False  # leave a source that was also staged for another process, if that is running
    leaving: int | None = None  # pid of a process that is no longer an owner


def unstage(record: Record, options: UnstageOptions) -> bool:
    """Remove everything that a record describes, and the record; return False if it stays for other owners.

    It stays for other owners only with `unless_owned`. Raise MountError, which names the processes, if the mount is
    busy; then everything stays, and so does the keeper.
    """
    try:
        if not _claimed(record, options):
            return True
    except StillOwned:  # the keeper unstages it later, after all owners have ended
        return False
    if record.keeper == record.maker:  # this process was the keeper before exec
        record.keeper = None
    elif record.keeper is None and (record.mounted or record.owners):
        record.keeper = keeper.find(record.id)
    try:
        if record.boot == boot():  # after a reboot, its pids may belong to other processes
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
    """Return the mount of a record, even if a directory above it was renamed; None if it is not mounted.

    Raise MountError if it may be in another mount namespace, such as that of a job with a private /tmp.
    """
    found = mounts.mount_at(record.place)
    if found is not None and found.fstype == mounts.FSTYPE and record.device in ("", found.device):
        return found
    if record.daemon is None or not processes.alive(record.daemon):
        return None
    if (moved := _moved(record, record.daemon.pid)) is not None:
        return moved
    if processes.may_be_in_other_namespace(record.daemon):
        who = shown(record.daemon.pid)
        raise MountError(f"{record.dest}: is mounted in another mount namespace, that of {who}")
    return None


def _moved(record: Record, pid: int) -> mounts.Mount | None:
    """Find the mount of a daemon at any path. Ask the daemon of a mount for its pid: device numbers are reused."""
    for mount in mounts.mounts():
        if (mount.fstype, mount.device) == (mounts.FSTYPE, record.device):
            about = mounts.daemon_of(mount.mountpoint) or {}
            if about.get("pid") == pid:
                return mount
    return None


def at(dest: str, among: list[Record]) -> list[Record]:
    """Return the records whose DEST, node-local path, or current mount point is `dest`."""
    path = mounts.resolved(dest)
    named = [record for record in among if path in (record.dest, record.place)]
    if named or (mount := mounts.mount_at(path)) is None:
        return named
    there = [record for record in among if record.daemon is not None and record.device == mount.device]
    return [record for record in there if record.daemon and _moved(record, record.daemon.pid) == mount]


def why_stale(record: Record) -> str:
    """Return why a staged source is not needed any more, or "".

    A mount whose daemon has died is needed as long as its owner processes or its job run: its readers get an error.
    Once unmounted, a Zarr reader would return fill values.
    """
    if record.boot != boot():
        return "the node was rebooted since"
    if record.foreign:  # its processes and its mount may not be visible in this namespace
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
    """Return why a mount cannot be read any more, or "". The same job may replace it by staging there again."""
    return "its daemon has died" if record.mounted and mounts.is_dead(record.place) else ""


def ensure_keeper(record: Record) -> None:
    """Start a keeper if a mount has none; the mount is busy when this returns. Raise MountError."""
    if not record.mounted or processes.alive(record.keeper):
        return
    mount = mount_of(record)
    root = keeper.open_root(record.place if mount is None else mount.mountpoint)
    try:
        record.keeper = keeper.start(record.id, root, record.owners)[0]
    finally:
        os.close(root)


def _claimed(record: Record, options: UnstageOptions) -> bool:
    """Claim a record, and wait if another process has claimed it; return False if that process has unstaged it.

    Raise MountError after a timeout, and StillOwned.
    """
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
        if not options.again:  # else the new mount replaces it
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
    """Remove links, copies and directories that are as the record describes them, but no copy with a mount in it."""
    if record.mounted and options.again:
        return
    if record.link and _remove_link(record.dest, record.place) and record.replaced is not None:
        with contextlib.suppress(OSError):
            os.mkdir(record.dest)
            _set_mode(record.dest, record.replaced)
    if record.manifest:  # remove the unfinished manifest of a killed command
        with contextlib.suppress(OSError):
            os.unlink(record.unfinished(record.manifest))
    if not record.mounted and (record.local or options.copies):
        _remove_copy(record, options.notify)
    elif options.again and record.note and not record.share:  # the journal of a share was not removed
        from zarrfs.copying.destination_journal import put

        with contextlib.suppress(OSError):  # if this fails, the next copy reports the files as existing
            put(record.place, record.note)
    if options.upper and record.upper:
        from zarrfs.copying.changes import discard

        if os.path.isdir(record.upper):
            discard(record.upper, lambda count: True)
            os.rmdir(record.upper)
    if record.made_upper:  # staging has not finished, so no job can have written to it
        with contextlib.suppress(OSError):
            os.rmdir(record.upper)
    for path in reversed([*record.made, *([record.local] if record.local else [])]):
        with contextlib.suppress(OSError):  # not empty: it contains other files
            os.rmdir(path)


def _set_mode(directory: str, mode: int) -> None:
    """Set the mode of a directory of this user, without following a link by which another user may replace it."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if os.fstat(descriptor).st_uid == os.geteuid():
            os.fchmod(descriptor, mode)
    finally:
        os.close(descriptor)


def _remove_copy(record: Record, notify: Callable[[str], None]) -> None:
    """Remove a node-local directory; from another directory, the files that the copy wrote, if unchanged since.

    Also remove its manifest. Raise MountError.
    """
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

    share = share_of(record.share or None)
    note = record.note or kept(record.place, record.mark, share)  # from the journal if the copy was killed
    if note is not None and note != record.note:
        record.note = note
        record.save()
    if note is None or not forget(record.place, record.mark, share):
        raise MountError(f"{record.place}: another run is writing to it: not removed")
    who = f"the share {record.share}" if record.share else "the copy"
    if left := remove_written(record.place, record.note.get("spans", [])):
        notify(f"{record.place}: {left:,} files that {who} has not written, or that have changed since, stay")


def unstage_all(chosen: Iterable[tuple[Record, str]], options: UnstageOptions) -> list[dict[str, Any]]:
    """Unstage (record, reason) pairs; return an object for each, ready for JSON, with `error` if that failed.

    Records that stay for other owners are left out.
    """
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
    """Unstage sources that are not needed any more, as root those of all users. Return objects as unstage_all().

    If ZARRFS_STATE_DIR is set, root unstages only those recorded there.
    """
    results = _unstage_own_stale(options)
    _report_damaged(results, options)
    if os.geteuid() == 0 and not os.environ.get(records.VARIABLE):
        for user in records.users_with_records():
            found = _as_user(user, lambda: _unstage_own_stale(options), options.timeout + _USER_TIMEOUT)
            _report_damaged(found, options)
            results += found
    return results


def damaged_results(damaged: Iterable[MountError]) -> list[dict[str, Any]]:
    """Return objects for damaged records, in the form of unstage_all()."""
    return [_nothing(str(exc)) for exc in damaged]


def _report_damaged(results: list[dict[str, Any]], options: UnstageOptions) -> None:
    """Report failures that belong to no DEST; unstage_all() has reported the others."""
    for result in results:
        if result["dest"] is None:
            options.notify(result["error"])


def _unstage_own_stale(options: UnstageOptions) -> list[dict[str, Any]]:
    chosen, damaged = [], list[MountError]()
    for record in records.found(damaged):
        reason = why_stale(record)
        if reason:
            chosen.append((record, reason))
        elif record.state == READY and not record.foreign:  # a keeper needs to see the owners' pids
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
    """Remove node-local directories of an earlier boot without a record: a reboot removes records of root in /run."""
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
    """Remove a link to `place`; return False if it did not exist: another node of the job may have removed it."""
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
    """Run `body` in a child process of `user`, because root must not follow paths of a user; return its result.

    The child process is killed after `timeout` seconds: the user may have mounted a file system that does not answer,
    or may have stopped the process.
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
    except ValueError:  # the child process was killed, perhaps by its user, before it had written everything
        found = [_failed(user)]
    return found


def _failed(user: int, why: str = "the child that does it was ended") -> dict[str, Any]:
    return _nothing(f"records of user {user}: not looked at: {why}")


def _nothing(error: str) -> dict[str, Any]:
    return {"dest": None, "source": None, "how": None, "reason": "", "error": error}


def _become(user: int) -> None:
    """Change the user and groups of this process to those of `user`, irreversibly."""
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

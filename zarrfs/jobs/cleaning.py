"""Several records at once: those of a job, all, or what nobody needs any more, by root for every user."""

from __future__ import annotations

import contextlib
import json
import os
import pwd
import re
import signal
from collections.abc import Callable, Iterable
from typing import Any

from zarrfs.errors import MountError, ZarrfsError
from zarrfs.jobs import nodelocal, processes, records
from zarrfs.jobs.records import READY, Record
from zarrfs.jobs.unstage import Taking, keep, unstage, why_stale
from zarrfs.system import mounts
from zarrfs.system.processes import readable

_PATIENCE = 120.0  # seconds for what one user has staged, besides --timeout
_OURS = re.compile(r"zarrfs-(run|stage)-[0-9a-f]{16}")  # directories that are made on a node


def take(chosen: Iterable[tuple[Record, str]], how: Taking) -> list[dict[str, Any]]:
    """Take away records, each for a reason; gives an object for each, ready for JSON; `error` where it failed."""
    results = []
    for record, reason in chosen:
        result = {"dest": record.dest, "source": record.source, "how": record.how, "reason": reason, "error": None}
        try:
            unstage(record, how)
        except (ZarrfsError, OSError) as exc:
            how.tell(str(exc))
            result["error"] = str(exc)
        results.append(result)
    return results


def take_stale(how: Taking) -> list[dict[str, Any]]:
    """Take away what nobody needs any more, of this user; of every user, if that is root. As take()."""
    results = _take_own_stale(how)
    _tell_of_none(results, how)
    if os.geteuid() == 0 and not os.environ.get(records.VARIABLE):
        for user in records.users_with_records():
            found = _as_user(user, lambda: _take_own_stale(how), how.timeout + _PATIENCE)
            _tell_of_none(found, how)
            results += found
    return results


def unreadable(damaged: Iterable[MountError]) -> list[dict[str, Any]]:
    """What take() would give for records of which only that they are damaged is known."""
    return [_nothing(str(exc)) for exc in damaged]


def _tell_of_none(results: list[dict[str, Any]], how: Taking) -> None:
    """Tell of failures of which nobody has told: those without a place."""
    for result in results:
        if result["dest"] is None:
            how.tell(result["error"])


def _take_own_stale(how: Taking) -> list[dict[str, Any]]:
    chosen, damaged = [], list[MountError]()
    for record in records.found(damaged):
        reason = why_stale(record)
        if reason:
            chosen.append((record, reason))
        elif record.state == READY:
            _look_after(record, how.tell)
    results = take(chosen, how)
    if not damaged:  # else what has a record is not known
        _remove_leftovers(how.tell)
    return results + unreadable(damaged)


def _look_after(record: Record, tell: Callable[[str], None]) -> None:
    """A mount in use whose keeper was killed gets another one."""
    if not record.mounted or processes.alive(record.keeper) or mounts.is_dead(record.place):
        return
    try:
        with records.locked():
            now = records.current(record)
            if now is not None and now.state == READY:  # else somebody takes it away meanwhile
                keep(now)
                now.save()
    except MountError as exc:
        tell(str(exc))


def _remove_leftovers(tell: Callable[[str], None]) -> None:
    """Remove our directories of an earlier boot that have no record: those of root are gone with /run."""
    known = {path for record in records.found() for path in (record.local, record.place, *record.made)}
    for parent in ("/tmp", "/var/tmp", os.environ.get("TMPDIR", "/tmp")):
        with contextlib.suppress(OSError):
            for entry in os.scandir(parent):
                if not _OURS.fullmatch(entry.name) or entry.path in known:
                    continue
                status = entry.stat(follow_symlinks=False)
                if status.st_uid == os.geteuid() and status.st_ctime < processes.booted():
                    _remove_leftover(entry.path, tell)


def _remove_leftover(path: str, tell: Callable[[str], None]) -> None:
    from zarrfs.store.destination import remove_tree

    if os.path.islink(path) or any(nodelocal.beneath(mount.mountpoint, path) for mount in mounts.mounts()):
        return
    try:
        remove_tree(path)
    except OSError as exc:
        tell(f"{path}: {(exc.strerror or str(exc)).lower()}")


def _as_user(
    user: int, body: Callable[[], list[dict[str, Any]]], patience: float = _PATIENCE
) -> list[dict[str, Any]]:
    """What `body` gives in a child that is `user`: as root, nothing of theirs is to be followed.

    A child that takes more than `patience` seconds is ended: a user may have mounted anything on what it looks at.
    """
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(read_end)
            _become(user)
            with open(write_end, "w") as file:
                try:
                    done = body()
                except (ZarrfsError, OSError) as exc:
                    done = [_failed(user, str(exc))]
                json.dump(done, file)
        finally:
            os._exit(0)
    os.close(write_end)
    if not readable(read_end, patience):
        os.kill(child, signal.SIGKILL)
    with open(read_end) as file:
        said = file.read()
    os.waitpid(child, 0)
    try:
        found: list[dict[str, Any]] = json.loads(said)
    except ValueError:  # it was killed, which its user may do, before it had said all
        found = [_failed(user)]
    return found


def _failed(user: int, why: str = "the child that does it was ended") -> dict[str, Any]:
    return _nothing(f"records of user {user}: not looked at: {why}")


def _nothing(error: str) -> dict[str, Any]:
    return {"dest": None, "source": None, "how": None, "reason": "", "error": error}


def _become(user: int) -> None:
    """Be `user` for good, with no more groups than that has."""
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

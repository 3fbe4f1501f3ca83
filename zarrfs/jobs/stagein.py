"""Staging a source for a job as a mount. Copies and links are in staged_copy.py."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import re
import stat
import time
from collections.abc import Callable, Iterator
from typing import IO

from zarrfs.archives.source_kinds import absolute
from zarrfs.config.options import TABLE, Options, Parsed
from zarrfs.config.redaction import without_secrets
from zarrfs.config.shares import Share
from zarrfs.errors import MountError, UsageError, reason_of
from zarrfs.jobs import keeper, nodelocal, processes, records
from zarrfs.jobs.processes import Process
from zarrfs.jobs.records import Record
from zarrfs.jobs.unstage import UnstageOptions, unstage, why_dead, why_stale
from zarrfs.net.identity import of_other
from zarrfs.sources import absolute_source
from zarrfs.system import mounts

_LOOK = 1.0  # seconds between checks of a record that another process is staging or unstaging
_WAIT = 10.0  # seconds that --join waits to unstage a stale source, because other processes may be doing that, too
_ENDING = 30.0  # seconds that --join waits for another process that is unstaging
_FORBIDDEN = re.compile(r"filesystem type (0x[0-9a-f]+) is forbidden")  # a message of fusermount3


@dataclasses.dataclass(frozen=True)
class StageRequest:
    """A source to stage, with its destination and its owner."""

    source: str
    dest: str
    how: str  # mount, copy, link or run
    node_local: str | None = None  # parent of a node-local directory; "": find one; None: stage at `dest` itself
    job: str | None = None  # None: the job in the environment
    owner: int | None = None  # pid of the process for which it is staged
    share: Share | None = None  # the share of a copy
    join: bool = False  # become one more owner of the mount that the same job has at `dest`


def begin(request: StageRequest, parsed: Parsed, notify: Callable[[str], None]) -> Record:
    """Create a record for a request, after unstaging a stale source at the same DEST.

    A request with `join` may get the record of another process instead, in the state READY. Raise UsageError or
    MountError if DEST cannot be used, MountError if a source that may still be needed is staged there.
    """
    dest = mounts.resolved(request.dest)
    manager, job = processes.job_of(os.environ, request.job)
    owners = [] if request.owner is None else [records.owner_of(request.owner)]
    upper = parsed.options.upperdir or ""
    record = Record(
        request.how, without_secrets(request.source), dest, dest, records.process_here(), owners=owners,
        manager=manager, job=job, upper=upper, writable=bool(upper) and not parsed.options.ro,
        asked=digest(request.source, parsed.options), share="" if request.share is None else str(request.share),
    )  # fmt: skip
    made: list[str] = []
    until = time.monotonic() + _ENDING
    while True:
        other = records.add(record)
        if other is None:
            break
        if request.join and _joinable(other, record):
            if _join(other, owners):
                return other
            if other.state != records.ENDING:
                until = time.monotonic() + _ENDING
            elif time.monotonic() >= until:
                who = f"process {other.maker.pid} is unstaging it"
                raise MountError(f"{dest}: {who}, and waits for others that use it")
            if processes.alive(other.maker):
                mounts.wait_for_end(other.maker.pid, _LOOK)
            continue
        _replace(other, record, notify, _WAIT if request.join else 0.0)
        made += other.made
    try:
        _check_dest(record, record.mounted or request.node_local is not None)
        local = request.node_local
        if local is None and request.how == "mount" and record.writable and nodelocal.removed_by_flux(dest):
            notify(f"{dest}: lies in {nodelocal.FLUX}, which Flux deletes with all that is mounted there")
            local = ""
        if local is not None:
            go_local(record, local)
        _record_directories(record, made)
    except BaseException:
        record.remove()
        raise
    return record


def digest(source: str, options: Options) -> str:
    """Return a digest of a source and of the options that affect its content.

    It depends neither on the working directory nor on credentials, which may be renewed.
    """
    values = {name: getattr(options, name) for name, field in TABLE.items() if field.metadata["scope"] == "source"}
    values["blobs"] = [without_secrets(absolute(place)) for place in options.blobs]
    values["base"] = options.base and without_secrets(absolute_source(options.base))
    values["storage"] = sorted(of_other(place, "", given) for place, given in options.storage.items())
    text = json.dumps([without_secrets(absolute_source(source)), values], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _joinable(other: Record, record: Record) -> bool:
    """Return whether `other`, a source that the same job has staged or is staging, can serve the new `record`, too."""
    wanted = (record.how, record.source, record.manager, record.job, record.upper, record.writable)
    there = (other.how, other.source, other.manager, other.job, other.upper, other.writable)
    same = there == wanted and other.asked in ("", record.asked) and not other.foreign
    return same and bool(other.owners) and not why_stale(other) and not why_dead(other)


def _join(other: Record, owners: list[Process]) -> bool:
    """Add owners to a record and start a keeper that waits for all of them.

    Return False if a process is staging or unstaging it, or has unstaged it. Raise MountError.
    """
    with records.locked():
        now = records.current(other)
        if now is None or now.state != records.READY:
            return False
        root = keeper.open_root(now.place)
        try:
            former, now.owners = now.keeper, [*filter(processes.alive, now.owners), *owners]
            now.keeper, _ = keeper.start(now.id, root, now.owners)
            now.save()
        finally:
            os.close(root)
        processes.kill(former)  # it has not begun to unstage, as that needs the lock and changes the state
        vars(other).update(vars(now))
        return True


def _replace(other: Record, record: Record, notify: Callable[[str], None], timeout: float) -> None:
    """Unstage the source at the DEST of a new record. Raise MountError if it may still be needed."""
    same = (other.manager, other.job, other.owners) == (record.manager, record.job, record.owners)
    # whether the same copy is made again over its own files; not if it is node-local: unstage() would remove it,
    # although the job may be reading it
    again = (other.how, other.source) == (record.how, record.source) and not other.mounted and not other.local
    # a dead mount of another job stays, so that its readers get an error
    if reason := why_stale(other) or (why_dead(other) if same else ""):
        notify(f"{record.dest}: taking away what was staged there: {reason}")
    elif not (same and again and other.share == record.share):
        what = f"the share {other.share} of {other.source}" if other.share else other.source
        raise MountError(f"{record.dest}: {what} is staged there already (zarrfs unstage takes it away)")
    dead = record.mounted and other.mounted and not other.local and bool(why_dead(other))
    unstage(other, UnstageOptions(timeout, again=again or dead, notify=notify))
    if again:
        record.manifest, record.manifest_written, record.note = other.manifest, other.manifest_written, other.note


def mount(
    request: StageRequest, parsed: Parsed, notify: Callable[[str], None], pipe: bool = False
) -> tuple[Record, IO[bytes] | None]:
    """Mount a source and start its keeper; return its record when the source can be read.

    With `pipe`, also return the stream for keeper.add_owner(). Raise UsageError, SourceError, MountError as
    daemon.session.mount() does; after an error nothing is left behind.
    """
    if parsed.options.foreground:
        raise UsageError("option foreground: a job's mount is served in the background (zarrfs mount has it)")
    record = begin(request, parsed, notify)
    if record.state == records.READY:
        return record, None
    with undone_on_failure(record):
        make_directories(record)
        try:
            mount_here(record, request.source, parsed, notify)
        except _Refused as exc:
            if record.local:
                raise
            notify(f"{record.dest}: {exc}; mounting on the node itself, with a link there")
            go_local(record, "")
            record.save()
            make_directories(record)
            mount_here(record, request.source, parsed, notify)
        return record, hold_and_link(record, pipe)


class _Refused(MountError):
    """The error that fusermount3 refuses to mount on the file system of the mount point."""


@contextlib.contextmanager
def undone_on_failure(record: Record) -> Iterator[None]:
    """Unstage a record if the block fails."""
    others = processes.children()  # children of a shell that was replaced by this process (exec)
    there = mounts.mount_at(record.place) if record.mounted else None  # a dead mount, which stays in place
    try:
        yield
    except BaseException:
        for child in processes.children():  # a daemon that is not ready yet
            if child not in others:
                processes.kill(child)
        record.state = records.ENDING
        with contextlib.suppress(MountError):
            found = mounts.mount_at(record.place) if record.mounted else None
            if found is not None and found != there and found.fstype == mounts.FSTYPE:
                mounts.unmount(record.place, lazy=True)
        with contextlib.suppress(MountError, OSError):
            unstage(record, UnstageOptions(again=there is not None))
        raise


def mount_here(record: Record, source: str, parsed: Parsed, notify: Callable[[str], None]) -> None:
    """Mount the source at `record.place`, and record the device number and the daemon."""
    from zarrfs.daemon import session

    try:
        session.mount(source, record.place, parsed, notify)
    except MountError as exc:
        refused = _FORBIDDEN.search(str(exc))
        if refused is None:
            raise
        raise _Refused(f"fusermount3 does not mount on its file system (type {refused[1]})") from exc
    found = mounts.mount_at(record.place)
    record.device = "" if found is None else found.device
    about = mounts.daemon_of(record.place, timeout=10.0) or {}
    record.daemon = processes.process(int(about["pid"])) if "pid" in about else None
    record.save()


def hold_and_link(record: Record, pipe: bool = False) -> IO[bytes] | None:
    """Start the keeper, create the link, and mark the record as READY; return the stream of the keeper, if any."""
    root = keeper.open_root(record.place) if record.mounted else None
    try:
        stream = None
        if record.mounted or record.owners:
            record.keeper, stream = keeper.start(record.id, root, record.owners, pipe)
    finally:
        if root is not None:
            os.close(root)
    link(record)
    record.state, record.made_upper = records.READY, False
    record.save()
    return stream


def go_local(record: Record, parent: str) -> None:
    """Change a record to use a node-local directory in `parent` ("": one that is found), with a link at `dest`."""
    name = nodelocal.name_of(record.dest, record.job)
    record.local = record.place = nodelocal.directory(parent, name, record.mounted, record.writable)
    record.link = True
    with contextlib.suppress(OSError):  # another node may be creating the link
        status = os.lstat(record.dest)
        if stat.S_ISDIR(status.st_mode) and record.dest not in record.made:
            record.replaced = stat.S_IMODE(status.st_mode)


def about(record: Record) -> dict[str, object]:
    """Return the JSON fields of a report that describe a record."""
    return {
        "record": record.id, "mountpoint": record.place if record.mounted else None, "place": record.place,
        "link": record.dest if record.link else None, "upper": record.upper or None, "job": record.job or None,
        "daemon": record.daemon and record.daemon.pid, "keeper": record.keeper and record.keeper.pid,
        "manifest": record.manifest or None,
    }  # fmt: skip


def link(record: Record) -> None:
    """Create the link at `dest`, replacing an empty directory. Raise MountError if something else is at `dest`."""
    if not record.link:
        return
    try:
        if os.path.islink(record.dest):
            if os.readlink(record.dest) != record.place:
                raise MountError(f"{record.dest}: is a link to something else")
            return  # another node of this job has created it
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):  # another node may be creating the link
            os.rmdir(record.dest)
        with contextlib.suppress(FileExistsError):
            os.symlink(record.place, record.dest)
        if os.readlink(record.dest) != record.place:
            raise MountError(f"{record.dest}: something else has taken the place of the link")
    except OSError as exc:
        raise MountError(f"{record.dest}: no link can be made: {reason_of(exc)}") from None


def _check_dest(record: Record, empty: bool) -> None:
    """Raise MountError unless a source can be staged at `dest`.

    It must not be a symbolic link, except one of the same job, made on another node. With `empty`, it must be absent
    or an empty directory. If the source will be mounted, nothing may be mounted at `dest` except a dead zarrfs mount.
    """
    dest = record.dest
    if record.mounted:
        mount = mounts.mount_at(dest)
        if mount is not None and not (mount.fstype == mounts.FSTYPE and mounts.is_dead(dest)):
            raise MountError(f"{dest}: {mounts.taken(mount)}")
        if mount is not None:
            return
    try:
        if os.path.islink(dest):
            name = os.path.basename(os.readlink(dest))
            if name == nodelocal.name_of(dest, record.job):
                return
            raise MountError(f"{dest}: is a symbolic link")
        if empty and os.listdir(dest):
            raise MountError(f"{dest}: is not empty")
    except FileNotFoundError:
        pass
    except NotADirectoryError:
        raise MountError(f"{dest}: is not a directory") from None
    except OSError as exc:
        raise MountError(f"{dest}: {reason_of(exc)}") from None


def _record_directories(record: Record, made: list[str]) -> None:
    """Record the directories to create: the missing parents of `dest`, and `dest` itself unless it becomes a link.

    Also record directories `made` for an earlier record at `dest`, and parents made for other records, so that
    unstaging the last record removes them.
    """
    made += [path for other in records.found([]) for path in other.made if record.dest.startswith(f"{path}/")]
    path, missing = os.path.dirname(record.dest) if record.link else record.dest, []
    while not os.path.lexists(path):
        missing.append(path)
        path = os.path.dirname(path)
    record.made = [*filter(os.path.isdir, sorted({*made})), *missing[::-1]]
    record.save()


def make_directories(record: Record) -> None:
    """Create the recorded directories. Raise MountError.

    A node-local directory is private, except one of root, which the user of the job must be able to read.
    """
    try:
        for path in record.made:
            with contextlib.suppress(FileExistsError):
                os.mkdir(path, 0o700 if record.how == "run" else 0o777)
        if record.upper and record.mounted:
            with contextlib.suppress(FileExistsError):
                os.mkdir(record.upper, 0o700)
                record.made_upper = True
                record.save()
        if record.local:
            os.mkdir(record.local, 0o755 if os.geteuid() == 0 else 0o700)
    except FileExistsError:
        _take_over(record)
    except OSError as exc:
        raise MountError(f"{exc.filename}: cannot be made: {reason_of(exc)}") from None


def _take_over(record: Record) -> None:
    """Raise MountError unless the existing node-local directory may be that of a killed command of this user."""
    status = os.lstat(record.local)
    if status.st_uid != os.geteuid() or status.st_mode & 0o022 or os.path.islink(record.local):
        raise MountError(f"{record.local}: exists and was not made by zarrfs")
    if record.mounted and os.listdir(record.local):
        raise MountError(f"{record.local}: exists and is not empty")

"""Putting a source where a job wants it, as a mount; copies and links are in copies.py."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
from collections.abc import Callable, Iterator
from typing import IO

from zarrfs.config.options import Parsed
from zarrfs.config.redaction import without_secrets
from zarrfs.errors import MountError, UsageError
from zarrfs.jobs import keeper, nodelocal, processes, records
from zarrfs.jobs.records import Record
from zarrfs.jobs.unstage import Taking, unstage, why_dead, why_stale
from zarrfs.system import mounts

_FORBIDDEN = re.compile(r"filesystem type (0x[0-9a-f]+) is forbidden")  # fusermount3's words


@dataclasses.dataclass(frozen=True)
class Wish:
    """What is to be staged, where, and for whom."""

    source: str
    dest: str
    how: str  # mount, copy or link
    node_local: str | None = None  # a directory of the node to take; "": one that is found; None: `dest` itself
    job: str | None = None  # None: as the environment says
    owner: int | None = None  # the process that it is for


def begin(wish: Wish, parsed: Parsed, tell: Callable[[str], None]) -> Record:
    """A new record for `wish`; what an earlier, killed one left at the same place is taken away first.

    UsageError where DEST cannot be used, MountError where something is staged there.
    """
    dest = records.resolved(wish.dest)
    manager, job = processes.job_of(os.environ, wish.job)
    owners = [] if wish.owner is None else [records.owner_of(wish.owner)]
    upper = parsed.options.upperdir or ""
    record = Record(
        wish.how, without_secrets(wish.source), dest, dest, records.process_here(), owners=owners, manager=manager,
        job=job, upper=upper, writable=bool(upper) and not parsed.options.ro,
    )  # fmt: skip
    made: list[str] = []
    while True:
        other = records.add(record)
        if other is None:
            break
        _replace(other, record, tell)
        made += other.made
    try:
        _look_at(record)
        local = wish.node_local
        if local is None and wish.how == "mount" and record.writable and nodelocal.removed_by_flux(dest):
            tell(f"{dest}: lies in {nodelocal.FLUX}, which Flux deletes with all that is mounted there")
            local = ""
        if local is not None:
            go_local(record, local)
        _note_directories(record, made)
    except BaseException:
        record.remove()
        raise
    return record


def _replace(other: Record, record: Record, tell: Callable[[str], None]) -> None:
    """Take away what was staged at the place of a new record. MountError where it may still be of use."""
    same = (other.manager, other.job, other.owners) == (record.manager, record.job, record.owners)
    # not one on the node, which would be removed, and may be read just now
    again = (other.how, other.source) == (record.how, record.source) and not other.mounted and not other.local
    if reason := why_stale(other) or (why_dead(other) if same else ""):  # to another job it stays an error
        tell(f"{record.dest}: taking away what was staged there: {reason}")
    elif not (same and again):
        raise MountError(f"{record.dest}: {other.source} is staged there already (zarrfs unstage takes it away)")
    unstage(other, Taking(again=again, tell=tell))
    if again:
        record.manifest, record.told, record.note = other.manifest, other.told, other.note


def mount(
    wish: Wish, parsed: Parsed, tell: Callable[[str], None], pipe: bool = False
) -> tuple[Record, IO[bytes] | None]:
    """Mount a source as `wish` says; returns when it can be read, and is kept in use. Or nothing is left behind.

    With `pipe`, the second of what it gives takes more processes to wait for (keeper.tell). UsageError, SourceError,
    MountError as daemon.session.mount.
    """
    if parsed.options.foreground:
        raise UsageError("option foreground: a job's mount is served in the background (zarrfs mount has it)")
    if parsed.options.idle_timeout:  # zarrfs.toml may say so for all mounts
        tell("option idle_timeout: has no effect: a job's mount is kept in use until it is unstaged")
    record = begin(wish, parsed, tell)
    with undone_on_failure(record):
        make_directories(record)
        try:
            mount_here(record, wish.source, parsed, tell)
        except _Refused as exc:
            if record.local:
                raise
            tell(f"{record.dest}: {exc}; mounting on the node itself, with a link there")
            go_local(record, "")
            record.save()
            make_directories(record)
            mount_here(record, wish.source, parsed, tell)
        return record, hold_and_link(record, pipe)


class _Refused(MountError):
    """The file system of the mount point is not one that fusermount3 mounts on."""


@contextlib.contextmanager
def undone_on_failure(record: Record) -> Iterator[None]:
    """Take away what was begun if what is inside fails."""
    others = processes.children()  # of a shell that has become this process
    try:
        yield
    except BaseException:
        for child in processes.children():  # a daemon that is not ready: nobody waits for it any more
            if child not in others:
                processes.kill(child)
        record.state = records.ENDING
        with contextlib.suppress(MountError):
            if record.mounted and (found := mounts.mount_at(record.place)) and found.fstype == mounts.FSTYPE:
                mounts.unmount(record.place, lazy=True)
        with contextlib.suppress(MountError, OSError):
            unstage(record, Taking())
        raise


def mount_here(record: Record, source: str, parsed: Parsed, tell: Callable[[str], None]) -> None:
    """Mount at `record.place`, and note by whom."""
    from zarrfs.daemon import session

    try:
        session.mount(source, record.place, parsed, tell)
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
    """Keep the mount in use, put the link in place, and say so in the record; gives the keeper's pipe, if any."""
    root = keeper.hold(record.place) if record.mounted else None
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


def go_local(record: Record, said: str) -> None:
    """Let the record's place be a directory on the node, with a link from its `dest`."""
    name = nodelocal.name_of(record.dest, record.job)
    record.local = record.place = nodelocal.directory(said, name, record.mounted, record.writable)
    record.link = True
    if os.path.isdir(record.dest) and not os.path.islink(record.dest) and record.dest not in record.made:
        record.replaced = os.stat(record.dest).st_mode & 0o7777


def about(record: Record) -> dict[str, object]:
    """What a report tells of what is staged."""
    return {
        "record": record.id, "mountpoint": record.place if record.mounted else None, "place": record.place,
        "link": record.dest if record.link else None, "upper": record.upper or None, "job": record.job or None,
        "daemon": record.daemon and record.daemon.pid, "keeper": record.keeper and record.keeper.pid,
        "manifest": record.manifest or None,
    }  # fmt: skip


def link(record: Record) -> None:
    """Put the link at `dest`, in the place of an empty directory. MountError where something else is there."""
    if not record.link:
        return
    try:
        if os.path.islink(record.dest):
            if os.readlink(record.dest) != record.place:
                raise MountError(f"{record.dest}: is a link to something else")
            return  # of another node of this job
        with contextlib.suppress(FileNotFoundError):
            os.rmdir(record.dest)
        with contextlib.suppress(FileExistsError):
            os.symlink(record.place, record.dest)
        if os.readlink(record.dest) != record.place:
            raise MountError(f"{record.dest}: something else has taken the place of the link")
    except OSError as exc:
        raise MountError(f"{record.dest}: no link can be made: {(exc.strerror or str(exc)).lower()}") from None


def _look_at(record: Record) -> None:
    """MountError unless `dest` is absent, or an empty directory that nothing is mounted on."""
    dest = record.dest
    if record.mounted:
        mount = mounts.mount_at(dest)
        if mount is not None and not (mount.fstype == mounts.FSTYPE and mounts.is_dead(dest)):
            raise MountError(f"{dest}: already a mount point ({mount.source}, type {mount.fstype})")
        if mount is not None:
            return
    try:
        if os.path.islink(dest):
            name = os.path.basename(os.readlink(dest))
            if name == nodelocal.name_of(dest, record.job):
                return
            raise MountError(f"{dest}: is a symbolic link")
        if record.mounted and os.listdir(dest):
            raise MountError(f"{dest}: is not empty")
    except FileNotFoundError:
        pass
    except NotADirectoryError:
        raise MountError(f"{dest}: is not a directory") from None
    except OSError as exc:
        raise MountError(f"{dest}: {(exc.strerror or str(exc)).lower()}") from None


def _note_directories(record: Record, made: list[str]) -> None:
    """Note which directories have to be made: what leads to `dest`, and itself unless a link goes there.

    Those that were `made` for what was there before, and are still there, are ours now. Those above that were made for
    others are noted as well: the last of us removes them.
    """
    made += [path for other in records.found([]) for path in other.made if record.dest.startswith(f"{path}/")]
    path, missing = os.path.dirname(record.dest) if record.link else record.dest, []
    while not os.path.lexists(path):
        missing.append(path)
        path = os.path.dirname(path)
    record.made = [*filter(os.path.isdir, sorted({*made})), *missing[::-1]]
    record.save()


def make_directories(record: Record) -> None:
    """Make the directories that are noted; the one on the node is ours alone, but for root's, which a job reads."""
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
        raise MountError(f"{exc.filename}: cannot be made: {(exc.strerror or str(exc)).lower()}") from None


def _take_over(record: Record) -> None:
    """MountError unless the directory on the node is one of ours that a killed command has left."""
    status = os.lstat(record.local)
    if status.st_uid != os.geteuid() or status.st_mode & 0o022 or os.path.islink(record.local):
        raise MountError(f"{record.local}: is there already, and is not ours")
    if record.mounted and os.listdir(record.local):
        raise MountError(f"{record.local}: is there already, and not empty")

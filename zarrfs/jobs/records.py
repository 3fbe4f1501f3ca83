"""Records of staged sources on this node: a JSON file each, in a directory that only their user can write to.

A record is written before the actions that it describes, so a command leaves one whenever it is killed; `unstage`
checks which of them were done.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import re
import secrets
import stat
import time
from collections.abc import Iterator
from typing import Any

from zarrfs.errors import MountError, UsageError, reason_of
from zarrfs.jobs import processes
from zarrfs.jobs.processes import Process
from zarrfs.system.processes import boot, pid_namespace

VARIABLE = "ZARRFS_STATE_DIR"  # the directory of records, if it is set
_ATTEMPTS = 20
_VERSION = 1
_LARGEST = 1 << 20  # bytes
_UID = re.compile(r"[0-9]{1,10}")
MAKING, READY, ENDING = "making", "ready", "ending"


@dataclasses.dataclass
class Record:
    """A staged source, and everything that unstaging has to remove. Paths are absolute.

    The names of the fields are those of the JSON file.
    """

    how: str  # mount, copy, link or run
    source: str  # without credentials
    dest: str  # the path that the user gave
    place: str  # of the mount or copy: `dest`, or a node-local directory that `dest` is a link to
    maker: Process  # the process that stages or unstages it
    state: str = MAKING
    boot: str = dataclasses.field(default_factory=boot)
    pid_namespace: str = dataclasses.field(default_factory=pid_namespace)  # of all pids; "" in older records
    made_upper: bool = False  # the upper directory was made by a command that has not finished
    made: list[str] = dataclasses.field(default_factory=list)  # directories that staging created, outer first
    local: str = ""  # the node-local directory, if one was made
    link: bool = False  # `dest` is a link that staging made
    replaced: int | None = None  # mode of the empty directory that the link replaced
    device: str = ""  # of the mount, as "major:minor"
    daemon: Process | None = None
    keeper: Process | None = None
    owners: list[Process] = dataclasses.field(default_factory=list)  # the processes it is staged for, if named
    manager: str = ""  # the resource manager of the job: slurm, flux or ""
    job: str = ""
    upper: str = ""
    writable: bool = False
    manifest: str = ""
    manifest_written: bool = False  # completely, by staging
    asked: str = ""  # digest of the source and of its options (stagein.digest()); "" in older records
    share: str = ""  # I/N of a copy: other shares of it may be staged at the same `dest`
    mark: str = ""  # identifies the runs of a copy (zarrfs.copying.destination_journal)
    note: dict[str, Any] = dataclasses.field(default_factory=dict)  # the journal of the runs, once all is copied
    created: float = dataclasses.field(default_factory=time.time)  # seconds since 1970
    id: str = dataclasses.field(default_factory=lambda: secrets.token_hex(8))
    directory: str = ""  # of the record file

    @property
    def mounted(self) -> bool:
        """True if the source is mounted, or was about to be mounted when the record was written."""
        return self.how in ("mount", "run")

    @property
    def foreign(self) -> bool:
        """True if it was made in another PID namespace, such as a container: its pids mean nothing in this one."""
        return self.pid_namespace not in ("", pid_namespace())

    def save(self) -> None:
        """Write the record file, whole or not at all; on a full disk over the old one. Raises MountError."""
        shown = {name: value for name, value in dataclasses.asdict(self).items() if name != "directory"}
        path, text = self._path(), json.dumps({"zarrfs_staged": _VERSION, **shown}, ensure_ascii=False)
        data = text.encode("utf-8", "surrogateescape")
        try:
            with open(f"{path}.new", "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.rename(f"{path}.new", path)
        except OSError as exc:
            if not _overwrite(path, data):
                raise MountError(f"{path}: cannot be written: {reason_of(exc)}") from None

    def update(self) -> bool:
        """Write the record file anew unless it was removed meanwhile; return whether it was there. MountError."""
        if not self.exists():  # locked() would make the directory
            return False
        with locked():
            there = self.exists()
            if there:
                self.save()
            return there

    def remove(self) -> None:
        """Remove the record file, and directories of records that are empty then."""
        for path in (self._path(), f"{self._path()}.new"):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
        with contextlib.suppress(OSError):
            descriptor = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX)  # another process may be adding a record
                if os.fstat(descriptor).st_nlink:
                    _remove_empty(self.directory)
            finally:
                os.close(descriptor)

    def exists(self) -> bool:
        """Return whether the record file still exists."""
        return os.path.exists(self._path())

    def unfinished(self, path: str) -> str:
        """Return the temporary name of a file that is renamed to `path` once it is complete."""
        return f"{path}.{self.id}.tmp"

    def _path(self) -> str:
        return os.path.join(self.directory, f"{self.id}.json")


def _overwrite(path: str, data: bytes) -> bool:
    """Write a record over the old one, which takes no room: unstaging is what makes some. Return whether it fits."""
    with contextlib.suppress(OSError):
        os.unlink(f"{path}.new")
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)  # against readers of half of it
            status = os.fstat(descriptor)
            data = data.ljust(status.st_size)  # blanks after JSON mean nothing
            if len(data) > status.st_blocks * 512 or os.pwrite(descriptor, data, 0) != len(data):
                return False
            os.fsync(descriptor)  # some file systems find only now that there is no room
            return True
        finally:
            os.close(descriptor)
    except OSError:
        return False


def home() -> str:
    """Return the directory of records of this user, created if need be. MountError if others can write to it."""
    last: MountError | None = None
    for path in places():
        try:
            _make(path)
        except OSError as exc:
            last = MountError(f"{path}: no place for records: {reason_of(exc)}")
        else:
            return path
    assert last is not None
    raise last


def _make(path: str) -> None:
    """Create a directory of records and the one above it, which other processes remove when they are empty."""
    for attempt in range(_ATTEMPTS):
        try:
            for part in (os.path.dirname(path), path):
                with contextlib.suppress(FileExistsError):
                    os.mkdir(part, 0o700)
                _check_owned(part)
        except FileNotFoundError:
            if attempt + 1 == _ATTEMPTS:
                raise
        else:
            return


def found(damaged: list[MountError] | None = None) -> list[Record]:
    """Return all records of this user on this node, oldest first.

    Raises MountError for a damaged one, or adds that to `damaged`. Directories of other users are ignored: in /tmp any
    user can create one of this name.
    """
    records: dict[str, Record] = {}
    for directory in places():
        try:
            for part in (os.path.dirname(directory), directory):
                _check_owned(part)
            names = os.listdir(directory)
        except (FileNotFoundError, _NotOwned):
            continue
        for name in names:
            if name.endswith(".json"):
                try:
                    record = _read(directory, name)
                except MountError as exc:
                    if damaged is None:
                        raise
                    damaged.append(exc)
                else:
                    if record is not None:
                        records[record.id] = record
    return sorted(records.values(), key=lambda record: record.created)


def users_with_records() -> list[int]:
    """Return the uids of all other users with records on this node, in directories that they own."""
    users = set()
    for top, prefix in (("/run/user", ""), ("/tmp", "zarrfs-")):
        with contextlib.suppress(OSError):
            for name in os.listdir(top):
                number = name.removeprefix(prefix)
                path = os.path.join(top, name, *(() if prefix else ("zarrfs",)))
                if not name.startswith(prefix) or not _UID.fullmatch(number):
                    continue
                if _owner(path) == int(number) != os.geteuid():
                    users.add(int(number))
    return sorted(users)


@contextlib.contextmanager
def locked() -> Iterator[str]:
    """Lock the directory of records for a moment, and give its path; it is removed if it stays empty."""
    while True:
        path = home()
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:
            continue  # removed with its last record
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            if not os.fstat(descriptor).st_nlink:
                continue
            try:
                yield path
            finally:
                _remove_empty(path)  # of a record that is gone, home() has made it anew
            return
        finally:
            os.close(descriptor)


def _remove_empty(directory: str) -> None:
    """Remove a directory of records, and the one above it, if they are empty. The caller has locked it."""
    with contextlib.suppress(OSError):
        os.rmdir(directory)
        if not os.environ.get(VARIABLE):
            os.rmdir(os.path.dirname(directory))


def add(record: Record) -> Record | None:
    """Write a new record, or return an existing one of the same `dest`."""
    with locked() as directory:
        for other in found([]):  # a damaged one does not count: `dest` itself is checked, too
            if os.path.normpath(other.dest) == os.path.normpath(record.dest) and not _others_share(other, record):
                return other
        record.directory = directory
        record.save()
        return None


def _others_share(one: Record, other: Record) -> bool:
    """Return whether two records are of different shares of one copy."""
    copies = [(record.how, record.source, record.share.partition("/")[2]) for record in (one, other)]
    return copies[0] == copies[1] and bool(one.share) and one.share != other.share


def claim(record: Record, unless_owned: bool = False, leaving: int | None = None) -> bool:
    """Become the process that unstages a record, after rereading it; False if another one does, or has done so.

    With `unless_owned`, raises StillOwned if an owner other than `leaving` is running; `leaving` is no owner then.
    """
    with locked():
        now = current(record)
        if now is None:
            return False
        if unless_owned and now.state == READY:
            others = [owner for owner in now.owners if owner.pid != leaving]
            if any(map(processes.alive, others)):
                now.owners = others
                now.save()
                raise StillOwned(f"{record.dest}: is in use by another process that it was staged for")
        ours = process_here()
        if now.state in (MAKING, ENDING) and now.maker != ours and processes.alive(now.maker):
            return False
        for field in dataclasses.fields(record):
            setattr(record, field.name, getattr(now, field.name))
        record.state, record.maker = ENDING, ours
        record.save()
        return True


class StillOwned(MountError):
    """A staged source whose owners have not all ended."""


def current(record: Record) -> Record | None:
    """Reread a record; None if it was removed."""
    return _read(record.directory, f"{record.id}.json")


def process_here() -> Process:
    """Return this process."""
    ours = processes.process(os.getpid())
    assert ours is not None
    return ours


def places() -> list[str]:
    """Return the possible directories of records of this user, the best one first."""
    user = os.geteuid()
    if said := os.environ.get(VARIABLE):
        if not said.startswith("/"):
            raise UsageError(f"{VARIABLE}={said}: not an absolute path")
        return [os.path.join(said, "staged")]
    places = ["/run/zarrfs"] if user == 0 else []
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    for path in (runtime, f"/run/user/{user}") if user else ():
        if path.startswith("/") and _owner(path) == user and f"{path}/zarrfs" not in places:
            places.append(f"{path}/zarrfs")
    return [f"{place}/staged" for place in (*places, f"/tmp/zarrfs-{user}")]


def _owner(path: str) -> int | None:
    """Return the owner of a directory; None if it is none, or others may write to it."""
    try:
        status = os.lstat(path)
    except OSError:
        return None
    return status.st_uid if stat.S_ISDIR(status.st_mode) and not status.st_mode & 0o022 else None


class _NotOwned(MountError):
    """A directory of another user, as any user can create in /tmp."""


def _check_owned(path: str) -> None:
    if _owner(path) != os.geteuid():
        status = os.lstat(path)  # FileNotFoundError
        kind = MountError if status.st_uid == os.geteuid() else _NotOwned
        raise kind(f"{path}: is not a directory of user {os.geteuid()} that nobody else can write to")


def _read(directory: str, name: str) -> Record | None:
    """Read a record; None if there is none."""
    path = os.path.join(directory, name)
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    except OSError as exc:
        raise MountError(f"{path}: no record: {reason_of(exc)}") from None
    with open(descriptor, encoding="utf-8", errors="surrogateescape") as file:
        status = os.fstat(descriptor)
        if status.st_uid != os.geteuid() or not stat.S_ISREG(status.st_mode) or status.st_size > _LARGEST:
            raise MountError(f"{path}: is not a record of zarrfs")
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_SH)  # see _overwrite()
        try:
            return _from_json(json.load(file), directory)
        except (ValueError, TypeError, KeyError, AttributeError) as exc:
            raise MountError(f"{path}: is damaged, or of another version of zarrfs: {exc}") from None


def _from_json(values: dict[str, Any], directory: str) -> Record:
    if values.pop("zarrfs_staged") != _VERSION:
        raise ValueError("zarrfs_staged")
    for name in ("maker", "daemon", "keeper"):
        values[name] = values[name] and Process(*values[name])
    values.setdefault("pid_namespace", "")
    values["owners"] = [Process(*owner) for owner in values["owners"]]
    known = {field.name for field in dataclasses.fields(Record)}  # other fields are of another version of zarrfs
    return Record(**{name: value for name, value in values.items() if name in known} | {"directory": directory})


def owner_of(pid: int) -> Process:
    """Return the process `pid` that a source is staged for. Raises UsageError if there is none."""
    who = processes.process(pid)
    if who is None:
        raise UsageError(f"--for {pid}: there is no such process")
    return who

"""Records of staged sources on this node: one JSON file each, in a directory that only their user can write to.

A record is written before the actions that it describes, so that a killed command always leaves a record; `unstage`
checks which of the actions were done.
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

VARIABLE = "ZARRFS_STATE_DIR"  # if set, records are in its subdirectory "staged"
_ATTEMPTS = 20
_VERSION = 1
_LARGEST = 1 << 20  # bytes
_UID = re.compile(r"[0-9]{1,10}")
MAKING, READY, ENDING = "making", "ready", "ending"


@dataclasses.dataclass
class Record:
    """A staged source, and everything that unstaging must remove. Paths are absolute.

    The names of the fields are those in the JSON file.
    """

    how: str  # mount, copy, link or run
    source: str  # without credentials
    dest: str  # the path that the user gave
    place: str  # the path of the mount or copy: `dest`, or a node-local directory that `dest` is a link to
    maker: Process  # the process that stages or unstages the source
    state: str = MAKING
    boot: str = dataclasses.field(default_factory=boot)  # the boot id of the node
    pid_namespace: str = dataclasses.field(default_factory=pid_namespace)  # of all pids; "" in older records
    made_upper: bool = False  # the upper directory was created by a command that has not finished
    made: list[str] = dataclasses.field(default_factory=list)  # directories that staging created, outer first
    local: str = ""  # the node-local directory, if one is used
    link: bool = False  # `dest` is a link that staging creates
    replaced: int | None = None  # the mode of the empty directory that the link replaced
    device: str = ""  # the device number of the mount, as "major:minor"
    daemon: Process | None = None
    keeper: Process | None = None
    owners: list[Process] = dataclasses.field(default_factory=list)  # the processes it was staged for, if named
    manager: str = ""  # the resource manager of the job: slurm, flux or ""
    job: str = ""
    upper: str = ""
    writable: bool = False
    manifest: str = ""
    manifest_written: bool = False  # staging has written the whole manifest
    asked: str = ""  # the digest of the source and its options (stagein.digest()); "" in older records
    share: str = ""  # I/N for a share of a copy: other shares may be staged at the same `dest`
    mark: str = ""  # identifies the runs of a copy (zarrfs.copying.destination_journal)
    note: dict[str, Any] = dataclasses.field(default_factory=dict)  # the journal of the runs of a complete copy
    created: float = dataclasses.field(default_factory=time.time)  # seconds since 1970
    id: str = dataclasses.field(default_factory=lambda: secrets.token_hex(8))
    directory: str = ""  # the directory of the record file

    @property
    def mounted(self) -> bool:
        """True if the source is mounted, or was about to be mounted when the record was written."""
        return self.how in ("mount", "run")

    @property
    def foreign(self) -> bool:
        """True if it was written in another PID namespace, as in a container: its pids are not valid in this one."""
        return self.pid_namespace not in ("", pid_namespace())

    def save(self) -> None:
        """Write the record file atomically; if that fails, as on a full disk, overwrite the old one in place.

        Raise MountError if neither succeeds.
        """
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
        """Write the record file unless it was removed meanwhile; return whether it existed. Raise MountError."""
        if not self.exists():  # otherwise locked() would create the directory
            return False
        with locked():
            there = self.exists()
            if there:
                self.save()
            return there

    def remove(self) -> None:
        """Remove the record file, and then the directories of records if they are empty."""
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
        """Return the temporary path of a file that is renamed to `path` once it is complete."""
        return f"{path}.{self.id}.tmp"

    def _path(self) -> str:
        return os.path.join(self.directory, f"{self.id}.json")


def _overwrite(path: str, data: bytes) -> bool:
    """Overwrite the old record in place, and return whether that was possible.

    This needs no disk space, so that unstaging, which frees some, works on a full disk.
    """
    with contextlib.suppress(OSError):
        os.unlink(f"{path}.new")
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)  # so that no process reads a record that is half written
            status = os.fstat(descriptor)
            data = data.ljust(status.st_size)  # blanks after JSON are ignored
            if len(data) > status.st_blocks * 512 or os.pwrite(descriptor, data, 0) != len(data):
                return False
            os.fsync(descriptor)  # some file systems report only here that the disk is full
            return True
        finally:
            os.close(descriptor)
    except OSError:
        return False


def home() -> str:
    """Return the directory of records of this user, and create it if it is missing.

    Raise MountError if it cannot be created, or if other users can write to it.
    """
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
    """Create a directory of records and its parent; try again if another process removes an empty one meanwhile."""
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

    Raise MountError for a damaged record, or adds the error to `damaged`. Directories of other users are ignored,
    because any user can create one of this name in /tmp.
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
    """Return the uids of all other users who own a directory for records on this node."""
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
    """Lock the directory of records during the block, and yield its path; remove it afterwards if it is empty."""
    while True:
        path = home()
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:
            continue  # another process removed it with its last record
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            if not os.fstat(descriptor).st_nlink:
                continue
            try:
                yield path
            finally:
                _remove_empty(path)  # home() may have created it although no record is written
            return
        finally:
            os.close(descriptor)


def _remove_empty(directory: str) -> None:
    """Remove a directory of records, which the caller has locked, and its parent, if they are empty."""
    with contextlib.suppress(OSError):
        os.rmdir(directory)
        if not os.environ.get(VARIABLE):
            os.rmdir(os.path.dirname(directory))


def add(record: Record) -> Record | None:
    """Write a new record and return None, or return an existing record with the same `dest`."""
    with locked() as directory:
        for other in found([]):  # damaged records are ignored, because `dest` itself is checked, too
            if os.path.normpath(other.dest) == os.path.normpath(record.dest) and not _others_share(other, record):
                return other
        record.directory = directory
        record.save()
        return None


def _others_share(one: Record, other: Record) -> bool:
    """Return whether two records are of different shares of the same copy."""
    copies = [(record.how, record.source, record.share.partition("/")[2]) for record in (one, other)]
    return copies[0] == copies[1] and bool(one.share) and one.share != other.share


def claim(record: Record, unless_owned: bool = False, leaving: int | None = None) -> bool:
    """Reread a record, and make this process the one that unstages it.

    Return False if another process is staging or unstaging it, or has unstaged it. With `unless_owned`, raise
    StillOwned if an owner other than the process `leaving` is running; `leaving` is then no longer an owner.
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
    """The error that a staged source has owners that are still running."""


def current(record: Record) -> Record | None:
    """Reread a record; None if it was removed."""
    return _read(record.directory, f"{record.id}.json")


def process_here() -> Process:
    """Return the calling process."""
    ours = processes.process(os.getpid())
    assert ours is not None
    return ours


def places() -> list[str]:
    """Return the possible directories of records of this user, in order of preference.

    Raise UsageError if ZARRFS_STATE_DIR is not an absolute path.
    """
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
    """Return the uid of the owner of a directory; None if it is not a directory, or other users can write to it."""
    try:
        status = os.lstat(path)
    except OSError:
        return None
    return status.st_uid if stat.S_ISDIR(status.st_mode) and not status.st_mode & 0o022 else None


class _NotOwned(MountError):
    """The error that a directory of records belongs to another user: in /tmp any user can create it."""


def _check_owned(path: str) -> None:
    if _owner(path) != os.geteuid():
        status = os.lstat(path)  # raises FileNotFoundError
        kind = MountError if status.st_uid == os.geteuid() else _NotOwned
        raise kind(f"{path}: is not a directory of user {os.geteuid()} that nobody else can write to")


def _read(directory: str, name: str) -> Record | None:
    """Read a record; return None if it does not exist. Raise MountError if it is damaged."""
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
    known = {field.name for field in dataclasses.fields(Record)}  # another version of zarrfs may have other fields
    return Record(**{name: value for name, value in values.items() if name in known} | {"directory": directory})


def owner_of(pid: int) -> Process:
    """Return the process `pid`, for which a source is staged. Raise UsageError if there is no such process."""
    who = processes.process(pid)
    if who is None:
        raise UsageError(f"--for {pid}: there is no such process")
    return who

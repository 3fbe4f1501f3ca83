"""Records of what is staged on this node: one JSON file each, in a directory that only their user can write to.

A record is written before what it tells is done, so whatever is killed, and whenever, leaves one: `unstage` looks at
what is really there.
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

from zarrfs.errors import MountError, UsageError
from zarrfs.jobs import processes
from zarrfs.jobs.processes import Process
from zarrfs.system.machine import boot

VARIABLE = "ZARRFS_STATE_DIR"  # where records are, if it is set
_VERSION = 1
_LARGEST = 1 << 20  # bytes
_NUMBER = re.compile(r"[0-9]{1,10}")  # of a user
MAKING, READY, ENDING = "making", "ready", "ending"


@dataclasses.dataclass
class Record:
    """What was staged, and all there is to take away. Paths are absolute."""

    how: str  # mount, copy, link or run
    source: str  # without credentials
    dest: str  # as the user has it
    place: str  # where it really is: `dest`, or a directory on the node that `dest` is a link to
    maker: Process  # who makes it, or takes it away
    state: str = MAKING
    boot: str = dataclasses.field(default_factory=boot)
    made_upper: bool = False  # the directory with the job's changes, by a command that is not done yet
    made: list[str] = dataclasses.field(default_factory=list)  # directories that were not there before, outer first
    local: str = ""  # the directory on the node, if one was made
    link: bool = False  # whether `dest` is a link, made by us
    replaced: int | None = None  # mode of the empty directory whose place the link took
    device: str = ""  # of the mount, as "major:minor"
    daemon: Process | None = None
    keeper: Process | None = None
    owners: list[Process] = dataclasses.field(default_factory=list)  # who it is for; [] where nobody was named
    manager: str = ""  # of the job: slurm, flux or ""
    job: str = ""
    upper: str = ""
    writable: bool = False
    manifest: str = ""
    told: bool = False  # whether the manifest is there, and ours
    mark: str = ""  # of a copy's runs (copying.destination_journal)
    note: dict[str, Any] = dataclasses.field(default_factory=dict)  # theirs, once all is copied
    created: float = dataclasses.field(default_factory=time.time)  # seconds since 1970
    id: str = dataclasses.field(default_factory=lambda: secrets.token_hex(8))
    directory: str = ""  # where the record is

    @property
    def mounted(self) -> bool:
        """Whether it is, or was to be, a mount."""
        return self.how in ("mount", "run")

    def save(self) -> None:
        """Write the record, at once and whole. MountError where that fails."""
        shown = {name: value for name, value in dataclasses.asdict(self).items() if name != "directory"}
        path = self._path()
        try:
            with open(f"{path}.new", "w", encoding="utf-8", errors="surrogateescape") as file:
                json.dump({"zarrfs_staged": _VERSION, **shown}, file, ensure_ascii=False)
                file.flush()
                os.fsync(file.fileno())
            os.rename(f"{path}.new", path)
        except OSError as exc:
            raise MountError(f"{path}: cannot be written: {(exc.strerror or str(exc)).lower()}") from None

    def remove(self) -> None:
        """Forget it; the directories of records go, too, when they are empty."""
        for path in (self._path(), f"{self._path()}.new"):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
        with contextlib.suppress(OSError):
            os.rmdir(self.directory)
            if not os.environ.get(VARIABLE):
                os.rmdir(os.path.dirname(self.directory))

    def exists(self) -> bool:
        """Whether it has not been taken away."""
        return os.path.exists(self._path())

    def unfinished(self, path: str) -> str:
        """The name of a file that is to be called `path` when it is whole."""
        return f"{path}.{self.id}.tmp"

    def _path(self) -> str:
        return os.path.join(self.directory, f"{self.id}.json")


def home() -> str:
    """The directory of records of this user on this node, made if need be. MountError where it is not ours alone."""
    last: MountError | None = None
    for path in places():
        try:
            for part in (os.path.dirname(path), path):
                with contextlib.suppress(FileExistsError):
                    os.mkdir(part, 0o700)
                _check_ours(part)
        except OSError as exc:
            last = MountError(f"{path}: no place for records: {(exc.strerror or str(exc)).lower()}")
        else:
            return path
    assert last is not None
    raise last


def found(damaged: list[MountError] | None = None) -> list[Record]:
    """All records of this user on this node, oldest first. MountError for a damaged one, or it is added to `damaged`.

    None is in a directory of another user, which may be there only to be in the way.
    """
    records: dict[str, Record] = {}
    for directory in places():
        try:
            for part in (os.path.dirname(directory), directory):
                _check_ours(part)
            names = os.listdir(directory)
        except (FileNotFoundError, _Foreign):
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
    """The numbers of all other users who have records on this node, as far as their directories are theirs."""
    users = set()
    for top, prefix in (("/run/user", ""), ("/tmp", "zarrfs-")):
        with contextlib.suppress(OSError):
            for name in os.listdir(top):
                number = name.removeprefix(prefix)
                path = os.path.join(top, name, *(() if prefix else ("zarrfs",)))
                if not name.startswith(prefix) or not _NUMBER.fullmatch(number):
                    continue
                if _owner(path) == int(number) != os.geteuid():
                    users.add(int(number))
    return sorted(users)


@contextlib.contextmanager
def locked() -> Iterator[str]:
    """The directory of records, while nobody else looks at it to decide anything; for moments."""
    while True:
        path = home()
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:
            continue  # whoever had the last record has just taken it away
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            if not os.fstat(descriptor).st_nlink:
                continue
            yield path
            return
        finally:
            os.close(descriptor)


def add(record: Record) -> Record | None:
    """Write a new record, unless one of the same `dest` is there, which is returned."""
    with locked() as directory:
        for other in found([]):  # a damaged one is in nobody's way; what is at `dest` is looked at, too
            if os.path.normpath(other.dest) == os.path.normpath(record.dest):
                return other
        record.directory = directory
        record.save()
        return None


def claim(record: Record) -> bool:
    """Make `record`, as it is now on disk, ours to take away; False where another process does that, or has."""
    with locked():
        now = current(record)
        if now is None:
            return False
        ours = process_here()
        if now.state in (MAKING, ENDING) and now.maker != ours and processes.alive(now.maker):
            return False
        for field in dataclasses.fields(record):
            setattr(record, field.name, getattr(now, field.name))
        record.state, record.maker = ENDING, ours
        record.save()
        return True


def current(record: Record) -> Record | None:
    """`record` as it is now on disk; None where it was taken away."""
    return _read(record.directory, f"{record.id}.json")


def process_here() -> Process:
    """This process."""
    ours = processes.process(os.getpid())
    assert ours is not None
    return ours


def places() -> list[str]:
    """Where records of this user may be, the best place first."""
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
    """Whose directory it is; None for no directory, or one that others may write to."""
    try:
        status = os.lstat(path)
    except OSError:
        return None
    return status.st_uid if stat.S_ISDIR(status.st_mode) and not status.st_mode & 0o022 else None


class _Foreign(MountError):
    """What another user has put there: anybody can, in /tmp."""


def _check_ours(path: str) -> None:
    if _owner(path) != os.geteuid():
        status = os.lstat(path)  # FileNotFoundError
        kind = MountError if status.st_uid == os.geteuid() else _Foreign
        raise kind(f"{path}: is not a directory of user {os.geteuid()} that nobody else can write to")


def _read(directory: str, name: str) -> Record | None:
    """A record; None where there is none."""
    path = os.path.join(directory, name)
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    except OSError as exc:
        raise MountError(f"{path}: no record: {(exc.strerror or str(exc)).lower()}") from None
    with open(descriptor, encoding="utf-8", errors="surrogateescape") as file:
        status = os.fstat(descriptor)
        if status.st_uid != os.geteuid() or not stat.S_ISREG(status.st_mode) or status.st_size > _LARGEST:
            raise MountError(f"{path}: is no record of ours")
        try:
            return _from_json(json.load(file), directory)
        except (ValueError, TypeError, KeyError, AttributeError) as exc:
            raise MountError(f"{path}: is damaged, or of another version of zarrfs: {exc}") from None


def _from_json(values: dict[str, Any], directory: str) -> Record:
    if values.pop("zarrfs_staged") != _VERSION:
        raise ValueError("zarrfs_staged")
    for name in ("maker", "daemon", "keeper"):
        values[name] = values[name] and Process(*values[name])
    values["owners"] = [Process(*owner) for owner in values["owners"]]
    known = {field.name for field in dataclasses.fields(Record)}  # what else is in it is of another zarrfs
    return Record(**{name: value for name, value in values.items() if name in known} | {"directory": directory})


def owner_of(pid: int) -> Process:
    """The process `pid`, for whom something is staged. UsageError where there is none."""
    who = processes.process(pid)
    if who is None:
        raise UsageError(f"--for {pid}: there is no such process")
    return who


def resolved(dest: str) -> str:
    """DEST as records have it: absolute, its directory without links; a link at its end is not followed."""
    parent, name = os.path.split(os.path.abspath(dest))
    return os.path.join(os.path.realpath(parent), name)

"""Putting a source where a job wants it, as copies, or links to files that this node can read anyway."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import stat
from collections.abc import Callable, Iterator
from typing import IO, TYPE_CHECKING

from zarrfs.config.options import Options, Parsed
from zarrfs.copying.copy_report import CopyOptions, CopyReport
from zarrfs.copying.destination_journal import forget, kept
from zarrfs.errors import MountError, UsageError, ZarrfsError
from zarrfs.jobs import nodelocal, stagein
from zarrfs.jobs.records import Record
from zarrfs.jobs.unstage import Taking, unstage
from zarrfs.sources import fingerprint
from zarrfs.store.api import Info, Kind, Store
from zarrfs.store.uri import path_of_uri

if TYPE_CHECKING:
    from zarrfs.copying.copy_report import CopiedEntry
    from zarrfs.documents.plan import Plan

TAKES = "zarrfs.store.remotefiles", "zarrfs.copying.copy"  # what is imported while the source is planned
_FIELDS = {"key", "size", "mtime_ns", "sha256", "how"}  # of a line of a manifest
_LINE = 1 << 16  # bytes that one has at most
SUMS = ".sha256"  # a manifest of this name is one for sha256sum -c


@dataclasses.dataclass(frozen=True)
class Copying:
    """What is copied, and how."""

    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    jobs: int | None = None
    keep_going: bool = False
    manifest: str | None = None  # None: none
    sync: bool = False


@contextlib.contextmanager
def staged(
    wish: stagein.Wish, parsed: Parsed, tell: Callable[[str], None], report: CopyReport
) -> Iterator[Record]:
    """A record of a copy that is made inside, at `record.place`; afterwards it is linked to, and kept for its owner.

    If what is inside fails, what is whole stays at DEST, for a next run to go on from, as it does where the `report`
    has failures; a directory of the node goes.
    """
    record = stagein.begin(wish, parsed, tell)
    try:
        stagein.make_directories(record)
        yield record
        record.note = kept(record.place, record.mark) or {}
        stagein.hold_and_link(record)
        if not report.bad:
            forget(record.place, record.mark)  # until here a run after a kill takes this one up
    except BaseException:
        with contextlib.suppress(ZarrfsError, OSError):
            _keep(record) if record.note else unstage(record, Taking())
        raise


def _keep(record: Record) -> None:
    """A copy that was whole before it was made once more is on record as it was, with what has come since."""
    record.mark = record.note["mark"]
    record.note = kept(record.place, record.mark) or record.note
    stagein.hold_and_link(record)
    forget(record.place, record.mark)


async def write(
    record: Record, store: Store, plan: Plan, how: Copying, options: Options, report: CopyReport
) -> int:
    """Write all of `store`, or what `how` picks, to the record's place; gives how many files became links.

    UsageError, SourceError as copy_store().
    """
    from zarrfs.copying.copy import copy_store

    linking = _Links(store, record, options) if record.how == "link" else None
    version = plan.source, fingerprint(plan), plan.mtime_ns
    mark = json.dumps([*version, record.how])
    record.mark = hashlib.sha256(os.fsencode(mark)).hexdigest()
    record.save()
    choice = CopyOptions(
        include=how.include, exclude=how.exclude, jobs=how.jobs, keep_going=how.keep_going,
        mark=record.mark, sync=how.sync, sums=how.manifest is not None, unfinished=True,
    )  # fmt: skip
    with _manifest(how.manifest, record) as note:
        await copy_store(store, record.place, choice, report, note, None if linking is None else linking.link)
    return 0 if linking is None else linking.count


class _Links:
    """Which files can be links: those that are all of a file of this node, in a place that stays."""

    def __init__(self, store: Store, record: Record, options: Options) -> None:
        self._store, self.count = store, 0
        removed = [os.environ.get(name) for name in (nodelocal.FLUX, "SLURM_TMPDIR")]
        removed += [options.cache_dir, options.upperdir, record.local or None]
        places = {os.path.realpath(path) for path in removed if path}
        # what is removed together with the links is no reason against them
        self._removed = {path for path in places if not nodelocal.beneath(os.path.realpath(record.place), path)}
        self._removed |= {os.path.realpath(record.place)}

    async def link(self, key: str, info: Info) -> str | None:
        """The target of a link that takes the place of a copy; None where it is to be copied."""
        import trio

        where = await self._store.locate(key)
        path = path_of_uri(where["url"]) if set(where) == {"url"} else None
        if path is None or not path.startswith("/"):
            return None
        await self._store.info(key)  # whether it may be reached, and is there
        if not await trio.to_thread.run_sync(self._stays, path):
            return None
        self.count += 1
        return path

    def _stays(self, path: str) -> bool:
        """Whether it is a file in a place that stays; blocks, as a server of files may not answer."""
        real = os.path.realpath(path)
        readable = os.path.isfile(real) and os.access(real, os.R_OK, effective_ids=True)  # else that is told now
        return readable and not any(nodelocal.beneath(real, place) for place in self._removed)


@contextlib.contextmanager
def _manifest(path: str | None, record: Record) -> Iterator[Callable[[CopiedEntry], None]]:
    """What notes an entry in the manifest `path`, which appears whole at the end. UsageError."""
    if path is None:
        yield lambda done: None
        return
    path = os.path.abspath(path)
    if nodelocal.beneath(os.path.realpath(path), os.path.realpath(record.dest)):
        raise UsageError(f"--manifest {path}: lies in {record.dest}, of which it tells")
    if os.path.isdir(path):
        raise UsageError(f"--manifest {path}: is a directory")
    told = record.told and path == record.manifest
    if os.path.lexists(path) and not told and not _is_manifest(path):
        raise UsageError(f"--manifest {path}: is there already, and no manifest of ours: it stays")
    record.told = told
    record.manifest, new = path, record.unfinished(path)
    record.save()
    try:
        with _failing(path), open(new, "x", encoding="utf-8", errors="surrogateescape") as file:
            yield _failing(path)(_noting(file, record.place, path.endswith(SUMS)))  # a nursery hides what it raises
            file.flush()
            os.fsync(file.fileno())
        with _failing(path):
            os.rename(new, path)
        record.told = True
        record.save()
    finally:
        with contextlib.suppress(OSError):
            os.unlink(new)


def _is_manifest(path: str) -> bool:
    """Whether a file is a manifest of another copy, and no list of sums, which may be anybody's."""
    try:
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode) or not status.st_size:
                return stat.S_ISREG(status.st_mode)  # of a copy of nothing
            first = json.loads(file.readline(_LINE))
            return isinstance(first, dict) and first.keys() == _FIELDS
    except (OSError, ValueError, RecursionError):
        return False


@contextlib.contextmanager
def _failing(path: str) -> Iterator[None]:
    """Turns what the system says of a manifest into a MountError about it."""
    try:
        yield
    except OSError as exc:
        raise MountError(f"{path}: cannot be written: {(exc.strerror or str(exc)).lower()}") from exc


def _noting(file: IO[str], place: str, sums: bool) -> Callable[[CopiedEntry], None]:
    def note(done: CopiedEntry) -> None:
        if done.kind is not Kind.FILE and done.how != "linked":
            return
        if not sums:
            status = os.stat(os.path.join(place, done.key))  # not every source knows sizes and times
            about = {"key": done.key, "size": status.st_size, "mtime_ns": status.st_mtime_ns}
            escape = not done.key.isprintable()  # as a name that is not UTF-8, which would be no JSON
            file.write(json.dumps({**about, "sha256": done.sha256, "how": done.how}, ensure_ascii=escape) + "\n")
        elif done.sha256 is not None:
            escaped = done.key.replace("\\", "\\\\").replace("\n", "\\n").replace("\r", "\\r")
            file.write(f"{'' if escaped == done.key else chr(92)}{done.sha256}  {escaped}\n")

    return note

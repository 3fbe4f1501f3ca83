"""Staging a source for a job as a copy, or as symbolic links to files that this node can read directly."""

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
from zarrfs.config.shares import Share
from zarrfs.copying.copy_report import CopyOptions, CopyReport
from zarrfs.copying.destination_journal import forget, kept
from zarrfs.errors import MountError, UsageError, ZarrfsError, reason_of
from zarrfs.jobs import nodelocal, stagein
from zarrfs.jobs.records import Record
from zarrfs.jobs.unstage import UnstageOptions, unstage
from zarrfs.sources import fingerprint, variant
from zarrfs.store.api import Info, Kind, Store
from zarrfs.store.uri import path_of_uri
from zarrfs.system import mounts

if TYPE_CHECKING:
    from zarrfs.copying.copy_report import CopiedEntry
    from zarrfs.documents.plan import Plan

TAKES = "zarrfs.store.remotefiles", "zarrfs.copying.copy"  # modules to import while the source is planned
_FIELDS = {"key", "size", "mtime_ns", "sha256", "how"}  # fields of a line of a manifest
_LINE = 1 << 16  # maximum length of a line, in bytes
SUMS = ".sha256"  # suffix of a manifest for sha256sum -c


@dataclasses.dataclass(frozen=True)
class StageCopyOptions:
    """Options for staging a copy."""

    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    jobs: int | None = None
    keep_going: bool = False
    manifest: str | None = None  # its path; None: write no manifest
    sync: bool = False


@contextlib.contextmanager
def staged(
    request: stagein.StageRequest, parsed: Parsed, notify: Callable[[str], None], report: CopyReport
) -> Iterator[Record]:
    """Write the record of a copy that the block makes at `record.place`; then link to the copy and start its keeper.

    If the block fails, or `report` has failures, complete files stay at DEST, so that the next run resumes the copy.
    If the block fails, a node-local directory is removed.
    """
    record = stagein.begin(request, parsed, notify)
    try:
        stagein.make_directories(record)
        yield record
        record.note = kept(record.place, record.mark, request.share) or {}
        stagein.hold_and_link(record)
        # with failures, the next run needs the journal; a share may be run again on another node
        if not report.bad and request.share is None:
            forget(record.place, record.mark)  # if this process is killed before, the next run resumes the copy
    except BaseException:
        with contextlib.suppress(ZarrfsError, OSError):
            complete = record.note and request.share is None and not record.local
            _restore(record) if complete else unstage(record, UnstageOptions())
        raise


def _restore(record: Record) -> None:
    """Keep the record of a copy that was complete before its second run failed, including files of the second run."""
    record.mark = record.note["mark"]
    record.note = kept(record.place, record.mark) or record.note
    stagein.hold_and_link(record)
    forget(record.place, record.mark)


async def write(
    record: Record, store: Store, plan: Plan, copying: StageCopyOptions, options: Options, report: CopyReport,
    share: Share | None = None,
) -> int:  # fmt: skip
    """Copy the entries of `store` that `copying` selects to the path of a record.

    Return the number of files that became symbolic links. Raise UsageError and SourceError as copy_store() does,
    UsageError if the copy or its manifest would be in the source directory, and MountError if the manifest cannot be
    written.
    """
    from zarrfs.copying.copy import copy_store

    for path in filter(None, (record.place, copying.manifest)):
        if plan.kind == "zarr" and plan.path and mounts.beneath(os.path.realpath(path), os.path.realpath(plan.path)):
            raise UsageError(f"{path}: lies in {plan.source}, which is to be copied")
    linking = _Linking(store, record, options) if record.how == "link" else None
    version = plan.source, fingerprint(plan) or plan.mtime_ns, *variant(plan, options)
    mark = json.dumps([*version, record.how])
    record.mark = hashlib.sha256(os.fsencode(mark)).hexdigest()
    record.save()
    choice = CopyOptions(
        include=copying.include, exclude=copying.exclude, jobs=copying.jobs, keep_going=copying.keep_going,
        mark=record.mark, sync=copying.sync, sums=copying.manifest is not None, unfinished=True,
        share=share,
    )  # fmt: skip
    with _manifest(copying.manifest, record) as note:
        await copy_store(store, record.place, choice, report, note, None if linking is None else linking.link)
    return 0 if linking is None else linking.count


class _Linking:
    """Decides which files become symbolic links: whole local files in directories that stay as long as the links."""

    def __init__(self, store: Store, record: Record, options: Options) -> None:
        self._store, self.count = store, 0
        removed = [os.environ.get(name) for name in (nodelocal.FLUX, "SLURM_TMPDIR")]
        removed += [options.cache_dir, options.upperdir, record.local or None]
        places = {os.path.realpath(path) for path in removed if path}
        # a directory that is removed together with the links is fine
        self._removed = {path for path in places if not mounts.beneath(os.path.realpath(record.place), path)}
        self._removed |= {os.path.realpath(record.place)}

    async def link(self, key: str, info: Info) -> str | None:
        """Return the target of a symbolic link that replaces the copy, or None to copy the file."""
        import trio

        where = await self._store.locate(key)
        if set(where) != {"url"} or not where["url"].startswith(("/", "file:")):
            return None
        await self._store.info(key)  # raises if the file does not exist, or access to it is not allowed
        path = path_of_uri((await self._store.locate(key))["url"])  # info() has resolved a percent-encoded URL
        if path is None or not await trio.to_thread.run_sync(self._stays, path):
            return None
        self.count += 1
        return path

    def _stays(self, path: str) -> bool:
        """Return whether a path is a readable file that stays. Blocks, perhaps until a file server answers."""
        real = os.path.realpath(path)
        # an unreadable file is copied, so that the error is reported
        readable = os.path.isfile(real) and os.access(real, os.R_OK, effective_ids=True)
        return readable and not any(mounts.beneath(real, place) for place in self._removed)


@contextlib.contextmanager
def _manifest(path: str | None, record: Record) -> Iterator[Callable[[CopiedEntry], None]]:
    """Yield a function that adds an entry to the manifest, which appears, complete, after the block.

    Raise UsageError if the manifest cannot be at `path`, and MountError if it cannot be written.
    """
    if path is None:
        yield lambda done: None
        return
    path = os.path.abspath(path)
    if mounts.beneath(os.path.realpath(path), os.path.realpath(record.dest)):
        raise UsageError(f"--manifest {path}: lies in {record.dest}, which it describes")
    if os.path.isdir(path):
        raise UsageError(f"--manifest {path}: is a directory")
    own = record.manifest_written and path == record.manifest
    if os.path.lexists(path) and not own and not _is_manifest(path):
        raise UsageError(f"--manifest {path}: exists and is not a manifest of zarrfs: not replaced")
    record.manifest_written = own
    record.manifest, new = path, record.unfinished(path)
    record.save()
    try:
        with _about(path), open(new, "x", encoding="utf-8", errors="surrogateescape") as file:
            # convert errors in the function, too, because a nursery would wrap them in an exception group
            yield _about(path)(_manifest_writer(file, record.place, path.endswith(SUMS)))
            file.flush()
            os.fsync(file.fileno())
        with _about(path):
            os.rename(new, path)
        record.manifest_written = True
        record.save()
    finally:
        with contextlib.suppress(OSError):
            os.unlink(new)


def _is_manifest(path: str) -> bool:
    """Return whether a file is a JSON manifest of a copy, or empty. Other programs write lists of checksums, too."""
    try:
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode) or not status.st_size:
                return stat.S_ISREG(status.st_mode)  # an empty file is the manifest of an empty copy
            first = json.loads(file.readline(_LINE))
            return isinstance(first, dict) and first.keys() == _FIELDS
    except (OSError, ValueError, RecursionError):
        return False


@contextlib.contextmanager
def _about(path: str) -> Iterator[None]:
    """Convert an OSError of the block to a MountError about the manifest."""
    try:
        yield
    except OSError as exc:
        raise MountError(f"{path}: cannot be written: {reason_of(exc)}") from exc


def _manifest_writer(file: IO[str], place: str, sums: bool) -> Callable[[CopiedEntry], None]:
    def note(done: CopiedEntry) -> None:
        if done.kind is not Kind.FILE and done.how != "linked":
            return
        if not sums:
            status = os.stat(os.path.join(place, done.key))  # not all sources have sizes and times
            about = {"key": done.key, "size": status.st_size, "mtime_ns": status.st_mtime_ns}
            escape = not done.key.isprintable()  # a name that is not UTF-8 would be invalid JSON
            file.write(json.dumps({**about, "sha256": done.sha256, "how": done.how}, ensure_ascii=escape) + "\n")
        elif done.sha256 is not None:
            escaped = done.key.replace("\\", "\\\\").replace("\n", "\\n").replace("\r", "\\r")
            file.write(f"{'' if escaped == done.key else chr(92)}{done.sha256}  {escaped}\n")

    return note

"""Packing of a directory tree: walk it, read and hash its files, and write its entries and blobs.

TreeWalk splits a tree into tasks, and EntryReader runs them, in the processes of zarrfs.system.workers.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from zarrfs.archives.blob_writer import ALGORITHMS, BlobDirectory
from zarrfs.archives.document_writer import (
    MAX_SIZE,
    PATH_MAX,
    SPECIAL_FILES,
    blobs_rule,
    cut,
    encoded,
    inline_content,
    joined,
)
from zarrfs.archives.dump_writer import BlobSpan, TaskBlobs, check_name
from zarrfs.errors import SourceError, UsageError, reason_of
from zarrfs.store.destination import is_utf8
from zarrfs.store.staging import RESERVED
from zarrfs.system.beneath import FileVersion, file_version
from zarrfs.system.cpus import usable
from zarrfs.system.sparse import each_extent

REGION_MAX = 64 << 20  # bytes of the largest blob; each process holds one in memory
_JOBS_MAX = 8  # processes by default; more of them would only contend for the directory of blobs
BATCH = 64  # files of one task
MANY = 4096  # regions; a file with more is split into several tasks
PIECE = 32 << 10  # bytes; a larger inline file is written to the document in pieces
_UNFINISHED = "a name that is reserved for unfinished copies"  # at any depth, because stores hide such names
_NO_SIZE = "no archive can hold it; archive a copy"
_PAGE = 4096  # bytes that one read(2) returns atomically

# Some names of a directory: (entry of the directory itself, its path, its (device, inode), regular files, other names)
DirectoryPart = tuple[bytes | None, str, tuple[int, int] | None, list[str], list[str]]
# Encoded entries, and their blobs in the memory of the task
EntryBatch = tuple[bytes, list[BlobSpan]]
# A file that is too large for its task: path, fields without the content, version when it was opened
LargeFile = tuple[str, dict[str, Any], FileVersion]
# Entries in the order of the document, number of files, number of bytes, warnings
Result = tuple[list[EntryBatch | LargeFile], int, int, list[str]]

_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY


@dataclass(frozen=True)
class CreateOptions:
    """Options of `zarrfs archive create`. Sizes are in bytes."""

    blobs: str | None = None  # the directory of blobs
    dump: str | None = None  # name of the archive in a dump tar, which also holds the blobs; None: write no tar
    algorithm: str = "sha1"
    inline: int = 1024  # files of up to this size are stored in the document itself
    region: int = 1 << 20  # largest size of a blob
    dictionary: bool = False
    all_inline: bool = False
    skip_unsupported: bool = False  # leave out files that no archive can hold, with a warning
    sync: bool = False  # flush blobs to the disk before the document is complete
    jobs: int | None = None  # processes that read and hash; None: one per CPU, up to 8
    excludes: tuple[str, ...] = ()  # globs of names at any depth, or with a "/" of paths, left out with all below
    leave_out: Callable[[str], bool] | None = None  # returns whether to leave out a path, and all below it, silently
    own: frozenset[tuple[int, int]] = frozenset()  # (device, inode) of the outputs, which are left out

    def check(self) -> None:
        """Raise UsageError for options that contradict each other or are out of range."""
        if self.algorithm not in ALGORITHMS:
            raise UsageError(f"{self.algorithm}: is not a hash of blobs ({', '.join(ALGORITHMS)})")
        if not 1 <= self.region <= REGION_MAX:
            raise UsageError(f"a region of {self.region:,} bytes: it has 1 to {REGION_MAX:,}")
        if self.dump is not None:
            check_name(self.dump)
            if self.blobs is not None:
                raise UsageError("--blobs cannot be combined with a tar, which holds the blobs itself")
        if self.all_inline and self.blobs is not None:
            raise UsageError("--blobs cannot be combined with --inline, which puts all data into the document")

    def processes(self) -> int:
        """Return the number of processes that read and hash."""
        return self.jobs or min(usable(), _JOBS_MAX)


class EntryReader:
    """A reader of the entries below the directory `base`, which is open as `descriptor`."""

    def __init__(
        self, descriptor: int, base: str, options: CreateOptions, blobs: BlobDirectory | TaskBlobs | None
    ) -> None:
        self._descriptor, self._base = descriptor, base
        self._options, self._blobs = options, blobs
        self._entries: list[bytes] = []
        self._found: list[EntryBatch | LargeFile] = []
        self._files = self._bytes = 0
        self._warnings: list[str] = []

    def run(self, task: tuple[str, Any], memory: memoryview) -> Any:
        """Run a task in a worker process. Blobs for a dump tar go to `memory`, which is shared with the parent.

        For the task ("parts", list of DirectoryPart), return a Result. For ("regions", (path, version, regions)),
        return the regions of a large file as a blobvec, and the spans of their blobs in `memory`.
        """
        if self._blobs is not None:
            self._blobs.use(memory)
        kind, value = task
        return self.entries(value) if kind == "parts" else self._regions(*value)

    def entries(self, parts: list[DirectoryPart]) -> Result:
        """Read and encode the entries of some directories. Raise SourceError, which names the unreadable entry."""
        self._found, self._entries, self._warnings, self._files, self._bytes = [], [], [], 0, 0
        for own, directory, identity, files, others in parts:
            if own is not None:
                self._entries.append(own)
            if not files and not others:
                continue
            named = identity is None  # the directory of a path on the command line may be a symlink
            with self.opened(directory, os.O_RDONLY | os.O_DIRECTORY, named) as descriptor:
                if identity is not None:
                    status = os.fstat(descriptor)
                    if (status.st_dev, status.st_ino) != identity:
                        raise changed(self._base, directory)
                prefix = f"{directory}/" if directory else ""
                for names, add in (files, self._add_file), (others, self._add_other):
                    for name in names:
                        self._add(descriptor, name, prefix + name, add)
        self._join()
        return self._found, self._files, self._bytes, self._warnings

    @contextlib.contextmanager
    def opened(self, path: str, flags: int = _FILE, follow: bool = False) -> Iterator[int]:
        """Open a path below the base directory. Raise SourceError if that fails."""
        flags |= os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW)
        with reading(self._base, path):
            descriptor = os.open(path or ".", flags, dir_fd=self._descriptor)
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    def refuse(self, path: str, rule: str, warn: Callable[[str], None]) -> None:
        """Raise SourceError for an entry that no archive can hold; with skip_unsupported, only warn about it."""
        if not self._options.skip_unsupported:
            raise failed(self._base, path, f"{rule} (--skip-unsupported leaves it out)")
        warn(f"{failed(self._base, path, rule)}: left out")

    # -- one entry

    def _add(self, directory: int, name: str, path: str, add: Callable[[int, str, str], str | None]) -> None:
        try:
            rule = path_rule(path) or add(directory, name, path)
        except OSError as exc:
            raise failed(self._base, path, exc) from exc
        if rule is not None:
            self.refuse(path, rule, self._warnings.append)

    def _add_other(self, directory: int, name: str, path: str) -> str | None:
        # not opened, because opening a device may have side effects
        status = os.stat(name, dir_fd=directory, follow_symlinks=False)
        if not stat.S_ISLNK(status.st_mode):
            what = SPECIAL_FILES.get(stat.S_IFMT(status.st_mode))
            if what is None:
                raise changed(self._base, path)
            return f"{what}, which no archive can hold"
        target = os.readlink(name, dir_fd=directory)
        if not is_utf8(target):
            return "a symbolic link whose target is not UTF-8, which no archive can hold"
        rule = time_rule(status.st_mtime_ns)
        if rule is None:
            self._emit(path, self._fields(status) | {"data": target})
        return rule

    def _add_file(self, directory: int, name: str, path: str) -> str | None:
        descriptor = os.open(name, _FILE, dir_fd=directory)
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise changed(self._base, path)
            rule = time_rule(status.st_mtime_ns) or size_rule(status.st_size)
            if rule is None and not status.st_size and os.pread(descriptor, 1, 0):
                rule = f"bytes in a file whose size is 0, as of /proc: {_NO_SIZE}"
            if rule is None:
                fields = self._fields(status)
                fields["size"] = status.st_size
                rule = self._add_content(descriptor, path, fields, status)
                self._files += rule is None
            return rule
        finally:
            os.close(descriptor)

    @staticmethod
    def _fields(status: os.stat_result) -> dict[str, Any]:
        return {"mode": status.st_mode, "mtime": status.st_mtime_ns // 10**9}

    def _emit(self, path: str, fields: dict[str, Any]) -> None:
        self._entries.append(encoded(path, fields, self._options.dictionary))

    def _join(self) -> None:
        """Join the entries added since the last call, so that the parent can write them as they are."""
        if self._entries:
            self._found.append((joined(self._entries), self._blob_spans()))
            self._entries = []

    def _blob_spans(self) -> list[BlobSpan]:
        return self._blobs.take() if self._blobs is not None else []

    # -- what is in a file

    def _add_content(self, descriptor: int, path: str, fields: dict[str, Any], status: os.stat_result) -> str | None:
        """Add a file; return why no archive can hold it, or None if one can."""
        size, options = status.st_size, self._options
        if not size or (not status.st_blocks and not any(each_extent(descriptor, size))):
            self._emit(path, fields)
            return None
        inline = options.all_inline or size <= options.inline
        if not inline and self._blobs is None:
            raise UsageError(f"{path}: {blobs_rule(size)}")
        if size <= PIECE and (inline or (size <= options.region and _is_dense(descriptor, size))):
            small = self._small(descriptor, path, status, inline)
            if small is None:
                return f"fewer bytes than its size of {size:,}, as of /sys: {_NO_SIZE}"
            fields |= small
        else:
            found = None if inline else self._blobvec(descriptor, path, status)
            if found is None:
                self._join()
                self._found.append((path, fields, file_version(status)))
                return None
            if found:
                fields |= {"encoding": "blobvec", "data": found}
        self._emit(path, fields)
        return None

    def _small(self, descriptor: int, path: str, status: os.stat_result, inline: bool) -> dict[str, Any] | None:
        """Read a file with one call; return its fields `encoding` and `data`, or None if it ends before its size."""
        size = status.st_size
        view = memoryview(bytearray(size + 1)) if self._blobs is None else self._blobs.buffer(size + 1)
        data = view[: os.preadv(descriptor, [view], 0)]
        if len(data) != size or size > _PAGE:
            if file_version(os.fstat(descriptor)) != file_version(status) or len(data) > size:
                raise changed(self._base, path)
            if len(data) < size:
                return None
        self._bytes += size
        if inline:
            return inline_content(bytes(data))
        assert self._blobs is not None
        return {"encoding": "blobvec", "data": [[0, size, self._blobs.put(data)]]}

    def _blobvec(self, descriptor: int, path: str, status: os.stat_result) -> list[list[Any]] | None:
        """Read a file into blobs and return its blobvec, or None if the file is too large for this task."""
        assert self._blobs is not None
        size = status.st_size
        room = self._blobs.room()
        if min(size, status.st_blocks * 512) > room:
            return None
        regions: list[tuple[int, int]] = []
        taken = 0
        for start, stop in cut(each_extent(descriptor, size), self._options.region):
            regions.append((start, stop))
            taken += stop - start
            if taken > room or len(regions) > MANY:
                return None
        found = [self._region(descriptor, path, start, stop) for start, stop in regions]
        if file_version(os.fstat(descriptor)) != file_version(status):
            raise changed(self._base, path)
        self._bytes += taken
        return found

    def _region(self, descriptor: int, path: str, start: int, stop: int) -> list[Any]:
        assert self._blobs is not None
        length, at = stop - start, 0
        view = self._blobs.buffer(length)
        while at < length:
            count = os.preadv(descriptor, [view[at:]], start + at)
            if not count:
                raise changed(self._base, path)
            at += count
        return [start, length, self._blobs.put(view)]

    def _regions(
        self, path: str, version: FileVersion, regions: list[tuple[int, int]]
    ) -> tuple[list[list[Any]], list[BlobSpan]]:
        """Read some regions of a large file into blobs; return them as a blobvec, and the spans of their blobs."""
        with self.opened(path) as descriptor, reading(self._base, path):
            found = [self._region(descriptor, path, start, stop) for start, stop in regions]
            if file_version(os.fstat(descriptor)) != version:
                raise changed(self._base, path)
        return found, self._blob_spans()


def _is_dense(descriptor: int, size: int) -> bool:
    """Return whether a file has no hole; False if the file system cannot tell."""
    try:
        return os.lseek(descriptor, 0, os.SEEK_HOLE) == size
    except OSError:  # a file system that does not report holes
        return False


def named(paths: Iterable[str]) -> list[str]:
    """Normalise paths and drop duplicates. Raise UsageError if one is empty, absolute, or has ".." or NUL."""
    found: dict[str, None] = {}
    for path in paths:
        if not path or "\0" in path:
            raise UsageError("an empty path" if not path else f"{path!r}: a path with a NUL")
        if path.startswith("/"):
            more = f"say -C / {path.lstrip('/') or '.'}"
            raise UsageError(f"{path}: paths in an archive are relative: {more}, or -C with its directory")
        parts = [part for part in path.split("/") if part not in ("", ".")]
        if ".." in parts:
            raise UsageError(f"{path}: paths in an archive cannot contain ..: use -C DIR to start elsewhere")
        found["/".join(parts)] = None
    return list(found)


def _above(path: str) -> Iterator[str]:
    if path:
        yield ""
        yield from (path[:at] for at, character in enumerate(path) if character == "/")


class TreeWalk:
    """A walk through the directory that `reader` reads. It opens no regular files."""

    def __init__(self, descriptor: int, base: str, options: CreateOptions, reader: EntryReader) -> None:
        self._descriptor, self._base, self._options, self._reader = descriptor, base, options, reader
        self._inodes = {inode for _device, inode in options.own}
        self._leave_out = [] if options.leave_out is None else [options.leave_out]
        if options.excludes:
            from zarrfs.store.keyglobs import Globs

            self._leave_out.append(Globs(options.excludes).match)

    def tasks(self, paths: Iterable[str], warn: Callable[[str], None]) -> Iterator[tuple[str, list[DirectoryPart]]]:
        """Yield tasks for EntryReader.run(), in an order that depends only on names.

        `warn` is called with each warning. Raise SourceError for an entry that cannot be read or archived, UsageError
        for a path that is an output of this command.
        """
        batch: list[DirectoryPart] = []
        count = 0
        for part in self.parts(paths, warn):
            batch.append(part)
            count += len(part[3]) + len(part[4]) + 1
            if count >= BATCH:
                yield "parts", batch
                batch, count = [], 0
        if batch:
            yield "parts", batch

    def parts(self, paths: Iterable[str], warn: Callable[[str], None]) -> Iterator[DirectoryPart]:
        """Yield parts of directories, of up to BATCH names each. Raise the errors of tasks()."""
        kept = dict.fromkeys(path for path in paths if not self._left_out(path))
        links: dict[str, bool] = {}
        tops = [path for path in kept if not self._is_below(path, kept, links)]
        for path in tops:
            if any(part.startswith(RESERVED) for part in path.split("/")):
                warn(f"{failed(self._base, path, _UNFINISHED)}: left out")
                continue
            with reading(self._base, path):
                status = os.stat(path or ".", dir_fd=self._descriptor, follow_symlinks=False)
            directory, _, name = path.rpartition("/")
            if (status.st_dev, status.st_ino) in self._options.own:
                raise UsageError(f"{path or '.'}: is an output of this command, so it cannot be archived")
            if stat.S_ISDIR(status.st_mode):
                yield from self._below(path, warn)
            elif stat.S_ISREG(status.st_mode):
                yield None, directory, None, [name], []
            else:
                yield None, directory, None, [], [name]

    def _is_below(self, path: str, others: Container[str], links: dict[str, bool]) -> bool:
        """Return whether one of `others` is a parent of `path`, so that `path` is archived with it.

        In that case, raise SourceError if `path` does not exist, or if that parent or a directory between the two is a
        symbolic link, which the walk does not follow, so that `path` would be left out silently. `links` caches which
        directories are symbolic links.
        """
        below = False
        for above in _above(path):
            below = below or above in others
            if not below:
                continue
            if above not in links:
                with reading(self._base, above):
                    status = os.stat(above or ".", dir_fd=self._descriptor, follow_symlinks=False)
                links[above] = stat.S_ISLNK(status.st_mode)
            if links[above]:
                rule = f"is below the symbolic link {above}, which is archived as a link: leave out one of them"
                raise failed(self._base, path, rule)
        if below:
            with reading(self._base, path):
                os.stat(path, dir_fd=self._descriptor, follow_symlinks=False)
        return below

    def _left_out(self, path: str) -> bool:
        """Return whether a path from the command line is left out, by itself or with a parent directory."""
        places = [path, *filter(None, _above(path))]
        return any(leave_out(place) for leave_out in self._leave_out for place in places)

    def _below(self, top: str, warn: Callable[[str], None]) -> Iterator[DirectoryPart]:
        waiting = [top]
        while waiting:
            path = waiting.pop()
            rule = path_rule(path)
            if rule is not None:
                self._reader.refuse(path, rule, warn)
                continue
            with self._reader.opened(path, os.O_RDONLY | os.O_DIRECTORY) as descriptor:
                status = os.fstat(descriptor)
                rule = time_rule(status.st_mtime_ns)
                if rule is not None:
                    self._reader.refuse(path, rule, warn)
                    continue
                with reading(self._base, path):
                    files, others, directories = self._sorted(descriptor, path, warn)
            waiting += reversed(directories)
            own = None
            if path:  # RFC 37 has no entry for the root
                fields = {"mode": status.st_mode, "mtime": status.st_mtime_ns // 10**9}
                own = encoded(path, fields, self._options.dictionary)
            identity = status.st_dev, status.st_ino
            for at in range(0, len(files) or 1, BATCH):
                yield own, path, identity, files[at : at + BATCH], []
                own = None
            for at in range(0, len(others), BATCH):
                yield None, path, identity, [], others[at : at + BATCH]

    def _sorted(
        self, descriptor: int, path: str, warn: Callable[[str], None]
    ) -> tuple[list[str], list[str], list[str]]:
        """Return the regular files, the other names, and the paths of the subdirectories, each sorted."""
        files: list[str] = []
        others: list[str] = []
        directories: list[str] = []
        prefix = f"{path}/" if path else ""
        with os.scandir(descriptor) as entries:
            for entry in entries:
                name = entry.name
                if self._leave_out and any(leave_out(prefix + name) for leave_out in self._leave_out):
                    continue
                if name.startswith(RESERVED):
                    warn(f"{failed(self._base, prefix + name, _UNFINISHED)}: left out")
                elif entry.inode() in self._inodes and self._is_own(entry):
                    warn(f"{failed(self._base, prefix + name, 'is an output of this command')}: left out")
                elif entry.is_file(follow_symlinks=False):
                    files.append(name)
                elif entry.is_dir(follow_symlinks=False):
                    directories.append(prefix + name)
                else:
                    others.append(name)
        return sorted(files), sorted(others), sorted(directories)

    def _is_own(self, entry: os.DirEntry[str]) -> bool:
        with contextlib.suppress(FileNotFoundError):
            status = entry.stat(follow_symlinks=False)
            return (status.st_dev, status.st_ino) in self._options.own
        return False


def failed(base: str, path: str, rule: str | OSError) -> SourceError:
    """Return the error about an entry of the directory `base`."""
    if isinstance(rule, FileNotFoundError | NotADirectoryError):
        rule = "no such file or directory (or it is gone meanwhile)"
    elif isinstance(rule, OSError):
        rule = reason_of(rule)
    return SourceError(path or ".", rule) if base == "." else SourceError(base, rule, path or ".")


@contextlib.contextmanager
def reading(base: str, path: str) -> Iterator[None]:
    """Turn OSErrors of the body into SourceErrors about an entry."""
    try:
        yield
    except OSError as exc:
        raise failed(base, path, exc) from exc


def changed(base: str, path: str) -> SourceError:
    """Return the error about an entry that changed while it was read."""
    return failed(base, path, "changed while it was read: archive it when nothing writes to it")


def path_rule(path: str) -> str | None:
    """Return why an archive cannot hold an entry with this path, or None."""
    try:
        size = len(path.encode())
    except UnicodeEncodeError:
        return "a name that is not UTF-8, which no archive can hold"
    return f"a path over {PATH_MAX:,} bytes, which no archive can hold" if size > PATH_MAX else None


def time_rule(mtime_ns: int) -> str | None:
    """Return why an archive cannot hold an entry with this mtime, or None."""
    return None if -(2**63) <= mtime_ns < 2**63 else "a time that does not fit 64 bits of nanoseconds"


def size_rule(size: int) -> str | None:
    """Return why an archive cannot hold a file of `size` bytes, or None."""
    return None if size <= MAX_SIZE else f"a size over {MAX_SIZE:,} bytes, which no archive can hold"

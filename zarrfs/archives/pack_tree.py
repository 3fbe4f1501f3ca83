"""Packing of a directory tree: walk it, read and hash its files, and write its entries and blobs."""

from __future__ import annotations

import base64
import codecs
import contextlib
import os
import stat
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import orjson

from zarrfs.archives.blob_writer import ALGORITHMS, BlobDirectory
from zarrfs.archives.document_writer import (
    MAX_SIZE,
    PATH_MAX,
    SPECIAL_FILES,
    DocumentWriter,
    blobs_rule,
    cut,
    encoded,
    encoded_around,
    inline_content,
)
from zarrfs.errors import SourceError, UsageError, reason_of
from zarrfs.store.destination import is_utf8
from zarrfs.store.keyglobs import Globs
from zarrfs.store.writing import RESERVED
from zarrfs.system.beneath import file_version
from zarrfs.system.sparse import each_extent

REGION_MAX = 64 << 20  # bytes of the largest blob, which is held in memory
PIECE = 3 << 14  # bytes; a larger inline file is written to the document in pieces. base64 needs a multiple of 3
_UNFINISHED = "a name that is reserved for unfinished copies"  # at any depth, because stores hide such names
_NO_SIZE = "no archive can hold it; archive a copy"
_PAGE = 4096  # bytes that one read(2) returns atomically

# A directory: (entry of the directory itself, its path, its (device, inode), regular files, other names)
DirectoryPart = tuple[bytes | None, str, tuple[int, int] | None, list[str], list[str]]

_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY


@dataclass(frozen=True)
class CreateOptions:
    """Options of `zarrfs archive create`. Sizes are in bytes."""

    blobs: str | None = None  # the directory of blobs
    algorithm: str = "sha1"
    inline: int = 1024  # files of up to this size are stored in the document itself
    region: int = 1 << 20  # largest size of a blob
    dictionary: bool = False
    all_inline: bool = False
    skip_unsupported: bool = False  # leave out files that no archive can hold, with a warning
    sync: bool = False  # flush blobs to the disk before the document is complete
    excludes: tuple[str, ...] = ()  # globs of names at any depth, or with a "/" of paths, left out with all below
    own: frozenset[tuple[int, int]] = frozenset()  # (device, inode) of the outputs, which are left out

    def check(self) -> None:
        """Raise UsageError for options that contradict each other or are out of range."""
        if self.algorithm not in ALGORITHMS:
            raise UsageError(f"{self.algorithm}: is not a hash of blobs ({', '.join(ALGORITHMS)})")
        if not 1 <= self.region <= REGION_MAX:
            raise UsageError(f"a region of {self.region:,} bytes: it has 1 to {REGION_MAX:,}")
        if self.all_inline and self.blobs is not None:
            raise UsageError("--blobs cannot be combined with --inline, which puts all data into the document")


@dataclass
class Progress:
    """The progress of create(). The expected counts are None until expect() has counted all entries."""

    files: int = 0
    bytes: int = 0
    expected_files: int | None = None
    expected_bytes: int | None = None


class EntryWriter:
    """A writer of the entries below the directory `base`, which is open as `descriptor`, to a document and blobs."""

    def __init__(
        self, descriptor: int, base: str, options: CreateOptions, blobs: BlobDirectory | None,
        writer: DocumentWriter, progress: Progress, warn: Callable[[str], None],
    ) -> None:  # fmt: skip
        self._descriptor, self._base = descriptor, base
        self._options, self._blobs, self._writer = options, blobs, writer
        self._progress, self._warn = progress, warn

    def add(self, part: DirectoryPart) -> None:
        """Write the entries of a directory. Raise SourceError, which names an unreadable entry."""
        own, directory, identity, files, others = part
        if own is not None:
            self._writer.add(own)
        if not files and not others:
            return
        named = identity is None  # the directory of a path on the command line may be a symlink
        with opened(self._descriptor, self._base, directory, os.O_RDONLY | os.O_DIRECTORY, named) as descriptor:
            if identity is not None:
                status = os.fstat(descriptor)
                if (status.st_dev, status.st_ino) != identity:
                    raise changed(self._base, directory)
            prefix = f"{directory}/" if directory else ""
            for names, add in (files, self._add_file), (others, self._add_other):
                for name in names:
                    self._add(descriptor, name, prefix + name, add)

    # -- one entry

    def _add(self, directory: int, name: str, path: str, add: Callable[[int, str, str], str | None]) -> None:
        try:
            rule = path_rule(path) or add(directory, name, path)
        except OSError as exc:
            raise failed(self._base, path, exc) from exc
        if rule is not None:
            refuse(self._base, path, rule, self._options, self._warn)

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
            self._emit(path, _fields(status) | {"data": target})
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
                rule = self._add_content(descriptor, path, status)
                self._progress.files += rule is None
            return rule
        finally:
            os.close(descriptor)

    def _emit(self, path: str, fields: dict[str, Any]) -> None:
        self._writer.add(encoded(path, fields, self._options.dictionary))

    # -- what is in a file

    def _add_content(self, descriptor: int, path: str, status: os.stat_result) -> str | None:
        """Add a file; return why no archive can hold it, or None if one can."""
        size, options = status.st_size, self._options
        fields = _fields(status) | {"size": size}
        if not size or (not status.st_blocks and not any(each_extent(descriptor, size))):
            self._emit(path, fields)
            return None
        inline = options.all_inline or size <= options.inline
        if not inline and self._blobs is None:
            raise UsageError(f"{path}: {blobs_rule(size)}")
        if size <= PIECE and (inline or (size <= options.region and _is_dense(descriptor, size))):
            data = self._small(descriptor, path, status)
            if data is None:
                return f"fewer bytes than its size of {size:,}, as of /sys: {_NO_SIZE}"
            self._emit(path, fields | (inline_content(data) if inline else self._one_blob(data)))
            return None
        if inline:
            self._add_inline(descriptor, path, fields)
        else:
            self._add_blobvec(descriptor, path, fields)
        if file_version(os.fstat(descriptor)) != file_version(status):
            raise changed(self._base, path)
        return None

    def _small(self, descriptor: int, path: str, status: os.stat_result) -> bytes | None:
        """Read a file with one call; return None if it ends before its size."""
        size = status.st_size
        data = os.pread(descriptor, size + 1, 0)
        if len(data) != size or size > _PAGE:
            if file_version(os.fstat(descriptor)) != file_version(status) or len(data) > size:
                raise changed(self._base, path)
            if len(data) < size:
                return None
        self._progress.bytes += size
        return data

    def _one_blob(self, data: bytes) -> dict[str, Any]:
        assert self._blobs is not None
        return {"encoding": "blobvec", "data": [[0, len(data), self._blobs.put(data)]]}

    def _add_blobvec(self, descriptor: int, path: str, fields: dict[str, Any]) -> None:
        assert self._blobs is not None
        before, after = encoded_around(path, fields | {"encoding": "blobvec"}, self._options.dictionary)
        self._writer.add(before + b"[")
        mark = b""
        for start, stop in cut(each_extent(descriptor, fields["size"]), self._options.region):
            length, at = stop - start, 0
            view = self._blobs.buffer(length)
            while at < length:
                count = os.preadv(descriptor, [view[at:]], start + at)
                if not count:
                    raise changed(self._base, path)
                at += count
            self._writer.append(mark + orjson.dumps([start, length, self._blobs.put(view)]))
            self._progress.bytes += length
            mark = b","
        self._writer.append(b"]" + after)

    def _add_inline(self, descriptor: int, path: str, fields: dict[str, Any]) -> None:
        size = fields["size"]
        text = self._is_text(descriptor, path, size)
        fields = fields | {"encoding": "utf-8" if text else "base64"}
        before, after = encoded_around(path, fields, self._options.dictionary)
        self._writer.add(before + b'"')
        decoder = codecs.getincrementaldecoder("utf-8")()
        try:
            for piece in self._pieces(descriptor, path, size):
                shown = orjson.dumps(decoder.decode(piece))[1:-1] if text else base64.b64encode(piece)
                self._writer.append(shown)
                self._progress.bytes += len(piece)
            decoder.decode(b"", final=text)
        except UnicodeDecodeError:
            raise changed(self._base, path) from None
        self._writer.append(b'"' + after)

    def _is_text(self, descriptor: int, path: str, size: int) -> bool:
        """Return whether a file is UTF-8 without NUL. It is read a second time later, as it may not fit in memory."""
        decoder = codecs.getincrementaldecoder("utf-8")()
        try:
            for piece in self._pieces(descriptor, path, size):
                if b"\0" in piece:
                    return False
                decoder.decode(piece)
            decoder.decode(b"", final=True)
        except UnicodeDecodeError:
            return False
        return True

    def _pieces(self, descriptor: int, path: str, size: int) -> Iterator[bytes]:
        for at in range(0, size, PIECE):
            piece = os.pread(descriptor, min(PIECE, size - at), at)
            if len(piece) != min(PIECE, size - at):
                raise changed(self._base, path)
            yield piece


def _is_dense(descriptor: int, size: int) -> bool:
    """Return whether a file has no hole; False if the file system cannot tell."""
    try:
        return os.lseek(descriptor, 0, os.SEEK_HOLE) == size
    except OSError:  # a file system that does not report holes
        return False


def _fields(status: os.stat_result) -> dict[str, Any]:
    return {"mode": status.st_mode, "mtime": status.st_mtime_ns // 10**9}


@contextlib.contextmanager
def opened(directory: int, base: str, path: str, flags: int, follow: bool = False) -> Iterator[int]:
    """Open a path below the base directory. Raise SourceError if that fails."""
    with reading(base, path):
        descriptor = os.open(path or ".", flags | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW), dir_fd=directory)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def refuse(base: str, path: str, rule: str, options: CreateOptions, warn: Callable[[str], None]) -> None:
    """Raise SourceError for an entry that no archive can hold; with skip_unsupported, only warn about it."""
    if not options.skip_unsupported:
        raise failed(base, path, f"{rule} (--skip-unsupported leaves it out)")
    warn(f"{failed(base, path, rule)}: left out")


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
    """A walk through the directory `base`, which is open as `descriptor`. It opens no regular files."""

    def __init__(self, descriptor: int, base: str, options: CreateOptions) -> None:
        self._descriptor, self._base, self._options = descriptor, base, options
        self._inodes = {inode for _device, inode in options.own}
        self._excludes = Globs(options.excludes)

    def parts(self, paths: Iterable[str], warn: Callable[[str], None]) -> Iterator[DirectoryPart]:
        """Yield directories in an order that depends only on names. `warn` is called with each warning.

        Raise SourceError for an entry that cannot be read or archived, UsageError for a path that is an output of this
        command.
        """
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
        return any(map(self._excludes.match, places))

    def _below(self, top: str, warn: Callable[[str], None]) -> Iterator[DirectoryPart]:
        waiting = [top]
        while waiting:
            path = waiting.pop()
            rule = path_rule(path)
            if rule is not None:
                refuse(self._base, path, rule, self._options, warn)
                continue
            with opened(self._descriptor, self._base, path, os.O_RDONLY | os.O_DIRECTORY) as descriptor:
                status = os.fstat(descriptor)
                rule = time_rule(status.st_mtime_ns)
                if rule is not None:
                    refuse(self._base, path, rule, self._options, warn)
                    continue
                with reading(self._base, path):
                    files, others, directories = self._sorted(descriptor, path, warn)
            waiting += reversed(directories)
            own = None
            if path:  # RFC 37 has no entry for the root
                own = encoded(path, _fields(status), self._options.dictionary)
            yield own, path, (status.st_dev, status.st_ino), files, others

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
                if self._excludes and self._excludes.match(prefix + name):
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

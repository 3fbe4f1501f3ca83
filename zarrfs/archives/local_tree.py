"""The files of this machine, as write_archive() reads them: a walk that opens one directory and one file at a time."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import AsyncGenerator, Callable, Collection, Generator, Iterable, Iterator
from typing import Self

import trio

from zarrfs.archives.blobrefs import SPECIAL_FILES
from zarrfs.archives.writer import Entry, archive_rule
from zarrfs.errors import SourceError, UsageError, reason_of
from zarrfs.store.api import KINDS
from zarrfs.store.keyglobs import Globs
from zarrfs.store.writing import RESERVED
from zarrfs.system.beneath import file_version
from zarrfs.system.sparse import data_extents

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
_UNFINISHED = "a name that is reserved for unfinished copies"  # at any depth, because stores hide such names
_OWN = "is an output of this command"
_CHANGED = "changed while it was read: archive it when nothing writes to it"


class LocalTree:
    """The entries below the directory `base`.

    `excludes`: globs of names at any depth, or with a "/" of paths, which are left out with all below; `skip`: leave
    out what no archive can hold, instead of raising SourceError; `own`: (device, inode) of the outputs, which are left
    out. `warn` is called with each warning. Raise UsageError if `base` cannot be opened.
    """

    def __init__(
        self, base: str, warn: Callable[[str], None], excludes: Iterable[str] = (), skip: bool = False,
        own: Collection[tuple[int, int]] = (),
    ) -> None:  # fmt: skip
        self.files, self.bytes = 0, 0  # yielded, and read, so far
        self._shown, self._warn, self._skip, self._own = base, warn, skip, own
        self._excludes = Globs(excludes)
        self._file = -1  # the descriptor of the file that was yielded last
        try:
            self._base = os.open(base, _DIRECTORY)
        except OSError as exc:
            raise UsageError(f"{base}: {reason_of(exc)}") from exc

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._base)

    async def entries(self, paths: Iterable[str]) -> AsyncGenerator[Entry, None]:
        """Yield the entries at `paths` and below, each once, in an order that depends only on names.

        A file can be read until the next entry is requested. Raise SourceError, which names the entry and the rule,
        for one that cannot be read or archived, or has changed while it was read; UsageError for an invalid path.
        """
        with contextlib.closing(self._all(paths)) as entries:
            for entry in entries:
                await trio.lowlevel.checkpoint_if_cancelled()
                yield entry

    async def size(self, entry: Entry) -> int:
        """Return the size of a file."""
        assert entry.size is not None
        return entry.size

    async def extents(self, entry: Entry, size: int) -> list[tuple[int, int]]:
        """Return (start, stop) of the data extents of the file that was yielded last."""
        assert entry.status is not None
        try:
            if not size and os.pread(self._file, 1, 0):
                raise self._failed(entry.key, "has bytes, but a size of 0, as files of /proc: archive a copy")
            if entry.status.st_blocks * 512 >= size:
                return [(0, size)] if size else []
            return data_extents(self._file, size)
        except OSError as exc:
            raise self._failed(entry.key, exc) from exc

    async def read(self, entry: Entry, start: int, stop: int) -> bytes:
        """Return the bytes [start, stop) of the file that was yielded last."""
        await trio.lowlevel.checkpoint_if_cancelled()
        try:
            data = os.pread(self._file, stop - start, start)
        except OSError as exc:
            raise self._failed(entry.key, exc) from exc
        if len(data) < stop - start:
            raise self._failed(entry.key, f"ended at byte {start + len(data):,}: {_CHANGED}, or archive a copy")
        self.bytes += len(data)
        return data

    # -- the walk

    def _all(self, paths: Iterable[str]) -> Generator[Entry, None, None]:
        for path in self._tops(_named(paths)):
            if any(part.startswith(RESERVED) for part in path.split("/")):
                self._leave_out(path, _UNFINISHED)
                continue
            status = self._stat(path)
            if (status.st_dev, status.st_ino) in self._own:
                raise UsageError(f"{path or '.'}: {_OWN}, so it cannot be archived")
            if stat.S_ISDIR(status.st_mode):
                yield from self._below(path)
            else:
                above, _, name = path.rpartition("/")
                with self._opened(above, follow=True) as directory:
                    yield from self._leaf(directory, name, path)

    def _tops(self, paths: Iterable[str]) -> Iterator[str]:
        """Yield the paths that are not excluded, and not archived with another one that is a directory above them.

        Raise SourceError for one that would be left out silently: it does not exist, or is behind a symbolic link that
        is itself archived with the other one.
        """
        kept = dict.fromkeys(path for path in paths if not any(map(self._excludes.match, (path, *_above(path)))))
        for path in kept:
            cover = next((above for above in _above(path) if above in kept), None)
            if cover is None:
                yield path
                continue
            top, above = os.path.dirname(cover), os.path.dirname(path)
            self._stat(path)
            straight = os.path.normpath(os.path.join(self._real(top), above[len(top) :].lstrip("/")))
            if self._real(above) != straight:
                rule = f"is below a symbolic link, which {cover or '.'} archives as a link: leave out one of them"
                raise self._failed(path, rule)

    def _real(self, path: str) -> str:
        return os.path.realpath(os.path.join(self._shown, path))

    def _below(self, top: str) -> Iterator[Entry]:
        waiting = [top]
        while waiting:
            path = waiting.pop()
            with self._opened(path) as directory:
                entry = _entry(path, os.fstat(directory))
                if self._refused(path, archive_rule(entry)):
                    continue
                if path:  # RFC 37 has no entry for the root
                    yield entry
                names, directories = self._sorted(directory, path)
                for name in names:
                    yield from self._leaf(directory, name, f"{path}/{name}" if path else name)
            waiting += reversed(directories)

    def _sorted(self, directory: int, path: str) -> tuple[list[str], list[str]]:
        """Return the names of what is no directory, and the paths of the subdirectories."""
        names: list[str] = []
        directories: list[str] = []
        inodes = {inode for _device, inode in self._own}
        with os.scandir(directory) as found:
            for item in found:
                key = f"{path}/{item.name}" if path else item.name
                if self._excludes.match(key):
                    continue
                if item.name.startswith(RESERVED):
                    self._leave_out(key, _UNFINISHED)
                elif item.inode() in inodes and (item.stat(follow_symlinks=False).st_dev, item.inode()) in self._own:
                    self._leave_out(key, _OWN)
                elif item.is_dir(follow_symlinks=False):
                    directories.append(key)
                else:
                    names.append(item.name)
        return sorted(names), sorted(directories)

    def _leaf(self, directory: int, name: str, path: str) -> Iterator[Entry]:
        """Yield the entry of what is no directory, unless no archive can hold it. A file is open meanwhile."""
        try:
            status = os.stat(name, dir_fd=directory, follow_symlinks=False)
            form = stat.S_IFMT(status.st_mode)
            if form in SPECIAL_FILES:
                self._refused(path, f"{SPECIAL_FILES[form]}, which no archive can hold")
                return
            target = os.readlink(name, dir_fd=directory) if form == stat.S_IFLNK else None
            entry = _entry(path, status, target)
            if self._refused(path, archive_rule(entry)):
                return
            if form != stat.S_IFREG:
                yield entry
                return
            self._file = os.open(name, _FILE, dir_fd=directory)
            try:
                yield entry
                self.files += 1
                if file_version(os.fstat(self._file)) != file_version(status):
                    raise self._failed(path, _CHANGED)
            finally:
                os.close(self._file)
        except OSError as exc:
            raise self._failed(path, exc) from exc

    # -- refusals

    def _refused(self, path: str, rule: str | None) -> bool:
        """Return whether a rule says that no archive can hold an entry. Raise SourceError for it, or warn."""
        if rule is None:
            return False
        if not self._skip:
            raise self._failed(path, f"{rule} (--skip-unsupported leaves it out)")
        self._leave_out(path, rule)
        return True

    def _leave_out(self, path: str, rule: str) -> None:
        self._warn(f"{self._failed(path, rule)}: left out")

    def _failed(self, path: str, rule: str | OSError) -> SourceError:
        if isinstance(rule, FileNotFoundError | NotADirectoryError):
            rule = "no such file or directory (or it is gone meanwhile)"
        elif isinstance(rule, OSError):
            rule = reason_of(rule)
        return SourceError(path or ".", rule) if self._shown == "." else SourceError(self._shown, rule, path or ".")

    def _stat(self, path: str) -> os.stat_result:
        try:
            return os.stat(path or ".", dir_fd=self._base, follow_symlinks=False)
        except OSError as exc:
            raise self._failed(path, exc) from exc

    @contextlib.contextmanager
    def _opened(self, path: str, follow: bool = False) -> Iterator[int]:
        try:
            flags = _DIRECTORY if follow else _DIRECTORY | os.O_NOFOLLOW
            descriptor = os.open(path or ".", flags, dir_fd=self._base)
            try:
                yield descriptor
            finally:
                os.close(descriptor)
        except OSError as exc:
            raise self._failed(path, exc) from exc


def _entry(path: str, status: os.stat_result, target: str | None = None) -> Entry:
    kind = KINDS[stat.S_IFMT(status.st_mode)]
    return Entry(path, kind, status.st_size, stat.S_IMODE(status.st_mode), status.st_mtime_ns, target, status)


def _named(paths: Iterable[str]) -> list[str]:
    """Normalise paths. Raise UsageError if one is empty, absolute, or has ".." or NUL."""
    found = []
    for path in paths:
        if not path or "\0" in path:
            raise UsageError("an empty path" if not path else f"{path!r}: a path with a NUL")
        if path.startswith("/"):
            more = f"say -C / {path.lstrip('/') or '.'}"
            raise UsageError(f"{path}: paths in an archive are relative: {more}, or -C with its directory")
        parts = [part for part in path.split("/") if part not in ("", ".")]
        if ".." in parts:
            raise UsageError(f"{path}: paths in an archive cannot contain ..: use -C DIR to start elsewhere")
        found.append("/".join(parts))
    return found


def _above(path: str) -> Iterator[str]:
    if path:
        yield ""
        yield from (path[:at] for at, character in enumerate(path) if character == "/")

"""What files hold, as entries: read, hashed and put into blobs. This is what the processes of workers.py do."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Callable, Iterator
from typing import Any

from zarrfs.archives.blob_writer import BlobDirectory
from zarrfs.archives.create_options import Making, changed, failed, path_rule, reading, time_rule
from zarrfs.archives.document_writer import blobs_rule, cut, encoded, inline_content, joined
from zarrfs.archives.dump_writer import Held, TaskBlobs
from zarrfs.errors import UsageError
from zarrfs.store.destination import is_utf8
from zarrfs.system.sparse import each_extent

MANY = 4096  # regions: a file of more is cut into tasks, and so is one of more data than there is room for;
PIECE = 32 << 10  # a file in the document that is larger is written to it in pieces
_PAGE = 4096  # bytes that one read(2) gives as they were at one time

# (entry of the directory itself, its path, its (device, inode), its regular files, what else is in it)
Part = tuple[bytes | None, str, tuple[int, int] | None, list[str], list[str]]
Identity = tuple[int, int, int, int, int]
# some entries, and where their blobs are held, if they are
Written = tuple[bytes, list[Held]]
# a file that goes on in pieces: its path, its fields so far, what it was then
Later = tuple[str, dict[str, Any], Identity]
# what comes one after the other; files, bytes, warnings
Result = tuple[list[Written | Later], int, int, list[str]]

_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
_OTHERS = {
    stat.S_IFIFO: "a fifo", stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a character device",
    stat.S_IFBLK: "a block device",
}  # fmt: skip


class Contents:
    """Reads what is below a directory, whose path is `base` and which is open as `descriptor`."""

    def __init__(self, descriptor: int, base: str, making: Making, blobs: BlobDirectory | TaskBlobs | None) -> None:
        self._descriptor, self._base = descriptor, base
        self._making, self._blobs = making, blobs
        self._entries: list[bytes] = []
        self._found: list[Written | Later] = []
        self._files = self._bytes = 0
        self._warnings: list[str] = []

    def run(self, task: tuple[str, Any], memory: memoryview) -> Any:
        """Do a task: ("parts", list of Part) gives a Result; ("regions", (path, identity, regions)) their JSON, and
        where their blobs are held in `memory`, if they are."""
        if self._blobs is not None:
            self._blobs.use(memory)
        kind, value = task
        return self.entries(value) if kind == "parts" else self._regions(*value)

    def entries(self, parts: list[Part]) -> Result:
        """The entries of what is in some directories. SourceError, naming the one that cannot be had, and why."""
        self._found, self._entries, self._warnings, self._files, self._bytes = [], [], [], 0, 0
        for own, directory, identity, files, others in parts:
            if own is not None:
                self._entries.append(own)
            if not files and not others:
                continue
            named = identity is None  # where somebody has named what is in it, it may be a link
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
        """A descriptor of what is below the base. SourceError."""
        flags |= os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW)
        with reading(self._base, path):
            descriptor = os.open(path or ".", flags, dir_fd=self._descriptor)
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    def refuse(self, path: str, rule: str, warn: Callable[[str], None]) -> None:
        """SourceError about what no archive can hold, or a warning."""
        if not self._making.skip_unsupported:
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
        """What is no regular file is not opened: that alone may do something."""
        status = os.stat(name, dir_fd=directory, follow_symlinks=False)
        if not stat.S_ISLNK(status.st_mode):
            what = _OTHERS.get(stat.S_IFMT(status.st_mode))
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
            rule = time_rule(status.st_mtime_ns)
            if rule is None and not status.st_size and os.pread(descriptor, 1, 0):
                rule = "bytes in a file whose size is 0, as of /proc, which no archive can hold"
            if rule is None:
                fields = self._fields(status)
                fields["size"] = status.st_size
                self._add_content(descriptor, path, fields, status)
                self._files += 1
            return rule
        finally:
            os.close(descriptor)

    @staticmethod
    def _fields(status: os.stat_result) -> dict[str, Any]:
        return {"mode": status.st_mode, "mtime": status.st_mtime_ns // 10**9}

    def _emit(self, path: str, fields: dict[str, Any]) -> None:
        self._entries.append(encoded(path, fields, self._making.dictionary))

    def _join(self) -> None:
        """Make one of the entries since the last time: who started us only passes them on."""
        if self._entries:
            self._found.append((joined(self._entries), self._held()))
            self._entries = []

    def _held(self) -> list[Held]:
        return self._blobs.taken() if self._blobs is not None else []

    # -- what is in a file

    def _add_content(self, descriptor: int, path: str, fields: dict[str, Any], status: os.stat_result) -> None:
        size, making = status.st_size, self._making
        if not size or (not status.st_blocks and not any(each_extent(descriptor, size))):
            self._emit(path, fields)
            return
        inline = making.all_inline or size <= making.inline
        if not inline and self._blobs is None:
            raise UsageError(f"{path}: {blobs_rule(size)}")
        if size <= PIECE and (inline or (size <= making.region and _is_dense(descriptor, size))):
            fields |= self._small(descriptor, path, status, inline)
        else:
            found = None if inline else self._blobvec(descriptor, path, status)
            if found is None:
                self._join()
                self._found.append((path, fields, identity_of(status)))
                return
            if found:
                fields |= {"encoding": "blobvec", "data": found}
        self._emit(path, fields)

    def _small(self, descriptor: int, path: str, status: os.stat_result, inline: bool) -> dict[str, Any]:
        """encoding and data of a file that is read at once."""
        size = status.st_size
        view = memoryview(bytearray(size + 1)) if self._blobs is None else self._blobs.buffer(size + 1)
        data = view[: os.preadv(descriptor, [view], 0)]
        if len(data) != size or (size > _PAGE and identity_of(os.fstat(descriptor)) != identity_of(status)):
            raise changed(self._base, path)
        self._bytes += size
        if inline:
            return inline_content(bytes(data))
        assert self._blobs is not None
        return {"encoding": "blobvec", "data": [[0, size, self._blobs.put(data)]]}

    def _blobvec(self, descriptor: int, path: str, status: os.stat_result) -> list[list[Any]] | None:
        """The regions of a file, read and put; None for one that is too large to be done here."""
        assert self._blobs is not None
        size = status.st_size
        room = self._blobs.room()
        if min(size, status.st_blocks * 512) > room:
            return None
        regions: list[tuple[int, int]] = []
        taken = 0
        for start, stop in cut(each_extent(descriptor, size), self._making.region):
            regions.append((start, stop))
            taken += stop - start
            if taken > room or len(regions) > MANY:
                return None
        found = [self._region(descriptor, path, start, stop) for start, stop in regions]
        if identity_of(os.fstat(descriptor)) != identity_of(status):
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
        self, path: str, identity: Identity, regions: list[tuple[int, int]]
    ) -> tuple[list[list[Any]], list[Held]]:
        """Some regions of a large file, read and put."""
        with self.opened(path) as descriptor, reading(self._base, path):
            found = [self._region(descriptor, path, start, stop) for start, stop in regions]
            if identity_of(os.fstat(descriptor)) != identity:
                raise changed(self._base, path)
        return found, self._held()


def _is_dense(descriptor: int, size: int) -> bool:
    """Whether a file surely has no hole."""
    try:
        return os.lseek(descriptor, 0, os.SEEK_HOLE) == size
    except OSError:  # the file system does not know
        return False


def identity_of(status: os.stat_result) -> Identity:
    """What shows that a file is another one, or has changed."""
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns

"""Writer of file archives: a document of entries, and a directory of blobs. Sources: RFC 37, RFC 10 (blobrefs)."""

from __future__ import annotations

import base64
import contextlib
import os
import stat
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Self

import orjson

from zarrfs.archives.blobrefs import MAX_SIZE, PATH_MAX, blobref_of
from zarrfs.errors import SourceError, UsageError, reason_of
from zarrfs.store.api import FILE_TYPES, Kind
from zarrfs.store.destination import is_utf8, sync_file_system
from zarrfs.store.writing import NewFile, remove_abandoned
from zarrfs.system.buffers import write_all

if TYPE_CHECKING:
    from zarrfs.archives.tree import Entry, Tree
    from zarrfs.system.buffers import Buffer

MAX_REGION = 64 << 20  # bytes of the largest blob
MAX_INLINE = 256 << 20  # bytes of the largest file in a document, which is encoded in memory
_TOGETHER = 8 << 20  # bytes that are read, and then hashed and written by threads
_ENTRY = 8 << 10  # bytes that an entry counts besides its data
_THREADS = 2


async def write_archive(
    entries: AsyncIterator[Entry], tree: Tree, write: Callable[[bytes], object], blobs: BlobDirectory | None,
    inline: int, region: int = 1 << 20, dictionary: bool = False,
) -> None:  # fmt: skip
    """Write a document of `entries`, which archive_rule() permits, by `write`.

    Files of more than `inline` bytes are cut into `blobs` of up to `region` bytes. Raise UsageError if one of them
    needs a blob and `blobs` is None.
    """
    first, last = (b"{", b"}") if dictionary else (b"[", b"]")
    mark = first + b"\n"
    waiting: list[tuple[str, dict[str, Any]]] = []  # entries that are not written yet
    held: list[tuple[list[object], Buffer]] = []  # regions [offset, size] without their blobref, and their bytes
    room = _TOGETHER

    def put() -> None:
        nonlocal room
        if blobs is not None and held:
            for (part, data), name in zip(held, blobs.put([data for _, data in held]), strict=True):
                part.append(name)
                room += len(data)
            held.clear()

    def flush() -> None:
        nonlocal mark, room
        put()
        room = _TOGETHER
        for key, fields in waiting:
            start = orjson.dumps(key) + b":" if dictionary else b""
            write(mark + start + orjson.dumps(fields if dictionary else {"path": key, **fields}))
            mark = b",\n"
        waiting.clear()

    async for entry in entries:
        fields: dict[str, Any] = {"mode": FILE_TYPES[entry.kind] | entry.mode}
        waiting.append((entry.key, fields))
        room -= _ENTRY
        if entry.mtime_ns is not None:
            fields["mtime"] = entry.mtime_ns // 10**9
        if entry.kind is Kind.SYMLINK:
            fields["data"] = entry.target
        elif entry.kind is Kind.FILE:
            fields["size"] = size = await tree.size(entry)
            extents = await tree.extents(entry, size)  # none if it is empty or a single hole
            if extents and size <= inline:
                room -= size
                fields |= _inline(bytes(await tree.read(entry, 0, size)))
            elif extents:
                if blobs is None:
                    where = "name a directory for it (--blobs), or a larger --inline-threshold"
                    raise UsageError(f"{entry.key}: {size:,} bytes, which go to a blob: {where}")
                fields |= {"encoding": "blobvec", "data": (parts := [])}
                # cut from the start of each extent, as Flux does, so that the same files have the same blobs
                for at, end in [(at, stop) for start, stop in extents for at in range(start, stop, region)]:
                    data = await tree.read(entry, at, min(at + region, end))
                    part: list[object] = [at, len(data)]
                    parts.append(part)
                    held.append((part, data))
                    room -= len(data)
                    if room <= 0:
                        put()
        if room <= 0 or len(waiting) > _TOGETHER // _ENTRY:
            flush()
    flush()
    write(first + last + b"\n" if mark == first + b"\n" else b"\n" + last + b"\n")


def _inline(data: bytes) -> dict[str, str]:
    """Return the fields `encoding` and `data` of a file in the document."""
    if b"\0" not in data:  # RFC 37 allows NUL in text, but Flux then refuses the whole archive
        with contextlib.suppress(UnicodeDecodeError):
            return {"encoding": "utf-8", "data": data.decode()}
    return {"encoding": "base64", "data": base64.b64encode(data).decode()}


def archive_rule(entry: Entry) -> str | None:
    """Return why no archive can hold an entry, or None. A single bad entry could make the archive unreadable."""
    if not is_utf8(entry.key):
        return "a name that is not UTF-8, which no archive can hold"
    if len(entry.key.encode()) > PATH_MAX:
        return f"a path over {PATH_MAX:,} bytes, which no archive can hold"
    if entry.target is not None and not is_utf8(entry.target):
        return "a symbolic link whose target is not UTF-8, which no archive can hold"
    if not -(2**63) <= (entry.mtime_ns or 0) < 2**63:
        return "a time that does not fit 64 bits of nanoseconds"
    if (entry.size or 0) > MAX_SIZE:
        return f"a size over {MAX_SIZE:,} bytes, which no archive can hold"
    return None


class BlobDirectory:
    """A writer of blobs to the directory `path`, one file each, which appears under its blobref when it is complete.

    The directory is made if needed, and removed after an exception if it is new and empty. Raise UsageError if it
    cannot be made. The other methods raise SourceError if the directory cannot be written to; the first put() removes
    what killed writers left there.
    """

    def __init__(self, path: str, algorithm: str = "sha1") -> None:
        self.path, self._algorithm = path, algorithm
        self._base = -1
        self._threads = ThreadPoolExecutor(_THREADS)
        try:
            os.mkdir(path)
            self._made = True
        except FileExistsError:
            self._made = False
        except OSError as exc:
            raise UsageError(f"--blobs {path}: {reason_of(exc)}") from exc

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        """Close the directory. Blobs stay, because another archive may refer to them already."""
        self._threads.shutdown()
        if self._base >= 0:
            os.close(self._base)
        if kind is not None and self._made:
            with contextlib.suppress(OSError):
                os.rmdir(self.path)

    def put(self, pieces: Sequence[Buffer]) -> list[str]:
        """Write each of `pieces` as a blob unless it exists; return their blobrefs."""
        if self._base < 0:
            try:
                self._base = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                remove_abandoned(self._base)
            except OSError as exc:
                raise self._failed(self.path, exc) from exc
        return list(self._threads.map(self._put, pieces)) if len(pieces) > 1 else [self._put(pieces[0])]

    def finish(self) -> None:
        """Flush all blobs to the disk, also those that existed: a command that was killed may not have flushed them.

        One syncfs(2) flushes all of them, while fsync(2) would commit the journal for each blob. It also flushes data
        that other programs wrote to this file system.
        """
        try:
            if self._base >= 0:
                sync_file_system(self.path)
        except OSError as exc:
            raise self._failed(self.path, exc) from exc

    def _put(self, data: Buffer) -> str:
        name = blobref_of(data, self._algorithm)
        try:
            if os.access(name, os.F_OK, dir_fd=self._base):  # stat() alone would raise an exception for each new blob
                status = os.stat(name, dir_fd=self._base)
                if status.st_size == len(data) and stat.S_ISREG(status.st_mode):
                    return name  # its bytes are left to `zarrfs check`
            with contextlib.closing(NewFile(self._base)) as new:
                write_all(new.descriptor, data, 0)
                new.place(self._base, os.fsencode(name))
        except OSError as exc:
            raise self._failed(f"{self.path}/{name}", exc) from exc
        return name

    def _failed(self, path: str, exc: OSError) -> SourceError:
        return SourceError(path, f"cannot be written: {reason_of(exc)}")

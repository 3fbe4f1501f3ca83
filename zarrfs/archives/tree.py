"""The entries of a store that are written to a new source, and the bytes of their files."""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator, Callable, Iterator
from typing import NamedTuple

import trio

from zarrfs.errors import ReadError, SourceError, ZarrfsError, reason_of
from zarrfs.store.api import Info, Kind, Store, Value, join_key
from zarrfs.store.values import open_sized
from zarrfs.system.beneath import file_version
from zarrfs.system.buffers import Buffer
from zarrfs.system.sparse import data_extents

PIECE = 4 << 20  # bytes read at a time
_CHANGED = "changed while it was read: try again when nothing writes to it"


class Entry(NamedTuple):
    """One entry of a tree that is archived."""

    key: str
    kind: Kind
    size: int | None  # bytes; None: not in the listing, see Tree.size()
    mode: int  # permission bits
    mtime_ns: int | None
    target: str | None  # of a symbolic link
    changed: bool = False  # it is in the upper directory of an overlay
    unreadable: str = ""  # why it cannot be read, if that is known without opening it


class Tree:
    """The entries of `store`, which messages call `source`.

    Methods raise SourceError for what cannot be read, or has changed. An entry that the new source cannot hold raises
    it, too; with `skip` it is left out, and `warn` gets a message.
    """

    def __init__(self, store: Store, source: str, warn: Callable[[str], None], skip: bool = False) -> None:
        self.store, self.source, self.warn, self._skip = store, source, warn, skip
        self.files, self.bytes = 0, 0  # entries yielded, and bytes read, so far
        self._value: tuple[str, Value] | None = None  # the value that was read last, held open: see _opened()

    def close(self) -> None:
        """Close the value that was read last."""
        if self._value is not None:
            self._value[1].close()
            self._value = None

    async def below(self, top: Entry, rule: Callable[[Entry], str | None]) -> AsyncIterator[Entry]:
        """Yield `top`, unless it is the root, and every entry below, a directory before its children, names in order.

        `rule` returns why the new source cannot hold an entry, or None.
        """
        levels = [iter((top,))]
        while levels:
            entry = next(levels[-1], None)
            if entry is None:
                levels.pop()
                continue
            await trio.lowlevel.checkpoint_if_cancelled()
            if entry.key:
                if self.refused(entry, entry.unreadable or rule(entry)):
                    continue
                yield entry
                self.files += 1
            if entry.kind is Kind.DIRECTORY:
                with self.reading(entry):
                    levels.append(await self.children(entry.key))

    async def children(self, key: str) -> Iterator[Entry]:
        """Return the entries of a directory, by name."""
        found = [info async for info in self.store.list_dir(key)]
        return (entry_of(join_key(key, info.name), info) for info in found)

    async def open(self, entry: Entry, size: int) -> Value:
        """Open a file of `size` bytes."""
        return await open_sized(self.store, entry.key, size)

    async def size(self, entry: Entry) -> int:
        """Return the size of a file, in bytes."""
        if entry.size is None:
            with self.reading(entry):
                return (await self.store.info(entry.key)).size or 0
        return entry.size

    async def extents(self, entry: Entry, size: int) -> list[tuple[int, int]]:
        """Return (start, stop) of the data extents of a file of `size` bytes, in order."""
        with self.reading(entry):
            value = await self._opened(entry, size)
            if (descriptor := value.fileno()) is not None:
                if not size and os.pread(descriptor, 1, 0):
                    raise self.error(entry, "has bytes, but a size of 0, as files of /proc: copy it first")
                if size and value.info.allocated is None:
                    return [(0, size)]
                return data_extents(descriptor, size)
            where = await self.store.locate(entry.key)
        if "regions" in where:
            return [(region["start"], region["start"] + region["length"]) for region in where["regions"]]
        return [(0, size)] if size and "hole" not in where else []

    async def pieces(self, entry: Entry, start: int, stop: int) -> AsyncIterator[Buffer]:
        """Yield exactly the bytes [start, stop) of a file, in pieces.

        `stop` is the size of the file, unless extents() was called for it just before.
        """
        while start < stop:
            piece = await self._piece(entry, start, stop)
            yield piece
            start += len(piece)

    async def read(self, entry: Entry, start: int, stop: int) -> Buffer:
        """Return the bytes [start, stop) of a file, as pieces() yields them."""
        if 0 < stop - start <= PIECE:
            piece = await self._piece(entry, start, stop)
            if len(piece) == stop - start:
                return piece
        return b"".join([bytes(piece) async for piece in self.pieces(entry, start, stop)])

    async def _piece(self, entry: Entry, start: int, stop: int) -> Buffer:
        piece: Buffer
        with self.reading(entry):
            value, length = await self._opened(entry, stop), min(PIECE, stop - start)
            if (descriptor := value.fileno()) is None:
                piece = await value.read(start, length)
            else:  # in this thread: the command has no other tasks
                await trio.lowlevel.checkpoint_if_cancelled()
                piece = os.pread(descriptor, length, start)
                if file_version(os.fstat(descriptor)) != value.version:
                    raise self.error(entry, _CHANGED)
        if not len(piece):
            raise self.error(entry, f"ended at byte {start:,} while it was read")
        self.bytes += len(piece)
        return piece

    async def _opened(self, entry: Entry, size: int) -> Value:
        """Open a value, and hold it until another one is opened, so that all its bytes are of one version."""
        if self._value is None or self._value[0] != entry.key:
            self.close()
            value = await self.open(entry, size)
            self._value = entry.key, value
            if value.fileno() is not None and (value.size, value.info.mtime_ns) != (size, entry.mtime_ns):
                raise self.error(entry, _CHANGED)
        return self._value[1]

    # -- errors

    def refused(self, entry: Entry, broken: str | None) -> bool:
        """Return whether an entry is left out because it is `broken` for the new source, and warn.

        Raise SourceError for a broken entry unless `skip` was given.
        """
        if not broken:
            return False
        if not self._skip:
            raise self.error(entry, f"{broken} (--skip-unsupported leaves it out)")
        self.warn(f"{self.error(entry, broken)}: left out")
        return True

    def error(self, entry: Entry, rule: str) -> SourceError:
        """Return the error about an entry."""
        return SourceError(self.source, rule, entry.key or "/")

    @contextlib.contextmanager
    def reading(self, entry: Entry) -> Iterator[None]:
        """Convert errors of the block to a SourceError that names the entry."""
        try:
            yield
        except SourceError:
            raise
        except ZarrfsError as exc:
            raise self.error(entry, exc.reason_for(entry.key) if isinstance(exc, ReadError) else str(exc)) from exc
        except OSError as exc:
            raise self.error(entry, reason_of(exc)) from exc


def entry_of(key: str, info: Info, changed: bool = False) -> Entry:
    """Return the entry of a key; `changed`: it is in the upper directory of an overlay."""
    mode = 0 if info.mode is None else info.mode
    return Entry(key, info.kind, info.size, mode, info.mtime_ns, info.target, changed, info.unreadable)

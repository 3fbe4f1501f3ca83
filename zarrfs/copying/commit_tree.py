"""The merged tree of an overlay, as read by commit: its entries and the bytes of its files."""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator, Callable, Iterator

from zarrfs.archives.writer import Entry
from zarrfs.errors import ReadError, SourceError, ZarrfsError, reason_of
from zarrfs.store.api import Info, Kind, Value, join_key
from zarrfs.store.overlay import Overlay
from zarrfs.store.values import open_sized
from zarrfs.system.beneath import file_version
from zarrfs.system.buffers import Buffer
from zarrfs.system.sparse import data_extents

PIECE = 4 << 20  # bytes read at a time
_BATCH = 1000  # maximum number of entries held while values are prefetched
_AHEAD = 64  # values prefetched at the same time


class MergedTree:
    """The merged tree of `overlay`, over `source`.

    An entry that the new format cannot hold raises SourceError; with `skip` it is left out, and `warn` gets a message.
    """

    def __init__(self, overlay: Overlay, source: str, warn: Callable[[str], None], skip: bool = False) -> None:
        self.overlay, self.source, self.warn = overlay, source, warn
        self.files, self.bytes = 0, 0  # entries yielded and bytes read so far
        self._skip = skip
        self._value: tuple[str, Value] | None = None  # the value that was read last, held open: see _opened()

    def close(self) -> None:
        """Close the value that was read last."""
        if self._value is not None:
            self._value[1].close()
            self._value = None

    async def nodes(self, rule: Callable[[Entry], str | None]) -> AsyncIterator[Entry]:
        """Yield every entry except the root, a directory before its children, names in order.

        `rule` returns why the new format cannot hold an entry, or None. Reserved names do not appear.
        """
        levels = [await self._children("")]
        while levels:
            node = next(levels[-1], None)
            if node is None:
                levels.pop()
            elif not self.refused(node, node.unreadable or rule(node)):
                yield node
                self.files += 1
                if node.kind is Kind.DIRECTORY:
                    levels.append(await self._children(node.key))

    async def with_values_ahead(self, nodes: AsyncIterator[Entry]) -> AsyncIterator[Entry]:
        """Yield `nodes` in order, after prefetching the values of lower files, a batch at a time."""
        batch: list[Entry] = []
        files = 0
        async for node in nodes:
            batch.append(node)
            files += node.kind is Kind.FILE and node.status is None
            if files == _AHEAD or len(batch) == _BATCH:
                async for ready in self._fetched(batch):
                    yield ready
                batch, files = [], 0
        async for ready in self._fetched(batch):
            yield ready

    async def _fetched(self, batch: list[Entry]) -> AsyncIterator[Entry]:
        lower = self.overlay.lower
        if lower is not None:
            await lower.prefetch([node.key for node in batch if node.kind is Kind.FILE and node.status is None])
        for node in batch:
            yield node

    async def is_empty(self, node: Entry) -> bool:
        """Return whether a directory is empty."""
        return not await self.overlay.entries(node.key)

    async def size(self, node: Entry) -> int:
        """Return the size of a file, in bytes. Raise SourceError if it cannot be determined."""
        if node.size is None:
            with reading(self.place(node), node.key):
                return (await self.overlay.info(node.key)).size or 0
        return node.size

    async def extents(self, node: Entry, size: int) -> list[tuple[int, int]]:
        """Return (start, stop) of the data extents of a file of `size` bytes, in order. Raise SourceError."""
        with reading(self.place(node), node.key):
            value = await self._opened(node, size)
            if (descriptor := value.fileno()) is not None:
                return data_extents(descriptor, size)
            where = await self.overlay.locate(node.key)
        if "regions" in where:
            return [(region["start"], region["start"] + region["length"]) for region in where["regions"]]
        return [(0, size)] if size and "hole" not in where else []

    async def _opened(self, node: Entry, size: int) -> Value:
        """Open a value, and hold it until another one is opened, so that all its bytes are of one version."""
        if self._value is None or self._value[0] != node.key:
            self.close()
            self._value = node.key, await open_sized(self.overlay, node.key, size)
            value = self._value[1]
            if value.fileno() is not None and (value.size, value.info.mtime_ns) != (size, node.mtime_ns):
                raise self._changed(node)
        return self._value[1]

    def _changed(self, node: Entry) -> SourceError:
        return SourceError(self.place(node), "has changed since it was listed", node.key)

    async def pieces(self, node: Entry, start: int, stop: int) -> AsyncIterator[Buffer]:
        """Yield exactly the bytes [start, stop) of a file, in pieces. Raise SourceError if they cannot be read.

        `stop` is the size of the file, unless extents() was called for it just before.
        """
        while start < stop:
            with reading(self.place(node), node.key):
                value = await self._opened(node, stop)
                piece = await value.read(start, min(PIECE, stop - start))
                if (descriptor := value.fileno()) is not None and file_version(os.fstat(descriptor)) != value.version:
                    raise self._changed(node)
            if not len(piece):
                raise SourceError(self.place(node), f"ended at byte {start:,} while it was read", node.key)
            yield piece
            start += len(piece)
            self.bytes += len(piece)

    async def read(self, node: Entry, start: int, stop: int) -> bytes:
        """Return the bytes [start, stop) of a file, as pieces() yields them. Raise SourceError."""
        return b"".join([bytes(piece) async for piece in self.pieces(node, start, stop)])

    def place(self, node: Entry) -> str:
        """Return the source or the upper directory that an entry is in, for messages."""
        return self.source if node.status is None else self.overlay.upper.path

    async def _children(self, key: str) -> Iterator[Entry]:
        with reading(self.source, key):
            entries = await self.overlay.entries(key)
        return (self._node(join_key(key, name), status, info) for name, status, info in entries)

    def _node(self, key: str, status: os.stat_result | None, info: Info | None) -> Entry:
        if status is not None:
            info = self.overlay.info_of(key, status)
        assert info is not None  # one of both
        assert info.mode is not None  # an overlay gives every entry a mode
        return Entry(
            key, info.kind, info.size, info.mode, info.mtime_ns, info.target, status, info.unreadable
        )  # fmt: skip

    def refused(self, node: Entry, broken: str | None) -> bool:
        """Return whether to leave out an entry that is `broken` for the format, and warn; else raise SourceError."""
        if not broken:
            return False
        if not self._skip:
            raise SourceError(self.place(node), f"{broken} (--skip-unsupported leaves it out)", node.key)
        self.warn(f"{node.key}: {broken}: left out")
        return True


@contextlib.contextmanager
def reading(place: str, key: str) -> Iterator[None]:
    """Convert errors of the block to a SourceError that names the entry."""
    try:
        yield
    except SourceError:
        raise
    except ZarrfsError as exc:
        reason = exc.reason_for(key) if isinstance(exc, ReadError) else str(exc)
        raise SourceError(place, reason, key or "/") from exc
    except OSError as exc:
        raise SourceError(place, reason_of(exc), key or "/") from exc

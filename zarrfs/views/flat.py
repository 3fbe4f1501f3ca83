"""An array as a flat file: its .npy header, and its items decoded on demand and ahead of sequential readers.

Source: numpy.lib.format, "Format version 1.0" and 2.0.
"""

from __future__ import annotations

import io
import itertools
import logging
import math
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import trio

from zarrfs.concurrency.tasks import for_each, in_background
from zarrfs.errors import ZarrfsError
from zarrfs.store.api import Store
from zarrfs.system.buffers import Buffer
from zarrfs.views.boxes import Piece, boxes, number_of_pieces, offset_of, pieces
from zarrfs.views.chunks import KEPT, Array, ChunkRow, Chunks, part_of
from zarrfs.views.decoded_cache import DecodedCache
from zarrfs.views.hierarchy import Node
from zarrfs.zarr.errors import MetadataError
from zarrfs.zarr.model import ArrayMetadata

if TYPE_CHECKING:
    from zarrfs.zarr.dtypes import DataType

log = logging.getLogger(__name__)

_SIZE_MAX = 2**63 - 1 - (1 << 20)  # bytes of a file, less a header
_RUNS = 8  # most contiguous runs that a read takes directly from uncompressed chunks, without caching these
_PIECES = 8192  # most pieces of chunks to assemble together
_AT_ONCE = 256  # most chunks to wait for together, because a read may need a chunk for each byte
_AHEAD_BYTES = 64 << 20  # decoded size of the chunks to request ahead from a remote store
_AHEAD_MOST = 1024  # chunks
_READERS = 8  # readers of one array to remember
_SLACK = 4 << 20  # bytes of tolerance, because the kernel's read-ahead requests arrive in any order


def flat_size(array: ArrayMetadata) -> int:
    """Return the size of all items in bytes. Raise MetadataError if no file or numpy array can hold them."""
    if array.dtype.name:
        raise MetadataError(f"dtype {array.dtype.name}: numpy has no such type")
    if not array.dtype.itemsize:
        raise MetadataError(f"dtype {array.dtype.text}: its items have no fixed size")
    try:
        np.empty((0,) * array.ndim)
    except ValueError:
        raise MetadataError(f"shape: numpy has no arrays of {array.ndim} dimensions") from None
    size = array.dtype.itemsize * math.prod(array.shape)
    if size > _SIZE_MAX:
        raise MetadataError(f"shape {array.shape}: larger than any file")
    return size


def npy_header(shape: tuple[int, ...], dtype: DataType, fortran: bool) -> bytes:
    """Return the header of a .npy file: 128 bytes, more for long shapes and data types with many fields.

    Raise MetadataError if the format cannot express the data type.
    """
    described = np.lib.format.dtype_to_descr(dtype.numpy)
    if np.lib.format.descr_to_dtype(described) != dtype.numpy:
        raise MetadataError(f"dtype {dtype.text}: numpy cannot write it to a .npy file")
    contents = {"descr": described, "fortran_order": fortran, "shape": shape}
    header = io.BytesIO()
    try:
        try:
            np.lib.format.write_array_header_1_0(header, contents)
        except ValueError:  # longer than 65535 bytes
            header = io.BytesIO()
            np.lib.format.write_array_header_2_0(header, contents)
    except UnicodeEncodeError:
        raise MetadataError(f"dtype {dtype.text}: names of fields that are not Latin-1") from None
    return header.getvalue()


class _Run(NamedTuple):
    """Consecutive items of a chunk in C order."""

    number: int  # of the chunk
    start: int
    items: int


class _Reader:
    """A reader that may be sequential."""

    def __init__(self, position: int) -> None:
        self.position = position  # bytes
        self.band = -1  # before `position`, once a read has continued another one
        self.fetched = 0  # chunks before this were requested from a server


class FlatArray:
    """The items of an array in C order, or in Fortran order if its chunks have that order (`chunks.fortran`)."""

    def __init__(self, store: Store, node: Node, cache: DecodedCache, in_chunks: bool = False) -> None:
        """`node` is an array in `store` with items of fixed size. `in_chunks`: in the order of ChunkRow instead."""
        self.chunks = ChunkRow(store, node, cache) if in_chunks else Chunks(store, node, cache)
        self._cache = cache
        self._store = store
        self._width = math.prod(self.chunks.counts[1:])  # chunks of a band
        row = math.prod(self.chunks.shape[1:]) * math.prod(self.chunks.shape_of_chunk[:1])
        self._band_bytes = max(row * self.chunks.itemsize, 1)
        self._room = cache.max_bytes // (self.chunks.size_of_chunk + KEPT)  # chunks
        self._readers: list[_Reader] = []

    async def read(self, start: int, stop: int) -> Buffer:
        """Return the bytes [start, stop) of the items. Raise ReadError if a chunk cannot be read or decoded."""
        item = self.chunks.itemsize
        first, last = start // item, -(-stop // item)
        runs = self._runs(first, last)
        direct = self.chunks.plain and bool(runs) and not any(self.chunks.coming(run.number) for run in runs)
        self._read_ahead(start, stop, direct)
        if direct:
            found: dict[_Run, Buffer] = {}
            for number in dict.fromkeys(run.number for run in runs):
                found |= await self._stored([run for run in runs if run.number == number])
            data = found[runs[0]] if len(runs) == 1 else b"".join(found[run] for run in runs)
        elif len(runs) == 1:
            data = await self._one(runs[0])
        else:
            data = await self._several(first, last)
        skipped = start - first * item
        if skipped or stop < last * item:
            data = memoryview(data)[skipped : skipped + stop - start]
        return data

    # -- items

    def _runs(self, first: int, last: int) -> list[_Run]:
        """Return the items [first, last) as contiguous runs of C-order chunks.

        Return [] if they are not contiguous, or more than _RUNS.
        """
        shape, chunks, found = self.chunks.shape, self.chunks.shape_of_chunk, list[_Run]()
        if sum(number_of_pieces(box, chunks) for box in boxes(shape, first, last)) > _RUNS:
            return []
        for box in boxes(shape, first, last):
            extents = box.extents
            below = next((at + 1 for at, extent in enumerate(extents) if extent > 1), len(extents))
            for piece in pieces(box, chunks, self.chunks.counts):
                inside = _extents(piece)
                offset = offset_of(piece.inside, chunks)
                if offset is None or inside[below:] != extents[below:]:
                    return []
                run = _Run(piece.number, offset, math.prod(inside))
                if found and found[-1].number == run.number and found[-1].start + found[-1].items == run.start:
                    run = _Run(run.number, found[-1].start, found.pop().items + run.items)
                found.append(run)
        return found

    async def _stored(self, runs: list[_Run]) -> dict[_Run, Buffer]:
        """Return the items of runs of one chunk."""
        data = await self.chunks.stored(runs[0].number, [(run.start, run.items) for run in runs])
        if data is None:
            data = [_bytes_of(self.chunks.filled((run.items,))) for run in runs]
        return dict(zip(runs, data, strict=True))

    async def _one(self, run: _Run) -> Buffer:
        """Return a single run without copying it."""
        chunk = await self.chunks.get(run.number)
        if chunk is None:
            return _bytes_of(self.chunks.filled((run.items,)))
        return _bytes_of(chunk.reshape(-1)[run.start : run.start + run.items])

    async def _several(self, first: int, last: int) -> Buffer:
        """Return the items [first, last), assembled from at most _PIECES pieces of chunks at a time."""
        out = np.empty(last - first, self.chunks.item)
        waiting: dict[int, list[tuple[Array, Piece]]] = {}

        async def fill(number: int) -> None:
            chunk = await self.chunks.get(number)
            for box, piece in waiting[number]:
                self._copy(box, piece, chunk)

        found = self._pieces(out, first, last)
        while some := list(itertools.islice(found, _PIECES)):
            waiting.clear()
            for box, piece in some:
                kept = self.chunks.kept(piece.number)
                if kept is None:
                    waiting.setdefault(piece.number, []).append((box, piece))
                else:
                    self._copy(box, piece, kept.value)
            numbers = iter(waiting)
            while batch := list(itertools.islice(numbers, _AT_ONCE)):
                await for_each(fill, batch)
            if len(some) == _PIECES:
                await trio.lowlevel.checkpoint()  # let other readers run
        return _bytes_of(out)

    def _pieces(self, out: Array, first: int, last: int) -> Iterator[tuple[Array, Piece]]:
        """Yield the pieces of chunks that the items [first, last) consist of, each with the box of `out` it is for."""
        at = 0
        for box in boxes(self.chunks.shape, first, last):
            count = math.prod(box.extents)
            target = out[at : at + count].reshape(box.extents)
            at += count
            for piece in pieces(box, self.chunks.shape_of_chunk, self.chunks.counts):
                yield target, piece

    def _copy(self, box: Array, piece: Piece, chunk: Array | None) -> None:
        part_of(box, piece.where)[...] = self.chunks.filled(()) if chunk is None else part_of(chunk, piece.inside)

    # -- read-ahead

    def _read_ahead(self, start: int, stop: int, direct: bool) -> None:
        """If a read continues an earlier one, and reaches a new band, decode and fetch the chunks after that band.

        A band is the chunks with the same index in the first dimension. A reader in C order needs all of them until it
        reaches the next band; then they are the first to be evicted.
        """
        for reader in self._readers:
            if abs(start - reader.position) <= (0 if reader.band < 0 else _SLACK):
                break
        else:
            self._readers = [*self._readers[1 - _READERS :], _Reader(stop)]
            return
        self._readers.remove(reader)
        self._readers.append(reader)
        reader.position = max(reader.position, stop)
        left, reader.band = reader.band, (reader.position - 1) // self._band_bytes
        bands = reader.band - left if left >= 0 else 1
        if not bands:
            return
        end, number = (reader.band + 1) * self._width, self.chunks.number
        ahead = min(max(bands * self._width, self._cache.threads), self._room - self._width)
        if not direct:
            for passed in range(end - (bands + 1) * self._width, end - self._width):
                self._cache.retire(self.chunks.id(passed))
            in_background(self._decode, range(end, min(end + ahead, number)))
        if self._store.remote:
            most = max(ahead, min(_AHEAD_MOST, _AHEAD_BYTES // max(self.chunks.size_of_chunk, 1)))
            start, stop = max(end, reader.fetched), min(end + most, number)
            if stop - start >= most // 2 or start < stop == number:
                reader.fetched = stop
                in_background(self._store.prefetch, list(dict.fromkeys(map(self.chunks.key, range(start, stop)))))

    async def _decode(self, numbers: Iterable[int]) -> None:
        waiting = (number for number in numbers if not self.chunks.coming(number))

        async def work(_worker: int) -> None:
            for number in waiting:
                try:
                    await self.chunks.get(number)
                except (OSError, ZarrfsError) as exc:  # a read of that chunk raises it again
                    log.debug("read-ahead: %s", exc)

        await for_each(work, range(self._cache.threads))


def _extents(piece: Piece) -> tuple[int, ...]:
    return tuple(part.stop - part.start for part in piece.inside)


def _bytes_of(items: Array) -> Buffer:
    """Return the bytes of a C-order array without copying."""
    return items.reshape(-1).view(np.uint8).data

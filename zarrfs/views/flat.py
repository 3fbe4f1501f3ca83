"""An array as a flat file: its .npy header, and its items decoded on demand and ahead of sequential readers.

Source: numpy.lib.format, "Format version 1.0" and 2.0.
"""

from __future__ import annotations

import io
import itertools
import logging
import math
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import numpy as np
import trio

from zarrfs.concurrency.tasks import for_each, in_background
from zarrfs.errors import ZarrfsError
from zarrfs.store.api import Store
from zarrfs.system.buffers import Buffer
from zarrfs.views.boxes import Piece, Run, boxes, pieces, runs
from zarrfs.views.chunks import KEPT, Array, ChunkRow, Chunks
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
        item, chunks = self.chunks.itemsize, self.chunks
        first, last = start // item, -(-stop // item)
        found = runs(chunks.shape, chunks.shape_of_chunk, chunks.counts, first, last, _RUNS)
        direct = chunks.plain and bool(found) and not any(chunks.coming(run.number) for run in found)
        self._read_ahead(start, stop, direct)
        if direct or len(found) == 1:
            some = [await self._run(run, direct) for run in found]
            data = some[0] if len(some) == 1 else b"".join(some)
        else:
            data = await self._several(first, last)
        skipped = start - first * item
        if skipped or stop < last * item:
            data = memoryview(data)[skipped : skipped + stop - start]
        return data

    # -- items

    async def _run(self, run: Run, direct: bool) -> Buffer:
        """Return a run without copying it; `direct`: from the store, not from the cache."""
        if direct:
            data = await self.chunks.stored(run)
            if data is not None:
                return data
        elif (chunk := await self.chunks.get(run.number)) is not None:
            return _bytes_of(chunk.reshape(-1)[run.start : run.start + run.items])
        return _bytes_of(self.chunks.filled((run.items,)))

    async def _several(self, first: int, last: int) -> Buffer:
        """Return the items [first, last), assembled from at most _PIECES pieces of chunks at a time."""
        out = np.empty(last - first, self.chunks.item)
        waiting: dict[int, list[tuple[Array, Piece]]] = {}

        def copy(box: Array, piece: Piece, chunk: Array | None) -> None:
            box[piece.where] = self.chunks.filled(()) if chunk is None else chunk[piece.inside]

        async def fill(number: int) -> None:
            chunk = await self.chunks.get(number)
            for box, piece in waiting[number]:
                copy(box, piece, chunk)

        found = self._pieces(out, first, last)
        while some := list(itertools.islice(found, _PIECES)):
            waiting.clear()
            for box, piece in some:
                if (kept := self.chunks.kept(piece.number)) is None:
                    waiting.setdefault(piece.number, []).append((box, piece))
                else:  # without a call of fill(), which would be half of the time of a read
                    copy(box, piece, kept.value)
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


def _bytes_of(items: Array) -> Buffer:
    """Return the bytes of a C-order array without copying."""
    return items.reshape(-1).view(np.uint8).data

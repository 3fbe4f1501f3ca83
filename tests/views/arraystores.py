"""Stores with arrays for tests, written by zarr-python, and views of them."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import math
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import trio
import zarr
from hypothesis import strategies as st
from zarr.codecs import TransposeCodec

from tests.sources.opening import open_source
from zarrfs.config.options import Options
from zarrfs.store.api import Store
from zarrfs.store.directory import FileSystemStore
from zarrfs.system.buffers import Buffer
from zarrfs.views.arrays import ArraysView

Array = np.ndarray[Any, Any]

DTYPES: list[Any] = [
    "u1", "<i2", ">i4", "<f8", ">f4", "?", "<c16", "S3", "<U2", "<M8[s]", "V5",
    [("a", "<i2"), ("b", "S3"), ("c", ">f8")],
]  # fmt: skip
DTYPES_3 = ["u1", "<i2", "<i4", "<f8", "?", "<c16", "S3", "<U2", "<M8[s]", "V5"]


class Shape(NamedTuple):
    """The layout of an array."""

    shape: tuple[int, ...]
    chunks: tuple[int, ...]
    dtype: Any  # a typestr, or fields
    order: str  # C or F
    version: int
    compressor: bool
    sharded: bool
    missing: int  # a bit mask of the chunks that are not written
    fill: int


@st.composite
def shapes(draw: st.DrawFn, ndim: int = 4) -> Shape:
    """Draw the layout of an array, which may be a scalar, empty, or overhung by its chunks."""
    sides = draw(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 5)), max_size=ndim))
    version = draw(st.sampled_from([2, 3]))
    dtype = draw(st.sampled_from(DTYPES if version == 2 else DTYPES_3))
    return Shape(
        tuple(extent for extent, _ in sides), tuple(step for _, step in sides), dtype, draw(st.sampled_from("CF")),
        version, draw(st.booleans()), version == 3 and bool(sides) and dtype != "V5" and draw(st.booleans()),
        draw(st.integers(0, 2**16 - 1)), draw(st.integers(0, 1)),
    )  # fmt: skip


def write(group: zarr.Group, name: str, how: Shape, **encoding: Any) -> Array:
    """Write an array to `group`, with an encoding of its own if given; return its items."""
    more: dict[str, Any] = {} if how.compressor else {"compressors": None}
    if how.version == 2:
        more |= {"order": how.order}
    elif how.order == "F" and len(how.shape) > 1:
        more["filters"] = [TransposeCodec(order=tuple(range(len(how.shape)))[::-1])]
    more |= encoding
    parts = tuple(2 * step for step in how.chunks) if how.sharded else how.chunks
    if how.sharded:
        more["shards"] = parts
    dtype = np.dtype(how.dtype)
    pattern = how.fill if dtype.kind in "iufc" else 0
    fill = np.frombuffer(bytes([pattern]) * dtype.itemsize, dtype)[0]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about data types and codecs that v3 does not specify
        stored = zarr.create_array(
            group.store, name=name, shape=how.shape, chunks=how.chunks, dtype=dtype, fill_value=fill,
            zarr_format=how.version, **more,
        )  # fmt: skip
    items = np.full(how.shape, fill, dtype)
    counts = tuple(-(-extent // step) for extent, step in zip(how.shape, parts, strict=True))
    rng = np.random.default_rng(how.missing)
    for number in range(math.prod(counts)):
        if how.missing >> (number % 16) & 1:
            continue
        index = np.unravel_index(number, counts) if counts else ()
        where = tuple(slice(int(at) * step, (int(at) + 1) * step) for at, step in zip(index, parts, strict=True))
        part = items[(*where, ...)].shape
        if dtype.kind == "V":
            items[(*where, ...)] = rng.integers(0, 100, (*part, dtype.itemsize), "u1").view(dtype)[..., 0]
        else:
            items[(*where, ...)] = rng.integers(0, 100, part).astype(dtype)
        stored[(*where, ...)] = items[(*where, ...)]
    return items


def flat_bytes(items: Array, how: Shape) -> bytes:
    """Return the content of an array's file after its header."""
    fortran = how.order == "F" and items.ndim > 1
    return items.tobytes("F" if fortran else "C")


@contextlib.asynccontextmanager
async def view_of(path: Path, budget: int = 1 << 20) -> AsyncIterator[ArraysView]:
    """Open a view of a directory."""
    view = ArraysView(FileSystemStore(str(path)), budget)
    try:
        yield view
    finally:
        await view.aclose()


async def items_of(view: Store, start: int = 0, length: int | None = None, name: str = "x.npy") -> Buffer:
    """Read the items of a file of the view, which follow its header."""
    header = 10 + int.from_bytes(bytes(await view.get(name, 8, 2)), "little")
    return await view.get(name, header + start, length)


def with_view(path: Path, use: Callable[[ArraysView], Awaitable[None]], **more: Any) -> None:
    """Run `use` with a view of a directory."""

    async def main() -> None:
        async with view_of(path, **more) as view:
            await use(view)

    trio.run(main)


def read_array(source: Path | str, path: str = "", options: Options | None = None) -> Array:
    """Read an array through view=arrays."""

    async def main() -> bytes:
        view = open_source(str(source), dataclasses.replace(options or Options(), view="arrays"))
        try:
            return bytes(await view.get(f"{path or 'array'}.npy"))
        finally:
            await view.aclose()

    found: Array = np.load(io.BytesIO(trio.run(main)))
    return found

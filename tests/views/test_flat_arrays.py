"""Arrays as flat files, compared with the arrays that zarr-python has written."""

from __future__ import annotations

import io
import tempfile
from pathlib import Path

import numpy as np
import pytest
import trio
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.views.arraystores import Array, Shape, flat_bytes, items_of, shapes, with_view, write
from zarrfs.errors import ReadError
from zarrfs.metrics.counters import COUNTS
from zarrfs.views.arrays import ArraysView

RANGES = st.lists(st.tuples(st.integers(0, 40_000), st.integers(0, 6000)), max_size=8)


def stored(directory: str, how: Shape) -> Array:
    """Write an array `x` to a group; return its items."""
    group = zarr.open_group(directory, mode="w", zarr_format=how.version)
    return write(group, "x", how)


@settings(max_examples=60, deadline=None)
@given(shapes(), RANGES, st.integers(1, 700), st.sampled_from([1, 100, 1 << 20]))
def test_any_range_of_any_array_has_the_right_bytes(
    how: Shape, ranges: list[tuple[int, int]], step: int, budget: int
) -> None:
    """A scan in steps decodes ahead; ranges are read at random."""
    with tempfile.TemporaryDirectory() as directory:
        items = stored(directory, how)
        wanted = flat_bytes(items, how)

        async def check(view: ArraysView) -> None:
            whole = bytes(await view.get("x.npy"))
            header = len(whole) - len(wanted)
            assert whole[header:] == wanted
            assert (await view.info("x.npy")).size == len(whole)
            loaded = np.load(io.BytesIO(whole))
            assert (loaded.dtype, loaded.shape, loaded.tobytes()) == (items.dtype, items.shape, items.tobytes())
            assert loaded.flags.f_contiguous if how.order == "F" else loaded.flags.c_contiguous
            longer = max(step, len(wanted) // 20)
            for start in range(header, len(whole), longer):
                assert bytes(await view.get("x.npy", start, longer)) == whole[start : start + longer]
            for start, length in ranges:
                start %= len(whole) + 2
                assert bytes(await view.get("x.npy", start, length)) == whole[start : start + length]

        with_view(Path(directory), check, budget=budget)


def plain(path: Path, shape: tuple[int, ...], chunks: tuple[int, ...], **more: object) -> Array:
    """Write an array `x` of consecutive numbers; return its items."""
    group = zarr.open_group(path, mode="w", zarr_format=2)
    items = np.arange(np.prod(shape), dtype="<i4").reshape(shape)
    array = group.create_array("x", shape=shape, chunks=chunks, dtype="<i4", **more)
    array[...] = items
    return items


def test_the_next_chunks_are_decoded_ahead(tmp_path: Path) -> None:
    plain(tmp_path, (64 << 10,), (1 << 10,))

    async def check(view: ArraysView) -> None:
        for at in range(0, 12_288, 4096):
            await items_of(view, at, 4096)
        for _ in range(2000):
            if COUNTS["chunks_decoded_total"] > 3:
                break
            await trio.sleep(0.01)
        assert 3 < COUNTS["chunks_decoded_total"] < 12

    with_view(tmp_path, check)


def test_a_small_read_decodes_one_chunk(tmp_path: Path) -> None:
    items = plain(tmp_path, (512, 256), (32, 64))

    async def check(view: ArraysView) -> None:
        for number, at in enumerate(np.random.default_rng(1).permutation(512 * 4)[:40] * 256):
            assert bytes(await items_of(view, int(at), 256)) == items.tobytes()[at : at + 256]
            assert COUNTS["chunks_decoded_total"] <= number + 1

    with_view(tmp_path, check)


@pytest.mark.parametrize("compressors", [None, "auto"])
def test_a_damaged_chunk_fails_alone(tmp_path: Path, compressors: str | None) -> None:
    items = plain(tmp_path, (64, 64), (32, 64), compressors=compressors)
    (tmp_path / "x/1.0").write_bytes((tmp_path / "x/1.0").read_bytes()[:-1])

    async def check(view: ArraysView) -> None:
        half = items.nbytes // 2
        for start, length in ((half, 4), (half - 4, 8), (0, None)):
            with pytest.raises(ReadError, match=r"x/1\.0"):
                await items_of(view, start, length)
        for at in range(0, half, 1024):  # decoding ahead reaches the damaged chunk, and fails
            assert bytes(await items_of(view, at, 1024)) == items.tobytes()[at : at + 1024]

    with_view(tmp_path, check)


@pytest.mark.parametrize("damage", ["directory", "link"])
@pytest.mark.parametrize("compressors", [None, "auto"])
def test_an_entry_that_is_no_chunk_is_an_error_and_not_the_fill_value(
    tmp_path: Path, compressors: str | None, damage: str
) -> None:
    plain(tmp_path, (64,), (32,), compressors=compressors)
    (tmp_path / "x/1").unlink()

    async def absent(view: ArraysView) -> None:
        assert bytes(await items_of(view, 128)) == bytes(128)

    async def failing(view: ArraysView) -> None:
        with pytest.raises(ReadError):
            await items_of(view, 128)

    with_view(tmp_path, absent)
    if damage == "directory":
        (tmp_path / "x/1").mkdir()
    else:
        (tmp_path / "x/1").symlink_to("nowhere")
    with_view(tmp_path, failing)


def test_shards_that_are_links_are_read(tmp_path: Path) -> None:
    items = np.arange(64, dtype="i4").reshape(8, 8)
    group = zarr.open_group(tmp_path, mode="w")
    group.create_array("x", shape=(8, 8), shards=(4, 4), chunks=(2, 2), dtype="i4")[:] = items
    shard, elsewhere = tmp_path / "x/c/0/0", tmp_path / "elsewhere"
    shard.rename(elsewhere)
    shard.symlink_to("../../../elsewhere")

    async def check(view: ArraysView) -> None:
        assert bytes(await items_of(view)) == items.tobytes()
        elsewhere.write_bytes((tmp_path / "x/c/1/1").read_bytes())
        await trio.sleep(1.2)
        changed = items.copy()
        changed[:4, :4] = items[4:, 4:]
        assert bytes(await items_of(view)) == changed.tobytes()

    with_view(tmp_path, check)

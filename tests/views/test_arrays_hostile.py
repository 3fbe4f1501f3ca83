"""Arrays made to exhaust their reader: countless tiny chunks, and chunks larger than memory."""

from __future__ import annotations

import json
import os
import tracemalloc
import zlib
from pathlib import Path
from typing import Any

import pytest
import trio

from tests.views.arraystores import with_view
from zarrfs.copying.check import check as run_check
from zarrfs.copying.check_report import CheckReport
from zarrfs.errors import ReadError
from zarrfs.metrics.counters import counters
from zarrfs.store.api import Store
from zarrfs.store.directory import FileSystemStore
from zarrfs.views import flat
from zarrfs.views.arrays import ArraysView
from zarrfs.views.translated import TranslatedView

MIB = 1 << 20


def write(directory: Path, name: str, shape: list[int], chunks: list[int], **more: Any) -> Path:
    """Write an array of bytes in a group; return its directory."""
    array = directory / name
    array.mkdir(parents=True)
    document: dict[str, Any] = {
        "zarr_format": 2, "shape": shape, "chunks": chunks, "dtype": "|u1", "compressor": None, "fill_value": 7,
        "order": "C", "filters": None,
    }  # fmt: skip
    (array / ".zarray").write_text(json.dumps(document | more))
    return array


def write_sharded(directory: Path, size: int) -> None:
    """Write the array `shards` in a group: one sparse shard of `size` chunks of one byte."""
    sharding = {"chunk_shape": [1], "codecs": [{"name": "bytes"}], "index_codecs": [{"name": "bytes"}]}
    shards = {
        "zarr_format": 3, "node_type": "array", "shape": [size], "data_type": "uint8", "fill_value": 0,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [size]}},
        "chunk_key_encoding": {"name": "default"},
        "codecs": [{"name": "sharding_indexed", "configuration": sharding}],
    }  # fmt: skip
    (directory / "shards/c").mkdir(parents=True)
    (directory / "shards/zarr.json").write_text(json.dumps(shards))
    (directory / "shards/c/0").touch()
    os.truncate(directory / "shards/c/0", 32 * size)


def test_chunks_of_one_byte_take_bounded_memory_and_do_not_block_other_readers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flat, "_PIECES", 500)  # with the default, 8192, this takes many seconds
    write(tmp_path, "x", [1 << 40], [1])
    (write(tmp_path, "good", [4], [4]) / "0").write_bytes(b"abcd")
    order = []

    async def check(view: ArraysView) -> None:
        async def read_many() -> None:
            data = bytes(await view.get("x.npy", 1 << 30, 1500))
            assert data == b"\7" * 1500
            order.append("x")

        async with trio.open_nursery() as nursery:
            nursery.start_soon(read_many)
            await trio.sleep(0.05)
            assert bytes(await view.get("good.npy"))[-4:] == b"abcd"
            order.append("good")

    tracemalloc.start()
    try:
        with_view(tmp_path, check)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert order == ["good", "x"]
    assert peak < 13 * MIB


def test_the_overhead_of_tiny_chunks_counts_towards_the_budget(tmp_path: Path) -> None:
    array = write(tmp_path, "x", [1500], [1])
    for number in range(1500):
        (array / str(number)).write_bytes(b"x")

    async def check(view: ArraysView) -> None:
        assert bytes(await view.get("x.npy"))[-1500:] == b"x" * 1500
        kept = counters()["memory_kept_bytes"]
        assert 0.5 * MIB < kept <= MIB

    with_view(tmp_path, check, budget=MIB)


def test_a_chunk_larger_than_memory_is_an_error_unless_it_is_missing_or_uncompressed(tmp_path: Path) -> None:
    trillion = 1 << 40
    packed = {"compressor": {"id": "zlib", "level": 1}}
    (write(tmp_path, "there", [trillion], [trillion], **packed) / "0").write_bytes(zlib.compress(bytes(MIB)))
    write(tmp_path, "absent", [trillion], [trillion], **packed)
    (write(tmp_path, "plain", [trillion], [trillion]) / "0").touch()
    os.truncate(tmp_path / "plain/0", trillion)
    write_sharded(tmp_path, 1 << 34)

    async def check(view: ArraysView) -> None:
        for name in ("there.npy", "shards.npy"):
            with pytest.raises(ReadError, match=r"\d+ bytes does not fit"):
                await view.get(name, 200, 10)
        assert bytes(await view.get("absent.npy", 1 << 39, 10)) == b"\7" * 10
        assert bytes(await view.get("plain.npy", 1 << 39, 10)) == bytes(10)  # read from the store as it is

    with_view(tmp_path, check)


@pytest.mark.parametrize("compressor", [None, {"id": "zlib", "level": 1}])
def test_a_stored_chunk_of_a_trillion_bytes_is_not_read(tmp_path: Path, compressor: Any) -> None:
    array = write(tmp_path, "x", [1000, 64], [1000, 8], compressor=compressor)
    (array / "0.0").touch()
    os.truncate(array / "0.0", 1 << 40)

    async def check(view: ArraysView) -> None:
        with pytest.raises(ReadError, match=f"{1 << 40} bytes are stored, not"):
            await view.get("x.npy", 128, 64_000)

    with_view(tmp_path, check)


def test_listings_end_despite_cycles_of_links(tmp_path: Path) -> None:
    write(tmp_path, "a/x", [4], [4])
    write(tmp_path, "b/y", [4], [4])
    for link, target in (("a/self", "."), ("a/up", ".."), ("a/other", "../b"), ("b/other", "../a"), ("b/y2", "y")):
        (tmp_path / link).symlink_to(target)

    async def check(view: Store) -> None:
        found = [key async for key in view.list_prefix("") if key.endswith((".npy", ".zarray"))]
        end = ".npy" if isinstance(view, ArraysView) else "/.zarray"
        arrays = ["a/other/y", "a/other/y2", "a/x", "b/other/x", "b/y", "b/y2"]
        assert sorted(found) == [name + end for name in arrays]

    with_view(tmp_path, check)

    async def as_v2() -> None:
        view = TranslatedView(FileSystemStore(str(tmp_path)), 2)
        await check(view)
        await view.aclose()

    trio.run(as_v2)


def test_check_does_not_read_a_shard_index_larger_than_memory(tmp_path: Path) -> None:
    write_sharded(tmp_path, 1 << 34)

    async def main() -> None:
        store, report = FileSystemStore(str(tmp_path)), CheckReport()
        await run_check(store, "", report, MIB)
        await store.aclose()
        assert [(bad.kind, "an index of" in bad.reason) for bad in report.bad] == [("undecodable", True)]

    trio.run(main)

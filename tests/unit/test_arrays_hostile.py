"""Arrays made to exhaust who reads them: tiny chunks without number, chunks that no memory holds."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import trio

from tests.unit.arraystores import with_view
from zarrfs.views.arrays import ArraysView

MIB = 1 << 20


def write(directory: Path, name: str, shape: list[int], chunks: list[int], **more: Any) -> Path:
    """An array of bytes in a group; returns its directory."""
    array = directory / name
    array.mkdir(parents=True)
    document: dict[str, Any] = {
        "zarr_format": 2, "shape": shape, "chunks": chunks, "dtype": "|u1", "compressor": None, "fill_value": 7,
        "order": "C", "filters": None,
    }  # fmt: skip
    (array / ".zarray").write_text(json.dumps(document | more))
    return array


def test_chunks_of_one_byte_take_bounded_memory_and_let_others_read(tmp_path: Path) -> None:
    write(tmp_path, "x", [1 << 40], [1])
    (write(tmp_path, "good", [4], [4]) / "0").write_bytes(b"abcd")
    order = []

    async def check(view: ArraysView) -> None:
        async def read_many() -> None:
            data = bytes(await view.get("x.npy", 1 << 30, 10_000))
            assert data == b"\7" * 10_000
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
    assert peak < 40 * MIB


def test_what_is_remembered_of_tiny_chunks_is_counted(tmp_path: Path) -> None:
    array = write(tmp_path, "x", [3000], [1])
    for number in range(3000):
        (array / str(number)).write_bytes(b"x")

    async def check(view: ArraysView) -> None:
        assert bytes(await view.get("x.npy"))[-3000:] == b"x" * 3000
        kept = view.stats()["arrays"]["kept"]
        assert 0.5 * MIB < kept <= MIB

    with_view(tmp_path, check, budget=MIB)

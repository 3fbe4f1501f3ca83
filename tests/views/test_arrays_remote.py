"""view=arrays over HTTP: prefetching for sequential readers, and errors of the server."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from pathlib import Path

import numpy as np
import pytest
import trio

from tests.servers import Faulty
from tests.sources.opening import open_source
from tests.views.arraystores import items_of
from zarrfs.config.options import Options
from zarrfs.errors import ReadError
from zarrfs.store.api import Store

ITEMS = np.arange(64 * 1024, dtype="<i4").reshape(64, 1024)
ROWS = 4  # of a chunk


def with_set(directory: Path, faulty: Faulty, use: Callable[[Store], Awaitable[None]], compressed: bool) -> None:
    """Run `use` with a view of a reference set whose chunks, all but number 5, are on the server."""
    import zlib

    refs: dict[str, object] = {".zgroup": '{"zarr_format": 2}'}
    refs["x/.zarray"] = json.dumps({
        "zarr_format": 2, "shape": ITEMS.shape, "chunks": [ROWS, 1024], "dtype": "<i4", "fill_value": 7, "order": "C",
        "compressor": {"id": "zlib", "level": 1} if compressed else None, "filters": None,
    })  # fmt: skip
    for number in range(16):
        data = ITEMS[number * ROWS : (number + 1) * ROWS].tobytes()
        url = faulty.put(f"/{number}", zlib.compress(data) if compressed else data)
        if number != 5:
            refs[f"x/{number}.0"] = [url]
    faulty.requests.clear()
    (directory / "refs.json").write_text(json.dumps({"version": 1, "refs": refs}))

    async def main() -> None:
        options = Options(view="arrays", retries=0)
        store = open_source(str(directory / "refs.json"), options)
        try:
            await use(store)
        finally:
            await store.aclose()

    trio.run(main)


@pytest.mark.parametrize("compressed", [False, True])
def test_a_sequential_reader_finds_chunks_prefetched(tmp_path: Path, faulty: Faulty, compressed: bool) -> None:
    wanted = ITEMS.copy()
    wanted[5 * ROWS : 6 * ROWS] = 7

    async def check(view: Store) -> None:
        step = ITEMS.nbytes // 64
        found = []
        for at in range(0, ITEMS.nbytes, step):
            found.append(bytes(await items_of(view, at, step)))
            if at == 4 * step:
                for _ in range(1000):
                    if len({path for _, path, _ in faulty.requests}) >= 8:  # this reader has read two
                        break
                    await trio.sleep(0.01)
                assert len({path for _, path, _ in faulty.requests}) >= 8
        assert b"".join(found) == wanted.tobytes()
        assert "/5" not in {path for _, path, _ in faulty.requests}

    with_set(tmp_path, faulty, check, compressed)


def test_a_chunk_that_the_server_refuses_is_not_the_fill_value(tmp_path: Path, faulty: Faulty) -> None:
    async def check(view: Store) -> None:
        faulty.put("/3", b"", forever=404)
        size = ROWS * 4096
        assert bytes(await items_of(view, 2 * size, size)) == ITEMS[2 * ROWS : 3 * ROWS].tobytes()
        for _ in range(2):
            with pytest.raises(ReadError):
                await items_of(view, 3 * size, 4)
        assert bytes(await items_of(view, 5 * size, 4)) == b"\x07\0\0\0"

    with_set(tmp_path, faulty, check, compressed=True)

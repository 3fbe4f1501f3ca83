"""Sequential readers of large values, with reads of any size."""

from __future__ import annotations

import os

import pytest
import trio

from tests.servers import Nginx
from zarrfs.cache.streams import Streams
from zarrfs.config.options import Options
from zarrfs.store.remotefiles import RemoteFiles

PART = 512 << 10


@pytest.mark.parametrize("step", [PART // 4, PART, 2 * PART])
def test_sequential_reads_fetch_each_part_once_and_drop_none(nginx: Nginx, step: int) -> None:
    data = os.urandom(24 * PART)
    (nginx.late.root / "parts").write_bytes(data)

    async def main() -> None:
        files = RemoteFiles(Options(part_size=PART, memory_limit=64 << 20))
        for low in range(0, len(data), step):
            found = await files.read(f"{nginx.late.url}/parts", low, step, 0, len(data))
            assert bytes(found) == data[low : low + step]
        stats = files.stats()
        assert stats["prefetch"]["dropped"] == 0
        assert stats["requests"] <= 24, "and nothing is fetched twice"
        await files.aclose()

    trio.run(main)


def test_the_read_ahead_window_grows_with_sequential_reads() -> None:
    streams, mib = Streams(16 << 20, 64 << 20), 1 << 20
    assert streams.read("v", 0, mib).window == 0
    for stop, window in ((2, 32), (3, 48), (4, 64), (5, 64)):
        assert streams.read("v", (stop - 1) * mib, stop * mib).window == window * mib
    assert streams.read("v", 100 * mib, 101 * mib).window == 0, "a seek"
    assert streams.read("v", 101 * mib, 101 * mib + 1000).window == 16 * mib + 16_000
    assert streams.read("short", 0, 1000).window == 0
    assert streams.read("short", 1000, 2000).window == 16 * mib, "never less than the first"

"""Readers of large values in order, whatever the size of their reads."""

from __future__ import annotations

import os

import pytest
import trio

from tests.servers import Nginx
from zarrfs.options import Options
from zarrfs.transfer.remote import RemoteFiles

PART = 512 << 10


@pytest.mark.parametrize("step", [PART // 4, PART, 2 * PART])
def test_a_part_on_its_way_is_not_given_up_for_the_read_that_ends_with_it(nginx: Nginx, step: int) -> None:
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

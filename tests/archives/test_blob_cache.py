"""Fetched blobs: held in memory, cached on disk, prefetched, and fetched once for all readers."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import fsspec
import pytest
import trio
import trio.testing

from tests.archives.blobreading import DATA, REF, URL, run, whole
from tests.archives.compiled import blobref, file, opened
from tests.servers import Faulty
from zarrfs.archives.blob_reader import BlobReader
from zarrfs.archives.blobrefs import sized
from zarrfs.errors import ReadError
from zarrfs.metrics.counters import COUNTS, counters
from zarrfs.store.index import IndexStore

MIB = 1 << 20


def url_of(data: bytes) -> str:
    return sized(blobref(data), len(data))


def remote(place: Path, blobs: Iterable[bytes]) -> None:
    """Put blobs behind the URL memory:/PLACE."""
    for data in blobs:
        fsspec.filesystem("memory").pipe(f"{place}/{blobref(data)}", data)


def pieces(count: int, size: int) -> list[bytes]:
    return [at.to_bytes(4, "big") * (size // 4) for at in range(count)]


# -- in memory


def test_readers_of_one_blob_fetch_it_once(faulty: Faulty) -> None:
    place = faulty.put(f"/{REF}", DATA).rpartition("/")[0]

    async def body(reader: BlobReader) -> None:
        async with trio.open_nursery() as nursery:
            for at in range(50):
                nursery.start_soon(reader.read, URL, at, 5, 0, len(DATA))
        assert faulty.gets() == 1

    run(place, body)


def test_blobs_in_memory_are_bounded_by_memory_limit(tmp_path: Path) -> None:
    blobs = pieces(64, MIB)
    remote(tmp_path / "db", blobs)

    async def body(reader: BlobReader) -> None:
        async with trio.open_nursery() as nursery:
            for data in blobs:
                nursery.start_soon(whole, reader, url_of(data), MIB)
        for data in [*blobs, *blobs[-3:]]:
            assert await whole(reader, url_of(data), MIB) == data
            assert counters()["memory_kept_bytes"] <= 8 * MIB
        assert counters()["memory_kept_bytes"] >= 6 * MIB
        fetched = COUNTS["memory_misses_total"]
        assert await whole(reader, url_of(blobs[-1]), MIB) == blobs[-1]
        assert COUNTS["memory_misses_total"] == fetched

    run(f"memory:/{tmp_path}/db", body, memory_limit=8 * MIB)


def test_a_blob_larger_than_memory_limit_is_an_error(tmp_path: Path) -> None:
    data = bytes(3 * MIB)
    remote(tmp_path / "db", [data])

    async def body(reader: BlobReader) -> None:
        with pytest.raises(ReadError, match="memory_limit="):
            await whole(reader, url_of(data), len(data))

    run(f"memory:/{tmp_path}/db", body, memory_limit=2 * MIB)


# -- prefetch


def test_regions_of_a_file_read_in_order_are_prefetched(faulty: Faulty) -> None:
    blobs = pieces(40, 4096)
    for data in blobs:
        place = faulty.put(f"/{blobref(data)}", data).rpartition("/")[0]
    regions = [[at * MIB, 4096, blobref(data)] for at, data in enumerate(blobs)]
    document = {"f": file(regions, encoding="blobvec", size=40 * MIB)}

    def settled(store: IndexStore) -> bool:
        found = counters()
        return not (found["requests_in_flight"] or found["requests_waiting"])

    async def fetched(store: IndexStore, offsets: list[int], least: int) -> int:
        for at in offsets:
            await store.get("f", at, MIB)
        with trio.fail_after(60):
            while faulty.gets() < least:  # noqa: ASYNC110
                await trio.sleep(0.01)
        before = -1
        while before != faulty.gets() or not settled(store):
            before = faulty.gets()
            await trio.sleep(0.1)
        return before

    with opened(document, blobs=(place,)) as (store, _):
        assert trio.run(fetched, store, [0], 2) == 2  # read-ahead fetches as much as was read
    faulty.requests.clear()
    with opened(document, blobs=(place,)) as (store, _):
        assert 12 <= trio.run(fetched, store, [at * MIB for at in range(8)], 12) <= 16
    faulty.requests.clear()
    with opened(document, blobs=(place,)) as (store, _):
        assert trio.run(fetched, store, [30 * MIB, 20 * MIB, 10 * MIB], 3) <= 6


# -- on disk


def cached(tmp_path: Path, *blobs: bytes, place: str = "db") -> None:
    """Read `blobs` through a disk cache."""

    async def body(reader: BlobReader) -> None:
        for data in blobs:
            assert await whole(reader, url_of(data), len(data)) == data

    run(f"memory:/{tmp_path}/{place}", body, cache_dir=str(tmp_path / "cache"))


def test_a_blob_on_disk_is_read_from_there_and_a_damaged_one_fetched_again(tmp_path: Path) -> None:
    blobs = [DATA, b"", b"short"]
    remote(tmp_path / "db", blobs)
    remote(tmp_path / "empty", [])
    cached(tmp_path, *blobs)
    for _ in range(2):
        cached(tmp_path, *blobs, place="empty")
    files = list((tmp_path / "cache").glob("*/*"))
    assert len(files) == len(blobs)
    for path in files:
        path.write_bytes(path.read_bytes()[:-1] + b"?")
    with pytest.raises(ReadError):
        cached(tmp_path, DATA, place="empty")
    cached(tmp_path, *blobs)
    cached(tmp_path, *blobs, place="empty")


def test_a_directory_that_cannot_be_written_to(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cache = tmp_path / "cache"
    cache.write_text("a file")
    remote(tmp_path / "db", [DATA, b"two"])

    async def body(reader: BlobReader) -> None:
        assert await whole(reader) == DATA
        cache.unlink()
        cache.mkdir()
        assert await whole(reader, url_of(b"two"), 3) == b"two"

    run(f"memory:/{tmp_path}/db", body, cache_dir=str(cache))
    assert len(caplog.messages) == 1
    assert os.listdir(cache) == []  # nothing is written for a while

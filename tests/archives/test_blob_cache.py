"""Fetched blobs: held in memory, cached on disk, prefetched, and fetched once for all readers."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import fsspec
import pytest
import trio
import trio.testing

from tests.archives.blobreading import DATA, REF, URL, run, whole
from tests.archives.compiled import blobref, file, opened, put
from tests.servers import Faulty
from zarrfs.archives.blob_reader import BlobReader
from zarrfs.archives.blobrefs import sized
from zarrfs.errors import ReadError, WrongHash
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


def names(directory: Path) -> set[str]:
    return {name for name in os.listdir(directory) if not name.startswith(".")}


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


def cached(tmp_path: Path, *blobs: bytes, **options: Any) -> Path:
    """Read `blobs` through a disk cache, and return the directory in which it keeps blobs."""
    remote(tmp_path / "db", blobs)

    async def body(reader: BlobReader) -> None:
        for data in blobs:
            assert await whole(reader, url_of(data), len(data)) == data

    run(f"memory:/{tmp_path}/db", body, cache_dir=str(tmp_path / "cache"), **options)
    return tmp_path / "cache/blobs"


def test_the_cache_directory_is_a_source_of_blobs(tmp_path: Path) -> None:
    place = cached(tmp_path, DATA, b"", b"short")
    assert names(place) == {REF, blobref(b""), blobref(b"short")}
    assert (place / REF).read_bytes() == DATA
    assert run(place, whole) == DATA
    remote(tmp_path / "empty", [])
    options = {"cache_dir": str(tmp_path / "cache")}

    async def body(reader: BlobReader) -> None:
        assert await whole(reader) == DATA

    run(f"memory:/{tmp_path}/empty", body, **options)
    assert run(f"memory:/{tmp_path}/empty", lambda reader: whole(reader), **options) == DATA
    with pytest.raises(ReadError):
        run(f"memory:/{tmp_path}/empty", whole)


def test_a_damaged_blob_in_the_cache_is_fetched_again(tmp_path: Path) -> None:
    place = cached(tmp_path, DATA)
    (place / REF).write_bytes(DATA[::-1])
    with pytest.raises(WrongHash):
        run(place, whole)
    assert cached(tmp_path, DATA) == place
    assert (place / REF).read_bytes() == DATA


def test_the_disk_cache_stays_within_cache_size(tmp_path: Path) -> None:
    blobs = pieces(40, MIB)
    limit = 16 * MIB
    place = cached(tmp_path, *blobs, cache_size=limit)
    taken = subprocess.run(["du", "-s", "-B1", str(place.parent)], capture_output=True, check=True).stdout
    assert int(taken.split()[0]) <= limit
    assert 5 <= len(names(place)) <= 15
    assert blobref(blobs[-1]) in names(place)


def test_the_least_recently_used_blob_is_evicted_first(tmp_path: Path) -> None:
    blobs = pieces(30, MIB)
    place = cached(tmp_path, *blobs[:10], cache_size=16 * MIB)
    for at, data in enumerate(blobs[:10]):
        os.utime(place / blobref(data), (1000 + at, 1000 + at))
    remote(tmp_path / "empty", [])
    run(f"memory:/{tmp_path}/empty", lambda reader: whole(reader, url_of(blobs[0]), MIB), cache_dir=str(place.parent))

    cached(tmp_path, *blobs[10:16], cache_size=16 * MIB)
    assert blobref(blobs[0]) in names(place)
    assert blobref(blobs[1]) not in names(place)


def test_a_foreign_directory_named_blobs_is_left_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    mine = tmp_path / "cache/blobs"
    mine.mkdir(parents=True)
    put(mine, b"precious")
    assert cached(tmp_path, DATA) == mine
    assert names(mine) == {blobref(b"precious")}
    assert any("left alone" in text for text in caplog.messages)


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

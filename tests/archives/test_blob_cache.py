"""Fetched blobs: held in memory, cached on disk, prefetched, and fetched once for all readers."""

from __future__ import annotations

import concurrent.futures
import errno
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from tests.archives.blobreading import DATA, REF, URL, run, whole
from tests.archives.compiled import blobref, file, opened, put
from tests.conftest import run as zarrfs
from tests.conftest import tmpfs
from tests.fakeflux import content_db
from tests.servers import Faulty
from zarrfs.archives import blob_cache
from zarrfs.archives.blob_cache import DiskBlobs, MemoryBlobs
from zarrfs.archives.blob_reader import BlobReader
from zarrfs.archives.blobrefs import sized
from zarrfs.errors import ReadError, WrongHash
from zarrfs.store.index import IndexStore

MIB = 1 << 20


def url_of(data: bytes) -> str:
    return sized(blobref(data), len(data))


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


def test_a_cancelled_reader_leaves_the_fetch_to_the_others(faulty: Faulty) -> None:
    place = faulty.put(f"/{REF}", DATA, "slow").rpartition("/")[0]

    async def body(reader: BlobReader) -> None:
        got: list[bytes] = []
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(whole, reader)
                await trio.to_thread.run_sync(faulty.arrived.wait)
                async with trio.open_nursery() as others:
                    others.cancel_scope.shield = True

                    async def other() -> None:
                        got.append(await whole(reader))

                    for _ in range(5):
                        others.start_soon(other)
                    scope.cancel()
        assert got == [DATA] * 5

    run(place, body)
    faulty.release()


def test_blobs_in_memory_are_bounded_by_memory_limit(tmp_path: Path) -> None:
    blobs = pieces(64, MIB)
    content_db(tmp_path / "db", blobs)

    async def body(reader: BlobReader) -> None:
        async with trio.open_nursery() as nursery:
            for data in blobs:
                nursery.start_soon(whole, reader, url_of(data), MIB)
        for data in [*blobs, *blobs[-3:]]:
            assert await whole(reader, url_of(data), MIB) == data
            assert reader.stats()["blob_bytes_held"] <= 8 * MIB
        assert reader.stats()["blobs_held"] >= 6
        fetched = reader.stats()["blobs_fetched"]["database"]
        assert await whole(reader, url_of(blobs[-1]), MIB) == blobs[-1]
        assert reader.stats()["blobs_fetched"]["database"] == fetched

    run(tmp_path / "db", body, memory_limit=8 * MIB)


def test_a_blob_larger_than_memory_limit_is_an_error(tmp_path: Path) -> None:
    data = bytes(3 * MIB)
    content_db(tmp_path / "db", [data])

    async def body(reader: BlobReader) -> None:
        with pytest.raises(ReadError, match="memory_limit="):
            await reader.size(url_of(data))

    run(tmp_path / "db", body, memory_limit=2 * MIB)


def test_blobs_in_flight_wait_for_a_quarter_of_the_memory() -> None:
    held, most, flying = MemoryBlobs(100), 0, 0

    async def one(at: int) -> None:
        nonlocal most, flying
        with trio.move_on_after(0.001 if at % 5 == 0 else 60):
            async with held.room("x", 10):
                flying += 1
                try:
                    most = max(most, flying)
                    await trio.sleep(0.002)
                    held.add(str(at), bytes(10))
                finally:
                    flying -= 1

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            for at in range(40):
                nursery.start_soon(one, at)

    trio.run(main)
    assert (most, held._in_flight.held, held.bytes) == (2, 0, 100)  # two of 10 bytes fit in a quarter of 100


def test_a_large_blob_is_not_overtaken_by_small_ones() -> None:
    async def main() -> None:
        held, order, release = MemoryBlobs(400), [], trio.Event()

        async def fetch(size: int) -> None:
            async with held.room("x", size):
                order.append(size)
                await release.wait()

        async with trio.open_nursery() as nursery:
            for size in (60, 100, 10):
                nursery.start_soon(fetch, size)
                await trio.testing.wait_all_tasks_blocked()
            assert (order, held.reserve(10)) == ([60], False)
            release.set()
        assert order == [60, 100, 10]
        async with held.room("x", 10):  # a task cancelled while it waits does not block those behind it
            with trio.move_on_after(0):
                await fetch(100)
            async with held.room("x", 10):
                pass

    trio.run(main)


def test_reserve_never_waits_and_never_exceeds_a_quarter() -> None:
    async def body() -> None:
        memory = MemoryBlobs(100)
        assert (memory.reserve(20), memory.reserve(6), memory.reserve(5)) == (True, False, True)
        memory.release(25)
        assert memory.reserve(25)

    trio.run(body)


# -- prefetch


def test_prefetch_fetches_each_blob_once(faulty: Faulty) -> None:
    blobs = pieces(20, 4096)
    for data in blobs:
        place = faulty.put(f"/{blobref(data)}", data).rpartition("/")[0]
    faulty.put(f"/{blobref(blobs[3])}", blobs[3][:-1])  # prefetch() ignores the short blob; reading it fails

    async def body(reader: BlobReader) -> None:
        await reader.prefetch([(url_of(data), 0, 4096) for data in blobs] * 2)
        assert faulty.gets() == 20
        for data in blobs:
            if data != blobs[3]:
                assert await whole(reader, url_of(data), 4096) == data
        assert faulty.gets() == 20
        with pytest.raises(ReadError):
            await whole(reader, url_of(blobs[3]), 4096)

    run(place, body)
    run(place, lambda reader: reader.prefetch([(url_of(data), 0, 4096) for data in blobs]), prefetch=5 * 4096)
    assert faulty.gets() == 21 + 5


def test_regions_of_a_file_read_in_order_are_prefetched(faulty: Faulty) -> None:
    blobs = pieces(40, 4096)
    for data in blobs:
        place = faulty.put(f"/{blobref(data)}", data).rpartition("/")[0]
    regions = [[at * MIB, 4096, blobref(data)] for at, data in enumerate(blobs)]
    document = {"f": file(regions, encoding="blobvec", size=40 * MIB)}

    def settled(store: IndexStore) -> bool:
        remote = store.stats()["remote"]
        return not (remote["in_flight"] or remote["waiting"])

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


def test_blobs_in_directories_are_not_prefetched(tmp_path: Path) -> None:
    put(tmp_path, DATA)

    async def body(reader: BlobReader) -> None:
        await reader.prefetch([(URL, 0, 1)])
        assert (reader.remote, reader.stats()["blobs_verified"]) == (False, 0)

    run(tmp_path, body)


# -- on disk


def cached(tmp_path: Path, *blobs: bytes, **options: Any) -> Path:
    """Read `blobs` through a disk cache, and return the directory in which it keeps blobs."""
    (tmp_path / "db").unlink(missing_ok=True)
    content_db(tmp_path / "db", blobs)

    async def body(reader: BlobReader) -> None:
        for data in blobs:
            assert await whole(reader, url_of(data), len(data)) == data

    run(tmp_path / "db", body, cache_dir=str(tmp_path / "cache"), **options)
    return tmp_path / "cache/blobs"


def test_the_cache_directory_is_a_source_of_blobs(tmp_path: Path) -> None:
    place = cached(tmp_path, DATA, b"", b"short")
    assert names(place) == {REF, blobref(b""), blobref(b"short")}
    assert (place / REF).read_bytes() == DATA
    assert run(place, whole) == DATA
    content_db(tmp_path / "empty", [])
    options = {"cache_dir": str(tmp_path / "cache")}

    async def body(reader: BlobReader) -> None:
        assert await whole(reader) == DATA
        assert reader.stats()["blobs_fetched"] == {}

    run(tmp_path / "empty", body, **options)
    assert run(tmp_path / "empty", lambda reader: whole(reader), cache="on", **options) == DATA
    with pytest.raises(ReadError):
        run(tmp_path / "empty", whole, cache="none", **options)


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
    place = cached(tmp_path, *blobs, cache_size=limit, cache_min_free=0)
    taken = subprocess.run(["du", "-s", "-B1", str(place.parent)], capture_output=True, check=True).stdout
    assert int(taken.split()[0]) <= limit
    assert 5 <= len(names(place)) <= 15
    assert blobref(blobs[-1]) in names(place)


def test_the_least_recently_used_blob_is_evicted_first(tmp_path: Path) -> None:
    blobs = pieces(30, MIB)
    place = cached(tmp_path, *blobs[:10], cache_size=16 * MIB, cache_min_free=0)
    for at, data in enumerate(blobs[:10]):
        os.utime(place / blobref(data), (1000 + at, 1000 + at))
    content_db(tmp_path / "empty", [])
    run(tmp_path / "empty", lambda reader: whole(reader, url_of(blobs[0]), MIB), cache_dir=str(place.parent))

    async def extracted(reader: BlobReader) -> None:
        assert await trio.to_thread.run_sync(reader.whole, url_of(blobs[2])) == blobs[2]

    run(tmp_path / "empty", extracted, cache_dir=str(place.parent))
    (tmp_path / "db").unlink()
    cached(tmp_path, *blobs[10:16], cache_size=16 * MIB, cache_min_free=0)
    assert {blobref(blobs[0]), blobref(blobs[2])} <= names(place)
    assert blobref(blobs[1]) not in names(place)


def test_a_reader_does_not_wait_for_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blobs are written to disk in the background, unless memory is short. Closing waits for writes in progress."""
    content_db(tmp_path / "db", [DATA, b"other"])
    done: list[str] = []
    put, begun, go_on = DiskBlobs.put, threading.Semaphore(0), threading.Event()

    def slow(disk: DiskBlobs, ref: str, data: bytes) -> None:
        begun.release()
        assert go_on.wait(60)
        put(disk, ref, data)
        done.append(ref)

    monkeypatch.setattr(DiskBlobs, "put", slow)

    async def waiting() -> None:
        assert await trio.to_thread.run_sync(begun.acquire, True, 60)
        assert done == []

    async def body(reader: BlobReader) -> None:
        with trio.fail_after(60):
            assert await whole(reader) == DATA
            await waiting()
            assert reader.stats()["blob_disk"]["queued"] == 1
            monkeypatch.setattr(MemoryBlobs, "reserve", lambda held, size: False)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(whole, reader, url_of(b"other"), 5)
                await waiting()
                go_on.set()
            assert blobref(b"other") in done

    run(tmp_path / "db", body, cache_dir=str(tmp_path / "cache"))
    assert names(tmp_path / "cache/blobs") == {REF, blobref(b"other")} == set(done)


def test_threads_can_store_the_first_blobs_concurrently(tmp_path: Path) -> None:
    """The threads race to create the directory, and no blob is lost."""
    for number in range(30):
        disk, begin = DiskBlobs(str(tmp_path / str(number)), 16 * MIB, 0), threading.Barrier(5)
        blobs = [b"%d" % at for at in range(5)]

        def put(data: bytes, disk: DiskBlobs = disk, begin: threading.Barrier = begin) -> None:
            begin.wait(60)
            disk.put(blobref(data), data)

        with concurrent.futures.ThreadPoolExecutor(5) as pool:
            list(pool.map(put, blobs))
        assert names(tmp_path / f"{number}/blobs") == {blobref(data) for data in blobs}
        assert set(os.listdir(tmp_path / str(number))) == {"blobs", "zarrfs-blocks-2"}
        disk.close()


def test_a_disk_short_of_cache_min_free_caches_no_blobs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    place = cached(tmp_path, DATA, cache_min_free=1 << 60)
    assert not place.exists() or not names(place)
    assert any("cache_min_free" in text for text in caplog.messages)


def test_a_foreign_directory_named_blobs_is_left_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    mine = tmp_path / "cache/blobs"
    mine.mkdir(parents=True)
    put(mine, b"precious")
    assert cached(tmp_path, DATA) == mine
    assert names(mine) == {blobref(b"precious")}
    assert any("left alone" in text for text in caplog.messages)
    assert zarrfs("cache", "clear", "--cache-dir", tmp_path / "cache").returncode == 0
    assert names(mine) == {blobref(b"precious")}


def test_a_disk_that_fails(tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error is logged once, and no blobs are written for a while."""
    disk = DiskBlobs(str(tmp_path), 1 << 30, 0)

    def full(*arguments: Any, **more: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "writev", full)
    disk.put(REF, DATA)
    monkeypatch.undo()
    disk.put(REF, DATA)  # dropped: the disk is not written to while backing off
    assert (disk.stats()["errors"], disk.stats()["dropped"], names(tmp_path / "blobs")) == (1, 2, set())
    assert len(caplog.messages) == 1
    disk.close()


def test_a_disk_without_inodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with a quota, the free bytes of statvfs(2) do not show the limit; old blobs are evicted for new ones."""
    monkeypatch.setattr(blob_cache, "BACK_OFF", 0.0)
    with tmpfs(tmp_path / "small", "size=64m,nr_inodes=40"):
        disk, blobs = DiskBlobs(str(tmp_path / "small"), 1 << 30, 0), pieces(80, 4096)
        for data in blobs:
            disk.put(blobref(data), data)
        assert disk.stats()["evicted"] > 0
        assert {blobref(data) for data in blobs[-2:]} & names(tmp_path / "small/blobs")
        disk.close()


MANY = """
import hashlib, os, sys
from zarrfs.archives.blob_cache import DiskBlobs
children = []
for _ in range(4):
    if not (child := os.fork()):
        disk = DiskBlobs(sys.argv[1], 64 << 20, 0)
        for at in range(40):
            data = at.to_bytes(4, "big") * 1024
            disk.put(f"sha1-{hashlib.sha1(data).hexdigest()}", data)
        disk.close()
        os._exit(0)
    children.append(child)
sys.exit(any([os.waitpid(child, 0)[1] for child in children]))
"""


def test_processes_share_the_cache_directory(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", MANY, str(tmp_path)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    blobs = pieces(40, 4096)
    assert names(tmp_path / "blobs") == {blobref(data) for data in blobs}
    assert sorted(os.listdir(tmp_path)) == ["blobs", "zarrfs-blocks-2"]

    async def body(reader: BlobReader) -> None:
        for data in blobs:
            assert await whole(reader, url_of(data), 4096) == data

    run(tmp_path / "blobs", body)


def test_the_cache_command_lists_verifies_prunes_and_clears_blobs(tmp_path: Path) -> None:
    place = cached(tmp_path, *pieces(5, 4096))
    (tmp_path / "none").mkdir()
    command = ("--cache-dir", tmp_path / "cache", "--index-dir", tmp_path / "none")
    (row,) = map(json.loads, zarrfs("cache", "ls", "--json", *command).stdout.splitlines())
    assert (row["source"], row["blocks"], row["size"]) == ("archives", 5, 5 * 4096)
    bad = place / blobref(pieces(5, 4096)[2])
    bad.write_bytes(bytes(4096))
    done = zarrfs("cache", "verify", "--json", *command)
    assert (done.returncode, json.loads(done.stdout)["bad_blocks"], bad.exists()) == (1, 1, False)
    old = place / blobref(pieces(5, 4096)[0])
    os.utime(old, (1000, 1000))
    assert zarrfs("cache", "prune", *command).returncode == 0
    assert len(names(place)) == 3
    assert zarrfs("cache", "clear", *command).returncode == 0
    assert not names(place)

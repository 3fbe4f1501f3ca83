"""Blocks: the cache on disk between memory and servers, and versions of targets in it."""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import fsspec
import pytest
import trio
import trio.testing
from click.testing import CliRunner

from tests.net.clockedserver import Server, run
from tests.remotereading import using
from tests.servers import Faulty
from zarrfs.cache import disk, pins
from zarrfs.cache.block_request import BlockRequest
from zarrfs.cache.blocks import Blocks
from zarrfs.cli import main
from zarrfs.config.options import Options
from zarrfs.errors import TargetChanged
from zarrfs.net import request_queue
from zarrfs.net.responses import Transient
from zarrfs.store.remotefiles import RemoteFiles

VALUE = os.urandom(300_000)


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_queue, "_FIRST_PAUSE", 0.001)


def read(url: str, options: Options, *lows: int, size: int = 10_000) -> list[bytes]:
    """Read values of `size` bytes at `lows`, one after another, with one RemoteFiles."""

    async def check(files: RemoteFiles) -> list[bytes]:
        return [bytes(await files.read(url, low, size, low, low + size)) for low in lows]

    found: list[bytes] = using(check, options)
    return found


def fill(faulty: Faulty, url: str, options: Options, *lows: int, size: int = 10_000) -> None:
    """Read values until they are on disk: a disk that is busy keeps nothing."""
    for _ in range(1000):
        faulty.requests.clear()
        read(url, options, *lows, size=size)
        if not faulty.gets():
            return
    raise AssertionError(f"nothing is kept; the last requests: {faulty.requests}")


def test_blocks_on_disk_are_read_without_a_request(faulty: Faulty, tmp_path: Path) -> None:
    url = faulty.put("/v", VALUE)
    options = Options(cache_dir=str(tmp_path))
    assert read(url, options, 50_000, 100_000) == [VALUE[50_000:60_000], VALUE[100_000:110_000]]
    assert faulty.gets() == 2
    fill(faulty, url, options, 50_000, 100_000)
    assert read(url, options, 50_000, 100_000) == [VALUE[50_000:60_000], VALUE[100_000:110_000]]
    assert not faulty.requests, "no HEAD either: its version was seen a moment ago"


def test_a_prefetch_reads_no_more_from_the_disk_than_memory_may_hold(faulty: Faulty, tmp_path: Path) -> None:
    url, lows = faulty.put("/v", LARGE), range(0, 9_000_000, 300_000)
    fill(faulty, url, Options(cache_dir=str(tmp_path)), *lows)

    async def check(files: RemoteFiles) -> int:
        await files.prefetch([(url, low, low + 10_000) for low in lows])
        assert bytes(await files.read(url, 0, 10_000, 0, 10_000)) == LARGE[:10_000]
        return files.blocks.cache.kept

    assert 10_000 <= using(check, Options(cache_dir=str(tmp_path), memory_limit=160_000)) <= 160_000


def test_a_version_that_was_seen_long_ago_is_asked_for(
    faulty: Faulty, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("zarrfs.cache.diskblocks._VALID", 0.0)
    url = faulty.put("/v", VALUE)
    options = Options(cache_dir=str(tmp_path))
    fill(faulty, url, options, 0, 50_000)
    faulty.put("/v", VALUE)
    assert read(url, options, 50_000, 0) == [VALUE[50_000:60_000], VALUE[:10_000]]
    assert [method for method, _, _ in faulty.requests] == ["HEAD"]

    other = os.urandom(len(VALUE))
    faulty.put("/v", other, tag="2")
    assert read(url, options, 50_000, 0) == [other[50_000:60_000], other[:10_000]]
    assert [method for method, _, _ in faulty.requests] == ["HEAD", "GET", "GET"]


def test_zarrfs_check_notices_that_a_cached_target_was_replaced(faulty: Faulty, tmp_path: Path) -> None:
    url, document, cache = faulty.put("/v", VALUE), tmp_path / "set.json", str(tmp_path / "cache")
    given = ["check", str(document), "-o", f"cache_dir={cache}"]
    document.write_text(json.dumps({"version": 1, "refs": {"a/0": [url, 50_000, 10_000]}}))
    fill(faulty, url, Options(cache_dir=cache), 50_000)
    assert CliRunner().invoke(main, given).exit_code == 0
    assert not faulty.gets(), "the bytes come from the cache"
    faulty.put("/v", VALUE[:55_000], tag="2")
    assert CliRunner().invoke(main, given).exit_code == 1


def test_a_version_has_the_time_of_its_answer_however_late_it_is_written(
    faulty: Faulty, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a refresh would take it for one that is newer than the refresh."""
    record, refreshed = disk.DiskCache.record, threading.Event()

    def late(*arguments: Any) -> None:
        assert refreshed.wait(120)
        record(*arguments)

    monkeypatch.setattr(disk.DiskCache, "record", late)
    url, other = faulty.put("/v", VALUE), os.urandom(len(VALUE))

    async def check(files: RemoteFiles) -> float:
        await files.read(url, 0, 10_000, 0, 10_000)
        now = time.time()
        await trio.sleep(0.01)
        refreshed.set()
        return now

    now = using(check, Options(cache_dir=str(tmp_path)))
    faulty.put("/v", other, tag="2")
    assert read(url, Options(cache_dir=str(tmp_path), asked_since=now), 0) == [other[:10_000]]


def test_a_block_of_a_version_that_is_replaced_while_it_is_read(
    faulty: Faulty, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread reads the block from the disk while bytes of another version arrive."""
    url = faulty.put("/v", VALUE)
    options = Options(cache_dir=str(tmp_path))
    fill(faulty, url, options, 0)
    other = os.urandom(len(VALUE))
    faulty.put("/v", other, tag="2")
    found: dict[int, bytes] = {}

    async def check(files: RemoteFiles) -> None:
        on_disk = files.blocks._disk
        assert on_disk is not None
        read_block, new = on_disk._cache.read, threading.Event()

        def late(target: str, start: int, stop: int, version: Any, now: bool = False, *more: Any) -> Any:
            if now:
                raise BlockingIOError
            if stop == 10_000:
                assert new.wait(120)
            return read_block(target, start, stop, version, now, *more)

        async def get(low: int) -> None:
            found[low] = bytes(await files.read(url, low, 10_000, low, low + 10_000))

        monkeypatch.setattr(on_disk._cache, "read", late)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(get, 0)
            await trio.testing.wait_all_tasks_blocked(0.05)
            await get(50_000)
            new.set()

    using(check, options)
    assert found == {0: other[:10_000], 50_000: other[50_000:60_000]}


def test_versions_are_never_mixed(faulty: Faulty, tmp_path: Path) -> None:
    url = faulty.put("/v", VALUE)
    options = Options(cache_dir=str(tmp_path))
    fill(faulty, url, options, 0)
    faulty.put("/v", bytes(len(VALUE)), tag="2")
    with pytest.raises(TargetChanged):  # cached bytes were returned already, and the rest is of another version
        read(url, options, 0, 50_000)
    assert read(url, options, 50_000, 0) == [bytes(10_000)] * 2, "nothing was given away: the new version it is"
    assert read(url, options, 0) == [bytes(10_000)], "and that is what the next one takes"


def test_blocks_without_a_version_are_not_kept_on_disk(faulty: Faulty, tmp_path: Path) -> None:
    """Without ETag and Last-Modified, old bytes on disk could not be recognised."""
    url = faulty.put("/v", VALUE, forever="untagged")
    faulty.head("/v", forever=405)
    options = Options(cache_dir=str(tmp_path))
    for _ in range(2):
        assert read(url, options, 0, 50_000) == [VALUE[:10_000], VALUE[50_000:60_000]]
    assert faulty.gets() == len(faulty.requests) == 4
    assert not list(tmp_path.rglob("*/*"))


def test_small_values_of_a_new_version_are_not_kept_as_the_old_one(
    faulty: Faulty, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Last-Modified of the last second is no version, but the size of the value shows that it has changed."""
    url = faulty.put("/v", VALUE)
    options = Options(cache_dir=str(tmp_path))
    fill(faulty, url, options, 0, size=100)

    async def check(files: RemoteFiles) -> None:
        assert bytes(await files.read(url, 0, 100, 0, 100)) == VALUE[:100]
        faulty.put("/v", bytes(400_000))
        monkeypatch.setattr(faulty, "tell_tags", False)
        monkeypatch.setattr(faulty, "tell_times", True)
        await files.prefetch([(url, low, low + 100) for low in range(100_000, 110_000, 500)])
        with pytest.raises(TargetChanged):
            await files.read(url, 100_000, 100, 100_000, 100_100)

    using(check, options)
    with pytest.raises(TargetChanged):
        read(url, options, 0, 100_000, size=100)


def test_a_large_block_stays_in_memory_while_the_disk_keeps_none(faulty: Faulty, tmp_path: Path) -> None:
    """The first block is lost by the failing write, and the next one is too large for the cache directory."""
    url = faulty.put("/v", VALUE)
    (tmp_path / "file").write_text("not a directory")
    for most, options in {
        2: Options(cache_dir=str(tmp_path / "file")),
        1: Options(cache_dir=str(tmp_path / "small"), cache_size=500_000),
    }.items():
        faulty.requests.clear()
        assert read(url, options, *[0] * 5, size=len(VALUE)) == [VALUE] * 5
        assert faulty.gets() <= most


def test_a_changed_version_is_remembered_for_the_next_run(faulty: Faulty, tmp_path: Path) -> None:
    url = faulty.put("/v", VALUE)
    options = Options(cache_dir=str(tmp_path))
    fill(faulty, url, options, 0)
    other = os.urandom(len(VALUE))
    faulty.put("/v", other, tag="2")
    with pytest.raises(TargetChanged):
        read(url, options, 0, 50_000)
    assert read(url, options, 0, 50_000) == [other[:10_000], other[50_000:60_000]]


def test_a_target_that_has_become_one_block_is_read_without_a_request(faulty: Faulty, tmp_path: Path) -> None:
    """The block says a later version than the one that was recorded for all blocks."""
    url = faulty.put("/v", VALUE)
    options = Options(cache_dir=str(tmp_path))
    fill(faulty, url, options, 50_000, 100_000)
    faulty.put("/v", VALUE[:10_000], tag="2")
    fill(faulty, url, options, 0)
    faulty.requests.clear()
    assert read(url, options, 0) == [VALUE[:10_000]]
    assert not faulty.requests


async def memory_value(files: RemoteFiles, value: bytes) -> tuple[Any, str]:
    """Put a value where responses have neither ETag nor size; return (its file system, path)."""
    fsspec.filesystem("memory").pipe("/blocks/v", value)
    return await files.find("memory://blocks/v")


@pytest.mark.parametrize("size", [len(VALUE), 200_000])
def test_a_change_is_noticed_if_answers_have_no_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    """Nothing of such a server is kept on disk."""
    monkeypatch.setattr(pins, "_FRESH", 0.0)
    options, url, other = Options(cache_dir=str(tmp_path)), "memory://blocks/v", os.urandom(size)

    async def check(files: RemoteFiles) -> None:
        system, path = await memory_value(files, VALUE)
        expected = await files.stat_at(system, path)
        assert bytes(await files.read(url, 0, 10_000, 0, 10_000)) == VALUE[:10_000]
        assert bytes(await files.read_at(system, path, 0, 10_000, 0, 10_000, expected)) == VALUE[:10_000]
        await memory_value(files, other)
        for low in (50_000, 100_000):
            with pytest.raises(TargetChanged, match="has changed since it was first read"):
                await files.read(url, low, 10_000, low, low + 10_000)

    using(check, options)
    assert read(url, options, 50_000, 0) == [other[50_000:60_000], other[:10_000]]
    assert not list(tmp_path.rglob("*"))


LARGE = os.urandom(10_000_000)


async def everything(files: RemoteFiles, url: str) -> bytes:
    return bytes(await files.read(url, 0, len(LARGE), 0, len(LARGE)))


def test_a_block_that_is_removed_from_the_disk_is_fetched_again(faulty: Faulty, tmp_path: Path) -> None:
    url, options = faulty.put("/v", LARGE), Options(cache_dir=str(tmp_path / "blocks"))
    fill(faulty, url, options, 0, size=len(LARGE))

    async def check(files: RemoteFiles) -> None:
        assert await everything(files, url) == LARGE
        assert not faulty.gets()
        shutil.rmtree(tmp_path / "blocks")
        assert await everything(files, url) == LARGE

    using(check, options)
    assert faulty.gets() == 3


class TwoServers(Server):
    """The server "a" answers after the time `end`, the server "b" always."""

    def __init__(self, end: float) -> None:
        async def answer(path: str) -> None:
            if path.startswith("a") and trio.current_time() < end:
                raise Transient("Connection refused")

        super().__init__(answer)

    def host(self, path: str) -> str:
        return path[0]


@pytest.mark.parametrize("ahead", [False, True])
def test_reads_of_a_server_that_is_out_hold_no_memory_from_others(ahead: bool) -> None:
    """Ten reads of 50 bytes wait for one server, where 100 bytes are allowed."""

    async def check() -> None:
        server, blocks = TwoServers(end=60.0), Blocks(Options(wait_for_outages="all", memory_limit=100))
        ended: dict[str, float] = {}

        async def read(path: str) -> None:
            wanted = BlockRequest(server, path, 0, 50)
            assert bytes(await blocks.read(wanted, 0, 50, (0, 50))) == path.encode() * 10
            ended[path] = trio.current_time()

        async with trio.open_nursery() as nursery:
            for number in range(10):
                if ahead:
                    blocks.ahead(BlockRequest(server, f"a{number:04d}", 0, 50))
                else:
                    nursery.start_soon(read, f"a{number:04d}")
            await trio.sleep(1)
            await read("b0001")
            assert ended == {"b0001": 1.0}
            assert blocks.cache.expected == 0
            for number in range(10):
                nursery.start_soon(read, f"a{number:04d}")
        assert max(ended.values()) < 75
        assert blocks.cache.expected == 0
        assert blocks.cache.kept <= 100

    run(check)


def test_sizes_on_a_server_that_is_out_do_not_delay_those_on_another() -> None:
    async def check() -> None:
        server, blocks = TwoServers(end=60.0), Blocks(Options(wait_for_outages="all"))
        ended: dict[str, float] = {}

        async def size(path: str) -> None:
            assert await blocks.begin(BlockRequest(server, path, 0, 50)) == 50
            ended[path] = trio.current_time()

        async with trio.open_nursery() as nursery:
            for number in range(2 * Options().host_requests):
                nursery.start_soon(size, f"a{number:04d}")
            await trio.sleep(1)
            await size("b0001")
            assert ended == {"b0001": 1.0}
            assert blocks.cache.expected == 0
        assert len(ended) == 2 * Options().host_requests + 1
        assert blocks.cache.expected == 0

    run(check)

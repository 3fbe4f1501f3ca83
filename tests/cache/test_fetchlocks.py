"""Leases: of the processes that share a cache directory one fetches a block; the others wait, but not for long."""

from __future__ import annotations

import errno
import fcntl
import functools
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import trio

from tests.cache.diskblocks import MIB, ONE, content, found, is_fetching, rows, write
from tests.servers import Faulty
from zarrfs.cache import diskblocks
from zarrfs.cache.disk import DiskCache
from zarrfs.cache.diskfiles import LAYOUT, Layout
from zarrfs.cache.diskspace import Space
from zarrfs.cache.fetchlocks import FetchLocks, Lease, Turn
from zarrfs.concurrency.tasks import for_each
from zarrfs.config.options import Options
from zarrfs.errors import ReadError
from zarrfs.net import request_queue
from zarrfs.store.remotefiles import RemoteFiles

VALUE = os.urandom(400_000)
T = "http://h/t"
LONG = 1000.0  # seconds
SIZE = 80_000  # bytes: not so small that neighbouring values share a lease


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_queue, "_FIRST_PAUSE", 0.001)
    # otherwise the other nodes stop waiting for a node that is not scheduled for a moment
    monkeypatch.setattr(Space, "locked", functools.partialmethod(Space.locked, LONG))
    monkeypatch.setattr(diskblocks, "_SLOW_LEAST", LONG)


def node(directory: Path) -> FetchLocks:
    return FetchLocks(Layout(str(directory)), lambda: True)


def taken(of: FetchLocks, start: int = 0) -> Lease:
    lease = of.take(T, start, start + 10)
    assert lease is not None
    return lease


# -- the locks


def test_one_of_many_nodes_holds_a_lease_until_it_is_released(tmp_path: Path) -> None:
    nodes = [node(tmp_path) for _ in range(5)]
    first, *others = [taken(one) for one in nodes]
    assert first.held
    assert not any(lease.held for lease in others)
    other = taken(nodes[1], 10)
    assert other.held, "another block"
    assert [one.look(lease, LONG) for one, lease in zip(nodes[1:], others, strict=True)] == [Turn.WAIT] * 4
    nodes[0].release(first)
    turns = [one.look(lease, LONG) for one, lease in zip(nodes[1:], others, strict=True)]
    assert turns == [Turn.OURS, Turn.WAIT, Turn.WAIT, Turn.WAIT]
    assert is_fetching(tmp_path)
    nodes[1].release(others[0])
    nodes[1].release(other)
    assert not is_fetching(tmp_path)


def test_the_lease_of_a_killed_process_is_free_immediately(tmp_path: Path) -> None:
    code = (
        "import os, sys; from tests.cache.test_fetchlocks import *\n"
        "held = node(Path(sys.argv[1])); lease = taken(held); print(lease.held, flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "True\n"
        one = node(tmp_path)
        waiting = taken(one)
        assert one.look(waiting, LONG) is Turn.WAIT
        other.kill()
        other.wait()
        assert one.look(waiting, LONG) is Turn.OURS


def test_one_waiter_takes_over_a_lease_that_timed_out(tmp_path: Path) -> None:
    """If that waiter takes too long as well, every node fetches the block itself."""
    holder, *nodes = [node(tmp_path) for _ in range(4)]
    first = taken(holder)
    waiting = [taken(one) for one in nodes]
    assert [one.look(lease, 0.0) for one, lease in zip(nodes, waiting, strict=True)] == [
        Turn.OURS, Turn.WAIT, Turn.WAIT,
    ]  # fmt: skip
    assert first.held
    assert nodes[1].look(waiting[1], LONG) is Turn.WAIT
    assert [nodes[1].look(waiting[1], 0.0), nodes[2].look(waiting[2], 0.0)] == [Turn.FREE] * 2
    assert nodes[1].stats()["given_up"] == 2


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL])
def test_a_file_system_without_locks(code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every process fetches blocks itself, and blocks are still cached."""

    def refuse(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "fcntl", refuse)  # all file systems of the tests support locks
    one, two = (DiskCache(str(tmp_path), 64 * MIB, 0) for _ in range(2))
    assert one.leases.take(T, 0, 10) is None
    write(one, T, 0, 1000)
    write(two, T, 5000, 6000)
    for cache in (one, two, DiskCache(str(tmp_path), 64 * MIB, 0)):
        assert found(cache, T, 0, 1000)
        assert found(cache, T, 5000, 6000)


def test_no_leases_are_taken_for_a_while_after_an_error(tmp_path: Path) -> None:
    (tmp_path / LAYOUT).write_text("a file in its place")
    one = node(tmp_path)
    assert one.take(T, 0, 10) is None
    (tmp_path / LAYOUT).unlink()
    assert one.take(T, 0, 10) is None, "not before a while has passed"
    assert node(tmp_path).take(T, 0, 10) is not None
    assert FetchLocks(Layout(str(tmp_path)), lambda: False).take(T, 0, 10) is None


def test_a_lease_can_be_released_after_its_directory_was_removed(tmp_path: Path) -> None:
    one, other = node(tmp_path), node(tmp_path)
    first, waiting = taken(one), taken(other)
    shutil.rmtree(tmp_path / LAYOUT)
    assert other.look(waiting, LONG) is Turn.WAIT
    one.release(first)
    assert not first.held
    assert other.look(waiting, LONG) is Turn.OURS


def test_a_lease_is_released_once_earlier_writes_are_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, other, go_on = DiskCache(str(tmp_path), 64 * MIB, 0), node(tmp_path), threading.Event()
    real = DiskCache._do
    monkeypatch.setattr(DiskCache, "_do", lambda self, batch: (go_on.wait(20), real(self, batch))[1])
    lease = cache.leases.take(T, 0, 1000)
    assert lease is not None
    cache.write(T, ONE, 0, content(T, ONE, 0, 1000))
    cache.release(lease)
    waiting = other.take(T, 0, 1000)
    assert waiting is not None
    assert other.look(waiting, LONG) is Turn.WAIT
    go_on.set()
    while other.look(waiting, LONG) is not Turn.OURS:
        time.sleep(0.001)
    assert found(DiskCache(str(tmp_path), 64 * MIB, 0), T, 0, 1000)


# -- readers


def read_by_many(check: Callable[[list[RemoteFiles]], Awaitable[Any]], count: int, options: Options) -> Any:
    """Run `check` on `count` RemoteFiles that share nothing but a cache directory."""

    async def main() -> Any:
        nodes = [RemoteFiles(options) for _ in range(count)]
        try:
            return await check(nodes)
        finally:
            for one in nodes:
                await one.aclose()

    return trio.run(main)


async def read(one: RemoteFiles, url: str, low: int, size: int = SIZE) -> None:
    assert bytes(await one.read(url, low, size, low, low + size)) == VALUE[low : low + size]


def test_eight_concurrent_readers_make_about_one_request_per_block(faulty: Faulty, tmp_path: Path) -> None:
    url = faulty.put("/v", VALUE)

    async def check(nodes: list[RemoteFiles]) -> None:
        async def all_of(one: RemoteFiles) -> None:
            await for_each(lambda low: read(one, url, low), range(0, len(VALUE), SIZE))

        await for_each(all_of, nodes)

    read_by_many(check, 8, Options(cache_dir=str(tmp_path), coalesce_gap=0, coalesce_size=SIZE, prefetch=0))
    assert faulty.gets() <= len(VALUE) // SIZE + 2, "not 40; one may look for a block the moment before it is there"
    assert not is_fetching(tmp_path)


def test_one_of_four_nodes_prefetches_tiny_values_for_all(faulty: Faulty, tmp_path: Path) -> None:
    """About one request is made for all values. No lease is held at the end."""
    url = faulty.put("/v", VALUE)
    wanted = [(url, low, low + 100) for low in range(0, 40_000, 200)]

    async def check(nodes: list[RemoteFiles]) -> None:
        await for_each(lambda one: one.prefetch(wanted), nodes)
        for one in nodes:
            await for_each(lambda at, one=one: read(one, url, at[1], 100), wanted)  # type: ignore[misc]

    read_by_many(check, 4, Options(cache_dir=str(tmp_path)))
    assert faulty.gets() <= 5
    assert not is_fetching(tmp_path)


def test_tiny_values_far_from_each_other_are_fetched_once(faulty: Faulty, tmp_path: Path) -> None:
    """Two requests share one lease; completing the first one does not release it."""
    url = faulty.put("/v", VALUE, None, "slow")
    wanted = [(url, low, low + 100) for low in (0, 300_000)]

    async def check(nodes: list[RemoteFiles]) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(nodes[0].prefetch, wanted)
            await trio.to_thread.run_sync(faulty.arrived.wait, 20)
            while not any(row.start < len(VALUE) for row in rows(tmp_path)):  # noqa: ASYNC110  # until one is on disk
                await trio.sleep(0.01)
            nursery.start_soon(nodes[1].prefetch, wanted)
            await trio.sleep(0.3)
            requests = faulty.gets()
            faulty.release()
        assert requests == faulty.gets() == 2

    read_by_many(check, 2, Options(cache_dir=str(tmp_path), coalesce_gap=0))
    assert not is_fetching(tmp_path)


def test_a_value_without_room_does_not_release_the_lease_of_others(faulty: Faulty, tmp_path: Path) -> None:
    url = faulty.put("/v", VALUE, "slow")

    async def check(nodes: list[RemoteFiles]) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(nodes[0].prefetch, [(url, low, low + 60_000) for low in (0, 100_000)])
            await trio.to_thread.run_sync(faulty.arrived.wait, 20)
            await trio.sleep(0.2)
            assert is_fetching(tmp_path)
            faulty.release()

    read_by_many(check, 1, Options(cache_dir=str(tmp_path), memory_limit=200_000))
    assert faulty.gets() == 1
    assert not is_fetching(tmp_path)


def test_a_cancelled_reader_releases_its_lease_and_its_wait(faulty: Faulty, tmp_path: Path) -> None:
    """One of the cancelled readers holds a lease, and the other one waits for it."""
    url = faulty.put("/v", VALUE, "slow")

    async def check(nodes: list[RemoteFiles]) -> None:
        first, second, third = nodes
        async with trio.open_nursery() as nursery:
            holding, waiting = trio.CancelScope(), trio.CancelScope()

            async def within(scope: trio.CancelScope, one: RemoteFiles) -> None:
                with scope:
                    await read(one, url, 0)

            nursery.start_soon(within, holding, first)
            await trio.to_thread.run_sync(faulty.arrived.wait, 20)
            nursery.start_soon(within, waiting, second)
            await trio.sleep(0.05)
            waiting.cancel()
            holding.cancel()
        with trio.fail_after(20):
            await read(third, url, 0)

    read_by_many(check, 3, Options(cache_dir=str(tmp_path)))
    assert faulty.gets() == 2
    assert not is_fetching(tmp_path)


def test_a_failed_fetch_fails_for_each_waiter_without_a_timeout(faulty: Faulty, tmp_path: Path) -> None:
    url = faulty.put("/v", VALUE, forever=503)
    failed = []

    async def check(nodes: list[RemoteFiles]) -> None:
        async def fails(one: RemoteFiles) -> None:
            try:
                await read(one, url, 0)
            except ReadError as exc:
                failed.append(exc)

        await for_each(fails, nodes)

    read_by_many(check, 6, Options(cache_dir=str(tmp_path), retries=0, read_timeout=20.0))
    assert len(failed) == 6
    assert all("read_timeout" not in str(exc) for exc in failed)
    assert not is_fetching(tmp_path)


def test_no_leases_after_a_value_without_a_version(faulty: Faulty, tmp_path: Path) -> None:
    """The value is not kept on disk, so no leases are taken after its first block."""
    url = faulty.put("/untagged", VALUE, forever="untagged")
    faulty.head("/untagged", forever=405)

    async def check(nodes: list[RemoteFiles]) -> dict[str, int]:
        for low in range(0, len(VALUE), SIZE):
            await read(nodes[0], url, low)
        return dict(nodes[0].stats()["disk"])

    assert read_by_many(check, 1, Options(cache_dir=str(tmp_path)))["claims"] == 1
    assert not is_fetching(tmp_path)

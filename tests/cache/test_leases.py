"""Claims: one of many that share a cache directory fetches a block, and the others wait for it, but never for long."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import trio

from tests.servers import Faulty
from zarrfs.cache import leases as claims
from zarrfs.cache.diskfiles import LAYOUT, Layout
from zarrfs.cache.leases import Claim, Claims, Turn
from zarrfs.concurrency.tasks import at_once
from zarrfs.config.options import Options
from zarrfs.errors import ReadError
from zarrfs.net import ranges
from zarrfs.store.remotefiles import RemoteFiles

VALUE = os.urandom(400_000)
T = "http://h/t"
LONG = 1000.0  # seconds
SIZE = 80_000  # bytes: not so small that neighbours share a file


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranges, "_FIRST_PAUSE", 0.001)


@pytest.fixture
def short_life(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who does not touch a claim for a moment is taken for dead."""
    monkeypatch.setattr(claims, "DEAD", 0.2)


def node(directory: Path) -> Claims:
    return Claims(Layout(str(directory)), lambda: True)


def taken(of: Claims, start: int = 0) -> Claim:
    claim = of.take(T, start, start + 10)
    assert claim is not None
    return claim


def files(directory: Path) -> list[str]:
    return sorted(os.listdir(directory / LAYOUT / claims.FOLDER))


# -- the files


def test_one_of_many_has_it_until_it_is_released(tmp_path: Path) -> None:
    nodes = [node(tmp_path) for _ in range(5)]
    first, *others = [taken(one) for one in nodes]
    assert first.held
    assert not any(claim.held for claim in others)
    assert taken(nodes[1], 10).held, "another block"
    assert [one.look(claim, LONG) for one, claim in zip(nodes[1:], others, strict=True)] == [Turn.WAIT] * 4
    nodes[0].release([first])
    assert [one.look(claim, LONG) for one, claim in zip(nodes[1:], others, strict=True)] == [Turn.GONE] * 4
    again = [one.again(claim) for one, claim in zip(nodes[1:], others, strict=True)]
    assert [claim is not None and claim.held for claim in again] == [True, False, False, False]
    for one in nodes:
        one.close()
    assert files(tmp_path) == []


def test_what_is_settled_is_what_begins_there(tmp_path: Path) -> None:
    one = node(tmp_path)
    found = [taken(one, start) for start in (0, 10, 20)]
    one.settle(T, 10, 20)
    one.settle("http://h/other", 0, 100)
    assert [claim.held for claim in found] == [True, False, True]
    assert len(files(tmp_path)) == 2


def test_a_shared_claim_goes_with_the_last_of_its_values(tmp_path: Path) -> None:
    one = node(tmp_path)
    claim = one.take(T, 0, 1000, [(0, 10), (500, 510), (600, 610)])
    assert claim is not None
    one.settle(T, 0, 10)
    assert claim.held
    assert not one.leave(claim, 500, 510), "there is one more"
    one.settle(T, 0, 1000)
    assert not claim.held
    assert files(tmp_path) == []


@pytest.mark.usefixtures("short_life")
def test_the_claim_of_a_killed_process_is_given_up_and_one_goes_on(tmp_path: Path) -> None:
    taken(node(tmp_path))  # never released, never touched
    nodes = [node(tmp_path) for _ in range(4)]
    waiting = [taken(one) for one in nodes]
    assert [one.look(claim, LONG) for one, claim in zip(nodes, waiting, strict=True)] == [Turn.WAIT] * 4
    time.sleep(claims.DEAD * 1.1)
    turns = [one.look(claim, LONG) for one, claim in zip(nodes, waiting, strict=True)]
    assert turns == [Turn.OURS, Turn.WAIT, Turn.WAIT, Turn.WAIT]
    nodes[0].release([waiting[0]])
    assert files(tmp_path) == [], "that of the killed one went, too"
    assert nodes[1].look(waiting[1], LONG) is Turn.GONE


def test_the_claim_of_a_process_of_this_machine_that_has_ended_is_given_up_at_once(tmp_path: Path) -> None:
    code = (
        "import os, sys; from tests.cache.test_leases import *\n"
        "held = node(Path(sys.argv[1])); taken(held); print(os.getpid(), flush=True); sys.stdin.read(); os._exit(0)"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdin is not None
        assert other.stdout is not None
        other.stdout.readline()
        one, elsewhere = node(tmp_path), node(tmp_path)
        elsewhere._place = b"another machine"
        mine, theirs = taken(one), taken(elsewhere)
        assert one.look(mine, LONG) is Turn.WAIT
        other.stdin.close()
        os.waitid(os.P_PID, other.pid, os.WEXITED | os.WNOWAIT)  # what nobody has waited for has ended, too
        assert elsewhere.look(theirs, LONG) is Turn.WAIT
        assert one.look(mine, LONG) is Turn.OURS


@pytest.mark.usefixtures("short_life")
def test_two_that_were_killed_and_nobody_is_waited_for_any_more(tmp_path: Path) -> None:
    taken(node(tmp_path))
    second, third = node(tmp_path), node(tmp_path)
    mine, waiting = taken(second), taken(third)
    second.look(mine, LONG)
    third.look(waiting, LONG)
    time.sleep(claims.DEAD * 1.1)
    assert second.look(mine, LONG) is Turn.OURS
    assert third.look(waiting, LONG) is Turn.WAIT
    third.look(waiting, LONG)
    time.sleep(claims.DEAD * 1.1)
    assert third.look(waiting, LONG) is Turn.FREE


@pytest.mark.usefixtures("short_life")
@pytest.mark.parametrize("skew", [-7200, 0, 7200])
def test_clocks_that_differ_change_nothing(skew: int, tmp_path: Path) -> None:
    """The file system's clock is two hours behind or ahead of ours: who touches lives, who does not is dead."""
    one, other = node(tmp_path), node(tmp_path)
    taken(one)
    waiting = taken(other)
    path = tmp_path / LAYOUT / claims.FOLDER / waiting.file(0)
    for number in range(8):
        at = time.time() + skew + number
        os.utime(path, (at, at))
        assert other.look(waiting, LONG) is Turn.WAIT
        time.sleep(claims.DEAD / 3)
    time.sleep(claims.DEAD)
    assert other.look(waiting, LONG) is Turn.OURS


@pytest.mark.usefixtures("short_life")
def test_who_takes_too_long_is_not_waited_for_though_he_lives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claims, "BEAT", 0.0)
    one, other = node(tmp_path), node(tmp_path)
    taken(one)
    waiting = taken(other)
    for _ in range(10):
        one.beat()
        assert other.look(waiting, LONG) is Turn.WAIT
        time.sleep(claims.DEAD / 5)
    assert other.look(waiting, 0.01) is Turn.OURS


def test_a_claim_that_went_twice_without_the_block_is_not_waited_for_again(tmp_path: Path) -> None:
    one, other = node(tmp_path), node(tmp_path)
    waiting = None
    for _ in range(3):
        first = taken(one)
        waiting = waiting or taken(other)
        assert other.look(waiting, LONG) is Turn.WAIT
        one.release([first])
        assert other.look(waiting, LONG) is Turn.GONE
        blocked = taken(one)
        again = other.again(waiting)
        one.release([blocked])
    assert again is None


def test_a_disk_that_refuses_a_claim_is_asked_for_none(tmp_path: Path) -> None:
    (tmp_path / LAYOUT).mkdir()
    (tmp_path / LAYOUT / claims.FOLDER).write_text("a file in its place")
    one = node(tmp_path)
    assert one.take(T, 0, 10) is None
    (tmp_path / LAYOUT / claims.FOLDER).unlink()
    assert one.take(T, 0, 10) is None, "not before a while has passed"
    assert node(tmp_path).take(T, 0, 10) is not None
    assert Claims(Layout(str(tmp_path)), lambda: False).take(T, 0, 10) is None


def test_a_directory_that_is_removed_meanwhile(tmp_path: Path) -> None:
    one, other = node(tmp_path), node(tmp_path)
    first, waiting = taken(one), taken(other)
    shutil.rmtree(tmp_path / LAYOUT)
    assert other.look(waiting, LONG) is Turn.GONE
    one.beat()
    one.release([first])
    assert not first.held


# -- readers


def read_by_many(check: Callable[[list[RemoteFiles]], Awaitable[Any]], count: int, options: Options) -> Any:
    """What `check` gives of so many RemoteFiles that share a cache directory and nothing else."""

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


def test_eight_that_read_at_once_make_about_one_request_a_block(faulty: Faulty, tmp_path: Path) -> None:
    url = faulty.put("/v", VALUE)

    async def check(nodes: list[RemoteFiles]) -> None:
        async def all_of(one: RemoteFiles) -> None:
            await at_once(lambda low: read(one, url, low), range(0, len(VALUE), SIZE))

        await at_once(all_of, nodes)

    read_by_many(check, 8, Options(cache_dir=str(tmp_path), coalesce_gap=0, coalesce_size=SIZE, prefetch=0))
    assert faulty.gets() <= len(VALUE) // SIZE + 2, "not 40; one may look for a block the moment before it is there"
    assert files(tmp_path) == []


def test_tiny_values_that_are_fetched_ahead_of_many(faulty: Faulty, tmp_path: Path) -> None:
    """One request for all of them, by one of the four; every claim is gone in the end."""
    url = faulty.put("/v", VALUE)
    wanted = [(url, low, low + 100) for low in range(0, 40_000, 200)]

    async def check(nodes: list[RemoteFiles]) -> None:
        await at_once(lambda one: one.prefetch(wanted), nodes)
        for one in nodes:
            await at_once(lambda at, one=one: read(one, url, at[1], 100), wanted)  # type: ignore[misc]

    read_by_many(check, 4, Options(cache_dir=str(tmp_path)))
    assert faulty.gets() <= 5
    assert files(tmp_path) == []


def test_tiny_values_far_from_each_other_are_fetched_once(faulty: Faulty, tmp_path: Path) -> None:
    """Two requests within one claim: the first that is done does not end it."""
    url = faulty.put("/v", VALUE, None, "slow")
    wanted = [(url, low, low + 100) for low in (0, 300_000)]

    async def check(nodes: list[RemoteFiles]) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(nodes[0].prefetch, wanted)
            await trio.to_thread.run_sync(faulty.arrived.wait, 20)
            await trio.sleep(0.3)  # the other is on the disk by now
            nursery.start_soon(nodes[1].prefetch, wanted)
            await trio.sleep(0.3)
            requests = faulty.gets()
            faulty.release()
        assert requests == faulty.gets() == 2

    read_by_many(check, 2, Options(cache_dir=str(tmp_path), coalesce_gap=0))
    assert files(tmp_path) == []


def test_a_value_that_finds_no_room_does_not_end_the_claim_of_others(faulty: Faulty, tmp_path: Path) -> None:
    url = faulty.put("/v", VALUE, "slow")

    async def check(nodes: list[RemoteFiles]) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(nodes[0].prefetch, [(url, low, low + 60_000) for low in (0, 100_000)])
            await trio.to_thread.run_sync(faulty.arrived.wait, 20)
            await trio.sleep(0.2)
            claimed = files(tmp_path)
            faulty.release()
        assert len(claimed) == 1

    read_by_many(check, 1, Options(cache_dir=str(tmp_path), memory_limit=200_000))
    assert faulty.gets() == 1
    assert files(tmp_path) == []


def test_who_is_cancelled_lets_go(faulty: Faulty, tmp_path: Path) -> None:
    """Of a claim that he holds, and of the wait for another's."""
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
    assert files(tmp_path) == []


def test_a_failure_is_everybodys_own_and_nobody_waits_for_ever(faulty: Faulty, tmp_path: Path) -> None:
    url = faulty.put("/v", VALUE, forever=503)
    failed = []

    async def check(nodes: list[RemoteFiles]) -> None:
        async def fails(one: RemoteFiles) -> None:
            try:
                await read(one, url, 0)
            except ReadError as exc:
                failed.append(exc)

        await at_once(fails, nodes)

    read_by_many(check, 6, Options(cache_dir=str(tmp_path), retries=0, read_timeout=20.0))
    assert len(failed) == 6
    assert all("read_timeout" not in str(exc) for exc in failed)
    assert files(tmp_path) == []


def test_a_server_that_tells_no_version_is_not_waited_for_twice(faulty: Faulty, tmp_path: Path) -> None:
    """Nothing of it is kept on disk: after the first block there are no claims on it."""
    url = faulty.put("/untagged", VALUE, forever="untagged")
    faulty.head("/untagged", forever=405)

    async def check(nodes: list[RemoteFiles]) -> dict[str, int]:
        for low in range(0, len(VALUE), SIZE):
            await read(nodes[0], url, low)
        return dict(nodes[0].stats()["disk"])

    assert read_by_many(check, 1, Options(cache_dir=str(tmp_path)))["claims"] == 1
    assert files(tmp_path) == []

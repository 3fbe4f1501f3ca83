"""The session loop with tasks like those of pyfuse3, on a socket in place of /dev/fuse."""

from __future__ import annotations

import contextlib
import itertools
import socket
from collections.abc import Awaitable, Callable, Iterator

import pyfuse3
import pytest
import trio
import trio.testing
from trio.testing import trio_test

from zarrfs.fuse import sessionloop
from zarrfs.fuse.sessionloop import Waiting

Handle = Callable[[bytes], Awaitable[None]]


class Session:
    """A session loop like that of pyfuse3: requests are datagrams, `handle` answers each."""

    def __init__(self, handle: Handle, waiting: object) -> None:
        self.requests, self.kernel = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.handle, self.waiting = handle, waiting
        self.lock = waiting.Lock()  # type: ignore[attr-defined]
        self.ended = 0

    async def worker(self) -> None:
        """Run one worker task."""
        while True:
            try:
                async with self.lock:
                    await self.waiting.lowlevel.wait_readable(self.requests.fileno())  # type: ignore[attr-defined]
            except trio.ClosedResourceError:
                break
            await self.handle(self.requests.recv(100))
        self.ended += 1


class Rounds(trio.abc.Instrument):
    """An instrument that counts scheduler passes."""

    def __init__(self) -> None:
        self.count = 0

    def before_io_wait(self, timeout: float) -> None:
        """Count one pass."""
        self.count += 1


@contextlib.contextmanager
def counted() -> Iterator[Rounds]:
    rounds = Rounds()
    trio.lowlevel.add_instrument(rounds)
    try:
        yield rounds
    finally:
        trio.lowlevel.remove_instrument(rounds)


async def rounds_for(waiting: object, requests: int) -> int:
    """Return how many scheduler passes it takes to answer pending requests."""
    answered = 0
    done = trio.Event()

    async def handle(_: bytes) -> None:
        nonlocal answered
        answered += 1
        if answered == requests:
            done.set()

    session = Session(handle, waiting)
    async with trio.open_nursery() as nursery:
        for _ in range(8):
            nursery.start_soon(session.worker)
        await trio.testing.wait_all_tasks_blocked()
        with counted() as rounds:
            for _ in range(requests):
                session.kernel.send(b"lookup")
            await done.wait()
        nursery.cancel_scope.cancel()
    return rounds.count


@trio_test
async def test_one_scheduler_pass_takes_several_pending_requests() -> None:
    """Eight requests per pass; with trio's own Lock and wait_readable(), each takes at least one pass."""
    assert await rounds_for(Waiting(), 64) <= 64 / 8 + 4
    assert await rounds_for(trio, 64) >= 64


@trio_test
async def test_endless_requests_do_not_starve_other_tasks() -> None:
    """Each handler triggers the next request immediately; other tasks must still run."""
    answered, seen = 0, []
    done = trio.Event()

    async def handle(_: bytes) -> None:
        nonlocal answered
        answered += 1
        if answered < 800:
            session.kernel.send(b"next")
        else:
            done.set()

    async def other() -> None:
        while not done.is_set():
            seen.append(answered)
            await trio.lowlevel.checkpoint()
        seen.append(answered)

    session = Session(handle, Waiting())
    async with trio.open_nursery() as nursery:
        for _ in range(4):
            nursery.start_soon(session.worker)
        nursery.start_soon(other)
        session.kernel.send(b"first")
        await done.wait()
        nursery.cancel_scope.cancel()
    assert max(after - before for before, after in itertools.pairwise(seen)) <= 3 * 8


@pytest.mark.parametrize("workers", [2, 3, 8])
@trio_test
async def test_a_slow_request_blocks_no_other(workers: int) -> None:
    """While all worker tasks but one wait, the remaining one answers requests."""
    answered: list[bytes] = []
    let_go = trio.Event()

    async def handle(request: bytes) -> None:
        if request == b"slow":
            await let_go.wait()
        answered.append(request)

    session = Session(handle, Waiting())
    async with trio.open_nursery() as nursery:
        for _ in range(workers):
            nursery.start_soon(session.worker)
        for _ in range(workers - 1):
            session.kernel.send(b"slow")
        for number in range(30):
            session.kernel.send(b"quick")
            await trio.testing.wait_all_tasks_blocked(0.001)
            assert len(answered) == number + 1
        let_go.set()
        await trio.testing.wait_all_tasks_blocked(0.001)
        nursery.cancel_scope.cancel()
    assert answered == [b"quick"] * 30 + [b"slow"] * (workers - 1)


@trio_test
async def test_a_waiting_task_can_be_cancelled() -> None:
    """Its place in the queue is dropped, and the others continue."""
    answered = trio.Event()

    async def handle(_: bytes) -> None:
        answered.set()

    session = Session(handle, Waiting())
    async with trio.open_nursery() as nursery:
        scopes = [trio.CancelScope() for _ in range(4)]

        async def within(scope: trio.CancelScope) -> None:
            with scope:
                await session.worker()

        for scope in scopes:
            nursery.start_soon(within, scope)
            await trio.testing.wait_all_tasks_blocked()
        for scope in scopes[:3]:  # the first one holds the lock
            scope.cancel()
            await trio.testing.wait_all_tasks_blocked()
        session.kernel.send(b"lookup")
        with trio.fail_after(60):
            await answered.wait()
        nursery.cancel_scope.cancel()


@trio_test
async def test_all_tasks_end_when_the_mount_does() -> None:
    """As in pyfuse3.terminate(), notify_closing() wakes one task; here it is called until all have ended."""

    async def handle(_: bytes) -> None:
        raise AssertionError("there is no request")

    waiting = Waiting()
    session = Session(handle, waiting)
    async with trio.open_nursery() as nursery:
        for _ in range(5):
            nursery.start_soon(session.worker)
        await trio.testing.wait_all_tasks_blocked()
        with trio.fail_after(60):
            while session.ended < 5:
                waiting.lowlevel.notify_closing(session.requests.fileno())
                await trio.sleep(0.001)


@trio_test
async def test_pyfuse3_uses_the_replacement_for_trio_while_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Afterwards pyfuse3 uses the real trio again."""
    seen = []

    async def main(*_: int) -> None:
        seen.append(pyfuse3.trio)  # type: ignore[attr-defined]

    monkeypatch.setattr(pyfuse3, "main", main)
    await sessionloop.run()
    assert isinstance(seen[0], Waiting)
    assert seen[0].open_nursery is trio.open_nursery
    assert pyfuse3.trio is trio  # type: ignore[attr-defined]

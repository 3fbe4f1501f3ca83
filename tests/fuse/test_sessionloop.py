"""How requests are waited for: tasks as pyfuse3 has them, on a socket in the place of /dev/fuse."""

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
    """Requests are datagrams; each is answered by `handle`, as pyfuse3's session loop has it."""

    def __init__(self, handle: Handle, waiting: object) -> None:
        self.requests, self.kernel = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.handle, self.waiting = handle, waiting
        self.lock = waiting.Lock()  # type: ignore[attr-defined]
        self.ended = 0

    async def worker(self) -> None:
        """One of the tasks."""
        while True:
            try:
                async with self.lock:
                    await self.waiting.lowlevel.wait_readable(self.requests.fileno())  # type: ignore[attr-defined]
            except trio.ClosedResourceError:
                break
            await self.handle(self.requests.recv(100))
        self.ended += 1


class Rounds(trio.abc.Instrument):
    """Counts rounds of the loop."""

    def __init__(self) -> None:
        self.count = 0

    def before_io_wait(self, timeout: float) -> None:
        """One more."""
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
    """How many rounds of the loop it takes to answer what is there."""
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
async def test_requests_that_are_there_are_taken_in_one_round() -> None:
    """Eight at a time; with trio's own lock and wait it is a round or more for each."""
    assert await rounds_for(Waiting(), 64) <= 64 / 8 + 4
    assert await rounds_for(trio, 64) >= 64


@trio_test
async def test_other_tasks_run_though_requests_never_end() -> None:
    """A handler that leads to the next request at once keeps nobody from running."""
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
async def test_a_request_that_takes_long_keeps_no_other_waiting(workers: int) -> None:
    """While all tasks but one wait for something, that one answers."""
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
async def test_a_task_that_is_cancelled_while_it_waits() -> None:
    """Its place in the queue goes to nobody, and the others go on."""
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
        for scope in scopes[:3]:  # the first one has the lock
            scope.cancel()
            await trio.testing.wait_all_tasks_blocked()
        session.kernel.send(b"lookup")
        with trio.fail_after(10):
            await answered.wait()
        nursery.cancel_scope.cancel()


@trio_test
async def test_all_tasks_end_when_the_mount_does() -> None:
    """As pyfuse3.terminate() has it: one is told, and the others look for themselves."""

    async def handle(_: bytes) -> None:
        raise AssertionError("there is no request")

    waiting = Waiting()
    session = Session(handle, waiting)
    async with trio.open_nursery() as nursery:
        for _ in range(5):
            nursery.start_soon(session.worker)
        await trio.testing.wait_all_tasks_blocked()
        with trio.fail_after(10):
            while session.ended < 5:
                waiting.lowlevel.notify_closing(session.requests.fileno())
                await trio.sleep(0.001)


@trio_test
async def test_pyfuse3_waits_with_it_while_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """And has its own afterwards."""
    seen = []

    async def main(*_: int) -> None:
        seen.append(pyfuse3.trio)  # type: ignore[attr-defined]

    monkeypatch.setattr(pyfuse3, "main", main)
    await sessionloop.run()
    assert isinstance(seen[0], Waiting)
    assert seen[0].open_nursery is trio.open_nursery
    assert pyfuse3.trio is trio  # type: ignore[attr-defined]

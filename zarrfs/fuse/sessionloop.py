"""pyfuse3's session loop with another way to wait for requests on /dev/fuse.

pyfuse3 needs two or three scheduler passes for each request, even if many are pending. While other tasks received
values, thirty readers waited 16 ms for their open(2). This loop reads up to AT_ONCE pending requests before the
scheduler runs. As pyfuse3.asyncio does, it replaces the name `trio` in the module pyfuse3.
"""

from __future__ import annotations

import resource
import select
from collections import deque
from typing import Any

import pyfuse3
import trio

AT_ONCE = 8  # requests between two scheduler passes; bounded, so that other tasks run, too
_MOMENT = 2.0  # seconds for requests in flight to finish after an unmount
# Worker tasks: idle ones to keep, and the maximum. Each request in flight has a task, even if it waits for an
# unreachable server or if its reader was killed. When all tasks are busy, none reads /dev/fuse.
_TASKS = 64, 1024


async def run() -> None:
    """Serve requests until the file system is unmounted, as pyfuse3.main() does.

    Requests in flight are cancelled a moment after the unmount: no client receives their replies, and they may be
    waiting for an unreachable server.
    """
    waiting = pyfuse3.trio = Waiting()  # type: ignore[attr-defined]
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_end, waiting, nursery.cancel_scope)
            await pyfuse3.main(_TASKS[0], _most_tasks())
            nursery.cancel_scope.cancel()
    finally:
        pyfuse3.trio = trio  # type: ignore[attr-defined]


def _most_tasks() -> int:
    """Return the maximum number of tasks. Each allocates a buffer of 1 MiB, and the mount ends if that fails."""
    space = resource.getrlimit(resource.RLIMIT_AS)[0]
    return _TASKS[1] if space == resource.RLIM_INFINITY else max(128, min(_TASKS[1], space >> 23))


async def _end(waiting: Waiting, scope: trio.CancelScope) -> None:
    await waiting.unmounted.wait()
    await trio.sleep(_MOMENT)
    scope.cancel()


class Lock:
    """A lock for the task reading /dev/fuse. Uncontended, it is taken without a scheduler pass."""

    def __init__(self, waiting: Waiting) -> None:
        self._loop = waiting
        self._held = False
        self._woken = False  # a waiter was rescheduled and has not run yet
        self._queue: deque[trio.lowlevel.Task] = deque()

    async def __aenter__(self) -> None:
        while self._held:
            task = trio.lowlevel.current_task()
            self._queue.append(task)

            def abort(_: Any, task: trio.lowlevel.Task = task) -> trio.lowlevel.Abort:
                self._queue.remove(task)
                return trio.lowlevel.Abort.SUCCEEDED

            await trio.lowlevel.wait_task_rescheduled(abort)
            self._woken = False
            self._loop.taken = 0
        self._held = True

    async def __aexit__(self, *_: object) -> None:
        self._held = False
        if self._queue and not self._woken:
            self._woken = True
            trio.lowlevel.reschedule(self._queue.popleft())


class Waiting:
    """A replacement for the module trio in pyfuse3, with another Lock and another wait_readable()."""

    def __init__(self) -> None:
        self.lowlevel = self
        self.taken = 0  # requests since the last scheduler pass
        self.unmounted = trio.Event()
        self._polls: dict[int, select.poll] = {}

    def Lock(self) -> Lock:
        """Return a lock with the part of trio.Lock's interface that pyfuse3 uses."""
        return Lock(self)

    async def wait_readable(self, descriptor: int) -> None:
        """Wait like trio.lowlevel.wait_readable(), but without a scheduler pass if a request is already pending.

        After AT_ONCE pending requests in a row the scheduler runs once.
        """
        poll = self._polls.get(descriptor)
        if poll is None:
            poll = self._polls[descriptor] = select.poll()
            poll.register(descriptor, select.POLLIN)
        if self.taken < AT_ONCE and (found := poll.poll(0)):
            self._look(found)
            self.taken += 1
            return
        self.taken = 0
        await trio.lowlevel.wait_readable(descriptor)
        self._look(poll.poll(0))

    def _look(self, found: list[tuple[int, int]]) -> None:
        """Set `unmounted` if poll() has reported the unmount and not a request."""
        if found and found[0][1] & select.POLLERR:
            self.unmounted.set()

    def __getattr__(self, name: str) -> Any:
        return getattr(trio, name) if hasattr(trio, name) else getattr(trio.lowlevel, name)

"""pyfuse3's session loop with another way to wait for requests on /dev/fuse.

pyfuse3 needs two or three scheduler passes a request, however many are pending: beside tasks that receive values,
thirty readers waited 16 ms for their open(2). Here pending requests are read one after the other, and only then the
scheduler runs. The replacement takes the place of the name `trio` in pyfuse3, as pyfuse3.asyncio does.
"""

from __future__ import annotations

import resource
import select
from collections import deque
from typing import Any

import pyfuse3
import trio

AT_ONCE = 8  # requests between two scheduler passes: other tasks have to run, too
_MOMENT = 2.0  # seconds that requests have to end after an unmount
# Worker tasks: idle ones to keep, and at most. Each request that is under way has one, also if it waits for a server
# that is out, and of a reader that was killed: with all of them taken, nobody reads /dev/fuse.
_TASKS = 64, 1024


async def run(waiting: Waiting | None = None) -> None:
    """Serve requests until the file system is unmounted, as pyfuse3.main() does.

    Requests that are under way then are given a moment: nobody gets their answers, and one may wait for a server that
    is out.
    """
    waiting = pyfuse3.trio = waiting or Waiting()  # type: ignore[attr-defined]
    waiting.open()
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_end, waiting, nursery.cancel_scope)
            await pyfuse3.main(_TASKS[0], _most_tasks())
            nursery.cancel_scope.cancel()
    finally:
        pyfuse3.trio = trio  # type: ignore[attr-defined]
        waiting.close()


def _most_tasks() -> int:
    """Return how many tasks may run: each has a buffer of 1 MiB, and the mount ends if there is no space for one."""
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
    """A stand-in for the module trio in pyfuse3, with another Lock and wait_readable()."""

    def __init__(self) -> None:
        self.lowlevel = self
        self.taken = 0  # requests since the last scheduler pass
        self.unmounted = trio.Event()
        self._polls: dict[int, select.poll] = {}

    def open(self) -> None:
        """Begin, in the loop."""

    def close(self) -> None:
        """Release what the waiting holds."""

    def Lock(self) -> Lock:
        """Return a lock with as much of trio.Lock as pyfuse3 uses."""
        return Lock(self)

    async def wait_readable(self, descriptor: int) -> None:
        """Wait as trio.lowlevel.wait_readable(), but return at once for a pending request, AT_ONCE times in a row."""
        poll = self.poll_of(descriptor)
        if self.taken < AT_ONCE and (found := poll.poll(0)):
            self.look(found)
            self.taken += 1
            return
        self.taken = 0
        await trio.lowlevel.wait_readable(descriptor)
        self.look(poll.poll(0))

    def poll_of(self, descriptor: int) -> select.poll:
        """Return the poll of a descriptor."""
        poll = self._polls.get(descriptor)
        if poll is None:
            poll = self._polls[descriptor] = select.poll()
            poll.register(descriptor, select.POLLIN)
        return poll

    def look(self, found: list[tuple[int, int]]) -> None:
        """Note what poll() has found, an unmount or a request."""
        if found and found[0][1] & select.POLLERR:
            self.unmounted.set()

    def __getattr__(self, name: str) -> Any:
        return getattr(trio, name) if hasattr(trio, name) else getattr(trio.lowlevel, name)

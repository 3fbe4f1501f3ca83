"""The session loop: pyfuse3's, which takes requests of the kernel in, with another way to wait for them.

pyfuse3 goes round the whole trio loop two or three times for each request, however many there are: beside tasks that
receive values, thirty readers waited 16 ms for their open(2). Here requests that are there are taken one after the
other, and only then the loop goes on. pyfuse3 waits with what its name `trio` stands for, which pyfuse3.asyncio
replaces as well.
"""

from __future__ import annotations

import select
from collections import deque
from typing import Any

import pyfuse3
import trio

_AT_ONCE = 8  # requests between two rounds of the loop: its other tasks have to run, too
_TASKS = 64, 128  # that wait for requests or answer them: kept, and at most


async def run() -> None:
    """Answer requests until the file system is unmounted; as pyfuse3.main()."""
    pyfuse3.trio = Waiting()  # type: ignore[attr-defined]
    try:
        await pyfuse3.main(*_TASKS)
    finally:
        pyfuse3.trio = trio  # type: ignore[attr-defined]


class _Lock:
    """The lock of the task that waits for a request: whoever comes while it is free has it, without a round."""

    def __init__(self, waiting: Waiting) -> None:
        self._loop = waiting
        self._held = False
        self._woken = False  # somebody who waited will look soon
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
    """What pyfuse3 takes for trio: its lock and its wait_readable() are those of this module, all else is trio's."""

    def __init__(self) -> None:
        self.lowlevel = self
        self.taken = 0  # requests since the last round of the loop
        self._polls: dict[int, select.poll] = {}

    def Lock(self) -> _Lock:
        """As trio.Lock(), as far as pyfuse3 uses it."""
        return _Lock(self)

    async def wait_readable(self, descriptor: int) -> None:
        """As trio.lowlevel.wait_readable(), but at once where a request is there, _AT_ONCE times in a row."""
        poll = self._polls.get(descriptor)
        if poll is None:
            poll = self._polls[descriptor] = select.poll()
            poll.register(descriptor, select.POLLIN)
        if self.taken < _AT_ONCE and poll.poll(0):
            self.taken += 1
            return
        self.taken = 0
        await trio.lowlevel.wait_readable(descriptor)

    def __getattr__(self, name: str) -> Any:
        return getattr(trio, name) if hasattr(trio, name) else getattr(trio.lowlevel, name)

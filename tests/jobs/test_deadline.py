"""The deadline of a command."""

from __future__ import annotations

import threading

import pytest
import trio

from zarrfs.errors import TimedOut
from zarrfs.jobs.deadline import Deadline


def test_a_deadline_ends_blocking_and_async_code() -> None:
    with pytest.raises(TimedOut), Deadline(0.05).armed():
        threading.Event().wait(20)

    async def forever(deadline: Deadline) -> None:
        with deadline.on_trio():
            await trio.sleep_forever()

    deadline = Deadline(0.05)
    with pytest.raises(TimedOut), deadline.armed():
        trio.run(forever, deadline)
    with Deadline(None).armed(), Deadline(60).armed():
        pass

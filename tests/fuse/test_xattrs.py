"""Values of extended attributes, which are JSON of a bounded size."""

from __future__ import annotations

import json
from typing import Any

import pytest
import trio
import trio.testing

from zarrfs.fuse.xattrs import REFRESH, Control, bounded

REGION = {"url": "https://host/" + "x" * 400, "offset": 0, "length": 1}


@pytest.mark.parametrize(
    ("value", "found"),
    [
        ({"url": "/a"}, {"url": "/a"}),
        ({"regions": [REGION] * 9}, {"regions": [REGION] * 4, "count": 9}),
        ({"url": "x" * 3000}, {"too_long": 3010}),
        ({"regions": [{"url": "x" * 600}] * 9}, {"too_long": 2467}),
    ],
)
def test_a_source_attribute_is_json_of_a_bounded_size(value: dict[str, object], found: dict[str, object]) -> None:
    text = bounded(value)
    assert len(text) <= 2048
    assert json.loads(text) == found


@pytest.mark.parametrize("count", [100, 2000])
def test_control_work_starts_once_however_much_of_it_is_running(count: int) -> None:
    """A client polls until its work has ended; if running work were forgotten, each poll would start it again."""

    async def body() -> None:
        may_end, calls, names = trio.Event(), 0, [f"{REFRESH}{number}" for number in range(count)]

        async def refresh(_force: bool) -> dict[str, Any]:
            nonlocal calls
            calls += 1
            await may_end.wait()
            return {"result": "refreshed"}

        async with trio.open_nursery() as nursery:
            control = Control(nursery, refresh, lambda _text: refresh(False))
            for _ in range(2):
                assert {control.answer(name) for name in names} == {b'{"state": "running"}'}
                await trio.testing.wait_all_tasks_blocked()
            may_end.set()
            await trio.testing.wait_all_tasks_blocked()
            assert count > 1000 or {control.answer(name) for name in names} == {b'{"result": "refreshed"}'}
            assert calls == count

    trio.run(body)

"""IndexStore, beyond what the tests of what compiles an index say."""

from __future__ import annotations

import threading

import trio

from tests.references.referencesets import compiled


def test_counting_all_entries_holds_up_no_lookup() -> None:
    """As the first statfs(2) of a mount does."""
    with compiled({"version": 1, "refs": {"a": "1"}}) as made:
        counting, go = threading.Event(), threading.Event()

        def wait() -> bool:
            counting.set()
            return not go.wait(60)

        made.store._counting.set_progress_handler(wait, 1)

        async def main() -> None:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(made.store.usage)
                await trio.to_thread.run_sync(counting.wait)
                assert bytes(await made.store.get("a")) == b"1"
                go.set()
            assert (await made.store.usage()).files == 1

        trio.run(main)

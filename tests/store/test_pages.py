"""Flat listings that fill the table of names page by page."""

from __future__ import annotations

import bisect
import time

import pytest
import trio

from zarrfs.errors import ReadError
from zarrfs.net.responses import Entry, Page
from zarrfs.store.name_table import END, NameTable, encoded
from zarrfs.store.pages import Pages

KEYS = sorted(["5.4", "5.40", "5.5", "5.50", "5.6", "a/é", "a/\ue000", "b"], key=encoded)


class Bucket:
    """A server that lists the `keys` after a given key, two per page."""

    def __init__(self, keys: list[str]) -> None:
        self.keys = keys
        self.pages = 0

    async def page(self, after: str) -> Page:
        self.pages += 1
        begin = bisect.bisect_right([encoded(key) for key in self.keys], encoded(after))
        found = self.keys[begin : begin + 2]
        entries = [(key, Entry(key, False, 1, None, '"1"')) for key in found]
        return Page(entries, found[-1] if found else after, begin + 2 < len(self.keys))


async def _know_all(pages: Pages) -> None:
    at = b""
    while at < END:
        at = await pages.ensure_listed(at, END, time.time() - 60)


@pytest.mark.parametrize("key", KEYS)
def test_a_key_that_was_forgotten_is_found_on_the_next_page(key: str) -> None:
    """A page has the keys after a given key. When a value changes, its key is forgotten, its neighbours are not."""
    names = NameTable(300.0, 300.0, in_memory=True)

    async def main() -> None:
        pages = Pages(names, Bucket(KEYS).page)
        await _know_all(pages)
        names.forget(key)
        assert names.get(key) is None
        await pages.ensure_listed(encoded(key), END, time.time() - 60)

    trio.run(main)
    known = names.get(key)
    assert known is not None
    assert known.entry is not None
    names.close()


def test_all_waiters_for_a_page_that_fails_get_the_failure() -> None:
    """If each waiter requested the page again, the last one would wait for the failures of all the others."""
    names, asked = NameTable(300.0, 300.0, in_memory=True), 0

    async def fail(after: str) -> Page:
        nonlocal asked
        asked += 1
        await trio.sleep(0.01)
        raise ReadError("s3://b", "no answer")

    async def main() -> None:
        pages, failed = Pages(names, fail), 0

        async def reach() -> None:
            nonlocal failed
            with pytest.raises(ReadError, match="no answer"):
                await pages.ensure_listed(b"", END, time.time())
            failed += 1

        async with trio.open_nursery() as nursery:
            for _ in range(5):
                nursery.start_soon(reach)
        assert failed == 5

    trio.run(main)
    assert asked == 1
    names.close()

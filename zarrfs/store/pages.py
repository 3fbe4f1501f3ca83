"""Flat listings of a tree in an object store, which fill the table of names ahead of a reader that walks the tree.

From the place where names are requested, keys are listed regardless of directories, a thousand per page. A reader that
continues with the next page is assumed to walk the tree: from then on pages are prefetched, more of them as long as
they are used. A page can be requested only when the page before it has arrived, so one listing is sequential. A long
listing is therefore split by a digit in its keys, and the parts are listed in parallel.
"""

from __future__ import annotations

import bisect
import logging
import time
from collections.abc import Awaitable, Callable

import trio

from zarrfs.concurrency.tasks import in_background
from zarrfs.errors import ReadError
from zarrfs.net.responses import Page
from zarrfs.store.api import key_rule
from zarrfs.store.name_table import END, NameTable, encoded

log = logging.getLogger(__name__)

_WALK = 2  # directories listed in order until a page may go beyond the end of its directory
_LONG = 4  # pages of a chain until it is split
_MOST = 32  # pages that are prefetched at most
_CHAINS = 512  # chains that are remembered
_LAST = "/\U0010ffff"  # after the name of a directory: sorts after all its keys
_HIGH = "z"  # sorts after most characters that follow a digit in keys


class _Chain:
    """The state of one sequential listing.

    `at`: where its next page begins; `after`: the key with which that page is requested; `stop`: where the listing
    ends.
    """

    __slots__ = ("after", "at", "error", "landed", "pages", "stop")

    def __init__(self, at: bytes, after: str, stop: bytes) -> None:
        self.at, self.after, self.stop = at, after, stop
        self.pages = 0
        self.landed: trio.Event | None = None  # set when the page that is under way has arrived or failed
        self.error: ReadError | None = None  # the error of the last page, for readers that waited for it


class Pages:
    """The flat listings of one store; `fetch` returns the page of the keys that follow a key."""

    def __init__(self, names: NameTable, fetch: Callable[[str], Awaitable[Page]]) -> None:
        self._names, self._fetch = names, fetch
        self._chains: list[_Chain] = []  # sorted
        self._unused: list[bytes] = []  # where prefetched pages begin that no reader has reached
        self._window = self._flying = 0
        self._most, self._emptied = _MOST, 0
        # the directory whose listing began last; how many directories were listed in order
        self._directory, self._directories = b"", 0

    @property
    def walking(self) -> bool:
        """Return whether a client walks the tree, listing one directory after the other in order."""
        return self._directories >= _WALK

    async def ensure_listed(self, start: bytes, stop: bytes, now: float) -> bytes:
        """Return the position, at most `stop`, up to which the table has all keys from `start` on.

        Fetch a page first if the table has none there. Raise ReadError if that fails; known names stay in the table.
        """
        while True:
            at = self._names.covered(start, stop, now)
            if at > start or at >= stop:
                self._go_on(at)
                return at
            chain, walks = self._chain(at)
            if self._emptied != self._names.emptied:  # the table has room for fewer names
                self._emptied, self._most = self._names.emptied, self._most // 2
                self._unused, self._window = [], 0
            if walks and not self._window:
                self._window = min(1, self._most)
            if chain.landed is None:
                await self._page(chain)
            else:
                await chain.landed.wait()
                if chain.error is not None:
                    raise chain.error.with_traceback(None)

    def _chain(self, at: bytes) -> tuple[_Chain, bool]:
        """Return (the chain whose next page begins at `at`, whether it has fetched pages before)."""
        index = bisect.bisect_left(self._chains, at, key=lambda chain: chain.at)
        if index < len(self._chains) and self._chains[index].at == at:
            return self._chains[index], self._chains[index].pages > 0
        if len(self._chains) >= _CHAINS:
            self._chains = [chain for chain in self._chains if chain.landed is not None]
            index = bisect.bisect_left(self._chains, at, key=lambda chain: chain.at)
        stop = self._chains[index].at if index < len(self._chains) else END
        after = at.removesuffix(b"\0").decode("utf-8", "surrogateescape")
        if at.endswith(b"/"):  # where a directory begins: the page has only keys of this directory
            self._directories = self._directories + 1 if at > self._directory else 0
            self._directory = at
            if self.walking:  # the page may go beyond the end of this directory
                after = after[:-1]
        elif after and not at.endswith(b"\0"):  # where a directory ends, or a forgotten key, which the page must have
            after = _before(after)
        chain = _Chain(at, after, stop)
        self._chains.insert(index, chain)
        return chain, False

    async def _page(self, chain: _Chain) -> None:
        """Fetch the next page of a chain, and store it in the table."""
        landed, chain.error = trio.Event(), None
        chain.landed = landed
        try:
            since, start = time.time(), chain.at
            page = await self._fetch(chain.after)
            found = []
            for key, entry in page.entries:
                rule = key_rule(key.removesuffix("/"))
                if encoded(key) < start:  # sorts before the directory where the page begins
                    continue
                if rule is None:
                    found.append((key.removesuffix("/"), entry))
                else:
                    log.debug("%s: %s: not listed", key, rule)
            stop = encoded(page.last) + b"\0" if page.more else encoded(page.within) + b"0" if page.within else END
            self._names.put_page(found, start, stop, since)
            chain.at, chain.after = max(stop, start), page.last
            if page.within and not page.entries:
                chain.after = page.within + _LAST
            chain.pages += 1
            if chain.at >= chain.stop and chain in self._chains:
                self._chains.remove(chain)
            elif chain.pages >= _LONG:
                self._split(chain)
        except ReadError as exc:
            chain.error = exc
            raise
        finally:
            chain.landed = None
            landed.set()

    def _split(self, chain: _Chain) -> None:
        """Split the rest of a chain by a digit in its keys: new chains begin after each value of that digit."""
        key = chain.after
        for index, digit in enumerate(key):
            if digit not in "0123456789":
                continue
            afters = [f"{key[:index]}{number}{_HIGH}" for number in range(int(digit), 10)]
            starts = [(encoded(after) + b"\0", after) for after in afters]
            starts = [(at, after) for at, after in starts if chain.at < at < chain.stop]
            if starts:
                stops = [*(at for at, _ in starts[1:]), chain.stop]
                made = [_Chain(at, after, stop) for (at, after), stop in zip(starts, stops, strict=True)]
                chain.stop, chain.pages = starts[0][0], 0
                self._chains = sorted([*self._chains, *made], key=lambda chain: chain.at)
                return

    def _go_on(self, at: bytes) -> None:
        """Prefetch pages after `at`, which a reader has reached; the more, the more prefetched pages were used."""
        if not self._window:
            return
        used = [start for start in self._unused if start < at]
        if used:
            self._unused = [start for start in self._unused if start >= at]
            self._window = min(2 * self._window, self._most)
        for chain in self._chains:
            if self._flying + len(self._unused) >= self._window:
                return
            if chain.at >= at and chain.landed is None:
                self._flying += 1
                chain.landed = trio.Event()  # so that no reader requests this page before the task begins
                in_background(self._page_ahead, chain)

    async def _page_ahead(self, chain: _Chain) -> None:
        begun, start = chain.landed, chain.at
        try:
            await self._page(chain)
            bisect.insort(self._unused, start)
        except ReadError as exc:  # a reader that needs the page requests it again and gets the error
            chain.error = None
            log.debug("%s", exc)
            self._window = 0
        finally:
            self._flying -= 1
            if begun is not None:
                begun.set()


def _before(key: str) -> str:
    """Return a text that sorts right before a key: the page of the keys after it begins with that key."""
    last = ord(key[-1]) - 1
    return key[:-1] + chr(last if not 0xD800 <= last < 0xE000 else 0xD7FF) + "\U0010ffff"

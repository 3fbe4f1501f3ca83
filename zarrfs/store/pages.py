"""Pages: flat listings of a tree in an object store, which fill the table of names ahead of a walk.

A place whose names are requested is listed from there on, a thousand keys a page, regardless of directories. A reader
that continues with the next page is assumed to walk: from then on pages are prefetched, as many as have been used.
The next page begins where one ends, so a single listing is sequential. A long one is split at changes of the first
number in its keys, and the parts are listed in parallel.
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

_WALK = 2  # directories listed one after the other until pages go on from one into the next
_LONG = 4  # pages of a chain until it is split
_MOST = 32  # pages asked for ahead
_CHAINS = 512  # that are remembered
_LAST = "/\U0010ffff"  # no key of a directory comes after
_HIGH = "z"  # comes after all that follows a digit, mostly


class _Chain:
    """A place up to which keys are known, from where the next page goes on."""

    __slots__ = ("after", "at", "error", "landed", "pages", "stop")

    def __init__(self, at: bytes, after: str, stop: bytes) -> None:
        self.at, self.after, self.stop = at, after, stop
        self.pages = 0
        self.landed: trio.Event | None = None  # of a page that is under way
        self.error: ReadError | None = None  # why readers did not get the last page


class Pages:
    """See the module. `fetch`: a page of the keys after one."""

    def __init__(self, names: NameTable, fetch: Callable[[str], Awaitable[Page]]) -> None:
        self._names, self._fetch = names, fetch
        self._chains: list[_Chain] = []  # sorted
        self._unused: list[bytes] = []  # where pages begin that came ahead, and that nobody has reached
        self._window = self._flying = 0
        self._most, self._emptied = _MOST, 0
        self._directory, self._directories = b"", 0  # begun last; how many of them in order, one after the other

    @property
    def walking(self) -> bool:
        """Whether directories are listed one after the other, in order."""
        return self._directories >= _WALK

    async def reach(self, start: bytes, stop: bytes, now: float) -> bytes:
        """Have more of what comes from `start` on in the table; returns up to where that has all keys, at most `stop`.

        ReadError where that cannot be had: what is known stays.
        """
        while True:
            at = self._names.covered(start, stop, now)
            if at > start or at >= stop:
                self._go_on(at)
                return at
            chain, walks = self._chain(at)
            if self._emptied != self._names.emptied:  # there is room for less
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
        """Return (the chain that continues at `at`, whether it existed)."""
        index = bisect.bisect_left(self._chains, at, key=lambda chain: chain.at)
        if index < len(self._chains) and self._chains[index].at == at:
            return self._chains[index], self._chains[index].pages > 0
        if len(self._chains) >= _CHAINS:
            self._chains = [chain for chain in self._chains if chain.landed is not None]
            index = bisect.bisect_left(self._chains, at, key=lambda chain: chain.at)
        stop = self._chains[index].at if index < len(self._chains) else END
        after = at.removesuffix(b"\0").decode("utf-8", "surrogateescape")
        if at.endswith(b"/"):  # where a directory begins: its page has the keys of this directory alone,
            self._directories = self._directories + 1 if at > self._directory else 0
            self._directory = at
            if self.walking:  # unless one after the other is listed
                after = after[:-1]
        elif after and not at.endswith(b"\0"):  # where a directory ends, or a key that was forgotten: that is wanted
            after = _before(after)
        chain = _Chain(at, after, stop)
        self._chains.insert(index, chain)
        return chain, False

    async def _page(self, chain: _Chain) -> None:
        """Take the next page of a chain into the table."""
        landed, chain.error = trio.Event(), None
        chain.landed = landed
        try:
            since, start = time.time(), chain.at
            page = await self._fetch(chain.after)
            found = []
            for key, entry in page.entries:
                rule = key_rule(key.removesuffix("/"))
                if encoded(key) < start:  # beside the directory where the page begins
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
        """Let others begin further on in what a chain would come to, where the first number is another one."""
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
        """Somebody has come to `at`: ask for pages ahead, if that has been of use."""
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
                chain.landed = trio.Event()  # so that nobody else asks for it before that begins
                in_background(self._page_ahead, chain)

    async def _page_ahead(self, chain: _Chain) -> None:
        begun, start = chain.landed, chain.at
        try:
            await self._page(chain)
            bisect.insort(self._unused, start)
        except ReadError as exc:  # a reader that needs it asks again and gets the error
            chain.error = None
            log.debug("%s", exc)
            self._window = 0
        finally:
            self._flying -= 1
            if begun is not None:
                begun.set()


def _before(key: str) -> str:
    """Return a text that sorts right before a key, as a page has the keys after a text."""
    last = ord(key[-1]) - 1
    return key[:-1] + chr(last if not 0xD800 <= last < 0xE000 else 0xD7FF) + "\U0010ffff"

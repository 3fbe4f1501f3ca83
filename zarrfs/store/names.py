"""The names of a tree on a server: listings of directories, and answers about single names.

Three rules decide what is known:
1. A listing is shown when it is complete, and never before. Its age counts from the request for its first page.
2. A name is absent if a valid listing that has come past it lacks it, or if the server has said so about this name.
3. The younger of two valid answers counts. An answer that is not valid any more counts for nothing.
A reader of a listing gets every entry of it, however long that takes: only lookups depend on the clock.
"""

from __future__ import annotations

import bisect
import logging
import math
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

import trio

from zarrfs.net.responses import Entry, Page
from zarrfs.store.api import join_key, key_rule, split_key

log = logging.getLogger(__name__)

_MOST = 250_000  # names of which listings are remembered, and as many of which single answers are
_HIDDEN_ENDS = ("~", "#", ",v", ",t")


class Known(NamedTuple):
    """An answer: the entry of a name, or that the name is absent."""

    entry: Entry | None  # None: the name is absent
    seen: float = 0.0  # when it was requested, on trio's clock


class Listing:
    """The entries of a directory, as they were at the time `asked` or later: all of them, if `flat` is None.

    Else it is incomplete: its names are those up to the last key of a flat listing in progress.
    """

    __slots__ = ("asked", "counted", "entries", "flat", "order")

    def __init__(self, asked: float, entries: dict[str, Entry], flat: FlatListing | None = None) -> None:
        self.asked, self.entries, self.flat = asked, entries, flat
        self.order: list[str] = []  # the names, sorted, once it is complete
        self.counted = 0  # names, when it was stored

    def tells(self, key: str, name: str) -> bool:
        """Return whether the listing shows if a key exists."""
        # keys below a directory sort before the name and "0"
        return name in self.entries or self.flat is None or encoded(f"{key}0") <= encoded(self.flat.after)


def encoded(key: str) -> bytes:
    """Encode a key so that it sorts as in flat listings."""
    return key.encode("utf-8", "surrogateescape")


def may_be_hidden(name: str) -> bool:
    """Return whether web servers may leave a name out of a listing.

    These are names that begin with a dot, and those that Apache's example configuration ignores. Source: IndexIgnore
    in httpd-autoindex.conf of httpd 2.4: .??* *~ *# HEADER* README* RCS CVS *,v *,t
    """
    return name in ("RCS", "CVS") or name.startswith((".", "HEADER", "README")) or name.endswith(_HIDDEN_ENDS)


class Names:
    """A cache of listings and of answers about single names of one store; see the docstring of the module.

    `ttl`: seconds for which an answer is valid. `may_omit`: listings may lack the names of may_be_hidden().
    """

    def __init__(self, ttl: float, may_omit: bool) -> None:
        self.ttl, self._may_omit = ttl, may_omit
        self._listings: dict[str, Listing] = {}  # by directory, the oldest first
        self._singles: dict[str, dict[str, Known]] = {}  # by directory and name
        self._listed = self._single = 0  # names in them

    def is_valid(self, asked: float) -> bool:
        """Return whether an answer that was requested at `asked` is still valid."""
        return asked + self.ttl > trio.current_time()

    def begun(self, directory: str) -> Listing | None:
        """Return the listing of a directory, complete or not, if that is valid.

        An empty one counts for nothing: permission may be missing, or the keys may be about to be written again.
        """
        found = self._listings.get(directory)
        return found if found is not None and found.entries and self.is_valid(found.asked) else None

    def listing(self, directory: str) -> Listing | None:
        """Return the complete listing of a directory, if that is valid."""
        found = self.begun(directory)
        return found if found is not None and found.flat is None else None

    def was_listed(self, directory: str) -> bool:
        """Return whether there is a complete listing, valid or not, and keep it longer than the others."""
        found = self._listings.pop(directory, None)
        if found is not None:
            self._listings[directory] = found
        return found is not None and found.flat is None

    def get(self, key: str) -> Known | None:
        """Look up a key; return None if there is no valid answer."""
        parent, name = split_key(key)
        single, listing, own = self._valid_single(parent, name), self.begun(parent), self.begun(key)
        if listing is not None and listing.tells(key, name):
            known = _younger(name, listing, single)
            if known.entry is not None or known is single or not (self._may_omit and may_be_hidden(name)):
                return known
        if own is not None and (single is None or single.seen < own.asked):
            return Known(Entry(name, True), own.asked)
        return single

    def children(self, directory: str, listing: Listing, after: str = "") -> Iterator[tuple[str, Known]]:
        """Yield (name, Known) of the entries of a listing after the name `after`, sorted, with younger answers."""
        singles = self._singles.get(directory, {})
        since = [name for name, one in singles.items() if one.seen > listing.asked and name not in listing.entries]
        order = sorted([*listing.order, *since]) if since else listing.order
        for at in range(bisect.bisect_right(order, after), len(order)):
            name = order[at]
            known = _younger(name, listing, self._valid_single(directory, name) if singles else None)
            if known.entry is not None:
                yield name, known

    def _valid_single(self, directory: str, name: str) -> Known | None:
        single = self._singles.get(directory, {}).get(name)
        return single if single is not None and self.is_valid(single.seen) else None

    def last(self, key: str) -> Known | None:
        """Return the last known entry of a key, valid or not."""
        parent, name = split_key(key)
        single, listing = self._singles.get(parent, {}).get(name), self._listings.get(parent)
        if single is not None and single.entry is not None:
            return single
        entry = None if listing is None else listing.entries.get(name)
        return None if listing is None or entry is None else Known(entry, listing.asked)

    def put(self, key: str, entry: Entry | None, asked: float) -> Known:
        """Store the answer about a key that was requested at `asked`, unless a younger one is known."""
        parent, name = split_key(key)
        known = Known(entry and entry._replace(name=name, html=False), asked)
        was = self._singles.get(parent, {}).get(name)
        if was is None or was.seen <= asked:
            self._set(parent, name, known)
        return known

    def _set(self, parent: str, name: str, known: Known) -> None:
        singles = self._singles.setdefault(parent, {})
        self._single += name not in singles
        singles[name] = known
        while self._single > _MOST:
            self._single -= len(self._singles.pop(next(iter(self._singles))))

    def put_listing(self, directory: str, listing: Listing) -> Listing:
        """Store the listing of a directory, unless a younger one is known, or a complete one; return it."""
        if listing.flat is None:
            listing.order = sorted(listing.entries)
        known = self.listing(directory)
        if known is None or (listing.flat is None and known.asked <= listing.asked):
            self._drop(directory)
            self._listings[directory], listing.counted = listing, len(listing.entries)
            self._listed += listing.counted
            while self._listed > _MOST and len(self._listings) > 1:
                self._drop(next(iter(self._listings)))
        return listing

    def _drop(self, directory: str) -> None:
        if (was := self._listings.pop(directory, None)) is not None:
            self._listed -= was.counted

    def forget(self, key: str) -> None:
        """Forget the attributes of a value, which has changed. A listing goes on to say that its name exists."""
        parent, name = split_key(key)
        last, listing = self.last(key), self._listings.get(parent)
        if last is not None:
            self._set(parent, name, last._replace(seen=-math.inf))  # last() still needs it
        if listing is not None and name in listing.entries:
            listing.entries[name] = Entry(name, False)


def _younger(name: str, listing: Listing, single: Known | None) -> Known:
    """Return the younger answer about a name. Attributes that the listing lacks come from the other one."""
    entry = listing.entries.get(name)
    if single is not None:
        if single.seen >= listing.asked:
            return single
        unsized = entry is not None and entry.size is None and not entry.directory
        if unsized and single.entry is not None and not single.entry.directory:
            return single
    return Known(entry, listing.asked)


class FlatListing:
    """A flat listing in progress: the keys of a tree in the order of their UTF-8 bytes, of which listings are made.

    It begins at the directory `top`, and may go on after it. A directory is complete when a key after its last one has
    been added. Those above `top` never are.
    """

    def __init__(self, names: Names, top: str) -> None:
        self._names = names
        self.after = f"{top}/" if top else ""  # the last key that was added
        self.more = True  # there may be keys after it
        self.lock = trio.Lock()  # of the task that requests the next page
        self.listing = Listing(trio.current_time(), {}, self)  # of `top`
        above = ["", *(top[:at] for at, mark in enumerate(top) if mark == "/")] if top else []
        # the directories that the last key lies in, and their listings
        self._open: list[tuple[str, Listing | None]] = [*((one, None) for one in above), (top, self.listing)]
        self._ends: deque[bytes] = deque()  # the last key of each page

    def pages_after(self, directory: str) -> int:
        """Return how many pages it is ahead of a reader that has come to `directory`."""
        while self._ends and self._ends[0] < encoded(directory):
            self._ends.popleft()
        return len(self._ends)

    def add(self, page: Page, asked: float) -> None:
        """Add the next page, which was requested at `asked`; store the listings that it completes or goes on with."""
        for key, entry in page.entries:  # the key of a directory ends with "/"
            while (above := self._open[-1][0]) and not key.startswith(f"{above}/"):
                self._leave()
            if (rule := key_rule(key[len(above) + 1 if above else 0 :].removesuffix("/"))) is not None:
                log.debug("%s: %s: not listed", key, rule)
                continue
            parent, name = (key.removesuffix("/"), "") if entry.directory else split_key(key)
            while (above := self._open[-1][0]) != parent:
                child = parent[len(above) + 1 if above else 0 :].partition("/")[0]
                self._put(child, Entry(child, True))
                self._open.append((join_key(above, child), Listing(asked, {}, self)))
            if not entry.directory:
                self._put(name, entry._replace(name=name))
        self.after, self.more = page.last, page.more
        self._ends.append(encoded(page.last))
        while self._open and not page.more:
            self._leave()
        for directory, listing in self._open:
            if listing is not None:
                self._names.put_listing(directory, listing)

    def _put(self, name: str, entry: Entry) -> None:
        listing = self._open[-1][1]
        if listing is not None:
            listing.entries.setdefault(name, entry)  # a value takes precedence over a directory of the same name

    def _leave(self) -> None:
        directory, listing = self._open.pop()
        if listing is not None:
            listing.flat = None
            self._names.put_listing(directory, listing)

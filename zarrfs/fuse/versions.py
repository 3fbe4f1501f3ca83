"""Version: a store that is shown, or was shown before a refresh, as long as somebody uses it."""

from __future__ import annotations

import dataclasses
import heapq
import logging
from collections.abc import Iterator
from typing import Any

from zarrfs.config.options import Options
from zarrfs.errors import ZarrfsError
from zarrfs.fuse.pagecache import Pusher
from zarrfs.metrics.counters import METRICS, PLACE_METRICS
from zarrfs.prefetch.readahead import KeyReadAhead
from zarrfs.store.api import Store
from zarrfs.system.memory import memory_limit

log = logging.getLogger("zarrfs")

_ANY = "*"  # any name
_DISK, _AHEAD = ("remote", "disk"), ("read_ahead",)
_COUNTERS = (  # paths of all that only grows; the rest tells what is now, and that is the version that is shown
    *(metric.path for metric in METRICS if metric.name.endswith("_total")),
    *((*metric.path, _ANY) for metric in PLACE_METRICS),
    *((*_DISK, name) for name in ("unkept", "claims", "waits", "given_up")),
    *((*_AHEAD, name) for name in ("started", "used", "dropped")),
    ("remote", "hosts", _ANY, "requests"), ("remote", "latency_sum"), ("remote", "latency_count"), ("local", "waits"),
)  # fmt: skip
_HOSTS = 32  # servers that are told of, as of one version
_ROOM = 16  # of memory_limit and array_cache: the part that an older version has,
_ROOM_LEAST = 8 << 20  # or so many bytes: two parts of a large value


class Version:
    """One version of a source.

    `users` are the requests that go on and the handles that are open: when a version is `retired`, and the last of
    them is gone, it is closed. Until then it keeps no blocks in memory, unless it is `roomy`, and then a few.
    """

    def __init__(self, store: Store, options: Options, values: Store | None = None) -> None:
        """`values`: where an open file is read, if not in `store`."""
        self.store = store
        self._options = options
        self.values = values or store
        self.ahead = KeyReadAhead(self.values, options.prefetch)
        self.pusher: Pusher | None = None  # set where pages are to be pushed ahead
        self.users = 0
        self.retired = False
        self.roomy = False
        self.changed = False  # a target is not the one that was read first
        self.closed = False

    async def get_ready(self) -> None:
        """Start what the first read over a network takes, if there are such."""
        try:
            await self.values.get_ready()
        except (ZarrfsError, OSError) as exc:  # the first reader gets the error
            log.debug("get_ready: %s", exc)

    def adjust(self, options: Options) -> None:
        """Take over what may change of the options."""
        self._options = options = dataclasses.replace(options, asked_since=self._options.asked_since)
        if self.retired:
            whole = memory_limit(options)
            most = max(whole // _ROOM, min(whole, _ROOM_LEAST)) if self.roomy else 0
            arrays = options.array_cache // _ROOM if self.roomy else 0
            options = dataclasses.replace(options, memory_limit=most, array_cache=arrays)
        self.ahead.resize(0 if self.retired else options.prefetch)
        self.store.adjust(options)

    def retire(self) -> None:
        """It is shown no more: what it has in memory, and nobody waits for, is given back."""
        self.retired = True
        self.adjust(self._options)

    def give_room(self, roomy: bool) -> None:
        """Of a retired version: whether it may keep some blocks."""
        self.roomy = roomy
        self.adjust(self._options)

    def stats(self) -> dict[str, Any]:
        """The counters of the store and its read-ahead."""
        return {"read_ahead": self.ahead.stats(), **self.store.stats()}

    async def aclose(self) -> None:
        """Close the store; the first call does it."""
        if not self.closed:
            self.closed = True
            try:
                await self.ahead.aclose()
            finally:
                await self.store.aclose()


class CounterTotals:
    """Sums of counters of versions."""

    def __init__(self) -> None:
        self._sums: dict[tuple[str, ...], float] = {}
        self._below: dict[float, int] = {}  # of the histogram of latencies: times up to each bound

    def add(self, counters: dict[str, Any]) -> None:
        """Add the counters of a version, as its stats() gives them."""
        for counter in _COUNTERS:
            for path, value in _values(counters, counter):
                self._sums[path] = self._sums.get(path, 0) + value
        for bound, below in counters.get("remote", {}).get("latency_histogram", ()):
            self._below[bound] = self._below.get(bound, 0) + below

    def added_to(self, counters: dict[str, Any], others: list[dict[str, Any]]) -> dict[str, Any]:
        """`counters` with all that was counted before, and by `others`."""
        total = CounterTotals()
        total._sums, total._below = dict(self._sums), dict(self._below)
        for other in (*others, counters):
            total.add(other)
        for path, value in total._sums.items():
            place = counters
            for name in path[:-1]:
                place = place.setdefault(name, {})
            place[path[-1]] = value
        remote = counters.get("remote")
        if remote is not None and total._below:
            remote["latency_histogram"] = sorted(total._below.items())
            remote["hosts"] = _most_asked(remote.get("hosts", {}))
        return counters


def _values(part: Any, path: tuple[str, ...], above: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], float]]:
    """(path, value) of each counter that `path` stands for, but those that are 0."""
    if not path:
        if isinstance(part, int | float) and part:
            yield above, part
    elif isinstance(part, dict):
        for name in part if path[0] == _ANY else path[:1]:
            yield from _values(part.get(name), path[1:], (*above, name))


def _most_asked(hosts: dict[str, dict[str, int]]) -> dict[str, dict[str, int]]:
    """Those of `hosts` that were asked most; one that only older versions have asked has nothing in flight."""
    most = heapq.nlargest(_HOSTS, hosts.items(), key=lambda item: item[1].get("requests", 0))
    return {name: {"in_flight": 0, **counts} for name, counts in most}

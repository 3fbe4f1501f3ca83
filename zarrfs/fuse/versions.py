"""Versions of a source: the store that a mount serves now, and those from before a refresh that are still in use."""

from __future__ import annotations

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

log = logging.getLogger(__name__)

_ANY = "*"  # any name
_DISK, _AHEAD = ("remote", "disk"), ("read_ahead",)
_COUNTERS = (  # paths of counters that only grow; all other figures are those of the visible version
    *(metric.path for metric in METRICS if metric.name.endswith("_total")),
    *((*metric.path, _ANY) for metric in PLACE_METRICS),
    *((*_DISK, name) for name in ("claims", "waits", "given_up")),
    *((*_AHEAD, name) for name in ("started", "used", "dropped")),
    ("remote", "hosts", _ANY, "requests"), ("remote", "latency_sum"), ("remote", "latency_count"), ("local", "waits"),
)  # fmt: skip
_HOSTS = 32  # servers to report, as many as for one version


class StoreVersion:
    """One version of a source.

    `users` counts requests in flight, open handles and work in the background. A `retired` version is closed when the
    count reaches zero.
    """

    def __init__(self, store: Store, options: Options, values: Store | None = None) -> None:
        """`values` is the store that open files are read from; default: `store`."""
        self.store = store
        self.values = values or store
        self.sizes_known = self.values.sizes_known
        self.ahead = KeyReadAhead(self.values, options.prefetch)
        self.pusher: Pusher | None = None  # set if the kernel's read-ahead window could not be raised
        self.users = 0
        self.retired = False
        self.changed = False  # a read found that a target has changed
        self.closed = False

    async def get_ready(self) -> None:
        """Prepare the store for its first read over a network, so that this read waits less."""
        try:
            await self.values.get_ready()
        except (ZarrfsError, OSError) as exc:  # the first read fails, too, and reports the error
            log.debug("get_ready: %s", exc)

    def stats(self) -> dict[str, Any]:
        """Return the counters of the store and its read-ahead."""
        return {"read_ahead": self.ahead.stats(), **self.store.stats()}

    async def aclose(self) -> None:
        """Close the store; a second call does nothing."""
        if not self.closed:
            self.closed = True
            await self.store.aclose()


class CounterTotals:
    """Carry counters over from closed versions, so that totals never decrease."""

    def __init__(self) -> None:
        self._sums: dict[tuple[str, ...], float] = {}
        self._below: dict[float, int] = {}  # histogram of latencies: requests up to each bound (seconds)

    def add(self, counters: dict[str, Any]) -> None:
        """Add the counters of a closed version, as its stats() returns them."""
        for counter in _COUNTERS:
            for path, value in _values(counters, counter):
                self._sums[path] = self._sums.get(path, 0) + value
        for bound, below in counters.get("remote", {}).get("latency_histogram", ()):
            self._below[bound] = self._below.get(bound, 0) + below

    def added_to(self, counters: dict[str, Any], others: list[dict[str, Any]]) -> dict[str, Any]:
        """Return `counters` (changed in place) with the carried totals and those of `others` added."""
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
            remote["hosts"] = _busiest(remote.get("hosts", {}))
        return counters


def _values(part: Any, path: tuple[str, ...], above: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], float]]:
    """Yield (path, value) for each non-zero counter that `path`, which may have wildcards, matches."""
    if not path:
        if isinstance(part, int | float) and part:
            yield above, part
    elif isinstance(part, dict):
        for name in part if path[0] == _ANY else path[:1]:
            yield from _values(part.get(name), path[1:], (*above, name))


def _busiest(hosts: dict[str, dict[str, int]]) -> dict[str, dict[str, int]]:
    """Return the hosts with most requests. `in_flight` is 0 for a host that only closed versions have contacted."""
    most = heapq.nlargest(_HOSTS, hosts.items(), key=lambda item: item[1].get("requests", 0))
    return {name: {"in_flight": 0, **counts} for name, counts in most}

"""Counted: what versions have counted that are shown no more, so that counters never go back."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import Any

from zarrfs.metrics.counters import METRICS, PLACE_METRICS

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


class Counted:
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
        total = Counted()
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

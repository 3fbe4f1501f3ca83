"""Sums of the counters of several processes that serve one mount."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

_OF_THE_FIRST = (("process", "started"), ("process", "descriptors_limit"))


def summed(several: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the counters of all processes as those of one process.

    Numbers are added, except those of which the maximum or minimum counts (_choice). Histograms are added by bucket.
    Values that are not numbers, and the numbers in _OF_THE_FIRST, are those of the first process that has them.
    """
    total: dict[str, Any] = {}
    for counters in several:
        _add(total, counters, ())
    return total


def _add(total: dict[str, Any], counters: dict[str, Any], above: tuple[str, ...]) -> None:
    for name, value in counters.items():
        path = (*above, name)
        if isinstance(value, dict):
            _add(total.setdefault(name, {}), value, path)
        elif name == "latency_histogram":
            below = dict(total.get(name, ()))
            for bound, count in value:
                below[bound] = below.get(bound, 0) + count
            total[name] = sorted(below.items())
        elif name not in total:
            total[name] = value
        elif isinstance(value, int | float) and not isinstance(value, bool) and path not in _OF_THE_FIRST:
            total[name] = _choice(path)(total[name], value)


def _choice(path: tuple[str, ...]) -> Callable[[Any, Any], Any]:
    """Return the function that combines two numbers at this path. For latencies and outages, the worse one counts."""
    if path[:2] == ("remote", "latency") or path[-2:] == ("outage", "seconds"):
        return max
    return min if path[-2:] == ("outage", "since") else operator.add

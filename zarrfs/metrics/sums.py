"""Counters of several processes that answer one mount, as those of one."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

_OF_THE_FIRST = (("process", "started"), ("process", "descriptors_limit"))


def summed(several: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the sums of all numbers that can be added; what is no number is that of the first process that has it."""
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
    """Return how two numbers at a path become one: those of latencies and outages are the worst ones."""
    if path[:2] == ("remote", "latency") or path[-2:] == ("outage", "seconds"):
        return max
    return min if path[-2:] == ("outage", "since") else operator.add

"""The distribution of the times that requests take."""

from __future__ import annotations

import math
from bisect import bisect_left
from itertools import accumulate

_STEPS = 8  # buckets to a doubling: the bounds of one are 9 % apart
_LEAST, _MOST = -20, 10  # powers of two, in seconds: from a microsecond to a quarter of an hour
_SHOWN_LEAST = -14  # histogram() begins at 61 microseconds: no network answers sooner
_BOUNDS = [2.0 ** (step / _STEPS) for step in range(_LEAST * _STEPS, _MOST * _STEPS + 1)]
_QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}


class Latency:
    """Times in buckets whose bounds grow by a factor, as Prometheus has them: 2 KB, however many there are."""

    def __init__(self) -> None:
        self.count = 0
        self.total = 0.0  # seconds
        self._longest = 0.0  # seconds
        self._counts = [0] * (len(_BOUNDS) + 1)  # each of the times up to its bound; the last has none

    def add(self, seconds: float) -> None:
        """Count one time."""
        self.count += 1
        self.total += seconds
        self._longest = max(self._longest, seconds)
        self._counts[bisect_left(_BOUNDS, seconds)] += 1

    def quantiles(self) -> dict[str, float]:
        """p50, p90, p99 and max in seconds; {} when nothing was counted.

        The nearest rank, without interpolation. max is exact, the others are within 5 % from a microsecond to 1024 s.
        """
        if not self.count:
            return {}
        below = list(accumulate(self._counts))
        found = {}
        for name, part in _QUANTILES.items():
            number = bisect_left(below, math.ceil(part * self.count))
            middle = _BOUNDS[number] * 2 ** (-0.5 / _STEPS) if number < len(_BOUNDS) else self._longest
            found[name] = min(middle, self._longest)
        return {**found, "max": self._longest}

    def histogram(self) -> list[tuple[float, int]]:
        """Return (bound in seconds, number of times up to it) for fixed bounds, each twice the one before.

        Times beyond the last bound are in `count` alone.
        """
        below = list(accumulate(self._counts))
        first = (_SHOWN_LEAST - _LEAST) * _STEPS
        return [(_BOUNDS[number], below[number]) for number in range(first, len(_BOUNDS), _STEPS)]

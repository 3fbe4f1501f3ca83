"""The distribution of the times that requests take."""

from __future__ import annotations

import math
from bisect import bisect_left
from itertools import accumulate

_STEPS = 8  # buckets per power of two: the bounds of a bucket are 9 % apart
_LEAST, _MOST = -20, 10  # powers of two, in seconds: from a microsecond to a quarter of an hour
_SHOWN_LEAST = -14  # histogram() begins at 61 microseconds: no network answers sooner
_BOUNDS = [2.0 ** (step / _STEPS) for step in range(_LEAST * _STEPS, _MOST * _STEPS + 1)]
_QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}


class Latency:
    """A histogram of times with exponential buckets, as in Prometheus; it takes 2 KB for any number of times."""

    def __init__(self) -> None:
        self.count = 0
        self.total = 0.0  # seconds
        self._longest = 0.0  # seconds
        self._counts = [0] * (len(_BOUNDS) + 1)  # of times in each bucket, bound included; the last has no bound

    def add(self, seconds: float) -> None:
        """Count one time."""
        self.count += 1
        self.total += seconds
        self._longest = max(self._longest, seconds)
        self._counts[bisect_left(_BOUNDS, seconds)] += 1

    def quantiles(self) -> dict[str, float]:
        """Return p50, p90, p99 and max in seconds; {} if nothing was counted.

        Quantiles are those of the nearest rank, without interpolation. max is exact; between a microsecond and 1024 s
        the others have an error of at most 5 %.
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

        Times beyond the last bound are counted in `count` only.
        """
        below = list(accumulate(self._counts))
        first = (_SHOWN_LEAST - _LEAST) * _STEPS
        return [(_BOUNDS[number], below[number]) for number in range(first, len(_BOUNDS), _STEPS)]

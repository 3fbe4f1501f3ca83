"""The distribution of the times that requests take."""

from __future__ import annotations

import math
from itertools import accumulate

_LEAST, _MOST = -14, 10  # powers of two, in seconds: from 61 microseconds to a quarter of an hour


class Latency:
    """A histogram of times, as in Prometheus: the bound of each bucket is twice the one before."""

    def __init__(self) -> None:
        self.count = 0
        self.total = 0.0  # seconds
        self._counts = [0] * (_MOST - _LEAST + 2)  # the last bucket has no bound

    def add(self, seconds: float) -> None:
        """Count one time."""
        self.count += 1
        self.total += seconds
        power = math.frexp(seconds)[1]
        self._counts[min(max(0, power - _LEAST), len(self._counts) - 1)] += 1

    def histogram(self) -> list[tuple[float, int]]:
        """Return (bound in seconds, number of times up to it) for each bucket that has a bound."""
        return [(2.0 ** (_LEAST + number), below) for number, below in enumerate(accumulate(self._counts[:-1]))]

    def quantile(self, part: float) -> float | None:
        """Return a quantile in seconds, interpolated as by Prometheus; None if nothing was counted."""
        if not self.count:
            return None
        rank, below = part * self.count, 0
        for bound, upto in self.histogram():
            if upto >= rank:
                return bound / 2 * (1 + (rank - below) / (upto - below))
            below = upto
        return 2.0**_MOST

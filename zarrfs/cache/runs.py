"""Runs: read-ahead along targets whose values are read in the order of their offsets.

A reader may take the keys of a set in an order that their names do not show, and still go through a target from one
end to the other. A run is a stretch of the target after the last value; values that lie in runs are cut out of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from zarrfs.cache.memory import Ahead
from zarrfs.concurrency.lru import LRU

_TARGETS = 256  # whose order is remembered
_IN_ORDER = 4  # values one after the other before anything is fetched ahead
_FIRST = 256 << 10  # bytes of the first run; each is twice as long as the one before
_AT_ONCE = 4  # runs beyond the last value


@dataclasses.dataclass(slots=True)
class _Order:
    at: int  # where the last value ended
    values: int = 0  # one after the other
    size: int = _FIRST  # bytes of the next run
    runs: list[tuple[int, int, Ahead]] = dataclasses.field(default_factory=list)  # (start, stop, run), by offset


class Runs:
    """The runs of many targets. `gap`: bytes between values in order; `most`: bytes of a run."""

    def __init__(self, gap: int, most: int, ahead: int) -> None:
        self._gap, self._most, self.ahead = gap, most, ahead
        self._orders: LRU[tuple[int, str], _Order] = LRU(_TARGETS, self._end)

    def covering(self, target: tuple[int, str], start: int, stop: int) -> list[tuple[int, int]]:
        """Return the (start, stop) of the runs that contain a value; [] if they do not contain all of it."""
        order = self._orders.get(target)
        found: list[tuple[int, int]] = []
        for low, high, _ in order.runs if order is not None else ():
            if low <= start < high:
                found.append((low, high))
                if stop <= high:
                    return found
                start = high
        return []

    def read(
        self, target: tuple[int, str], start: int, stop: int, fetch: Callable[[int, int], tuple[int, Ahead] | None]
    ) -> None:
        """Note a read of a value outside runs; `fetch` starts a run and returns its end, or None without room."""
        order = self._orders.use(target)
        if order is None or not 0 <= start - order.at <= self._gap:
            if order is not None:
                self._end(order)
            self._orders.put(target, _Order(stop))
            return
        order.at, order.values = stop, order.values + 1
        self._drop_before(order, start)
        if order.values >= _IN_ORDER:
            self._extend(order, stop, fetch)

    def _extend(self, order: _Order, stop: int, fetch: Callable[[int, int], tuple[int, Ahead] | None]) -> None:
        low = max(stop, order.runs[-1][1] if order.runs else 0)
        while len(order.runs) < _AT_ONCE and low - stop < self.ahead:
            found = fetch(low, low + order.size - low % order.size)  # processes that share a disk want the same runs
            if found is None:
                return
            high, run = found
            order.runs.append((low, high, run))
            low, order.size = high, min(2 * order.size, self._most)

    def _end(self, order: _Order) -> None:
        self._drop_before(order, order.at + self.ahead * _AT_ONCE)

    @staticmethod
    def _drop_before(order: _Order, start: int) -> None:
        """Cancel the runs that end by `start`."""
        while order.runs and order.runs[0][1] <= start:
            order.runs.pop(0)[2].drop()

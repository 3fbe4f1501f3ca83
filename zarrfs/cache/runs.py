"""Runs: read-ahead along targets whose values are read in the order of their offsets.

The names of keys need not show the order in which a reader goes through a target from its beginning to its end. A run
is a range of the target around and after the last value that was read. Values within runs are cut out of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from zarrfs.cache.memory import Ahead
from zarrfs.concurrency.lru import LRU
from zarrfs.net.request_queue import GAP, PART

_TARGETS = 256  # targets whose order is remembered
_IN_ORDER = 4  # values that must be read in order before runs are fetched ahead
_FIRST = 256 << 10  # bytes of the first run; each is twice as long as the one before, and begins at a multiple of it
_AT_ONCE = 4  # runs at a time, beyond the last value


@dataclasses.dataclass(slots=True)
class _Order:
    at: int  # the end of the last value
    values: int = 0  # values read in order
    size: int = _FIRST  # bytes of the next run
    runs: list[tuple[int, int, Ahead]] = dataclasses.field(default_factory=list)  # (start, stop, run), by offset


class Runs:
    """The runs of many targets. `ahead`: bytes after the last value in which runs begin."""

    def __init__(self) -> None:
        self.ahead = 0
        self._orders: LRU[tuple[int, str], _Order] = LRU(_TARGETS, self._end)

    def covering(self, target: tuple[int, str], start: int, stop: int) -> list[tuple[int, int]]:
        """Return (start, stop) of the runs that contain a value; [] if they do not contain all of it."""
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
        """Note a read of a value. `fetch` starts a run and returns (its end, the run), or None if there is no room."""
        order = self.passed(target, start, stop)
        if order is None:
            if (order := self._orders.get(target)) is not None:
                self._end(order)
            self._orders.put(target, _Order(stop))
            return
        order.values += 1
        if order.values >= _IN_ORDER:
            self._extend(order, stop, fetch)

    def passed(self, target: tuple[int, str], start: int, stop: int) -> _Order | None:
        """Note a value that was found elsewhere; return the order that it is part of. Several readers may share it."""
        order = self._orders.use(target)
        if order is None or not -GAP <= start - order.at <= GAP:
            return None
        order.at = max(order.at, stop)
        self._drop_before(order, start - GAP)
        return order

    def _extend(self, order: _Order, stop: int, fetch: Callable[[int, int], tuple[int, Ahead] | None]) -> None:
        low = max(stop - stop % _FIRST, order.runs[-1][1] if order.runs else 0)
        while len(order.runs) < _AT_ONCE and low - stop < self.ahead:
            # end at a multiple of the size, so that processes that share a cache on disk request the same runs
            found = fetch(low, low + order.size - low % order.size)
            if found is None:
                return
            high, run = found
            order.runs.append((low, high, run))
            low, order.size = high, min(2 * order.size, PART)

    def _end(self, order: _Order) -> None:
        self._drop_before(order, order.at + self.ahead * _AT_ONCE)

    @staticmethod
    def _drop_before(order: _Order, start: int) -> None:
        """Drop the runs that end at or before `start`."""
        while order.runs and order.runs[0][1] <= start:
            order.runs.pop(0)[2].drop()

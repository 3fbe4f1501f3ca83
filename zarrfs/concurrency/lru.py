"""A map of a bounded number of entries."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


class LRU(OrderedDict[K, V]):
    """A map of at most `bound` entries that evicts the least recently used ones.

    put() and use() count as a use; the methods of a dict do not. If a caller looks entries up with get() or [] only,
    they are evicted in the order of insertion, and a look-up is as fast as that of a dict. `evicted` is called with
    every value that put() drops.
    """

    def __init__(self, bound: int, evicted: Callable[[V], None] | None = None) -> None:
        super().__init__()
        self.bound, self._evicted = bound, evicted

    def put(self, key: K, value: V) -> V:
        """Store an entry as the most recently used one, and return its value."""
        self[key] = value
        self.move_to_end(key)
        while len(self) > self.bound:
            _, dropped = self.popitem(last=False)
            if self._evicted is not None:
                self._evicted(dropped)
        return value

    def use(self, key: K) -> V | None:
        """Return the value of `key`, and make it the most recently used one; None if there is no such key."""
        value = self.get(key)
        if value is not None:
            self.move_to_end(key)
        return value

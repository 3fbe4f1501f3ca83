"""A map of bounded size."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


class LRU(OrderedDict[K, V]):
    """A map that holds `bound` entries at most and forgets the least recently used ones.

    put() and use() count as a use. The methods of a dict do not, so a caller that looks entries up with get() or []
    has a map that forgets in the order of insertion, at the speed of a dict. `evicted` is called with every value that
    put() drops.
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
        """Return the value of `key`, which is the most recently used one from now on; None where there is none."""
        value = self.get(key)
        if value is not None:
            self.move_to_end(key)
        return value

"""Maps of bounded size, by number of entries or by bytes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

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


class SizedLRU(Generic[K, V]):
    """A map of values with a size in bytes, the least recently used one first.

    The bound may change, so the caller passes it to evict(); put() evicts nothing.
    """

    def __init__(self, size_of: Callable[[V], int]) -> None:
        self._values: OrderedDict[K, V] = OrderedDict()
        self._size_of = size_of
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._values)

    def __iter__(self) -> Iterator[K]:
        return iter(self._values)

    def __contains__(self, key: object) -> bool:
        return key in self._values

    def put(self, key: K, value: V) -> None:
        """Store a value as the most recently used one."""
        self.drop(key)
        self._values[key] = value
        self.bytes += self._size_of(value)

    def use(self, key: K) -> V | None:
        """Return the value of `key`, and make it the most recently used one; None if there is no such key."""
        value = self._values.get(key)
        if value is not None:
            self._values.move_to_end(key)
        return value

    def peek(self, key: K) -> V | None:
        """Return the value of `key` without counting this as a use; None if there is no such key."""
        return self._values.get(key)

    def drop(self, key: K) -> None:
        """Remove the value of `key`, if there is one."""
        value = self._values.pop(key, None)
        if value is not None:
            self.bytes -= self._size_of(value)

    def age(self, key: K) -> None:
        """Make the value of `key` the first to be evicted, if there is one."""
        if key in self._values:
            self._values.move_to_end(key, last=False)

    def evict(self, bound: int, keep: int = 0) -> None:
        """Evict values until at most `bound` bytes remain. The `keep` most recently used values always stay."""
        while self.bytes > bound and len(self._values) > keep:
            self.bytes -= self._size_of(self._values.popitem(last=False)[1])

    def clear(self) -> None:
        """Remove all values."""
        self._values.clear()
        self.bytes = 0

"""The division of a store's keys into shares of about the same bytes, decided by each process for itself."""

from __future__ import annotations

import hashlib
import heapq
from typing import Any, NamedTuple

from zarrfs.config.shares import Share

KEY = 4 << 10  # bytes that each key counts in addition to its value: finding and opening it takes time, too
UNKNOWN = 1 << 20  # bytes that a value of unknown size counts as
RUN = 8 << 20  # bytes of neighbours that stay together, so that their blocks are fetched by one process


class Listing(NamedTuple):
    """A summary of the keys that were divided: shares with equal summaries are shares of the same keys."""

    entries: int
    bytes: int
    digest: str  # of all keys and sizes, in order


class Division:
    """The selection of one share's keys: the caller passes all keys to mine(), in the order of the store.

    Each run of neighbouring keys goes to the share that has the fewest bytes so far. Because every process sees the
    same keys with the same sizes, all processes agree, and each key is in exactly one share. A run ends after RUN
    bytes, or after a sixteenth of the average share so far, if that is less. Two shares differ at most by that plus
    the largest value.
    """

    def __init__(self, share: Share, sizes: bool = True) -> None:
        """Without `sizes`, all values count the same, because processes may know different sizes."""
        self._share, self._sizes = share, sizes
        self._loads = [(0, index) for index in range(share.count)]  # a heap; its first share gets the current run
        self._run = self._limit = self._total = self._entries = self._bytes = 0
        self._digest = hashlib.blake2b(digest_size=16)

    def mine(self, key: str, size: int | None) -> bool:
        """Return whether the next key belongs to the share. Call it once for each key, in the order of the store."""
        size = size if self._sizes else None
        if self._run > self._limit:
            load, index = self._loads[0]
            heapq.heapreplace(self._loads, (load + self._run, index))
            self._run, self._limit = 0, min(RUN, self._total // (16 * self._share.count))
        taken = weight(size)
        self._run += taken
        self._total += taken
        self._entries += 1
        self._bytes += size or 0
        self._digest.update(b"%d %s\0" % (-1 if size is None else size, key.encode("utf-8", "surrogateescape")))
        return self._loads[0][1] == self._share.index

    @property
    def listing(self) -> Listing:
        """The keys that were divided so far."""
        return Listing(self._entries, self._bytes, self._digest.hexdigest())


def weight(size: int | None) -> int:
    """Return the bytes that a key counts as, by the size of its value."""
    return KEY + (UNKNOWN if size is None else size)


def listing_of(about: Any) -> Listing:
    """Return the Listing in parsed JSON. Raise TypeError or KeyError if there is none."""
    found = Listing(about["entries"], about["bytes"], about["digest"])
    if type(found.entries) is not int or type(found.bytes) is not int or type(found.digest) is not str:
        raise TypeError("listing")
    return found

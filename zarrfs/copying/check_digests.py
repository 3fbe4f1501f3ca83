"""Digests of all values that one pass over a store reads, for comparison with a second pass.

A value takes 24 bytes of memory: a digest of its key, for look-up, and a digest of its bytes.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np

from zarrfs.system.buffers import Buffer

_PAIR = np.dtype([("key", "<u8"), ("value", "V16")])


class Digests:
    """The digests of one pass. see() adds the pieces of a value, done() completes it."""

    def __init__(self) -> None:
        self._pairs = bytearray()
        # values being read: (hash, end of the last piece, whether the pieces follow each other from the start)
        self._seen: dict[str, tuple[Any, int, bool]] = {}

    def see(self, key: str, start: int, data: Buffer) -> None:
        """Add a piece of a value. A piece that overlaps, or leaves a gap, makes the value incomplete."""
        found, stop, whole = self._seen.get(key) or (hashlib.blake2b(digest_size=16), 0, True)
        whole = whole and start == stop
        if start > stop:
            found.update(b"hole %d" % (start - stop))
        if start >= stop:
            found.update(data)
            stop = start + len(data)
        self._seen[key] = found, stop, whole

    def complete(self, key: str, size: int) -> bool:
        """Return whether all bytes of a value were added in order; if not, forget it, so that it can be read again."""
        _, stop, whole = self._seen.get(key) or (None, 0, True)
        if whole and stop == size:
            return True
        self._seen.pop(key, None)
        return False

    def done(self, key: str) -> bytes:
        """Complete a value; store and return its digest."""
        found = (self._seen.pop(key, None) or (hashlib.blake2b(digest_size=16),))[0]
        digest: bytes = found.digest()
        self._pairs += _short(key) + digest
        return digest

    def drop(self, key: str) -> None:
        """Forget a value that cannot be read."""
        self._seen.pop(key, None)

    def first(self) -> FirstPass:
        """Return the digests, ready for look-ups in a second pass."""
        return FirstPass(np.frombuffer(bytes(self._pairs), _PAIR))


class FirstPass:
    """The digests of a finished pass."""

    def __init__(self, pairs: Any) -> None:
        order = np.argsort(pairs["key"], kind="stable")
        self._keys, self._values = pairs["key"][order], pairs["value"][order]
        self._again = np.zeros(len(pairs), np.bool_)

    def has(self, key: str, digest: bytes) -> bool | None:
        """Return whether `key` had this digest; None if there was no such value, or it could not be read.

        Also note that the second pass found `key`, for lost().
        """
        wanted = np.uint64(int.from_bytes(_short(key), "little"))
        low, high = (int(np.searchsorted(self._keys, wanted, side)) for side in ("left", "right"))
        self._again[low:high] = True
        if low == high:
            return None
        return any(value.tobytes() == digest for value in self._values[low:high])

    def lost(self) -> int:
        """Return the number of values that has() was never called for."""
        return int((~self._again).sum())


def _short(key: str) -> bytes:
    return hashlib.blake2b(key.encode("utf-8", "surrogateescape"), digest_size=8).digest()

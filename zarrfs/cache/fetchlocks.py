"""Leases: which of the processes that share a cache directory fetches a block, while the others wait for it there.

A lease is a lock on a byte of the index, at an offset that is hashed from the block (system/rangelocks.py). The kernel
drops it with the process that holds it. Waiting costs a request more than need be at worst:

- A waiter whose lease holder takes far longer than requests usually do tries for the lease of the next generation, on
  the next byte, so that one of all who lost patience fetches.
- After that everybody fetches for himself, and so does everybody where the file system has no locks.
"""

from __future__ import annotations

import enum
import threading
import time
from collections.abc import Callable

import trio

from zarrfs.cache.diskfiles import Layout, hash_of
from zarrfs.cache.diskspace import LOCKS
from zarrfs.system.rangelocks import UNSUPPORTED, try_lock, unlock

OFF = 30.0  # seconds without leases after the disk has refused one
_GENERATIONS = 2  # leases on a block that are waited for, one after the other
_SHORTEST, _LONGEST = 0.005, 0.25  # seconds between attempts to take a lease
_SHARE = 0.3  # of the time waited so far: the next pause


class Turn(enum.Enum):
    """The outcome of another attempt at a lease."""

    WAIT = 1
    OURS = 2  # the lease is ours now: the block may be on the disk
    FREE = 3  # nobody is waited for any more


class Lease:
    """A block, or a stretch of a target, that is to be fetched: by this process if `held`, else by another.

    `users` fetches need it; it is released after the last. `lock`: one of them looks, for all.
    """

    __slots__ = ("at", "began", "file", "generation", "held", "lock", "since", "users")

    def __init__(self, target: str, start: int, stop: int, file: int) -> None:
        self.at = LOCKS + 8 + (int.from_bytes(hash_of(target, "lease", start, stop)[:8], "little") >> 4 << 2)
        self.file = file  # the one that it was taken on: the index may be another one soon
        self.held = False
        self.generation = self.users = 0
        self.lock = trio.Lock()
        self.began = self.since = time.monotonic()  # of: all waiting, waiting for this generation

    def pause(self) -> float:
        """Return the seconds until the next attempt."""
        return min(max(_SHORTEST, (time.monotonic() - self.began) * _SHARE), _LONGEST)


class FetchLocks:
    """The leases of one DiskCache. Thread-safe; none raises for what the disk does.

    Methods block where the directory is not local. `usable` says whether blocks can be kept at the moment: where they
    cannot, waiting for one would be in vain.
    """

    def __init__(self, layout: Layout, usable: Callable[[], bool]) -> None:
        self._layout, self._usable = layout, usable
        self._off = 0.0  # monotonic: no leases before
        self._counts = dict.fromkeys(("claims", "waits", "given_up"), 0)
        self._lock = threading.Lock()

    def take(self, target: str, start: int, stop: int) -> Lease | None:
        """Return the lease on [start, stop) of `target`, ours or another's; None: fetch without."""
        if not self._usable() or time.monotonic() < self._off:
            return None
        try:
            self._layout.is_gone()
            lease = Lease(target, start, stop, self._layout.index(make=True))
        except OSError:
            self._refused()
            return None
        if not self._attempt(lease):
            return None
        self._count("claims" if lease.held else "waits")
        return lease

    def look(self, lease: Lease, patience: float) -> Turn:
        """Try again for a lease that another holds; wait up to `patience` seconds for a generation of it."""
        if not self._usable() or not self._attempt(lease):
            return Turn.FREE
        now = time.monotonic()
        if not lease.held and now - lease.since >= patience:
            self._count("given_up")
            lease.generation += 1
            lease.since = now
            if lease.generation >= _GENERATIONS or not self._attempt(lease):
                return Turn.FREE
        return Turn.OURS if lease.held else Turn.WAIT

    def release(self, lease: Lease) -> None:
        """Let another process have it."""
        if lease.held:
            lease.held = False
            try:
                unlock(lease.file, lease.at + lease.generation)
            except OSError:
                self._refused()

    def stats(self) -> dict[str, int]:
        """Return counts since the start: leases taken, waits for leases of others, and waits that were abandoned."""
        with self._lock:
            return dict(self._counts)

    def _attempt(self, lease: Lease) -> bool:
        """Set `lease.held`; False where there are no locks."""
        try:
            lease.held = try_lock(lease.file, lease.at + lease.generation)
        except OSError as exc:
            self._refused(float("inf") if exc.errno in UNSUPPORTED else OFF)
            return False
        return True

    def _refused(self, seconds: float = OFF) -> None:
        self._off = time.monotonic() + seconds

    def _count(self, what: str) -> None:
        with self._lock:
            self._counts[what] += 1

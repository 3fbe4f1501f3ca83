"""Leases: one of the processes that share a cache directory fetches a block, and the others wait to read it there.

A lease is a lock on a byte of the index, at an offset that is a hash of the block (system/rangelocks.py). The kernel
releases it when its holder ends. If a lease does not help, the only harm is an unnecessary request:

- A waiter whose lease holder takes much longer than requests usually do tries to take the lease of the next
  generation, on the next byte. So only one of the waiters that time out fetches the block.
- If that one is too slow as well, each process fetches for itself. So does each process if the file system has no
  locks.
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

OFF = 30.0  # seconds without leases after the file system has refused one
_GENERATIONS = 2  # leases on a block for which processes wait, one after the other
_SHORTEST, _LONGEST = 0.005, 0.25  # seconds between attempts to take a lease
_SHARE = 0.3  # the next pause, as a fraction of the time waited so far


class Turn(enum.Enum):
    """The outcome of another attempt at a lease."""

    WAIT = 1
    OURS = 2  # this process has the lease now; the block may already be on the disk
    FREE = 3  # do not wait any longer


class Lease:
    """The lease on a block, or on a range of a target: this process holds it if `held`, otherwise another one does.

    `users` is the number of fetches that use it; the last one releases it. The holder of `lock` makes attempts for
    all of them.
    """

    __slots__ = ("at", "began", "file", "generation", "held", "lock", "since", "users")

    def __init__(self, target: str, start: int, stop: int, file: int) -> None:
        self.at = LOCKS + 8 + (int.from_bytes(hash_of(target, "lease", start, stop)[:8], "little") >> 4 << 2)
        self.file = file  # the index that the lock is on; it may be removed, and replaced by another one
        self.held = False
        self.generation = self.users = 0
        self.lock = trio.Lock()
        self.began = self.since = time.monotonic()  # start of the whole wait; of the wait for this generation

    def pause(self) -> float:
        """Return the seconds until the next attempt."""
        return min(max(_SHORTEST, (time.monotonic() - self.began) * _SHARE), _LONGEST)


class FetchLocks:
    """The leases of one DiskCache. Thread-safe; methods raise nothing if the disk fails.

    Methods may block unless the directory is on a local file system. `usable` returns whether blocks are cached at the
    moment; if not, waiting for a block would be in vain.
    """

    def __init__(self, layout: Layout, usable: Callable[[], bool]) -> None:
        self._layout, self._usable = layout, usable
        self._off = 0.0  # monotonic: no leases before
        self._counts = dict.fromkeys(("claims", "waits", "given_up"), 0)
        self._lock = threading.Lock()

    def take(self, target: str, start: int, stop: int) -> Lease | None:
        """Return the lease on [start, stop) of `target`, held or not; None if the caller must fetch without one."""
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
        """Try again to take a lease of another process; after `patience` seconds, that of the next generation."""
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
        """Release a lease if this process holds it, so that another process can take it."""
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
        """Try to take a lease, and set `lease.held`. Return False if locks do not work."""
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

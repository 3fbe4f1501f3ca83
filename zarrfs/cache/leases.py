"""Claims: which of the processes that share a cache directory fetches a block, while the others wait for it there.

A claim is a small file in the directory `claims`, made with O_EXCL, which is exact on all file systems that nodes
share, whether they have locks or not. Who made it fetches the block, writes it, and removes the claim; who finds it
waits until it is gone, and reads the block from the disk. Waiting costs a request more than need be at worst:

- A claim says which process holds it: on the same machine one sees whether that lives.
- A claim is touched every second. One whose mtime stays as it is for DEAD seconds, as the waiter's own clock counts
  them, is of a process that was killed. The clocks of two machines are never compared.
- Whose holder lives, but takes far longer than requests usually do, is not waited for either.
- Who gives up on a claim makes one of the next generation, so that of all who give up at the same time one fetches.
- After that, and after two claims that went without leaving the block, everybody fetches for himself.
"""

from __future__ import annotations

import contextlib
import enum
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence

import trio

from zarrfs.cache.diskfiles import Layout, hash_of
from zarrfs.system.processes import here, lives

FOLDER = "claims"
BEAT = 1.0  # seconds between touches of a claim
DEAD = 3.5  # seconds without one: its process does not live
FORGOTTEN = 900.0  # seconds after which a claim of our own is let go, whatever holds it
OFF = 30.0  # seconds without claims after the disk has refused one
_GENERATIONS = 2  # claims on a block that are waited for, one after the other
_ROUNDS = 2  # claims that went without leaving the block
_SHORTEST, _LONGEST = 0.005, 0.25  # seconds between looks at a claim
_SHARE = 0.3  # of the time waited so far: the next pause


class Turn(enum.Enum):
    """The state of another process's lease, as its file shows it."""

    WAIT = 1
    GONE = 2  # the block should be on the disk
    OURS = 3  # the claim is ours now, as the other was given up
    FREE = 4  # nobody is waited for any more


class Claim:
    """A range that this process wants: `held` by it, or by another for which it waits, under `lock`.

    `left`: the ranges in it for which it was made and that are not done; it is released after the last of them.
    """

    __slots__ = (
        "began", "changed", "generation", "held", "left", "lock", "name", "over", "rounds", "sign", "since", "start",
        "stop", "target",
    )  # fmt: skip

    def __init__(self, target: str, start: int, stop: int, wants: Sequence[tuple[int, int]]) -> None:
        self.left = wants
        self.target, self.start, self.stop = target, start, stop
        self.lock = trio.Lock()  # many blocks may lie in the range: one after the other looks
        self.name = hash_of(target, "claim", start, stop).hex()
        self.held = self.over = False  # over: the last look has shown that there is nothing to wait for
        self.generation = self.rounds = 0
        self.began = self.since = self.changed = time.monotonic()  # of: all waiting, this claim, its last touch
        self.sign = (0, 0)  # inode and mtime of the file that we saw last

    def pause(self) -> float:
        """Seconds until it is worth another look."""
        return 0.0 if self.over else min(max(_SHORTEST, (time.monotonic() - self.began) * _SHARE), _LONGEST)

    def file(self, generation: int) -> str:
        """The name of its file; scans of the cache remove such files when they are old."""
        return f".{self.name}.{generation}.tmp"


class Claims:
    """The claims of one DiskCache. Thread-safe; all methods block; none raises for what the disk does.

    `usable` says whether blocks can be kept at the moment: where they cannot, waiting for one would be in vain.
    """

    def __init__(self, layout: Layout, usable: Callable[[], bool]) -> None:
        self._layout, self._usable = layout, usable
        self._lock = threading.Lock()
        self._own: dict[str, dict[str, Claim]] = {}  # held by us: by target, then by name
        self._place = here().encode()
        self._me = b"%s %d" % (self._place, os.getpid())
        self._off = 0.0  # monotonic: no claims before
        self._counts = dict.fromkeys(("claims", "waits", "given_up"), 0)

    @property
    def any_held(self) -> bool:
        """Return whether this process holds a lease."""
        return bool(self._own)

    def take(
        self, target: str, start: int, stop: int, wants: Sequence[tuple[int, int]] | None = None
    ) -> Claim | None:
        """The claim on the range [start, stop) of `target`, ours or another's. None: to be fetched without.

        `wants`: what is to be fetched of it, if not all.
        """
        if not self._usable() or time.monotonic() < self._off:
            return None
        claim = Claim(target, start, stop, [(start, stop)] if wants is None else wants)
        if self._make(claim) is None:
            return None
        self._count("claims" if claim.held else "waits")
        return claim

    def look(self, claim: Claim, patience: float) -> Turn:
        """Return the state of another's lease; wait up to `patience` seconds for one whose holder lives."""
        found = self._look(claim, patience)
        claim.over = found is not Turn.WAIT
        return found

    def _look(self, claim: Claim, patience: float) -> Turn:
        if claim.generation >= _GENERATIONS:
            return Turn.FREE
        try:
            fd = self._layout.open(FOLDER, claim.file(claim.generation), os.O_RDONLY)  # NFS asks its server at open(2)
            try:
                status, holder = os.fstat(fd), os.read(fd, 200)
            finally:
                os.close(fd)
        except FileNotFoundError:
            return Turn.GONE
        except OSError:
            return Turn.FREE
        now, sign = time.monotonic(), (status.st_ino, status.st_mtime_ns)
        if sign != claim.sign:
            claim.since = claim.since if sign[0] == claim.sign[0] else now
            claim.sign, claim.changed = sign, now
        if now - claim.changed < DEAD and now - claim.since < patience and not self._has_ended(holder):
            return Turn.WAIT
        self._count("given_up")
        claim.generation += 1
        if claim.generation >= _GENERATIONS or self._make(claim) is None:
            return Turn.FREE
        claim.since = claim.changed = now
        return Turn.OURS if claim.held else Turn.WAIT

    def again(self, claim: Claim) -> Claim | None:
        """Take a claim that is gone, though the block is not there. None: to be fetched without."""
        claim.rounds += 1
        claim.generation = 0
        claim.since = claim.changed = time.monotonic()
        if claim.rounds > _ROUNDS or not self._usable() or self._make(claim) is None:
            return None
        return claim

    def release(self, claims: Iterable[Claim]) -> None:
        """Let go of those of `claims` that are held."""
        for claim in claims:
            with self._lock:
                own = self._own.get(claim.target, {})
                if own.pop(claim.name, None) is None:
                    continue
                if not own:
                    del self._own[claim.target]
            claim.held = False
            for generation in range(claim.generation + 1):  # those before were of others, who were given up
                with contextlib.suppress(OSError):
                    os.unlink(claim.file(generation), dir_fd=self._layout.folder(FOLDER))

    def settle(self, target: str, start: int, stop: int) -> None:
        """Let go of the claims for what touches [start, stop) of `target`: that is on the disk, or will not be."""
        with self._lock:
            own = self._own.get(target, {}).values()
            touched = [claim for claim in own if claim.start < stop and start < claim.stop]
        self.release([claim for claim in touched if self.leave(claim, start, stop)])

    def leave(self, claim: Claim, start: int, stop: int) -> bool:
        """Note that nobody waits for [start, stop) of a claim any more; True: it is to be released."""
        with self._lock:
            claim.left = [(low, high) for low, high in claim.left if stop <= low or high <= start]
            return claim.held and not claim.left

    def beat(self) -> None:
        """Touch what is held, so that others see that we live."""
        now = time.monotonic()
        with self._lock:
            held = [claim for own in self._own.values() for claim in own.values()]
        self.release(claim for claim in held if now - claim.began > FORGOTTEN)
        for claim in held:
            if now - claim.began < BEAT:
                continue
            with contextlib.suppress(OSError):
                name, folder = claim.file(claim.generation), self._layout.folder(FOLDER)
                os.utime(name, dir_fd=folder, follow_symlinks=False)

    def close(self) -> None:
        """Let go of all."""
        with self._lock:
            held = [claim for own in self._own.values() for claim in own.values()]
        self.release(held)

    def stats(self) -> dict[str, int]:
        """Counts since the start: claims made, those of others that were waited for, and those that were given up."""
        with self._lock:
            return dict(self._counts)

    def _make(self, claim: Claim) -> bool | None:
        """Try to take the lease: True if this process holds it now, None if the disk refuses."""
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
            fd = self._layout.open(FOLDER, claim.file(claim.generation), flags, make=True)
            try:
                os.write(fd, self._me)
            finally:
                os.close(fd)
        except FileExistsError:
            return False
        except OSError:
            self._layout.forget()  # perhaps somebody has removed the directory
            self._off = time.monotonic() + OFF
            return None
        claim.held = True
        with self._lock:
            self._own.setdefault(claim.target, {})[claim.name] = claim
        return True

    def _has_ended(self, holder: bytes) -> bool:
        """Return whether a process of this machine has certainly ended."""
        place, _, pid = holder.rpartition(b" ")
        return place == self._place and pid.isdigit() and not lives(int(pid))

    def _count(self, what: str) -> None:
        with self._lock:
            self._counts[what] += 1

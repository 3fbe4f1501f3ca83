"""Workers of a soak, which read, list and write; each is a thread with its own random numbers."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence

from tests.soak.model import Model
from tests.soak.places import Place
from tests.soak.tally import Tally
from tests.soak.world import World, digest

STUCK = 120.0  # seconds after which an operation counts as hanging
_KILLED = 10.0  # seconds in which an interrupted reader must have exited
_PIECES = (4096, 65_536, 1 << 20)

# Maps a file and prints the SHA-256 of bytes [argument 2, argument 3): SIGBUS kills it if a page cannot be read.
_MAPPER = """
import hashlib, mmap, os, sys
descriptor = os.open(sys.argv[1], os.O_RDONLY)
memory = mmap.mmap(descriptor, 0, prot=mmap.PROT_READ)
print(hashlib.sha256(memory[int(sys.argv[2]) : int(sys.argv[3])]).hexdigest())
"""


class Control:
    """The signals that stop and pause the workers."""

    def __init__(self) -> None:
        self.stopping = threading.Event()
        self._go = threading.Event()
        self._go.set()

    def pause(self, workers: Sequence[Worker]) -> list[str]:
        """Let no operation begin; return the names of workers whose operation has not ended after STUCK seconds."""
        self._go.clear()
        deadline = time.monotonic() + STUCK
        while (busy := [worker.name for worker in workers if not worker.idle]) and time.monotonic() < deadline:
            time.sleep(0.01)
        return busy

    def resume(self) -> None:
        """Let operations begin again."""
        self._go.set()

    def wait(self) -> bool:
        """Block the worker while paused; return whether to continue."""
        self._go.wait()
        return not self.stopping.is_set()


class Worker(threading.Thread):
    """A thread that repeats one kind of operation; `_one` decides which of its errors are violations."""

    def __init__(
        self, kind: str, number: int, world: World, tally: Tally, control: Control,
        places: Sequence[Place], act: Callable[[Place, random.Random, Tally], int],
    ) -> None:  # fmt: skip
        super().__init__(name=f"{kind} {number}", daemon=True)
        self.kind, self.idle, self.since = kind, True, 0.0
        self.doing = ""
        self._tally, self._control, self._places, self._act = tally, control, places, act
        self._chance = random.Random(f"{world.seed} {self.name}")

    def run(self) -> None:
        """Repeat the operation until the control stops the workers."""
        while True:
            self.idle = True
            if not self._control.wait():
                return
            self.idle, self.since = False, time.monotonic()
            if self._control.wait():  # again: a pause may have begun before it was busy
                self._one(self._chance.choice(self._places))
            time.sleep(self._chance.random() * 0.01)

    def _one(self, place: Place) -> None:
        with place.used():
            self.since, epoch, excused = time.monotonic(), place.epoch, place.remote and place.weather.excuses
            self.doing = place.name
            try:
                self._tally.done(self.kind, self._act(place, self._chance, self._tally))
            except OSError as exc:
                if place.excuses(exc.errno, epoch) or (excused and exc.errno == errno.EIO):
                    self._tally.excused(self.kind, exc.errno)
                else:
                    self._tally.violation(f"{self.name} in {place.name}: {exc!r}")
            except Exception:
                self._tally.violation(f"{self.name} in {place.name}: {traceback.format_exc()}")


class Wrong(Exception):
    """Bytes, names or attributes are not the expected ones."""


@contextlib.contextmanager
def _opened(place: Place, key: str, chance: random.Random) -> Iterator[int]:
    """Open a file; half of the time, without read-ahead, and drop its pages from the page cache afterwards."""
    descriptor = os.open(place.mountpoint / key, os.O_RDONLY)
    try:
        dropping = chance.random() < 0.5
        if dropping:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
        yield descriptor
        if dropping:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def _check(place: Place, key: str, start: int, found: bytes, length: int) -> None:
    wanted = place.values[key][start : start + length]
    if found != wanted:
        first = next((at for at, (one, two) in enumerate(zip(found, wanted, strict=False)) if one != two), None)
        raise Wrong(f"{key} [{start}, {start + length}): {len(found)} bytes for {len(wanted)}, first wrong: {first}")


def _pread(descriptor: int, length: int, start: int) -> bytes:
    """Read `length` bytes or raise the error: a failure after the first page makes only a short read of pread(2)."""
    found = b""
    while len(found) < length and (more := os.pread(descriptor, length - len(found), start + len(found))):
        found += more
    return found


def read_randomly(place: Place, chance: random.Random, tally: Tally) -> int:
    """Read one to nine pieces of one file at random offsets."""
    key = chance.choice(place.keys)
    size, total = len(place.values[key]), 0
    with _opened(place, key, chance) as descriptor:
        for _ in range(chance.randrange(1, 10)):
            start, length = chance.randrange(size), chance.choice((1, 100, 5000, 70_000))
            found = _pread(descriptor, min(length, size - start), start)
            _check(place, key, start, found, length)
            total += len(found)
    return total


def read_through(place: Place, chance: random.Random, tally: Tally) -> int:
    """Read a file from its start until a read returns nothing, which must be at its end."""
    key, piece, at = chance.choice(place.keys), chance.choice(_PIECES), 0
    with _opened(place, key, chance) as descriptor:
        while found := os.pread(descriptor, piece, at):
            _check(place, key, at, found, len(found))
            at += len(found)
    if at != len(place.values[key]):
        raise Wrong(f"{key}: ends after {at} of {len(place.values[key])} bytes")
    return at


def read_all(place: Place, keys: Sequence[str]) -> int:
    """Read and compare every byte of the files; raise OSError or Wrong."""
    total = 0
    for key in keys:
        found = (place.mountpoint / key).read_bytes()
        _check(place, key, 0, found, max(len(found), len(place.values[key])))
        total += len(found)
    return total


def list_names(place: Place, chance: random.Random, tally: Tally) -> int:
    """List a directory: each of its files must occur exactly once."""
    folder = chance.choice(place.keys).rpartition("/")[0]
    wanted = {key.rpartition("/")[2] for key in place.keys if key.rpartition("/")[0] == folder}
    epoch = place.epoch
    with os.scandir(place.mountpoint / folder) as entries:
        found = [entry.name for entry in entries]
    if epoch % 2 or epoch != place.epoch:
        raise FileNotFoundError(errno.ENOENT, "unmounted meanwhile: an empty directory may have been listed")
    if len(found) != len(set(found)) or not wanted <= set(found):
        raise Wrong(f"listing of {folder!r}: {len(found)} names, {len(wanted - set(found))} missing")
    return 0


def stat_storm(place: Place, chance: random.Random, tally: Tally) -> int:
    """Stat 200 random files and 20 names that do not exist."""
    for key in chance.choices(place.keys, k=200):
        if (size := os.stat(place.mountpoint / key).st_size) != len(place.values[key]):
            raise Wrong(f"{key}: size {size}, not {len(place.values[key])}")
    for number in range(20):
        with contextlib.suppress(FileNotFoundError):
            os.stat(place.mountpoint / f"absent-{number}-{chance.random()}")
            raise Wrong("a name that is not there is")
    return 0


def map_file(place: Place, chance: random.Random, tally: Tally) -> int:
    """Read a part of a file through mmap, in a process of its own, which SIGBUS may kill."""
    key = chance.choice(place.keys)
    start = chance.randrange(len(place.values[key]))
    stop = min(len(place.values[key]), start + chance.randrange(1, 300_000))
    command = [sys.executable, "-I", "-S", "-c", _MAPPER, str(place.mountpoint / key), str(start), str(stop)]
    epoch, excused = place.epoch, place.remote and place.weather.excuses
    done = subprocess.run(command, capture_output=True, text=True, timeout=STUCK, check=False)
    if done.returncode:
        if epoch % 2 or epoch != place.epoch:
            raise OSError(errno.ENOTCONN, "the daemon went")
        if excused or (place.remote and place.weather.excuses):
            raise OSError(errno.EIO, "ended early")  # by SIGBUS, or by an error of open(2)
        raise Wrong(f"{key}: mmap: status {done.returncode}: {done.stderr[-300:]}")
    if done.stdout.strip() != digest(place.values[key][start:stop]):
        raise Wrong(f"{key} [{start}, {stop}): mapped bytes are not right")
    return stop - start


def interrupt(place: Place, chance: random.Random, tally: Tally) -> int:
    """Interrupt cat(1) of a file by SIGINT or SIGKILL: it must exit within _KILLED seconds."""
    reader = subprocess.Popen(
        ["cat", str(place.mountpoint / chance.choice(place.keys))], stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )  # fmt: skip
    time.sleep(chance.random() * 0.05)
    reader.send_signal(chance.choice((signal.SIGINT, signal.SIGKILL)))
    try:
        reader.wait(_KILLED)
    except subprocess.TimeoutExpired:
        raise Wrong(f"a reader (pid {reader.pid}) that was interrupted is still there") from None
    return 0


def start_workers(world: World, tally: Tally, control: Control, model: Model) -> list[Worker]:
    """Start all workers and return them."""
    readable = [place for place in world.places if not place.writable]
    kinds: list[tuple[str, int, Sequence[Place], Callable[[Place, random.Random, Tally], int]]] = [
        ("random read", 6, readable, read_randomly),
        ("sequential read", 3, readable, read_through),
        ("listing", 1, readable, list_names),
        ("stat storm", 1, readable, stat_storm),
        ("mmap read", 1, readable, map_file),
        ("interrupted read", 1, readable, interrupt),
        ("write", 2, [world.place("overlay")], model.act),
    ]
    workers = [
        Worker(kind, number, world, tally, control, places, act)
        for kind, count, places, act in kinds
        for number in range(count)
    ]
    for worker in workers:
        worker.start()
    return workers

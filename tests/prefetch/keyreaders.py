"""Simulated readers of the keys of a reference set, and a store that records prefetches; time is simulated, too."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Sequence
from pathlib import Path

import trio
from trio.testing import MockClock

from tests.sources.opening import open_source
from zarrfs.config.options import Options
from zarrfs.prefetch.readahead import KeyReadAhead
from zarrfs.store.index import IndexStore

LATENCY = 0.03  # seconds of simulated time
CHUNK, TINY = 100_000, 1000  # bytes of a value


def a_store(path: Path, keys: Iterable[str], size: int = CHUNK) -> RecordingStore:
    """Open a reference set with `keys`, each of which has `size` bytes of one target."""
    refs: dict[str, object] = {key: ["http://nowhere.test/data", size * at, size] for at, key in enumerate(keys)}
    (path / "refs.json").write_text(json.dumps({"version": 1, "refs": refs}))
    store = open_source(str(path / "refs.json"), Options(), child=False)
    assert isinstance(store, IndexStore)
    store.__class__ = RecordingStore
    assert isinstance(store, RecordingStore)
    store.size, store.there = size, frozenset(refs)
    store.begin()
    return store


class RecordingStore(IndexStore):
    """An IndexStore that only pretends to prefetch: each batch takes LATENCY."""

    size: int  # bytes of a value
    there: frozenset[str]  # its keys

    def begin(self) -> None:
        """Forget what was recorded."""
        self.batches: list[list[str]] = []
        self.asked: dict[str, float] = {}  # the time of the first prefetch of each key
        self.cancelled = 0

    @property
    def remote(self) -> bool:
        return True

    async def prefetch(self, keys: Sequence[str]) -> None:
        there = [key for key in keys if key in self.there]  # absent keys are skipped
        self.batches.append(there)
        for key in there:
            self.asked.setdefault(key, trio.current_time())
        try:
            await trio.sleep(LATENCY)
        except trio.Cancelled:
            self.cancelled += 1
            raise


class Outcome:
    """The results of readers."""

    def __init__(self, store: RecordingStore, reads: list[str], expected: int, seconds: float, ahead: KeyReadAhead):
        self.reads = len(reads)
        self.expected = expected  # reads of keys that were prefetched already
        self.batches = store.batches
        self.prefetched = set(store.asked)
        self.cancelled = store.cancelled
        self.waste = len(self.prefetched - set(reads))
        self.seconds = seconds  # simulated

    @property
    def share(self) -> float:
        """The share of reads whose key was prefetched already."""
        return self.expected / self.reads

    def __repr__(self) -> str:
        return (
            f"{self.reads} reads, {self.share:.3f} expected, {self.waste} wasted, {len(self.batches)} batches, "
            f"{self.cancelled} cancelled, {self.seconds:.2f} s"
        )


def read_all(
    store: RecordingStore, *orders: Sequence[str], readers: int = 1, limit: int = 64 << 20, seed: int = 1
) -> Outcome:
    """Read all `orders` concurrently; `readers` tasks share each order, and each takes the next key from it."""
    reads: list[str] = []
    expected = 0

    async def reader(queue: list[str], rng: random.Random, nursery: trio.Nursery, ahead: KeyReadAhead) -> None:
        nonlocal expected

        async def apart() -> None:
            await trio.sleep(rng.random() * 1e-6)  # no two readers at once: trio would choose which goes first

        await apart()
        while queue:
            key = queue.pop()
            await trio.sleep(rng.random() * 0.002)  # between taking a key and reading it
            asked = store.asked.get(key)
            expected += asked is not None
            reads.append(key)
            if (work := ahead.opened(key, store.size)) is not None:
                nursery.start_soon(work)
            now = trio.current_time()
            await trio.sleep(max(0.0, (now if asked is None else asked) + LATENCY - now) + 0.0005)
            await apart()

    async def main() -> tuple[float, KeyReadAhead]:
        ahead = KeyReadAhead(store, limit)
        began = trio.current_time()
        async with trio.open_nursery() as background:
            async with trio.open_nursery() as nursery:
                for number, order in enumerate(orders):
                    queue = list(reversed(order))
                    for at in range(readers):
                        rng = random.Random(f"{seed} {number} {at}")
                        nursery.start_soon(reader, queue, rng, background, ahead)
            took = trio.current_time() - began
        return took, ahead

    store.begin()
    seconds, ahead = trio.run(main, clock=MockClock(autojump_threshold=0))
    return Outcome(store, reads, expected, seconds, ahead)


def grid(*counts: int | range, prefix: str = "a/", separator: str = ".", suffix: str = "") -> list[str]:
    """Return the keys of a grid, or of a part of it, in C order."""
    found: list[tuple[int, ...]] = [()]
    for count in counts:
        found = [(*above, at) for above in found for at in (range(count) if isinstance(count, int) else count)]
    return [prefix + separator.join(map(str, index)) + suffix for index in found]


async def _listed(store: IndexStore) -> list[str]:
    return [key async for key in store.list_prefix("")]


def listed(store: IndexStore) -> list[str]:
    """Return all keys in the order in which cp -r reads them."""
    return trio.run(_listed, store)

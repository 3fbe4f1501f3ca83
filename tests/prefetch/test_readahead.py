"""Read-ahead across keys: the share of reads that were prefetched, and the share of prefetches that are never read.

Time is simulated, and the order of readers is random with a fixed seed. The shares in these tests are slightly below
those that were measured.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from pathlib import Path

import pytest
import trio
import trio.lowlevel

from tests.prefetch.keyreaders import CHUNK, TINY, Outcome, RecordingStore, a_store, grid, listed, read_all
from zarrfs.errors import ReadError
from zarrfs.prefetch.readahead import KeyReadAhead
from zarrfs.store.index import IndexStore

SQUARE = grid(40, 60)


@pytest.fixture(scope="module")
def square(tmp_path_factory: pytest.TempPathFactory) -> RecordingStore:
    """Return a store with the 2,400 chunks of an array, and its metadata."""
    return a_store(tmp_path_factory.mktemp("square"), [".zgroup", "a/.zarray", *SQUARE])


def check(outcome: Outcome, share: float, waste: float = 0.0) -> None:
    """Check that at least `share` of the reads were prefetched, and that at most `waste` keys per read were wasted."""
    assert outcome.share >= share, outcome
    assert outcome.waste <= waste * outcome.reads, outcome


# -- the chunk grid


@pytest.mark.parametrize(
    ("keys", "readers", "share", "waste"),
    [
        (SQUARE, 1, 0.998, 0), (SQUARE, 64, 0.85, 0),
        (SQUARE[:1500:-1], 1, 0.995, 0.6), (SQUARE[:1500:-1], 32, 0.75, 0.6),
        # along the first axis; the window at its end is wasted
        ([f"a/{row}.{column}" for column in range(40) for row in range(40)], 8, 0.97, 0.7),
        (grid(range(40), range(1, 2)), 1, 0.9, 0.6),  # one point at every time
        # a box: its end cannot be predicted
        (grid(40, range(5, 15)), 1, 0.98, 0.1), (grid(40, range(5, 15)), 32, 0.75, 0.1),
        (grid(range(10, 40), range(30, 50)), 1, 0.98, 1), (grid(range(10, 40), range(30, 50)), 32, 0.6, 1),
        # lines some columns or rows apart, or in another direction
        (grid(40, range(0, 60, 3)), 1, 0.99, 0.05), (grid(40, range(0, 60, 3)), 32, 0.7, 0.05),
        (grid(range(0, 40, 2), 60), 1, 0.99, 0.1), (grid(range(0, 40, 6), 10), 1, 0.9, 0.2),
        (grid(range(39, -1, -1), 60), 1, 0.99, 0.1), (grid(40, range(59, -1, -1)), 1, 0.99, 0.1),
    ],
)  # fmt: skip
def test_a_part_of_a_grid_is_prefetched(
    keys: list[str], readers: int, share: float, waste: float, square: RecordingStore
) -> None:
    check(read_all(square, keys, readers=readers), share, waste)


@pytest.mark.parametrize("readers", [1, 32])
def test_random_reads_fetch_nothing(readers: int, square: RecordingStore) -> None:
    outcome = read_all(square, random.Random(readers).sample(SQUARE, 400), readers=readers)
    assert len(outcome.prefetched) < 40, outcome


@pytest.mark.parametrize("readers", [1, 32])
def test_random_reads_of_half_an_array_fetch_little(readers: int, tmp_path: Path) -> None:
    """So many of its chunks have been read that a new one is often beside others."""
    chunks = grid(20, 30)
    outcome = read_all(a_store(tmp_path, chunks), random.Random(readers).sample(chunks, 300), readers=readers)
    assert outcome.waste < 90, outcome


@pytest.mark.parametrize("readers", [1, 16])
def test_a_scan_of_short_lines_after_random_reads_is_prefetched(readers: int, tmp_path: Path) -> None:
    """Random reads have made a sequence need more reads in order than a line has chunks."""
    chunks = grid(200, 5)
    several = random.Random(1).sample(chunks[:400], 200)
    outcome = read_all(a_store(tmp_path, chunks), several + chunks[400:], readers=readers)
    assert outcome.share > 0.7, outcome  # 0.75 are in order


@pytest.mark.parametrize(
    "form",
    [
        {"separator": "/"}, {"separator": "/", "prefix": "a/c/"}, {"prefix": "a/c."}, {"suffix": ".blosc"},
        {"prefix": ""}, {"prefix": "0/"},
    ],
)  # fmt: skip
def test_every_form_of_chunk_keys_is_predicted(form: dict[str, str], tmp_path: Path) -> None:
    """The grid has indices above 9, where its order differs from that of names."""
    keys = grid(5, 4, 30, **form)
    check(read_all(a_store(tmp_path, keys), keys), 0.99)


def test_a_scan_in_name_order_prefetches_no_key_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunk 99 comes last by name; chunk 100, next in the grid, was read long before. Listing names costs requests."""
    monkeypatch.setattr(IndexStore, "immutable", False)
    keys = grid(400, 1, 1, separator="/", prefix="b/c/")
    outcome = read_all(a_store(tmp_path, keys), sorted(keys))
    asked = Counter(key for batch in outcome.batches for key in batch)
    assert not [key for key, times in asked.items() if times > 1 and key >= "b/c/1" and key < "b/c/2"], outcome


def test_missing_chunks_do_not_end_a_sequence(tmp_path: Path) -> None:
    """Chunks that have nothing but the fill value may be absent from a store."""
    rng = random.Random(3)
    keys = [key for key in grid(50, 50) if rng.random() > 0.3]
    check(read_all(a_store(tmp_path, keys), keys), 0.9, 0.05)


def test_readers_of_separate_parts_of_an_array(square: RecordingStore) -> None:
    check(read_all(square, *[SQUARE[at : at + 600] for at in range(0, 2400, 600)]), 0.95)


def test_arrays_read_concurrently(tmp_path: Path) -> None:
    arrays = [grid(40, 25, prefix=f"{name}/") for name in "xyz"]
    check(read_all(a_store(tmp_path, [key for array in arrays for key in array]), *arrays, readers=2), 0.97)


def test_a_long_key_is_parsed_in_no_time(square: RecordingStore) -> None:
    """It would stop the loop, and with it all readers of the mount: a quadratic parser takes seconds."""
    ahead = KeyReadAhead(square, 1)
    began = time.thread_time()
    for end in ("x", "1.x", "1" * 200, "1" * 4000):
        for _ in range(10):
            ahead.opened("0/" * 2000 + end, 1)
    for number in range(8):
        ahead.opened(f"{number * 10**12}.dat", 1)
    assert time.thread_time() - began < 0.5


# -- the directory


@pytest.mark.parametrize(("readers", "share"), [(1, 0.99), (32, 0.7)])
def test_cp_of_chunks(readers: int, share: float, tmp_path: Path) -> None:
    """cp reads in the order of names (0, 1, 10, 100, 101), one directory after another."""
    store = a_store(tmp_path, [f"tiny/{group}/{number}" for group in range(5) for number in range(200)], TINY)
    outcome = read_all(store, listed(store), readers=readers)
    check(outcome, share)
    assert readers > 1 or len(outcome.batches) <= 15, outcome


@pytest.mark.parametrize(("readers", "share"), [(1, 0.99), (32, 0.93)])
def test_cp_of_files(readers: int, share: float, tmp_path: Path) -> None:
    rng = random.Random(1)
    store = a_store(tmp_path, [f"d{at % 3}/{rng.randrange(10**9):x}.dat" for at in range(1500)])
    check(read_all(store, listed(store), readers=readers), share)
    outcome = read_all(store, rng.sample(listed(store), 500), readers=readers)
    assert len(outcome.prefetched) < 30, outcome


def test_cp_of_directories_with_few_files(tmp_path: Path) -> None:
    names = (".zarray", ".zattrs", "0")
    store = a_store(tmp_path, [f"v{number}/{name}" for number in range(300) for name in names])
    check(read_all(store, listed(store)), 0.99)


# -- bounds


@pytest.mark.parametrize("limit", [2, 100])
def test_bytes_ahead_are_bounded(limit: int, square: RecordingStore) -> None:
    outcome = read_all(square, SQUARE[:1000], limit=limit * CHUNK)
    check(outcome, 0.98, limit / 1000)
    assert max(map(len, outcome.batches)) <= max(4, limit)


def test_a_limit_of_zero_disables_read_ahead(square: RecordingStore) -> None:
    assert read_all(square, SQUARE[:100], limit=0).batches == []


def test_random_reads_after_a_scan_cancel_its_read_ahead(square: RecordingStore) -> None:
    async def main() -> None:
        ahead = KeyReadAhead(square, 64 << 20)
        async with trio.open_nursery() as nursery:
            for key in SQUARE[:200]:
                if (work := ahead.opened(key, CHUNK)) is not None:
                    nursery.start_soon(work)
                await trio.lowlevel.checkpoint()
            rng = random.Random(1)
            for key in rng.sample(SQUARE[2000:], 50):
                ahead.opened(key, CHUNK)

    square.begin()
    trio.run(main)
    assert square.cancelled > 0
    assert len(square.asked) < 600


def test_errors_of_the_store_do_not_reach_readers(square: RecordingStore, monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(*arguments: object, **more: object) -> None:
        raise failure

    for failure in (ReadError("target", "broken"), RuntimeError("a bug")):  # noqa: B007 - broken() raises it
        for method in ("info", "prefetch"):
            with monkeypatch.context() as patch:
                patch.setattr(square, method, broken)
                read_all(square, SQUARE[:100], ["a/.zarray", ".zgroup"])


def test_local_targets_are_not_prefetched(square: RecordingStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RecordingStore, "remote", False)
    assert read_all(square, SQUARE[:100]).batches == []

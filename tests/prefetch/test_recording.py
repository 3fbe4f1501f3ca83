"""Records of reads: writing and parsing them, and warming a cache with them."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.prefetch.keyreaders import RecordingStore
from tests.servers import Faulty
from zarrfs import sources
from zarrfs.cache import diskspace
from zarrfs.config.options import Options
from zarrfs.config.shares import Share
from zarrfs.errors import SourceError, UsageError
from zarrfs.prefetch import recording
from zarrfs.prefetch.recording import (
    BLOCK,
    RecordedRead,
    Recorder,
    Warmed,
    read_record,
    records_to_warm,
    settle,
    warm,
)
from zarrfs.store.api import Store
from zarrfs.store.remote import FsspecStore
from zarrfs.system.buffers import Buffer

HEADER = '{"zarrfs": "record", "version": 1}\n'


def blocks(records: list[RecordedRead]) -> list[tuple[str, int]]:
    """Return (key, number) of each block in some records."""
    assert all(record.start % BLOCK == record.stop % BLOCK == 0 for record in records)
    return [(key, at // BLOCK) for key, start, stop in records for at in range(start, stop, BLOCK)]


READS = st.lists(
    st.tuples(
        st.sampled_from(["a", "d/0.1", "d/ü", "d/\udc80", 'q"\n']),
        st.integers(0, 5 * BLOCK),
        st.integers(0, 2 * BLOCK),
    ),
    max_size=30,
)


@settings(deadline=None, max_examples=200)
@given(reads=READS, flushes=st.integers(1, 10))
def test_each_block_is_recorded_once_in_order_of_first_use(
    reads: list[tuple[str, int, int]], flushes: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("record") / "record"
    recorder = Recorder(str(path), "the source")
    expected: dict[tuple[str, int], None] = {}
    for number, (key, start, length) in enumerate(reads):
        recorder.read(key, start, start + length)
        for at in range(start // BLOCK, -(-(start + length) // BLOCK) if length else 0):
            expected[key, at] = None
        if number % flushes == 0:
            lines, recorder._lines = recorder._lines, []
            recorder._write(lines)
    recorder.close()
    assert blocks(list(read_record(str(path)))) == list(expected)
    assert json.loads(path.read_text().split("\n")[0]) == {"zarrfs": "record", "version": 1, "source": "the source"}


def test_a_large_value_read_in_order_is_one_line(tmp_path: Path) -> None:
    recorder = Recorder(str(tmp_path / "record"))
    for at in range(0, 40 * BLOCK, 1 << 20):
        recorder.read("big", at, at + (1 << 20))
    recorder.close()
    assert list(read_record(str(tmp_path / "record"))) == [("big", 0, 40 * BLOCK)]


def test_recorded_reads_are_written_soon(tmp_path: Path) -> None:
    path = tmp_path / "record"

    async def main() -> None:
        recorder = Recorder(str(path))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(recorder.run)
            recorder.read("a", 0, 1)
            with trio.fail_after(30):
                while len(path.read_text().splitlines()) < 2:  # noqa: ASYNC110 - a file tells nobody
                    await trio.sleep(0.01)
            nursery.cancel_scope.cancel()

    trio.run(main)
    assert list(read_record(str(path))) == [("a", 0, BLOCK)]


WRITER = """
import itertools, sys, trio
from zarrfs.prefetch import recording
recording._INTERVAL = 0.002
async def main():
    recorder = recording.Recorder(sys.argv[1])
    async with trio.open_nursery() as nursery:
        nursery.start_soon(recorder.run)
        for number in itertools.count():
            recorder.read(f"key/{number}" + "x" * (number % 200), 0, 1)
            if number % 10 == 0:
                await trio.sleep(0)
trio.run(main)
"""


def test_a_killed_writer_leaves_a_readable_record(tmp_path: Path) -> None:
    path = tmp_path / "record"
    for _ in range(5):
        with subprocess.Popen([sys.executable, "-c", WRITER, str(path)]) as writer:
            while not path.exists() or path.stat().st_size < 200_000:
                time.sleep(0.005)
            writer.send_signal(signal.SIGKILL)
        keys = [record.key for record in read_record(str(path))]
        assert keys == [f"key/{number}" + "x" * (number % 200) for number in range(len(keys))]
        assert len(keys) > 500
        path.unlink()


def test_a_new_record_replaces_the_old_one_immediately(tmp_path: Path) -> None:
    """An open reader of the old record can still read it: record= and warm= may name the same file."""
    path = tmp_path / "record"
    path.write_text(HEADER + '["old", 0, 1]\n' * 100)
    options = Options(record=str(path), warm=str(path))
    old = records_to_warm(options)
    assert old is not None
    recorder = Recorder(str(path))
    assert list(read_record(str(path))) == []
    recorder.close()
    assert len(list(old)) == 100
    assert [entry.name for entry in tmp_path.iterdir()] == ["record"]


def test_a_first_run_has_no_record_yet(tmp_path: Path) -> None:
    path = str(tmp_path / "record")
    assert records_to_warm(Options()) is None
    assert records_to_warm(Options(record=path, warm=path)) is None
    with pytest.raises(SourceError, match="record: no such file"):
        records_to_warm(Options(warm=path))


def test_a_record_in_a_missing_directory_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"option record=.*: no such file or directory"):
        Recorder(str(tmp_path / "none" / "record"))


@pytest.mark.parametrize(
    "content",
    [b"my thesis\n", b'{"version": 1, "refs": {}}\n', b"[1]\n", b"\xff", b'{"zarrfs": "record"', b"\n", b"[" * 9999],
)
def test_a_file_that_is_no_record_is_not_replaced(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    (tmp_path / "link").symlink_to(path)
    for name in ("file", "link"):
        with pytest.raises(UsageError, match="is no record of reads, and is not replaced"):
            Recorder(str(tmp_path / name))
    assert path.read_bytes() == content
    assert sorted(os.listdir(tmp_path)) == ["file", "link"]


def test_an_empty_file_becomes_a_record(tmp_path: Path) -> None:
    """mktemp, for example, creates an empty file."""
    path = tmp_path / "file"
    path.touch()
    Recorder(str(path)).close()
    assert list(read_record(str(path))) == []


def test_a_record_on_a_full_disk_is_an_error(caplog: pytest.LogCaptureFixture) -> None:
    try:
        recorder = Recorder("/dev/full")
    except UsageError:  # raised when the first line is written
        return
    recorder.close()
    raise AssertionError("a full disk took a line")


def test_a_disk_that_fails_later_ends_the_record(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    recorder = Recorder(str(tmp_path / "record"))
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, recorder._descriptor)
    os.close(full)
    for number in range(3):
        recorder.read(f"key{number}", 0, 1)
        lines, recorder._lines = recorder._lines, []
        recorder._write(lines)
    recorder.close()
    assert [message.getMessage() for message in caplog.records] == [
        f"{tmp_path}/record: the record ends here: no space left on device"
    ]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "line 1: not a record"),
        ("[]\n", "line 1: not a record"),
        ("\0\n", "line 1: not a record"),
        (HEADER.strip(), "line 1: not a record"),
        ('{"version": 1, "refs": {}}\n', "line 1: not a record"),
        ('{"zarrfs": "record", "version": 2}\n', "line 1: version 2 of records"),
        (HEADER + "{\n", "line 2: not JSON"),
        (HEADER + "\n", "line 2: not JSON"),
        (HEADER + "[" * 100_000 + "\n", "line 2: not JSON"),
        (HEADER + '["a", 0, 1]\n["a", 0]\n', r"line 3: expected \["),
        (HEADER + '[1, 0, 1]\n', r"line 2: expected \["),
        (HEADER + '["../a", 0, 1]\n', "line 2: not a key: a part '..'"),
        (HEADER + '["a", 1, 1]\n', "line 2: expected whole numbers"),
        (HEADER + '["a", -1, 1]\n', "line 2: expected whole numbers"),
        (HEADER + '["a", 0, 1.5]\n', "line 2: expected whole numbers"),
        (HEADER + '["a", false, true]\n', "line 2: expected whole numbers"),
        (HEADER + f'["a", 0, {1 << 63}]\n', "line 2: expected whole numbers"),
        (HEADER + '["' + "a" * (1 << 20) + '", 0, 1]\n', "line 2: a line of more than"),
        (HEADER + '["\xff"', None),
    ],
)  # fmt: skip
def test_damaged_records_are_refused(text: str, told: str | None, tmp_path: Path) -> None:
    path = tmp_path / "bad.record"
    path.write_bytes(text.encode())
    if told is None:
        assert list(read_record(str(path))) == []
        return
    with pytest.raises(SourceError, match=told) as caught:
        list(read_record(str(path)))
    assert str(caught.value).startswith(f"{path}: line ")


def test_a_record_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "bad.record"
    path.write_bytes(HEADER.encode() + b'["\xff", 0, 1]\n')
    with pytest.raises(SourceError, match="not UTF-8"):
        list(read_record(str(path)))


# -- warming with a record

LARGE = 2 * BLOCK + 5


class Watched(RecordingStore):
    """A RecordingStore that also records calls of get()."""

    async def get(self, key: str, start: int = 0, length: int | None = None) -> Buffer:
        self.got.append((key, start, length))
        return await super().get(key, start, length)

    def begin(self) -> None:
        super().begin()
        self.got: list[tuple[str, int, int | None]] = []


@pytest.fixture
def store(tmp_path: Path) -> Watched:
    with open(tmp_path / "data", "wb") as file:
        file.truncate(LARGE)
    refs = {f"a/{number}": ["data", number, 1] for number in range(600)}
    refs |= {"big": ["data"], "gone": ["nothing", 0, 5], "far": ["nothing"]}
    (tmp_path / "refs.json").write_text(json.dumps({"version": 1, "refs": refs}))
    opened: Store = sources.open_source(str(tmp_path / "refs.json"), Options(), child=False)
    opened.__class__ = Watched
    assert isinstance(opened, Watched)
    opened.begin()
    return opened


def warmed(store: Store, *records: tuple[str, int, int]) -> Warmed:
    async def main() -> Warmed:
        return await warm(store, [RecordedRead(*record) for record in records])

    return trio.run(main)


def test_warm_fetches_small_values_in_batches(store: Watched) -> None:
    keys = [f"a/{number}" for number in range(600)]
    assert warmed(store, *[(key, 0, BLOCK) for key in keys]) == Warmed(600, 0, 0, 600)
    assert [key for batch in store.batches for key in batch] == keys
    assert len(store.batches) <= 4


def test_warm_fetches_ranges_of_large_values(store: Watched) -> None:
    assert warmed(store, ("big", BLOCK, 4 * BLOCK), ("a/1", 0, BLOCK)) == Warmed(3, 0, 0, BLOCK + 5 + 1)
    assert sorted(store.got) == [("a/1", 0, 1), ("big", BLOCK, BLOCK), ("big", 2 * BLOCK, 5)]


def test_warm_counts_absent_and_failed_keys(store: Watched) -> None:
    records = [("b/1", 0, 1), ("a", 0, 1), ("a/1/x", 0, 1), ("gone", 0, BLOCK), ("far", 0, BLOCK), ("a/7", 0, BLOCK)]
    assert warmed(store, *records) == Warmed(found=1, absent=3, failed=2, bytes=1)


def test_warm_fetches_the_records_before_a_bad_line(store: Watched, tmp_path: Path) -> None:
    path = tmp_path / "record"
    path.write_text(HEADER + '["a/1", 0, 1]\n["big", 0, 10]\n["a/2", 0, 1]\nnonsense\n')

    async def main() -> None:
        with pytest.raises(SourceError, match="line 5: not JSON"):
            await warm(store, read_record(str(path)))

    trio.run(main)
    assert sorted(store.got) == [("a/1", 0, 1), ("a/2", 0, 1), ("big", 0, 10)]


def test_the_counts_of_warm_grow_with_each_batch(store: Watched) -> None:
    told: list[int] = []

    class Seen(Warmed):
        def __setattr__(self, name: str, value: int) -> None:
            super().__setattr__(name, value)
            if name == "found" and value:
                told.append(value)

    async def main() -> None:
        records = [RecordedRead(f"a/{number}", 0, BLOCK) for number in range(600)]
        await warm(store, records, Seen())

    trio.run(main)
    assert len(told) >= 3
    assert told == sorted(told)
    assert told[-1] == 600


@pytest.mark.parametrize("count", [2, 3])
def test_shares_divide_the_records_among_them(store: Watched, count: int) -> None:
    records = [(f"a/{number}", 0, BLOCK) for number in range(600)] + [("big", 0, 2 * BLOCK), ("a/7", 0, BLOCK)]
    got: list[list[str]] = []

    async def main(share: Share) -> Warmed:
        return await warm(store, [RecordedRead(*record) for record in records], share=share)

    for index in range(count):
        store.got = []
        assert trio.run(main, Share(index, count)).found == len(store.got)
        got.append([key for key, *_ in store.got])
    assert sorted(itertools.chain(*got)) == sorted([*(key for key, *_ in records), "big"])
    assert all(len(keys) > 150 for keys in got)


def test_warm_waits_for_a_disk_that_is_slower_than_the_server(
    faulty: Faulty, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    append = diskspace.Segment.append

    def slowly(segment: diskspace.Segment, parts: Sequence[memoryview], sync: bool = False) -> int:
        time.sleep(sum(map(len, parts)) / (40 << 20))
        return append(segment, parts, sync)

    monkeypatch.setattr(diskspace.Segment, "append", slowly)
    for number in range(20):
        faulty.put(f"/slow/{number}", bytes([number]) * (1 << 20))

    async def main() -> tuple[Warmed, dict[str, int]]:
        store = FsspecStore(f"{faulty.url}/slow", Options(cache_dir=str(tmp_path), memory_limit=32 << 20, fills=True))
        done = await warm(store, [RecordedRead(str(number), 0, BLOCK) for number in range(20)])
        await settle(store, done)
        disk = store.stats()["remote"]["disk"]
        await store.aclose()
        return done, disk

    done, disk = trio.run(main)
    assert done == Warmed(20, 0, 0, 20 << 20, dropped=0)
    assert disk["bytes_written"] >= 20 << 20


def test_settle_waits_for_blobs_and_counts_dropped_ones(store: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = [{"queued": 2, "dropped": 0}, {"queued": 1, "dropped": 1}, {"queued": 0, "dropped": 2}]
    monkeypatch.setattr(recording, "_SETTLE", 0.0)
    monkeypatch.setattr(store, "stats", lambda: {"blob_disk": looks.pop(0) if len(looks) > 1 else looks[0]})
    done = Warmed()
    trio.run(settle, store, done)
    assert done.dropped == 2

"""BlobReader with files that change, and with concurrent and cancelled readers."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trio
import trio.testing

from tests.archives.blobreading import DATA, REF, fails, run, whole
from tests.archives.compiled import put
from zarrfs.archives import blob_files, blob_reader
from zarrfs.archives.blob_reader import BlobReader
from zarrfs.archives.blobrefs import sized
from zarrfs.errors import OutOfRange, ReadError, TargetChanged, TargetMissing, WrongHash

# -- files that change


def flip(path: Path) -> None:
    with path.open("r+b") as stream:
        stream.seek(100)
        stream.write(b"!")


def truncate(path: Path) -> None:
    os.truncate(path, 50)


def replace(path: Path) -> None:
    other = path.with_name("other")
    other.write_bytes(DATA[::-1])
    other.rename(path)


CHANGES = {
    "flipped": (flip, WrongHash),
    "truncated": (truncate, OutOfRange),
    "replaced": (replace, WrongHash),
    "deleted": (Path.unlink, TargetMissing),
}


@pytest.mark.parametrize(("change", "error"), CHANGES.values(), ids=CHANGES.keys())
def test_a_change_after_the_first_read_is_seen(tmp_path: Path, change: Callable[[Path], object], error: type) -> None:
    """The change comes within the same tick of file timestamps as the write and the first read."""
    put(tmp_path, DATA)

    async def body(reader: BlobReader) -> None:
        assert await whole(reader) == DATA
        change(tmp_path / REF)
        with pytest.raises(ReadError) as caught:
            await whole(reader)
        assert type(caught.value) is error
        (tmp_path / REF).unlink(missing_ok=True)
        put(tmp_path, DATA)
        assert await whole(reader) == DATA  # the right blob is back

    run(tmp_path, body)


def test_a_touched_file_is_verified_again(tmp_path: Path) -> None:
    put(tmp_path, DATA)

    async def body(reader: BlobReader) -> None:
        await whole(reader)
        os.utime(tmp_path / REF, (0, 0))
        assert await whole(reader) == DATA
        assert reader.stats()["blobs_verified"] == 2
        assert reader.stats()["blobs_open"] == 1

    run(tmp_path, body)


WAITS = [(0, [0.02]), (5_000_000, [0.015]), (20_000_000, []), (-1, [0.02])]


@pytest.mark.parametrize(("age", "waits"), WAITS)
def test_a_tick_passes_between_the_last_write_and_the_hash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, age: int, waits: list[float]
) -> None:
    """A second write within the same tick would leave the timestamps of the file unchanged."""
    put(tmp_path, DATA)
    now = os.stat(tmp_path / REF).st_ctime_ns + age
    waited: list[float] = []
    monkeypatch.setattr(blob_files, "time", SimpleNamespace(time_ns=lambda: now, sleep=waited.append))
    assert run(tmp_path, whole) == DATA
    assert waited == waits


def test_a_blob_that_keeps_changing_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path, DATA)
    real, times = blob_files._pread, iter(range(100))

    async def changing(fd: int, offset: int, length: int) -> Any:
        os.utime(tmp_path / REF, (next(times), 0))
        return await real(fd, offset, length)

    monkeypatch.setattr(blob_files, "_pread", changing)
    fails(tmp_path, TargetChanged, "keeps changing")


def test_a_blob_that_changes_while_it_is_verified_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path, DATA)
    real = blob_files.hash_of_file

    def changing(fd: int, ref: str, size: int, start: int) -> str:
        found = real(fd, ref, size, start)
        flip(tmp_path / REF)
        return found

    monkeypatch.setattr(blob_files, "hash_of_file", changing)
    fails(tmp_path, TargetChanged, "changed while it was verified")


# -- each blob is hashed once; descriptors and verdicts are bounded


def test_a_bad_blob_is_hashed_once(tmp_path: Path) -> None:
    (tmp_path / REF).write_bytes(DATA[::-1])

    async def body(reader: BlobReader) -> None:
        for _ in range(3):
            with pytest.raises(WrongHash):
                await whole(reader)
        assert reader.stats()["blobs_verified"] == 1

    run(tmp_path, body)


@pytest.mark.parametrize("good", [True, False])
def test_fifty_readers_hash_a_blob_once(tmp_path: Path, good: bool) -> None:
    data = bytes(5 << 20)
    ref = put(tmp_path, data)
    if not good:
        flip(tmp_path / ref)
    got: list[object] = []

    async def one(reader: BlobReader) -> None:
        try:
            got.append(await reader.read(sized(ref, len(data)), 7, 9, 0, len(data)))
        except WrongHash:
            got.append("wrong")

    async def body(reader: BlobReader) -> None:
        async with trio.open_nursery() as nursery:
            for _ in range(50):
                nursery.start_soon(one, reader)
        assert got == [bytes(9) if good else "wrong"] * 50
        assert reader.stats()["blobs_verified"] == 1
        assert reader._queues == {}

    run(tmp_path, body)


def test_a_cancelled_reader_does_not_fail_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path, DATA)
    started = trio.Event()
    real, calls = blob_files.hash_of_file, []

    def slow(fd: int, ref: str, size: int, start: int) -> str:
        calls.append(ref)
        if len(calls) == 1:
            trio.from_thread.run_sync(started.set)
            trio.from_thread.run(trio.sleep_forever)
        return real(fd, ref, size, start)

    monkeypatch.setattr(blob_files, "hash_of_file", slow)

    async def body(reader: BlobReader) -> None:
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(whole, reader)
                await started.wait()
                async with trio.open_nursery() as others:
                    others.cancel_scope.shield = True
                    results: list[bytes] = []

                    async def other() -> None:
                        results.append(await whole(reader))

                    for _ in range(5):
                        others.start_soon(other)
                    await trio.testing.wait_all_tasks_blocked()
                    scope.cancel()
        assert results == [DATA] * 5
        assert len(calls) == 2

    run(tmp_path, body)


def test_hashing_ends_when_its_reader_is_cancelled(tmp_path: Path) -> None:
    with (tmp_path / REF).open("wb") as stream:
        stream.truncate(1 << 40)  # hashing all of it would take most of an hour

    async def body(reader: BlobReader) -> None:
        with trio.move_on_after(0.05) as scope:
            await reader.read(REF, 0, 1, 0, 1)
        assert scope.cancelled_caught

    run(tmp_path, body)


def test_open_descriptors_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blob_reader, "MAX_OPEN", 3)
    refs = [put(tmp_path, b"%d" % number) for number in range(10)]

    async def body(reader: BlobReader) -> None:
        for _ in range(2):
            for number, ref in enumerate(refs):
                assert bytes(await reader.read(ref, 0, 1, 0, 1)) == b"%d" % number
                await reader.read(refs[0], 0, 1, 0, 1)
                assert reader.stats()["blobs_open"] <= 3
        assert reader.stats()["blobs_verified"] == 10  # a verdict outlives its descriptor
        for ref in [*refs[:3], refs[0], refs[3]]:
            await reader.size(ref)
        assert reader._open.keys() == {refs[0], refs[2], refs[3]}  # the most recently used ones
        async with trio.open_nursery() as nursery:
            for ref in refs * 5:
                nursery.start_soon(reader.read, ref, 0, 1, 0, 1)
        assert reader.stats()["blobs_open"] <= 3

    run(tmp_path, body)


def test_remembered_verdicts_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blob_files, "MAX_VERDICTS", 4)
    refs = [put(tmp_path, b"%d" % number) for number in range(10)]

    async def body(reader: BlobReader) -> None:
        for ref in refs:
            await reader.size(ref)
        assert len(reader._files._verdicts) == 4

    run(tmp_path, body)


def test_a_read_in_progress_survives_closing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path, DATA)
    real = blob_files._pread

    async def body(reader: BlobReader) -> None:
        async def closing(fd: int, offset: int, length: int) -> Any:
            await reader.aclose()
            return await real(fd, offset, length)

        monkeypatch.setattr(blob_files, "_pread", closing)
        assert await whole(reader) == DATA
        with pytest.raises(ReadError, match="closed"):
            await whole(reader)

    run(tmp_path, body)

"""BlobReader with files that change, and with concurrent and cancelled readers."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.archives.blobreading import DATA, REF, fails, run, whole
from tests.archives.compiled import put
from zarrfs.archives import blob_files
from zarrfs.archives.blob_reader import BlobReader
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

    def changing(fd: int, ref: str, size: int) -> str:
        found = real(fd, ref, size)
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

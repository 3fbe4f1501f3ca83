"""BlobReader returns only bytes that have the hash in their blobref."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import trio
import trio.testing

from tests.archives.blobreading import DATA, REF, URL, fails, run, whole
from tests.archives.compiled import file, opened, put
from zarrfs.archives.blob_reader import BlobReader
from zarrfs.archives.blobrefs import canonical, sized
from zarrfs.errors import Loop, OutOfRange, ReadError, TargetMissing, WrongHash
from zarrfs.system.own_mount import OWN_MOUNT

# -- reading


@pytest.mark.parametrize("algorithm", ["sha1", "sha256"])
def test_ranges_of_a_blob(tmp_path: Path, algorithm: str) -> None:
    ref = put(tmp_path, DATA, algorithm)
    url = sized(ref, len(DATA))

    async def body(reader: BlobReader) -> None:
        for start, length in [(0, 1), (0, len(DATA)), (5, 300), (len(DATA) - 1, 1), (len(DATA), 0)]:
            assert bytes(await reader.read(url, start, length, 0, length)) == DATA[start : start + length]
        assert await reader.size(url) == len(DATA)
        assert reader.resolve(url) == str(tmp_path / ref)
        with pytest.raises(OutOfRange):
            await reader.read(url, len(DATA), 1, 0, 1)

    run(tmp_path, body)


def test_an_empty_blob(tmp_path: Path) -> None:
    ref = put(tmp_path, b"")
    assert run(tmp_path, lambda reader: whole(reader, sized(ref, 0), 0)) == b""


def test_blobs_larger_than_a_piece(tmp_path: Path) -> None:
    data = os.urandom((3 << 20) + 17)
    url = sized(put(tmp_path, data), len(data))
    assert run(tmp_path, lambda reader: whole(reader, url, len(data))) == data
    (tmp_path / REF).write_bytes(data)
    fails(tmp_path, OutOfRange, "a blob of")
    fails(tmp_path, WrongHash, "another hash", sized(REF, len(data)))


def test_a_symlink_to_a_blob(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_bytes(DATA)
    (tmp_path / REF).symlink_to("elsewhere")
    assert run(tmp_path, whole) == DATA


# -- blobrefs


@pytest.mark.parametrize(
    "text",
    ["", "sha1-", REF[:-1], REF + "0", REF + "\n", "sha512-" + "0" * 128, "sha1-" + "g" * 40, "/" + REF],
)
def test_invalid_blobrefs(tmp_path: Path, text: str) -> None:
    assert canonical(text) is None
    fails(tmp_path, ReadError, "not a blobref", sized(text, 1))


def test_a_blobref_in_upper_case_in_an_archive(tmp_path: Path) -> None:
    put(tmp_path, DATA)
    entry = file([[0, len(DATA), REF.upper()]], encoding="blobvec", size=len(DATA))
    with opened({"f": entry}, blobs=(str(tmp_path),)) as (store, _):
        assert bytes(trio.run(store.get, "f")) == DATA


# -- bad blobs


def test_reading_without_sources_is_an_error() -> None:
    assert fails((), TargetMissing, "no blobs= given").where == REF


def test_a_blob_missing_from_all_sources(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    error = fails((tmp_path, other), TargetMissing, "no such blob: in none of these places")
    assert str(tmp_path) in str(error)
    assert REF in str(error)


def test_a_source_directory_that_was_removed_or_replaced(tmp_path: Path) -> None:
    """The place fails: whether it has the blob is not known."""
    fails(tmp_path / "absent", ReadError, "absent")
    (tmp_path / "file").write_text("")
    fails(tmp_path / "file", ReadError, "file")
    (tmp_path / "empty").mkdir()
    fails((tmp_path / "absent", tmp_path / "empty"), ReadError, "absent")


def _flip(path: Path) -> None:
    path.write_bytes(DATA[:-1] + bytes([DATA[-1] ^ 1]))


@pytest.mark.parametrize(
    ("make", "failure"),
    [
        (_flip, WrongHash),
        (lambda path: path.write_bytes(DATA[:-1]), OutOfRange),
        (lambda path: path.write_bytes(b""), OutOfRange),
        (lambda path: path.symlink_to("absent"), TargetMissing),
        (lambda path: path.symlink_to(path.name), ReadError),
        (lambda path: path.mkdir(), ReadError),
        (os.mkfifo, ReadError),
    ],
)
def test_a_bad_blob_is_named(tmp_path: Path, make: Callable[[Path], object], failure: type[ReadError]) -> None:
    make(tmp_path / REF)
    assert REF in str(fails(tmp_path, failure, ""))


def test_a_valid_blob_of_another_length_than_declared(tmp_path: Path) -> None:
    put(tmp_path, DATA)
    fails(tmp_path, OutOfRange, f"a blob of {len(DATA)} bytes, where the archive says 5", sized(REF, 5))

    async def body(reader: BlobReader) -> None:
        assert await whole(reader) == DATA
        with pytest.raises(OutOfRange):  # the blob is open now, and its length still differs
            await reader.read(sized(REF, 5), 0, 5, 0, 5)

    run(tmp_path, body)


def test_a_blob_in_the_mount_that_reads_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path, DATA)

    async def body(reader: BlobReader) -> None:
        monkeypatch.setattr(OWN_MOUNT, "device", os.stat(tmp_path).st_dev)
        with pytest.raises(Loop):
            await whole(reader)

    run(tmp_path, body)


UNREADABLE = """
import os, sys, trio
from zarrfs.errors import AccessDenied
from zarrfs.archives.blob_reader import BlobReader

if os.geteuid() == 0:
    os.setgid(65534)
    os.setuid(65534)
try:
    trio.run(BlobReader((sys.argv[1],)).read, sys.argv[2], 0, 1, 0, 1)
except AccessDenied as exc:
    print("denied:", exc.where)
"""


@pytest.mark.parametrize("what", ["blob", "place"])
def test_a_blob_or_directory_without_read_permission(what: str) -> None:
    with tempfile.TemporaryDirectory() as name:  # another session of pytest would close tmp_path to other users
        (place := Path(name)).chmod(0o755)
        put(place, DATA)
        ((place / REF) if what == "blob" else place).chmod(0)
        command = [sys.executable, "-c", UNREADABLE, str(place), URL]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        place.chmod(0o755)
    assert done.stdout == f"denied: {place / REF}\n", done.stderr


# -- several sources


def test_the_second_source_is_read_if_the_first_has_a_wrong_blob(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    one, two = tmp_path / "1", tmp_path / "2"
    one.mkdir()
    two.mkdir()
    put(two, DATA)

    async def twice(reader: BlobReader) -> bytes:
        await whole(reader)
        return await whole(reader)

    with caplog.at_level(logging.WARNING):
        assert run((one, two), twice) == DATA
        assert not caplog.messages  # no source needs to have every blob
        (one / REF).write_bytes(DATA[::-1])
        assert run((one, two), twice) == DATA
    assert caplog.messages == [
        f"{one / REF}: its bytes have another hash than its name says; read from {two / REF} instead"
    ]
    assert BlobReader((str(one), str(two))).resolve(URL) == str(one / REF)
    (two / REF).unlink()
    fails((one, two), WrongHash, "another hash")
    (one / REF).unlink()
    assert BlobReader((str(one), str(two))).resolve(URL) == str(one / REF)


# -- a change after a blob was read


def test_only_bytes_that_were_hashed_are_served(tmp_path: Path) -> None:
    """A blob that changes in place: readers get the right bytes, or an error, and the right ones once it is mended."""
    blobs = [bytes([at]) * 1000 for at in range(8)]
    paths = [tmp_path / put(tmp_path, data) for data in blobs]

    async def body(reader: BlobReader) -> None:
        for at, (path, data) in enumerate(zip(paths, blobs, strict=True)):
            url = sized(path.name, len(data))
            if at % 2:  # a part, so that the blob is kept
                assert await reader.read(url, 1, len(data) - 1, 0, len(data)) == data[1:]
            before = path.stat()
            with path.open("r+b") as file:
                file.write(b"x")
            os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))  # the file looks the same
            if not at % 2:
                with pytest.raises(WrongHash):
                    await whole(reader, url, len(data))
                path.write_bytes(data)
            assert await whole(reader, url, len(data)) == data

    run(tmp_path, body)

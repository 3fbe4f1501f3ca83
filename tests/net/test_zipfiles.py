"""Zip files with a large or forged index, which must stay within the memory limit, and encodings of member names."""

from __future__ import annotations

import os
import struct
import tracemalloc
import zipfile
import zlib
from pathlib import Path
from typing import Any

import pytest
import trio

from tests.remotereading import using
from tests.servers import Faulty
from zarrfs.config.options import Options
from zarrfs.errors import ReadError
from zarrfs.net import zipfiles
from zarrfs.store.remote import FsspecStore
from zarrfs.store.remotefiles import RemoteFiles

MEMORY = 4 << 20


@pytest.fixture(autouse=True)
def _small_indexes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zipfiles, "_LEAST", 0)


def archive(path: Path, names: list[bytes]) -> Path:
    """Write a zip file whose index lists empty members with these names; the members have no local headers."""
    about = struct.Struct("<4s4B4HL2L5H2L")
    index = b"".join(
        about.pack(b"PK\1\2", 20, 3, 20, 0, 0, 0, 0, 33, 0, 0, 0, len(name), 0, 0, 0, 0, 0, 0) + name for name in names
    )
    count = len(names) & 0xFFFF
    path.write_bytes(index + struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, count, count, len(index), 0, 0))
    return path


def stat(path: Path, name: str) -> tuple[int, int]:
    """Return (the size of a member, the peak memory in bytes of finding it)."""

    async def main() -> int:
        files = RemoteFiles(Options(memory_limit=MEMORY))
        system, at = await files.find(f"zip://{name}::{path}")
        try:
            return (await system.stat(at)).size or 0
        finally:
            await files.aclose()

    tracemalloc.start()
    try:
        return trio.run(main), tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_an_index_is_bounded_by_the_memory(tmp_path: Path) -> None:
    names = [b"%08x" % number for number in range(MEMORY // 8 // 54)]
    fits = archive(tmp_path / "fits.zip", names[:-1])
    size, taken = stat(fits, "00000001")
    assert size == 0
    assert taken < 1.5 * MEMORY
    large = archive(tmp_path / "large.zip", [*names, b"another", b"one more"])
    rule = rf"^{large}: its index, of \d+ bytes, would take more than {MEMORY} bytes of memory \(-o memory_limit=\)$"
    with pytest.raises(ReadError, match=rule):
        stat(large, "00000001")


def test_directories_in_directories_take_no_memory(tmp_path: Path) -> None:
    """A 64 KiB name may have 32,000 parent directories, whose names average 32 KiB: a gigabyte in all."""
    deep = archive(tmp_path / "deep.zip", [b"a/" * 32_000 + b"a"])
    assert stat(deep, "a/a/a")[1] < MEMORY


def test_a_small_index_before_a_long_comment_is_read(tmp_path: Path) -> None:
    """The member, which takes more bytes than the index may, is then read as a whole."""
    value = os.urandom(4 << 20)
    with zipfile.ZipFile(tmp_path / "small.zip", "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("a/b/c", value)
        file.comment = b"x" * 65_535
    assert stat(tmp_path / "small.zip", "a/b/c")[0] == len(value)

    async def check(files: RemoteFiles) -> None:
        system, path = await files.find(f"zip://a/b/c::{tmp_path}/small.zip")
        assert (await system.fetch(path, 0, len(value))).data == value

    using(check, Options(memory_limit=MEMORY))


@pytest.mark.parametrize(("raw", "shown"), [("é/0".encode(), "é/0"), (b"\x82/0", "é/0"), (b"a\xff/0", "a\xa0/0")])
@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_member_names_without_the_utf8_flag_are_decoded(tmp_path: Path, raw: bytes, shown: str, method: int) -> None:
    """As UTF-8, which Info-ZIP writes without the flag; a name that is not valid UTF-8 as cp437."""
    placeholder = "x" * len(raw)
    with zipfile.ZipFile(tmp_path / "x.zip", "w", method) as made:
        made.writestr(placeholder, b"data" * 100)
    content = (tmp_path / "x.zip").read_bytes()
    (tmp_path / "x.zip").write_bytes(content.replace(placeholder.encode(), raw))

    async def main() -> tuple[list[str], bytes]:
        store = FsspecStore(f"zip://::file://{tmp_path}/x.zip", Options())
        try:
            return [key async for key in store.list_prefix("")], bytes(await store.get(shown))
        finally:
            await store.aclose()

    assert trio.run(main) == ([shown], b"data" * 100)


@pytest.mark.parametrize("status", [403, 404])
def test_no_member_of_an_archive_that_is_not_there_is_absent(faulty: Faulty, status: int) -> None:
    faulty.put("/x.zip", b"", forever=status)
    faulty.head("/x.zip", forever=status)

    async def main() -> None:
        store = FsspecStore(f"zip://::{faulty.url}/x.zip", Options(retries=0, missing_status=(403, 404)))
        try:
            for read in (store.info, store.get):
                with pytest.raises(ReadError, match=f"/x.zip: HTTP status {status}"):
                    await read("a")
        finally:
            await store.aclose()

    trio.run(main)


@pytest.mark.parametrize("length", [0, 2, 4])
def test_a_part_of_a_member_whose_header_states_another_length_of_its_name_is_an_error(
    tmp_path: Path, length: int
) -> None:
    """The content would begin elsewhere, and only the whole member has a checksum."""
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as made:
        made.writestr("abc", bytes(range(256)) * (1 << 16))
    content = bytearray((tmp_path / "x.zip").read_bytes())
    struct.pack_into("<H", content, 26, length)
    (tmp_path / "x.zip").write_bytes(content)

    async def check(files: RemoteFiles) -> None:
        system, path = await files.find(f"zip://abc::{tmp_path}/x.zip")
        with pytest.raises(ReadError, match="bad zip file"):
            await system.fetch(path, 0, 100)

    using(check, Options())


@pytest.mark.parametrize(("method", "most"), [(zipfile.ZIP_STORED, 0), (zipfile.ZIP_DEFLATED, 4)])
def test_readers_of_a_large_member_each_decompress_it_once(
    tmp_path: Path, method: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Read-ahead requests several parts at a time, and the second reader is far behind the first one."""
    with zipfile.ZipFile(tmp_path / "x.zip", "w", method) as made, made.open("a", "w") as member:
        for at in range(96):
            member.write(at.to_bytes(4, "little") * (1 << 18))
    begun: list[int] = []
    real = zlib.decompressobj

    def counted(bits: int) -> Any:
        begun.append(bits)
        return real(bits)

    monkeypatch.setattr(zlib, "decompressobj", counted)

    async def check(files: RemoteFiles) -> None:
        url, size = f"zip://a::{tmp_path}/x.zip", 96 << 20

        async def scan(begin: int, stop: int) -> None:
            for at in range(begin, stop, 1 << 19):
                expected = (at >> 20).to_bytes(4, "little") * (1 << 17)
                assert await files.read(url, at, 1 << 19, 0, size) == expected

        async with trio.open_nursery() as nursery:
            nursery.start_soon(scan, 0, size // 4)
            nursery.start_soon(scan, 3 * size // 4, size)

    using(check, Options(memory_limit=128 << 20))
    assert len(begun) <= most

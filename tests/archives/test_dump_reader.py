"""Malformed dump tars, and searches for blobs in valid ones."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from tests.archives.blobreading import run, whole
from tests.archives.compiled import blobref, file
from tests.fakeflux import dump_tar
from zarrfs.archives import blob_sources
from zarrfs.archives import dump_reader as dumptar
from zarrfs.archives.blob_reader import BlobReader
from zarrfs.archives.blobrefs import sized
from zarrfs.config.options import Options
from zarrfs.documents import document as fetched_document
from zarrfs.documents.plan import Plan
from zarrfs.sources import open_plan, prepare

SCAN = """
import os, sys
from zarrfs.archives.dump_reader import DumpIndex, run_local, scan
index, file = DumpIndex(), os.open(sys.argv[1], os.O_RDONLY)
run_local(scan(os.fstat(file).st_size, index), file)
print(index.fault, len(index.blobs))
"""


def header(name: str, size: int, kind: bytes = tarfile.REGTYPE) -> bytes:
    """Return the header of a member; a negative size is written in the base-256 form of GNU tar."""
    found = tarfile.TarInfo(name)
    found.type = kind
    block = bytearray(found.tobuf(tarfile.GNU_FORMAT))
    block[124:136] = b"\xff" + (256**11 + size).to_bytes(11, "big") if size < 0 else b"%011o\0" % size
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


def scanned(path: Path, *blocks: bytes) -> str:
    """Scan a tar of these blocks in a process with a time limit; return its fault, if any, and its number of blobs."""
    path.write_bytes(b"".join(block + bytes(-len(block) % 512) for block in blocks) + bytes(1024))
    done = subprocess.run([sys.executable, "-c", SCAN, path], capture_output=True, text=True, timeout=60, check=True)
    return done.stdout.strip()


@pytest.mark.parametrize("size", [-512, -1024, -(1 << 60)])
@pytest.mark.parametrize("kind", [tarfile.REGTYPE, tarfile.XHDTYPE])
def test_a_member_of_negative_size(size: int, kind: bytes, tmp_path: Path) -> None:
    first = header("archive/a_blobs/0", 3), b"abc"
    assert scanned(tmp_path / "x", *first, header("archive/a", size, kind)).startswith("damaged at byte 1,024:")


@pytest.mark.parametrize("size", ["²", "9" * 5000, "-512", ""])
def test_an_invalid_size_in_an_extended_header(size: str, tmp_path: Path) -> None:
    """The size in the header of the member itself is used instead."""
    text = f" size={size}\n".encode()
    record = next(b"%d" % length + text for length in range(10_000) if length == len(str(length)) + len(text))
    extended = header("x", len(record), tarfile.XHDTYPE), record
    assert scanned(tmp_path / "x", *extended, header("archive/a_blobs/0", 3), b"abc") == "1"


def test_an_extended_header_of_many_records(tmp_path: Path) -> None:
    """Parsing takes time linear in its length."""
    records = b"6 a=b\n" * ((1 << 20) // 6)
    blocks = [header("x", len(records), tarfile.XHDTYPE), records] * 8
    assert scanned(tmp_path / "x", *blocks, header("archive/a_blobs/0", 3), b"abc") == "1"


def test_members_hashed_by_a_search_are_not_searched_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Readers that waited for a search use its results as well."""
    real, reads = blob_sources.DumpSource._read, []

    async def counting(self: Any, offset: int, length: int) -> Any:
        reads.append(offset)
        return await real(self, offset, length)

    monkeypatch.setattr(blob_sources.DumpSource, "_read", counting)
    blobs = [os.urandom(1000) for _ in range(40)]
    document = [{"path": "f", **file([], encoding="blobvec", size=0)}]
    dump_tar(tmp_path / "x.tar", {"main": (document, blobs)})

    async def body(reader: BlobReader) -> None:
        async def one(at: int) -> None:
            assert await whole(reader, sized(blobref(blobs[at]), 1000), 1000) == blobs[at]

        async with trio.open_nursery() as nursery:
            for at in range(40):
                nursery.start_soon(one, at)

    run(tmp_path / "x.tar", body)
    assert len(reads) <= 1 + 2 * len(blobs)  # the document; each member when a search passes it, and when it is read


NAMES = st.text(st.characters(codec="ascii", exclude_characters="\0"), min_size=1, max_size=99)


@given(NAMES, st.integers(0, (1 << 33) - 1), st.binary(max_size=31), st.integers(0, 511), st.integers(0, 8))
def test_headers_are_parsed_as_by_tarfile(name: str, size: int, owner: bytes, at: int, bit: int) -> None:
    """A header that is not plain, such as one with a flipped bit, may be left to tarfile: _plain() returns None."""
    found = tarfile.TarInfo(name)
    found.size, found.uname = size, owner.decode("latin-1")
    block = bytearray(found.tobuf(tarfile.USTAR_FORMAT, "latin-1"))
    block[at] ^= 1 << bit & 255  # bit 8 flips nothing
    plain = dumptar._plain(bytes(block))
    if plain is None:
        assert bit < 8 or not name.isascii() or "/" in name or len(name) > 99
    else:
        known = tarfile.TarInfo.frombuf(bytes(block), "utf-8", "surrogateescape")
        assert plain == (block[:100].partition(b"\0")[0].decode(), known.size)


def prepared(path: Path) -> tuple[Plan, dict[str, bytes]]:
    """Return the plan of a tar, and its files by name."""
    plan = prepare.prepare(str(path), Options(index_dir=str(path.parent / "index")))

    async def files() -> dict[str, bytes]:
        store = open_plan(plan, Options())
        try:
            return {info.name: bytes(await store.get(info.name)) async for info in store.list_dir("")}
        finally:
            await store.aclose()

    return plan, trio.run(files)


def test_a_cached_index_of_an_unchanged_tar_is_found_without_a_scan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetched_document, "_SETTLED_NS", -1)
    scans: list[int] = []
    real = prepare.run_local
    monkeypatch.setattr(prepare, "run_local", lambda *args: scans.append(1) or real(*args))  # type: ignore[func-returns-value]
    path, both = tmp_path / "x.tar", {}
    for name in "ab":
        blob = os.urandom(100)
        both[name] = [{"path": name, **file([[0, 100, blobref(blob)]], encoding="blobvec", size=100)}], [blob]
    dump_tar(path, {"a": both["a"]})
    first = prepared(path)
    assert scans == [1]
    assert prepared(path) == first
    assert scans == [1]
    with monkeypatch.context() as patch:  # the index is removed after the first lookup
        answers = iter([prepare.IndexCache.recall])
        patch.setattr(prepare.IndexCache, "recall", lambda *args: next(answers, lambda *args: None)(*args))
        assert prepared(path) == first
    dump_tar(path, {"b": both["b"]})
    plan, found = prepared(path)
    assert scans == [1, 1]
    assert found == {"b": both["b"][1][0]}
    assert plan.index != first[0].index
    dump_tar(path, both)  # each of the two archives has an index of its own
    for name in "aba":
        assert prepared(Path(f"{path}#{name}"))[1] == {name: both[name][1][0]}
    assert scans == [1] * 4

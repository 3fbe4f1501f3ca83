"""Tars of `zarrfs archive create`, read from their end without any header of a blob; and other tars, scanned."""

from __future__ import annotations

import io
import json
import os
import tarfile
import tempfile
import time
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import trio
from hypothesis import given, settings

from tests.archives.blobreading import run, whole
from tests.archives.compiled import blobref, file
from tests.archives.createdtrees import Model, models, write
from tests.archives.test_create import HOW
from tests.archives.test_dump_writer import made
from tests.fakeflux import dump_tar
from tests.servers import Faulty
from tests.servers import faulty as faulty
from zarrfs import sources
from zarrfs.archives import blob_sources
from zarrfs.archives import dump_reader as dumptar
from zarrfs.archives.blob_reader import BlobReader
from zarrfs.archives.blobrefs import sized
from zarrfs.archives.dump_reader import DumpIndex, document, go_through, lay_out
from zarrfs.archives.source_kinds import DUMP
from zarrfs.config.options import Options
from zarrfs.errors import SourceError

LIMIT = 1 << 30


def indexed(tar: bytes, steps: Any) -> tuple[DumpIndex, bool, list[tuple[int, int]]]:
    """Run `steps` on a tar; return its index, the result of the steps, and (offset, length) of each read."""
    index, reads = DumpIndex(), list[tuple[int, int]]()

    def read(offset: int, length: int) -> bytes:
        reads.append((offset, length))
        return tar[offset : offset + length]

    found = dumptar.run(steps(len(tar), index), read)
    return index, found, reads


def archive_in(tar: bytes, wanted: str = "", limit: int = LIMIT) -> bytes:
    """Return the document of an archive in a tar."""
    return dumptar.run(document(len(tar), wanted, "x.tar", limit), lambda at, length: tar[at : at + length])


def written(blobs: list[bytes], text: bytes, name: str = "main", before: bytes = b"") -> bytes:
    """Return `before` and a tar as `zarrfs archive create` writes it, with `text` as its document."""
    members = [(f"archive/{name}_blobs/{number}", data) for number, data in enumerate(blobs)]
    made = io.BytesIO()
    made.write(before)
    with tarfile.open(fileobj=made, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for path, data in [*members, (f"archive/{name}", text)]:
            member = tarfile.TarInfo(path)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return made.getvalue()


def listing(blobs: list[bytes]) -> bytes:
    """Return a document with one file made of these blobs."""
    regions, at = [], 0
    for data in blobs:
        regions.append([at, len(data), blobref(data)])
        at += len(data)
    return json.dumps([{"path": "f", **file(regions, encoding="blobvec", size=at)}]).encode()


@settings(deadline=None, max_examples=50)
@given(models(), HOW)
def test_the_last_document_gives_the_same_index_as_all_headers(model: Model, how: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory() as name:
        base = Path(name, "tree")
        base.mkdir()
        write(base, model)
        tar = made(base, Path(name, "a.tar"), **how).read_bytes()
    short, found, reads = indexed(tar, lay_out)
    full, _, _ = indexed(tar, go_through)
    assert found
    assert (short._hints, short.documents) == (full._hints, full.documents)
    assert (short.complete, full.complete) == (False, True)
    (where,) = full.documents.values()
    needed = len(tar) - where.offset + 1  # bytes from the last one of the header to the end of the tar
    lowest = min(where.offset - 512, len(tar) - (64 << 10), len(tar) - 2 * needed)
    assert reads[0] == (0, 1024)
    assert min(offset for offset, _ in reads[1:]) >= lowest
    assert archive_in(tar) == archive_in(tar, "main") == tar[where.offset : where.offset + where.size]


@pytest.mark.parametrize("size", [*range(-3, 4), -512, 512, -1024, 1024, 10_240])
@pytest.mark.parametrize("of", [2, 16 << 10, 64 << 10, 128 << 10, 256 << 10])
def test_a_document_of_any_length(of: int, size: int) -> None:
    """The start of the document is found at any position in the piece that is read."""
    blob = os.urandom(700)
    text = listing([blob])
    text = text[:1].ljust(max(of + size - len(text) + 1, 1)) + text[1:]
    tar = written([blob], text)
    index, found, _ = indexed(tar, lay_out)
    assert found
    assert index.known(blobref(blob)) == (512, 700)
    assert archive_in(tar) == text


def others(path: Path) -> dict[str, bytes]:
    """Return tars unlike those of `zarrfs archive create`, by description."""
    blobs = [os.urandom(1000), os.urandom(300)]
    text = listing(blobs)
    good = written(blobs, text)
    dump_tar(path, {"main": (json.loads(text), blobs)})
    return {
        "another member before": written(blobs, text, before=written([], b"[]")[:1024]),
        "a blob that is missing": written(blobs[:1], text),
        "a blob that nobody names": written([*blobs, b"x"], text),
        "a blob of another length": written([blobs[0], bytes(2000)], text),
        "no end": good.rstrip(b"\0") + bytes(-len(good.rstrip(b"\0")) % 512 + 512),
        "a blob for a document": written(blobs, text, "main_blobs/2"),
        "something behind the end": good + b"x",
        "a document of another length": good.replace(b"%011o\0" % len(text), b"%011o\0" % (len(text) - 1)),
        "a document with zeros": written(blobs, text[:-1] + b"\0" + text[-1:]),
        "zeros behind the document": written(blobs, text + b"\0"),
        "zeros alone": bytes(1 << 20),
        "text alone": b"x" * (1 << 20) + bytes(1024),
        "nothing": b"",
        "what flux dump writes": path.read_bytes(),
    }


def test_tars_of_other_programs_are_scanned(tmp_path: Path) -> None:
    for what, tar in others(tmp_path / "flux.tar").items():
        index, found, _ = indexed(tar, lay_out)
        assert not found, what
        assert index.documents == index._hints == {}, what


def test_one_of_two_archives_must_be_named() -> None:
    first, second = [os.urandom(600)], [os.urandom(700)]
    one = written(first, listing(first), "one")
    both = written(second, listing(second), "two", before=one.rstrip(b"\0") + bytes(-len(one.rstrip(b"\0")) % 512))
    with pytest.raises(SourceError, match="more than one archive"):
        archive_in(both)
    assert archive_in(both, "one") == listing(first)
    assert archive_in(both, "two") == listing(second)
    for tar in both, one:
        with pytest.raises(SourceError, match="no archive 'three'"):
            archive_in(tar, "three")


def test_a_document_that_is_too_large() -> None:
    with pytest.raises(SourceError, match=r"more than 10 bytes \(-o document_limit=\)"):
        archive_in(written([], b"[" + b" " * 20 + b"]"), limit=10)


@pytest.mark.parametrize("blobs", [[b"x" * (8 << 20)], [b"a", b"[" + b"x" * (8 << 20)]])
def test_a_text_member_at_the_end_is_not_searched(blobs: list[bytes]) -> None:
    """flux dump writes blobs in any order, so a long text may come last in its tar."""
    _, found, reads = indexed(written([b"first"], blobs[-1]), lay_out)
    assert (found, sum(length for _, length in reads) < 100_000) == (False, True)
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for name, data in (("content/x", b"1"), ("archive/main", b"[]" * (4 << 20))):
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    _, found, reads = indexed(made.getvalue(), lay_out)
    assert (found, reads) == (False, [(0, 1024)])


@pytest.mark.parametrize("huge", [500 << 20, 5 << 30])
def test_a_blob_declared_with_two_lengths(huge: int, tmp_path: Path) -> None:
    """Reading the member of the wrong length would need 500 MiB or 5 GiB of memory."""
    blob, at = os.urandom(100), 0
    text = json.dumps([[0, 100, blobref(blob)], [100, huge, blobref(blob)]]).encode()
    with open(tmp_path / "x.tar", "wb") as file:
        for name, size, data in (("main_blobs/0", 100, blob), ("main_blobs/1", huge, b""), ("main", len(text), text)):
            member = tarfile.TarInfo(f"archive/{name}")
            member.size = size
            file.seek(at)
            file.write(member.tobuf(tarfile.USTAR_FORMAT) + data)
            at += 512 + size + -size % 512
        file.truncate(at + 1024)

    async def body(reader: BlobReader) -> None:
        assert await whole(reader, sized(blobref(blob), 100), 100) == blob

    tracemalloc.start()
    run(tmp_path / "x.tar", body)
    assert tracemalloc.get_traced_memory()[1] < 100_000_000
    tracemalloc.stop()


def test_headers_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if the reader is cancelled: the thread continues, and the next reader uses its index."""
    blobs, begun = [os.urandom(1000) for _ in range(5)], list[int]()
    (tmp_path / "x.tar").write_bytes(written(blobs[::-1], listing(blobs)))

    def slow(size: int, index: DumpIndex) -> Any:
        begun.append(1)
        time.sleep(1)
        yield from go_through(size, index)

    monkeypatch.setattr(blob_sources, "go_through", slow)

    async def body(reader: BlobReader) -> None:
        for _ in range(3):
            with trio.move_on_after(0.1):
                await whole(reader, sized(blobref(blobs[0]), 1000), 1000)
        assert await whole(reader, sized(blobref(blobs[0]), 1000), 1000) == blobs[0]

    run(tmp_path / "x.tar", body)
    assert begun == [1]


def test_a_document_in_the_wrong_order_leads_to_no_wrong_bytes(tmp_path: Path) -> None:
    """All blobs have one length, so only their hashes show the wrong order; then all headers are read."""
    blobs = [os.urandom(1000) for _ in range(5)]
    (tmp_path / "x.tar").write_bytes(written(blobs[::-1], listing(blobs)))
    lost = os.urandom(1000)

    async def body(reader: BlobReader) -> None:
        for data in blobs:
            assert await whole(reader, sized(blobref(data), 1000), 1000) == data
        with pytest.raises(Exception, match="no such blob"):
            await whole(reader, sized(blobref(lost), 1000), 1000)

    run(tmp_path / "x.tar", body)


def test_only_blobs_that_are_read_are_fetched_from_a_url(tmp_path: Path, faulty: Faulty) -> None:
    blobs = [os.urandom(100_000) for _ in range(300)]
    tar = written(blobs, listing(blobs))
    url = faulty.put("/x.tar", tar)

    def fetched() -> int:
        ranges = [asked.removeprefix("bytes=").split("-") for method, _, asked in faulty.requests if asked]
        assert all(asked is not None for method, _, asked in faulty.requests if method == "GET")
        faulty.requests.clear()
        return sum(min(int(high), len(tar)) - int(low) + 1 for low, high in ranges)

    store = sources.open_source(url, Options(index_dir=str(tmp_path)), child=False)
    trio.run(store.aclose)
    assert 0 < fetched() < 1_000_000

    async def body(reader: BlobReader) -> None:
        assert await whole(reader, sized(blobref(blobs[150]), 100_000), 100_000) == blobs[150]
        assert fetched() < 1_000_000
        assert await whole(reader, sized(blobref(blobs[50]), 100_000), 100_000) == blobs[50]
        assert fetched() == 100_000

    run(DUMP + url, body)


def test_an_archive_in_a_remote_tar_is_compiled_once(tmp_path: Path, faulty: Faulty) -> None:
    """It is compiled again if the ETag of the tar has changed, or for a URL with another fragment."""

    def opened(url: str) -> tuple[bytes, int]:
        """Return the archive's only file, and the number of requests made before it was read."""
        faulty.requests.clear()
        store = sources.open_source(url, Options(index_dir=str(tmp_path)), child=False)
        asked = sum(method == "GET" for method, _, _ in faulty.requests)

        async def body() -> bytes:
            try:
                value = await store.get("f")
                assert value is not None
                return bytes(value)
            finally:
                await store.aclose()

        return trio.run(body), asked

    first, second = os.urandom(100_000), os.urandom(100_000)
    url = faulty.put("/x.tar", written([first], listing([first])))
    assert opened(url)[1] > 0
    assert opened(url) == (first, 0)
    assert opened(f"{url}#main")[1] > 0
    assert opened(f"{url}#main") == (first, 0)
    faulty.put("/x.tar", written([second], listing([second])), tag="2")
    value, asked = opened(url)
    assert (value, asked > 0) == (second, True)

"""Documents behind URLs: distinguished from stores, fetched, and not fetched again while unchanged."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest
import trio

from tests.servers import Faulty, Nginx, free_port
from tests.sources.zarrstores import put
from zarrfs.config.options import Options
from zarrfs.documents.document import Document
from zarrfs.errors import SourceError
from zarrfs.sources import fetching, open_plan, plan_source, prepare
from zarrfs.sources.fetching import read_document

OPTIONS = Options(retries=0)
TIME_NS = 1_234_567_890 * 10**9


def value(url: str, key: str) -> bytes:
    """Return one value of the document at `url`."""

    async def main() -> bytes:
        store = open_plan(plan_source(url, OPTIONS), OPTIONS)
        try:
            return bytes(await store.get(key))
        finally:
            await store.aclose()

    return trio.run(main)


@pytest.mark.parametrize(
    ("name", "data", "kind", "found"),
    [
        ("refs.json", b"{}", None, True),
        ("refs.json", b"not JSON", None, True),
        ("REFS.JSON", b"{}", None, True),
        ("refs", b'{"a": 1}', None, True),
        ("refs", b" \n\t[1]", None, True),
        ("refs.html", b"{}", None, False),
        ("refs.html", b"{}", "references", True),
        ("refs", b"PK\x03\x04{}", None, False),
        ("refs", b"text", None, False),
        ("refs", b"text", "archive", True),
        ("refs", b"", None, False),
    ],
)
def test_which_urls_are_documents(nginx: Nginx, name: str, data: bytes, kind: str | None, found: bool) -> None:
    (nginx.plain.root / name).write_bytes(data)
    os.utime(nginx.plain.root / name, ns=(TIME_NS, TIME_NS))
    read = read_document(f"{nginx.plain.url}/{name}", Options(retries=0, type=kind))
    assert (read and read[:2]) == ((data, TIME_NS) if found else None)


def test_the_modification_time_of_a_document(nginx: Nginx, faulty: Faulty) -> None:
    (nginx.plain.root / "set.json").write_text('{"a": "inline"}')
    os.utime(nginx.plain.root / "set.json", ns=(TIME_NS, TIME_NS))
    assert plan_source(f"{nginx.plain.url}/set.json", OPTIONS).mtime_ns == TIME_NS
    untold = faulty.put("/set.json", b'{"a": "inline"}')
    assert (read_document(untold, OPTIONS) or ())[:2] == (b'{"a": "inline"}', None)
    assert plan_source(untold, OPTIONS).mtime_ns is None


@pytest.mark.parametrize("rest", ["", "?sig=abc", "?sig=a/b", "#a/b", "?sig=a/b#c/d"])
def test_relative_targets_resolve_beside_the_document_whatever_its_query(faulty: Faulty, rest: str) -> None:
    faulty.put("/set/data.bin", b"GOODDATA")
    url = faulty.put(f"/set/set.json{rest.partition('#')[0]}", b'{"version": 1, "refs": {"x/0": ["data.bin", 0, 8]}}')
    assert value(url.partition("#")[0].partition("?")[0] + rest, "x/0") == b"GOODDATA"
    assert ("GET", "/set/data.bin", "bytes=0-7") in faulty.requests


def test_urls_without_a_document(nginx: Nginx) -> None:
    put(nginx.listing, "v3_hier")
    for web in (nginx.listing, nginx.plain, nginx.late):
        for name in ("v3_hier", "v3_hier/", "nope", "nope.json"):
            assert read_document(f"{web.url}/{name}", OPTIONS) is None
    with pytest.raises(SourceError, match="Connection refused"):
        read_document(f"http://127.0.0.1:{free_port()}/x.json", OPTIONS)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"\x89HDF\r\n\x1a\n" + bytes(600), "is a NetCDF-4 or HDF5 file, and no source: make a reference set of it"
         " with kerchunk.hdf.SingleHdf5ToZarr (docs/sources.md)"),
        (b"CDF\x01\0", "is a NetCDF-3 file, and no source: "),
        (b"CDF\x05\0", "is a NetCDF-3 file (CDF-5), and no source: convert it: nccopy -k nc4"),
        (b"GRIB\0\0\0\2", "is a GRIB file, "),
        (b"MM\0*\0", "is a TIFF file, "),
        (b"SIMPLE  =   T", "is a FITS file, "),
    ],
)  # fmt: skip
def test_a_data_file_is_refused_with_its_format_and_how_to_make_a_set(nginx: Nginx, data: bytes, says: str) -> None:
    (nginx.plain.root / "data").write_bytes(data)
    for source in (str(nginx.plain.root / "data"), f"{nginx.plain.url}/data"):
        for kind in (None, "references", "archive", "zarr"):
            with pytest.raises(SourceError) as caught:
                prepare.prepare(source, Options(retries=0, type=kind))
            assert str(caught.value).startswith(f"{source}: {says}")


@pytest.mark.parametrize("sized", [True, False])
def test_a_document_over_the_limit_is_refused(faulty: Faulty, sized: bool) -> None:
    url = faulty.put("/large.json", b'{"a": "inline"}' * 1000, forever=None if sized else "endless")
    faulty.head("/large.json", forever=None if sized else "unsized")
    with pytest.raises(SourceError, match=r"more than 10000 bytes$"):
        read_document(url, Options(retries=2, document_limit=10_000))
    assert faulty.gets() == (0 if sized else 1)


def test_a_document_larger_than_the_memory_limit_is_read(nginx: Nginx) -> None:
    data = b'{"a": "' + b"x" * 20_000_000 + b'"}'
    (nginx.plain.root / "large.json").write_bytes(data)
    assert (read_document(f"{nginx.plain.url}/large.json", Options(memory_limit=1 << 20)) or [b""])[0] == data


def test_a_found_index_is_not_looked_up_again(faulty: Faulty, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The index may be pruned meanwhile, and without the bytes of the document it could not be compiled again."""
    options = Options(retries=0)
    url = faulty.put("/pruned.json", b'{"a": "first"}')
    first = prepare.prepare(url, options)
    answers = iter([prepare.IndexCache.find])
    monkeypatch.setattr(prepare.IndexCache, "find", lambda *args: next(answers, lambda *args: None)(*args))
    assert prepare.prepare(url, options).index == first.index


@pytest.mark.parametrize("ranged", [True, False])
def test_a_document_over_the_step_size_is_read(faulty: Faulty, ranged: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetching, "_STEP", 500_000)
    data = b'{"a": "' + bytes(97 + number % 7 for number in range(1_700_000)) + b'"}'
    read = read_document(faulty.put("/huge.json", data, forever=None if ranged else "whole"), Options(retries=0))
    assert read is not None
    assert isinstance(read.data, int if ranged else bytes)
    assert Document("x", read.data, "", None).digest() == hashlib.sha256(data).digest()


def test_a_document_with_a_cached_index_is_not_fetched(faulty: Faulty, tmp_path: Path) -> None:
    options = Options(retries=0)
    url = faulty.put("/again.json", b'{"a": "first"}')
    first = plan_source(url, options)
    fetched = faulty.gets()
    assert plan_source(url, options) == first
    assert faulty.gets() == fetched
    faulty.head("/again.json", forever="weak")  # another version may have the same weak ETag
    plan_source(url, options)
    assert faulty.gets() > fetched
    faulty.put("/again.json", b'{"a": "other"}')
    faulty.head("/again.json", forever="changed")  # a different ETag
    assert plan_source(url, options).index != first.index


def test_other_request_options_make_another_document(faulty: Faulty, tmp_path: Path) -> None:
    url = faulty.put("/set.json", b"")
    for version in "12":
        faulty.put(f"/set.json?version={version}", b'{"a": "%b"}' % version.encode())  # same ETag and size
        storage = {"http": {"params": {"version": version}}}
        plan = plan_source(url, Options(retries=0, storage=storage))
        assert bytes(trio.run(open_plan(plan, OPTIONS).get, "a")).decode() == version


@pytest.mark.parametrize("step", [1, fetching._STEP])
def test_a_document_replaced_since_its_version_was_requested_is_not_cached_under_it(
    faulty: Faulty, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    monkeypatch.setattr(fetching, "_STEP", step)
    options = Options(retries=0)
    url = faulty.put("/raced.json", b'{"a": "new"}')
    faulty.head("/raced.json", "changed", "changed")  # the response for the previous version
    newer = plan_source(url, options)
    faulty.put("/raced.json", b'{"a": "old"}', tag="2")
    older = plan_source(url, options)
    assert older.index != newer.index
    assert older == plan_source(url, options)  # whose index is cached

"""Stores at URLs: failures that do not mean absence, archives, and web pages with listings."""

from __future__ import annotations

import json
import time
import zipfile
from pathlib import Path
from typing import Any

import fsspec
import pytest
import trio
import trio.testing

from tests.servers import S3, Faulty, Nginx
from tests.store.contract import keys, listed
from zarrfs.config.options import Options
from zarrfs.errors import (
    AccessDenied,
    NotFound,
    ReadError,
)
from zarrfs.net import http, request_queue, webpages
from zarrfs.net.responses import Entry
from zarrfs.store.api import Kind
from zarrfs.store.remote import FsspecStore

VALUE = bytes(range(256)) * 40
OPTIONS = Options(retries=2, read_timeout=100.0)


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_queue, "_FIRST_PAUSE", 0.001)


# -- stores


@pytest.mark.parametrize(
    ("fault", "error"), [(500, ReadError), (503, ReadError), ("reset", ReadError), (403, AccessDenied)]
)
@pytest.mark.parametrize("where", ["web", "s3"])
def test_a_failure_of_the_server_does_not_mean_that_a_key_is_absent(
    s3: S3, faulty: Faulty, where: str, fault: object, error: type[ReadError]
) -> None:
    path, url = ("/v", faulty.url) if where == "web" else ("/tests/v", "s3://tests")
    faulty.put(path, VALUE, forever=fault)
    faulty.head(path, forever=fault if isinstance(fault, int) else 500)
    storage = {"s3": {**s3.options, "endpoint_url": faulty.url}}

    async def check() -> None:
        store = FsspecStore(url, Options(retries=0, storage=storage))
        for call in (store.info, store.get, *([lambda key: listed(store, key)] if where == "web" else [])):
            with pytest.raises(ReadError) as caught:
                await call("v")
            assert caught.type in (ReadError, error)
        await store.aclose()

    try:
        trio.run(check)
    finally:
        faulty.put(path, VALUE)
        faulty.head(path)


def test_the_location_of_a_value_has_no_secrets(faulty: Faulty) -> None:
    faulty.put("/a%20b/v", VALUE)
    url = faulty.url.replace("http://", "http://user:secret@")

    async def check() -> None:
        store = FsspecStore(url, OPTIONS)
        assert await store.locate("a b/v") == {"url": faulty.url + "/a%20b/v"}
        assert "secret" not in json.dumps(await store.locate("a b/v"))
        assert await store.locate("a b/v", shown=False) == {"url": faulty.url + "/a%20b/v"}
        await store.aclose()

    trio.run(check)


def test_the_query_of_a_store_is_sent_with_every_key(faulty: Faulty) -> None:
    faulty.put("/d/v?token=1", VALUE)

    async def check() -> None:
        store = FsspecStore(faulty.url + "/d?token=1", OPTIONS)
        assert bytes(await store.get("v")) == VALUE
        assert "token" not in str(await store.locate("v"))
        assert await store.locate("v", shown=False) == {"url": faulty.url + "/d/v"}  # no token in a set either
        await store.aclose()

    trio.run(check)


def test_a_damaged_zip_member_is_a_read_error(nginx: Nginx) -> None:
    path = nginx.plain.root / "damaged.zip"
    for method in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        with zipfile.ZipFile(path, "w", method) as archive:
            archive.writestr("ok", VALUE)
            archive.writestr("bad", VALUE[::-1] * 20)
        data = bytearray(path.read_bytes())
        data[-len(data) // 3] ^= 0xFF
        path.write_bytes(data)

        async def check() -> None:
            store = FsspecStore(f"zip://::{nginx.plain.url}/damaged.zip", OPTIONS)
            assert await keys(store) == ["bad", "ok"]
            assert bytes(await store.get("ok")) == VALUE
            with pytest.raises(ReadError, match="bad zip file"):
                await store.get("bad")
            await store.aclose()

        trio.run(check)


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
@pytest.mark.parametrize("place", ["beyond the end", "of the other", "before the beginning"])
def test_a_wrong_offset_in_the_index_of_a_zip_file_is_a_read_error(place: str, method: int, tmp_path: Path) -> None:
    path, value = tmp_path / "lies.zip", VALUE * 200
    with zipfile.ZipFile(path, "w", method) as archive:
        archive.writestr("one", value)
        archive.writestr("two", value[::-1])
        at = archive.start_dir
    data = bytearray(path.read_bytes())
    entry = data.index(b"PK\x01\x02", data.index(b"PK\x01\x02") + 1)
    if place == "before the beginning":  # the end record has a larger offset of the index, which shifts all members
        end = data.rindex(b"PK\x05\x06")
        data[end + 16 : end + 20] = (at + 100).to_bytes(4, "little")
    else:
        data[entry + 42 : entry + 46] = (len(data) + 1000 if place == "beyond the end" else 0).to_bytes(4, "little")
    path.write_bytes(data)

    async def check() -> None:
        store = FsspecStore(f"zip://::file://{path}", Options(retries=2))
        if place != "before the beginning":
            assert bytes(await store.get("one")) == value
        for start, length in ((0, 100), (1_000_000, 50)):
            with pytest.raises(ReadError, match="bad zip file"):
                await store.get("two", start, length)
        await store.aclose()

    trio.run(check)


def test_a_large_compressed_member_is_read_in_pieces_in_any_order(tmp_path: Path) -> None:
    value = b"".join(number.to_bytes(4, "big") for number in range(1_000_000))
    path = tmp_path / "large.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        archive.writestr("v", value)

    async def check() -> None:
        store = FsspecStore(f"zip://::file://{path}", Options(memory_limit=1 << 20))

        async def reader(starts: range) -> None:
            for start in starts:
                assert await store.get("v", start, 100_000) == value[start : start + 100_000]

        async with trio.open_nursery() as nursery:
            nursery.start_soon(reader, range(0, len(value), 700_000))
            nursery.start_soon(reader, range(len(value) - 1, 0, -900_000))
        await store.aclose()

    trio.run(check)


# -- pages with listings


PAGES = {
    "nginx": '<title>Index of /d/</title><a href="../">../</a><a href="a%20b">a b</a><a href="c/">c/</a>',
    "apache": '<title>Index of /d</title><a href="?C=N;O=D">Name</a><a href="/">Parent Directory</a>'
    '<a href="a%20b">a b</a><a href="c/">c/</a>',
    "python": "<title>Directory listing for /d/</title><a href='a%20b'>a b</a><a href='c/'>c/</a>",
    "iis": '<title>h - /d/</title><A HREF="/">[To Parent Directory]</A><A HREF="/d/a%20b">a b</A>'
    '<A HREF="/d/c/">c</A>',
    "relative": '<title>d</title><a href="./a%20b">a b</a><a href="./c/">c</a><a href="./?sort=name">n</a>',
    "whole": '<title>x</title><a href="http://h/d/a%20b">a b</a><a href="http://h/d/c/">c</a>',
}


def entries_of(page: str, base: str) -> list[Entry] | None:
    """Return the entries that a page lists; None if it is not a listing."""
    found = webpages.listed(page, base)
    return found and found[0]


@pytest.mark.parametrize("server", PAGES)
def test_listings_of_many_servers_are_parsed(server: str) -> None:
    found = entries_of(PAGES[server], "http://h/d/")
    assert found is not None
    assert {(entry.name, entry.directory) for entry in found} == {("a b", False), ("c", True)}


@pytest.mark.parametrize("link", ["/s/a=b/0.0", "/s/a%3Db/0.0", "/s/a%3db/0%2E0", "0.0", "http://h/s/a=b/0.0"])
@pytest.mark.parametrize("base", ["http://h/s/a%3Db/", "http://h/s/a=b/"])
def test_a_listing_may_percent_encode_its_path_differently(base: str, link: str) -> None:
    """The links of a page and the URL of its directory may percent-encode different characters."""
    found = entries_of(f'<title>Directory Listing</title><a href="/s/">..</a><a href="{link}">0.0</a>', base)
    assert found is not None
    assert [entry.name for entry in found] == ["0.0"]


@pytest.mark.parametrize(
    "page",
    [
        "<title>My data</title><a href='http://elsewhere/'>x</a><a href='about.html'>y</a>",
        "<h1>It works!</h1>",
        "",
        "<title>Data</title><a href='v/1/2'>deep</a>",
        "<title>Directory: /int/d/</title><a href='/int/d/a/'>a</a>",  # of a server behind a proxy with another path
        "<title>Product directory</title><a href='http://elsewhere/'>x</a>",
    ],
)
def test_other_pages_are_not_taken_for_listings(page: str) -> None:
    assert entries_of(page, "http://h/d/") is None
    assert entries_of(page, "http://h/") is None


@pytest.mark.parametrize(
    "page",
    [
        '<title>Index of /d/</title><a href="../">../</a>',
        '<title>Index of /d</title><a href="?C=N;O=D">Name</a><a href="/">Parent Directory</a>'
        '<address>Apache at <a href="mailto:a@h">h</a></address>',
        '<title>Index of /d/</title><a href="../">..</a>/',
        "<title>Directory listing for /d/</title><ul></ul>",
    ],
    ids=["nginx", "apache", "lighttpd", "python"],
)
def test_an_empty_directory_has_a_listing(page: str) -> None:
    assert entries_of(page, "http://h/d/") == []


@pytest.mark.parametrize("busy", [(), (503,), (429,)], ids=["", "busy", "throttled"])
def test_a_server_with_a_titled_page_for_every_name_has_no_listings(busy: tuple[int, ...], faulty: Faulty) -> None:
    for path in ("/d/", f"/d/{http._NOBODYS}/", "/e/"):
        faulty.put(path, b"<title>Staff directory</title>", forever="html")
    faulty.head(f"/d/{http._NOBODYS}/", *busy)

    async def check() -> None:
        store = FsspecStore(faulty.url, OPTIONS)
        with pytest.raises(ReadError, match="no listing"):
            await keys(store, "d")
        await store.aclose()
        store = FsspecStore(faulty.url, OPTIONS)
        assert await keys(store, "e") == []
        await store.aclose()

    trio.run(check)


@pytest.mark.parametrize(
    ("body", "links"),
    [
        ("<A HREF = 'x&amp;y'\n>", ["x&y"]),
        ("<a class=b href=x>b<a/href=y>", ["x", "y"]),
        ("<a title='a > b' href=\"x\"/>", ["x"]),
        ("<a href='x' href='y'>", ["x"]),
        ("<a name=top><abbr href=x>", []),
        ("<!-- <a href=x> --><!doctype html><?php <a href=y?><a href=z>", ["z"]),
        ("<script>'<a href=x>'</SCRIPT><style><a href=y></style ><a href=z>", ["z"]),
        ("1 < 2 <3 </ > </> <a href=x", []),
        ("<a href=x><!-- <a href=y>", ["x"]),
    ],
)
def test_the_links_of_a_page_are_found(body: str, links: list[str]) -> None:
    found = entries_of(f"<title>Index of d</title>{body}", "http://h/d/")
    assert found is not None
    assert [entry.name for entry in found] == links


@pytest.mark.parametrize(
    "unit", ["<a ", '<a x="', "<!--", '<a href="', "</a", "</", "<![CDATA[", "<?", "< ", "<a x", "&#1", "<title>"]
)
def test_a_hostile_page_takes_linear_time(unit: str) -> None:
    began = time.process_time()
    entries_of("<title>Index of d</title>" * (unit != "<title>") + unit * (1_000_000 // len(unit)), "http://h/d/")
    assert time.process_time() - began < 5


def test_a_listing_that_is_too_long_is_an_error(faulty: Faulty, monkeypatch: pytest.MonkeyPatch) -> None:
    page = b"<title>Index of d</title>" + b"".join(b"<a href='v%d'>v</a>" % number for number in range(1000))
    faulty.put("/d/", page, forever="html")

    async def listed() -> int:
        store = FsspecStore(faulty.url, OPTIONS)
        try:
            return len(await keys(store, "d"))
        finally:
            await store.aclose()

    monkeypatch.setattr(http, "_LISTING_MAX", len(page))
    assert trio.run(listed) == 1000
    monkeypatch.setattr(http, "_LISTING_MAX", len(page) - 1)
    with pytest.raises(ReadError, match=f"d/: its listing has more than {len(page) - 1} bytes"):
        trio.run(listed)


def test_a_listing_page_without_a_redirect_is_a_directory(faulty: Faulty) -> None:
    faulty.put("/d", b"<title>Index of d</title>", forever="html")
    faulty.put("/d/", b"<title>Index of d</title><a href='v'>v</a>", forever="html")
    faulty.put("/d/v", VALUE)
    faulty.put("/page.html", b"<title>Index of all</title>", forever="html")
    faulty.head("/d", forever="unsized")

    async def check() -> None:
        store = FsspecStore(faulty.url, OPTIONS)
        assert (await store.info("d")).kind is Kind.DIRECTORY
        assert await keys(store, "d") == ["d/v"]
        assert (await store.info("page.html")).kind is Kind.FILE
        await store.aclose()

    trio.run(check)


def test_a_name_with_a_slash_is_left_out_of_a_listing(faulty: Faulty) -> None:
    faulty.put("/", b"<title>Index of /</title><a href='ok'>ok</a><a href='a%2Fb'>x</a>", forever="html")

    async def check() -> None:
        store = FsspecStore(faulty.url, OPTIONS)
        assert [info.name async for info in store.list_dir("")] == ["ok"]
        await store.aclose()

    trio.run(check)


def test_all_readers_of_a_removed_value_get_not_found(faulty: Faulty, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zarrfs.store.remote._FRESH", 0.0)
    monkeypatch.setattr(faulty, "tell_tags", False)
    faulty.put("/v", VALUE)
    gone = []

    async def check() -> None:
        store = FsspecStore(faulty.url, OPTIONS)
        assert (await store.info("v")).size == len(VALUE)
        del faulty.values["/v"]

        async def get() -> None:
            with pytest.raises(NotFound):
                await store.get("v")
            gone.append(1)

        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(get)
        await store.aclose()

    trio.run(check)
    assert len(gone) == 3


def test_a_value_read_in_parts_is_of_one_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory file system has no versions in its responses, so attributes are compared."""
    monkeypatch.setattr("zarrfs.store.remote._FRESH", 0.0)
    system = fsspec.filesystem("memory")
    system.pipe("/parts/v", b"old" * 1000)

    async def check() -> None:
        store = FsspecStore("memory://parts", OPTIONS)
        read_at, new = store.files.read_at, b"new" * 1000

        async def replaced(*arguments: Any) -> Any:
            found = await read_at(*arguments)
            if system.cat("/parts/v") != new:
                await trio.sleep(1)  # modification times are compared in whole seconds
                system.pipe("/parts/v", new)
            return found

        monkeypatch.setattr(store.files, "read_at", replaced)
        assert await store.get("v") == new
        await store.aclose()

    trio.run(check)
    system.rm("/parts", recursive=True)

"""A bucket with a million keys, and listings with faults, on a small S3 server."""

from __future__ import annotations

import bisect
import errno
import http.server
import os
import re
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

import pytest
import trio

from tests.mounts.mounting import daemon_pid, mounted
from tests.mounts.test_semantics import error_of
from tests.servers import GCS, gcs
from tests.store.contract import keys, listed
from zarrfs.config.options import Options
from zarrfs.errors import NotFound, ReadError
from zarrfs.store import names
from zarrfs.store.api import Kind, join_key
from zarrfs.store.remote import FsspecStore

__all__ = ["gcs"]

_HEAD = "<?xml version='1.0' encoding='UTF-8'?><ListBucketResult><Name>b</Name>"


class Bucket:
    """An S3 server that lists the sorted `keys` (ListObjectsV2); each value has three bytes.

    Attributes that a test may set: `fault` takes (page number, keys, more) and returns the (status, keys, more) to
    send instead. `changed` maps keys to (value, ETag) pairs that differ from the listing. `most` is the number of keys
    per page. With `expires` the server refuses all continuation tokens; without `tokens` it sends none. `delay` is the
    time until a page is sent, in seconds.
    """

    def __init__(self) -> None:
        self.keys: list[str] = []
        self.changed: dict[str, tuple[bytes, str]] = {}
        self.most, self.expires, self.tokens = 1000, False, True
        self.pages: list[str] = []  # the start-after of each requested page
        self.reads = 0  # requests for values
        self.delay = 0.0
        self.fault: Callable[[int, list[str], bool], tuple[int, list[str], bool]] | None = None
        handler = type("Handler", (_Handler,), {"owner": self})
        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    @property
    def option(self) -> str:
        """The -o options for this server."""
        return f"s3.endpoint_url={self.endpoint},s3.key=a,s3.secret=b,type=zarr"

    def options(self, **more: Any) -> Options:
        storage = {"s3": {"endpoint_url": self.endpoint, "key": "a", "secret": "b"}}
        return Options(retries=0, storage=storage, **more)

    def has(self, key: str) -> bool:
        at = bisect.bisect_left(self.keys, key)
        return self.keys[at : at + 1] == [key]

    def page(self, query: dict[str, str]) -> tuple[int, bytes]:
        """Return (status, body) for a listing request."""
        self.pages.append(query.get("start-after", ""))
        time.sleep(self.delay)
        if self.expires and "continuation-token" in query:
            return 400, b"<Error><Code>InvalidArgument</Code><Message>The token has expired</Message></Error>"
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter")
        most = min(int(query.get("max-keys", self.most)), self.most)
        after = max(query.get("start-after", ""), query.get("continuation-token", ""))
        at = max(bisect.bisect_right(self.keys, after) if after else 0, bisect.bisect_left(self.keys, prefix))
        found, directories = list[str](), list[str]()
        while at < len(self.keys) and self.keys[at].startswith(prefix) and len(found) + len(directories) < most:
            key = self.keys[at]
            end = key.find(delimiter, len(prefix)) if delimiter else -1
            if end >= 0:
                directories.append(key[: end + 1])
                at = bisect.bisect_left(self.keys, key[:end] + "0")
            else:
                found.append(key)
                at += 1
        more = at < len(self.keys) and self.keys[at].startswith(prefix)
        status = 200
        if self.fault is not None:
            status, found, more = self.fault(len(self.pages), found, more)
        if status != 200:
            return status, b""
        token = f"<NextContinuationToken>{escape(self.keys[at - 1])}</NextContinuationToken>"
        token = token if more and self.tokens else ""
        rows = "".join(
            f"<Contents><Key>{escape(key)}</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified>"
            f'<ETag>"{tag(key)}"</ETag><Size>3</Size></Contents>' for key in found
        )  # fmt: skip
        rows += "".join(f"<CommonPrefixes><Prefix>{escape(one)}</Prefix></CommonPrefixes>" for one in directories)
        body = f"{_HEAD}<IsTruncated>{str(more).lower()}</IsTruncated>{token}{rows}</ListBucketResult>"
        return 200, body.encode()


def tag(key: str) -> str:
    """Return the ETag of a key in listings."""
    return f"{len(key):032x}"


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # send the body without waiting for the acknowledgement of the headers
    owner: Bucket

    def log_message(self, *arguments: object) -> None:
        """Log nothing."""

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path, _, text = self.path.partition("?")
        query = {name: values[0] for name, values in urllib.parse.parse_qs(text, keep_blank_values=True).items()}
        key, headers = urllib.parse.unquote(path).removeprefix("/b").removeprefix("/"), {}
        self.owner.reads += "list-type" not in query
        if "list-type" in query:
            status, body = self.owner.page(query)
        elif self.owner.has(key):
            value, told = self.owner.changed.get(key, (b"abc", tag(key)))
            status, body = 200, value
            headers = {"ETag": f'"{told}"', "Last-Modified": "Thu, 01 Jan 2026 00:00:00 GMT"}
            if match := re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", "")):
                start, stop = int(match[1]), min(int(match[2]) + 1, len(value))
                status, body = (206, value[start:stop]) if start < stop else (416, b"")
                headers["Content-Range"] = f"bytes {start}-{stop - 1}/{len(value)}"
        else:
            status, body = 404, b""
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)


@pytest.fixture
def bucket() -> Iterator[Bucket]:
    """Yield a server for this test only: a shared one would count late requests of an earlier test, or fail them."""
    made = Bucket()
    yield made
    made.close()


def using(bucket: Bucket | GCS, check: Any, **more: Any) -> Any:
    """Run `check(store)` with a store at the prefix x of the bucket, and return its result."""

    async def main() -> Any:
        if isinstance(bucket, Bucket):
            store = FsspecStore("s3://b/x", bucket.options(**more))
        else:
            store = FsspecStore(f"gs://{bucket.bucket}/x", Options(retries=0, storage={"gcs": bucket.options}, **more))
        try:
            return await check(store)
        finally:
            await store.aclose()

    return trio.run(main)


ARRAY = [f"x/a{array:02}/c/{row}/{at}" for array in range(5) for row in range(20) for at in range(50)]


@pytest.mark.parametrize("fault", ["403", "503", "repeats", "goes back"])
def test_a_failed_listing_is_an_error_and_not_a_shorter_directory(bucket: Bucket, fault: str) -> None:
    """Once the server works again, the next listing is complete."""
    bucket.keys = sorted(ARRAY)
    first = bucket.keys[:1000]

    def broken(number: int, found: list[str], more: bool) -> tuple[int, list[str], bool]:
        if number < 3:
            return 200, found, more
        if fault in ("403", "503"):
            return int(fault), [], False
        return 200, first if fault == "repeats" else found[::-1], more

    async def check(store: FsspecStore) -> None:
        bucket.fault = broken
        with pytest.raises(ReadError):
            await keys(store)
        with pytest.raises(ReadError):
            await keys(store, "a04")
        bucket.fault = None
        assert sorted(await keys(store, "a04")) == sorted(key[2:] for key in ARRAY if key.startswith("x/a04"))
        assert sorted(await keys(store)) == sorted(key[2:] for key in ARRAY)

    using(bucket, check)


def test_a_page_that_fails_is_an_error_to_ls(bucket: Bucket, tmp_path: Path) -> None:
    """A failed page fails readdir after the known names; a later success completes the directory."""
    bucket.keys = sorted(f"x/{name}{at:04}" for name in "ab" for at in range(1500))
    with mounted("s3://b/x", tmp_path / "mnt", f"{bucket.option},retries=0") as root:
        for status in (403, 503):
            fails = {True: status, False: 200}
            bucket.fault = lambda _, found, more, fails=fails: (fails[found[-1:] > ["x/a1200"]], found, more)
            assert error_of(os.listdir, root) == errno.EIO
        assert (root / "a0100").read_bytes() == b"abc"
        bucket.fault = None
        assert len(os.listdir(root)) == 3000


def test_a_listing_that_was_refused_once_is_requested_again(bucket: Bucket) -> None:
    """As with a token that had expired: at once for a listing, after metadata_ttl= for a lookup."""
    bucket.keys = [f"x/a/{at}" for at in range(10)]
    bucket.fault = lambda number, found, more: (403 if number == 1 else 200, found, more)

    async def check(store: FsspecStore) -> None:
        assert (await store.info("a/1")).size == 3
        assert [await store.is_flat(), len(bucket.pages)] == [True, 1]
        with trio.move_on_after(30):
            while len(bucket.pages) == 1:
                assert (await store.info("a/2")).size == 3
                await trio.sleep(0.1)
        assert len(bucket.pages) == 2

    using(bucket, check, metadata_ttl=0.5)


@pytest.mark.parametrize("tokens", ["refused", "left out"])
def test_a_truncated_page_without_a_usable_token_is_not_the_end_of_a_listing(bucket: Bucket, tokens: str) -> None:
    """The listing resumes after the last key, or is an error."""
    bucket.keys, bucket.most = sorted(ARRAY), 300
    bucket.expires, bucket.tokens = tokens == "refused", tokens == "refused"

    async def check(store: FsspecStore) -> None:
        assert sorted(await keys(store)) == sorted(key[2:] for key in ARRAY)
        assert sorted(await keys(store, "a03")) == sorted(key[2:] for key in ARRAY if key.startswith("x/a03"))
        system, path = await store.files.find("s3://b/x/a03/c")
        bucket.most = 10
        if tokens == "left out":
            with pytest.raises(ReadError, match="truncated"):
                await system.listing(path)

    using(bucket, check)


OTHERS = {"longer": (b"longer", "1"), "shorter": (b"s", "2"), "longer, one tag": (b"longer", ""), "tag": (b"xyz", "3")}


def test_a_value_that_differs_from_its_listing_is_never_mixed(bucket: Bucket, tmp_path: Path) -> None:
    """A reader that knows the listed version gets EIO and then the new version."""
    bucket.keys = sorted([*(f"x/{name}" for name in OTHERS), "x/same"])
    with mounted("s3://b/x", tmp_path / "mnt", f"{bucket.option},retries=0") as root:
        assert {path.name: path.stat().st_size for path in root.iterdir()} == dict.fromkeys([*OTHERS, "same"], 3)
        for name, (value, told) in OTHERS.items():
            bucket.changed[f"x/{name}"] = value, told or tag(f"x/{name}")
            assert error_of((root / name).read_bytes) == errno.EIO, name
            assert (root / name).read_bytes() == value
            assert (root / name).stat().st_size == len(value)
        assert (root / "same").read_bytes() == b"abc"


def test_keys_that_no_path_can_have_are_left_out(bucket: Bucket) -> None:
    long = "n" * 255
    bucket.keys = sorted([
        "x//empty", "x/../up", "x/./here", "x/a", "x/a/below", "x/d/", "x/e/f", "x/" + "n" * 256, f"x/{long}",
        "x/" + "/".join(["deep"] * 200), "x/%41 b~*#é", "x/e/",
    ])  # fmt: skip

    async def check(store: FsspecStore) -> None:
        found = {info.name: info.kind.name for info in await listed(store, "")}
        assert found == {"%41 b~*#é": "FILE", "a": "FILE", "d": "DIRECTORY", "deep": "DIRECTORY", "e": "DIRECTORY",
                         long: "FILE"}  # fmt: skip
        assert bytes(await store.get("a")) == b"abc"
        assert [info.name for info in await listed(store, "e")] == ["f"]
        assert await listed(store, "d") == []
        for key in ("b", "e/x", "d/x"):
            with pytest.raises(NotFound):
                await store.info(key)

    using(bucket, check)


@pytest.mark.parametrize("how", ["as find does", "in order"])
@pytest.mark.parametrize("rows", [15, 60])
def test_a_walk_takes_one_listing(bucket: Bucket, rows: int, how: str) -> None:
    """A directory has less than a page of keys. Next to directories there are keys that begin with their names."""
    beside = [f"x/a1/c/3{odd}{at}" for odd in "-.!" for at in range(30)]
    bucket.keys = sorted([
        *(f"x/a{array}/c/{row}/{at}" for array in range(5) for row in range(rows) for at in range(rows)), *beside,
    ])  # fmt: skip

    async def check(store: FsspecStore) -> None:
        found = await walked(store, "") if how == "as find does" else await keys(store)
        assert sorted(found) == [key.removeprefix("x/") for key in bucket.keys]

    using(bucket, check)
    assert len(bucket.pages) <= len(bucket.keys) // 1000 + 1 + 6


def test_all_names_are_listed_though_the_table_is_emptied_meanwhile(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The full table is emptied many times during three walks, also in the middle of a directory."""
    monkeypatch.setattr(names, "_MOST", 150)
    bucket.most = 100
    bucket.keys = sorted([
        *(f"x/a{array}/c/{row}/{at}" for array in range(3) for row in range(13) for at in range(13)),
        *(f"x/flat/{at}-{at % 7}" for at in range(500)),
    ])  # fmt: skip
    shown: list[list[str]] = []

    async def check(store: FsspecStore) -> None:
        async def walk() -> None:
            shown.append(sorted(await walked(store, "")))

        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(walk)

    using(bucket, check)
    assert shown == 3 * [[key.removeprefix("x/") for key in bucket.keys]]


async def walked(store: FsspecStore, directory: str) -> list[str]:
    """Return all keys in the order of find(1): list a directory to its end, then its subdirectories."""
    found = [info async for info in store.list_dir(directory)]
    names = []
    for info in found:
        key = join_key(directory, info.name)
        names += await walked(store, key) if info.kind is Kind.DIRECTORY else [key]
    return names


@pytest.mark.nightly
def test_a_bucket_of_a_million_keys_needs_few_pages_and_little_memory(bucket: Bucket, tmp_path: Path) -> None:
    """The root takes at most two pages and a lookup a few; the memory of the daemon stays below 150 MiB."""
    hundred = range(100)
    bucket.keys = sorted(f"x/a{array:02}/c/{row}/{at}" for array in hundred for row in hundred for at in hundred)
    with mounted("s3://b/x", tmp_path / "mnt", bucket.option) as root:
        bucket.pages.clear()
        assert len(list(root.iterdir())) == 100
        assert len(bucket.pages) <= 2
        assert (root / "a57/c/99/99").read_bytes() == b"abc"
        assert not (root / "a57/c/99/100").exists()
        assert len(bucket.pages) <= 10
        found = sum(1 for _ in (root / "a00").rglob("*"))
        assert found == 1 + 100 + 10_000
        assert len(bucket.pages) < 200
        status = Path(f"/proc/{daemon_pid(root)}/status").read_text()
        peak = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))
        assert peak < 150 << 10

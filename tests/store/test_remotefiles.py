"""Reads over HTTP and S3: failures, which return no wrong bytes and do not mean absence, and the requests sent."""

from __future__ import annotations

import dataclasses
import os
import zipfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import fsspec
import pytest
import trio
import trio.testing

from tests import remotereading
from tests.servers import S3, Faulty, free_port
from zarrfs.config.options import Options
from zarrfs.errors import (
    AccessDenied,
    NotFound,
    OutOfRange,
    ReadError,
    TargetChanged,
    TargetMissing,
)
from zarrfs.net import request_queue
from zarrfs.net.request_queue import PART
from zarrfs.store.remote import FsspecStore
from zarrfs.store.remotefiles import RemoteFiles

VALUE = bytes(range(256)) * 40
OPTIONS = Options(retries=2, read_timeout=100.0)


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_queue, "_FIRST_PAUSE", 0.001)


def using(check: Callable[[RemoteFiles], Awaitable[Any]], options: Options = OPTIONS) -> Any:
    """Run `check` with a RemoteFiles, which is closed afterwards; return the result of `check`."""
    return remotereading.using(check, options)


def read(url: str, offset: int = 10, length: int = 100, high: int = 1000, options: Options = OPTIONS) -> bytes:
    """Read `length` bytes at `offset` of the value [0, high)."""

    async def one(files: RemoteFiles) -> bytes:
        return bytes(await files.read(url, offset, length, 0, high))

    found: bytes = using(one, options)
    return found


async def read_all(files: RemoteFiles, url: str) -> bytes:
    """Read all bytes of a value without the cache."""
    return await files.read_all_at(*await files.find(url))


# -- temporary faults


@pytest.mark.parametrize("fault", [500, 502, 503, 504, 429, 408, "reset", "truncate", "short", "whole truncated"])
def test_a_temporary_fault_is_retried(faulty: Faulty, fault: object) -> None:
    url = faulty.put("/v", VALUE, fault, fault)
    assert read(url, high=len(VALUE)) == VALUE[10:110]
    assert faulty.gets() == 3


def test_a_request_without_a_response_is_sent_again(faulty: Faulty) -> None:
    url = faulty.put("/v", VALUE, "slow")
    assert read(url, options=Options(retries=50, read_timeout=1)) == VALUE[10:110]
    faulty.release()


# -- permanent faults


@pytest.mark.parametrize(
    ("fault", "error", "gets"),
    [
        (500, ReadError, 3),
        (429, ReadError, 3),
        ("reset", ReadError, 3),
        ("truncate", ReadError, 3),
        ("short", ReadError, 3),
        (404, TargetMissing, 1),
        (410, TargetMissing, 1),
        (401, AccessDenied, 1),
        (403, AccessDenied, 1),
        (400, ReadError, 1),
        (418, ReadError, 1),
        ("elsewhere", ReadError, 1),
        ("unranged", ReadError, 1),
        ("gzip", ReadError, 1),
    ],
)
def test_a_fault_that_stays(faulty: Faulty, fault: object, error: type[ReadError], gets: int) -> None:
    url = faulty.put("/v", VALUE, forever=fault)
    with pytest.raises(ReadError) as caught:
        read(url)
    assert caught.type is error
    assert url in str(caught.value)
    assert faulty.gets() == gets


@pytest.mark.parametrize("url", ["http://127.0.0.1:{port}/x", "http://nosuchhost.invalid/x"])
def test_a_host_that_cannot_be_reached_is_a_read_error(url: str) -> None:
    with pytest.raises(ReadError) as caught:
        read(url.format(port=free_port()))
    assert caught.type is ReadError
    assert "ssl" not in str(caught.value)


@pytest.mark.parametrize("url", ["http://", "http:///x", "http://[bad/x", "http://h:99999/x"])
def test_an_invalid_url_is_a_read_error(url: str) -> None:
    with pytest.raises(ReadError):
        read(url, options=Options(retries=0))


# -- unusual responses


@pytest.mark.parametrize(("offset", "length", "high"), [(10, 100, 1000), (0, 1000, 1000), (0, 10_240, 10_240)])
@pytest.mark.parametrize("low", [0, 5])
def test_a_server_may_ignore_ranges(faulty: Faulty, offset: int, length: int, high: int, low: int) -> None:
    url = faulty.put("/v", VALUE, forever="whole")

    async def one(files: RemoteFiles) -> None:
        end = min(high + low, len(VALUE))
        got = await files.read(url, low + offset, min(length, end - low - offset), low, end)
        assert bytes(got) == VALUE[low + offset : low + offset + len(got)]

    using(one)


@pytest.mark.parametrize("fault", [None, "whole"])
def test_the_error_of_a_read_beyond_the_end_has_the_size(faulty: Faulty, fault: object) -> None:
    url = faulty.put("/v", b"0123456789", forever=fault)
    for offset, length, high in ((5, 6, 11), (10, 1, 11), (100, 1, 200), (0, 11, 11)):
        said = rf"has 10 bytes, bytes \[{offset}, {offset + length}\) were asked for"
        with pytest.raises(OutOfRange, match=said):
            read(url, offset, length, high)

    async def beyond(files: RemoteFiles) -> None:
        await files.read(url, 20, 5, 20, 30)

    with pytest.raises(OutOfRange, match=r"has 10 bytes, bytes \[20, 25\) were"):
        using(beyond)
    assert read(url, 2, 8, 20) == b"23456789"  # bytes that exist can be read


def test_the_size_is_found_also_if_head_fails(faulty: Faulty) -> None:
    url = faulty.put("/v", VALUE)
    size = lambda files: files.size(url)  # noqa: E731
    assert using(size) == len(VALUE)
    for fault in ("unsized", 405, 501, 403):
        faulty.head("/v", forever=fault)
        assert using(size) == len(VALUE)
        faulty.put("/v", VALUE, forever="whole")
        assert using(size) == len(VALUE)
        faulty.put("/v", VALUE)
    faulty.put("/v", b"")
    assert using(size) == 0
    faulty.head("/v")
    with pytest.raises(TargetMissing):
        using(lambda files: files.size(faulty.url + "/none"))


# -- a value that changes


def test_a_target_that_changes_is_an_error(faulty: Faulty) -> None:
    url = faulty.put("/v", VALUE, None, "changed")

    async def two(files: RemoteFiles) -> None:
        assert bytes(await files.read(url, 0, 10, 0, 100)) == VALUE[:10]
        with pytest.raises(TargetChanged):
            await files.read(url, 200, 10, 200, 300)

    using(two)


def test_a_value_of_a_store_that_changes_is_read_again(faulty: Faulty) -> None:
    async def main() -> None:
        store = FsspecStore(faulty.url, dataclasses.replace(OPTIONS, metadata_ttl=0.0))
        faulty.put("/v", VALUE)
        assert bytes(await store.get("v")) == VALUE
        store.files.blocks.cache.drop(lambda key: True)
        faulty.put("/v", VALUE, "changed")
        with pytest.raises(TargetChanged):  # GET has another ETag than HEAD
            await (await store.open("v")).read(0, len(VALUE))
        faulty.put("/v", b"new")
        assert bytes(await store.get("v")) == b"new"
        del faulty.values["/v"]
        store.files.blocks.cache.drop(lambda key: True)
        with pytest.raises(NotFound):
            await store.get("v")
        await store.aclose()

    trio.run(main)


# -- requests


def test_a_small_value_is_fetched_whole_and_once(faulty: Faulty) -> None:
    url = faulty.put("/v", VALUE)

    async def many(files: RemoteFiles) -> None:
        async def one(number: int) -> None:
            start = 100 + number * 10
            assert bytes(await files.read(url, start, 10, 100, 5100)) == VALUE[start : start + 10]

        async with trio.open_nursery() as nursery:
            for number in range(200):
                nursery.start_soon(one, number)

    using(many)
    assert faulty.requests == [("GET", "/v", "bytes=100-5099")]


def test_a_large_value_is_fetched_in_parts_ahead_of_its_reader(faulty: Faulty) -> None:
    value = os.urandom(1 << 20) * 48
    url = faulty.put("/v", value)
    low, high = 1000, len(value)

    async def check(files: RemoteFiles) -> None:
        for offset in range(low, high, 1 << 20):
            length = min(1 << 20, high - offset)
            assert await files.read(url, offset, length, low, high) == value[offset : offset + length]
            asked = faulty.gets()
            if offset == low + (1 << 20):  # the read-ahead window opens
                with trio.fail_after(60):
                    while faulty.gets() < 4:  # noqa: ASYNC110
                        await trio.sleep(0.01)
        assert asked == faulty.gets()

    using(check)
    parts = [f"bytes={start}-{min(start + PART, high) - 1}" for start in range(low, high, PART)]
    assert sorted(asked or "" for _, _, asked in faulty.requests) == sorted(parts)


def test_small_values_that_are_read_in_the_order_of_their_offsets_share_requests(faulty: Faulty) -> None:
    """Whatever their keys are. The last value ends with the target."""
    value = os.urandom(2_005_000)
    url, lows = faulty.put("/v", value), range(0, len(value), 10_000)

    async def check(files: RemoteFiles) -> None:
        for low in lows:
            size = min(10_000, len(value) - low)
            assert bytes(await files.read(url, low, size, low, low + size)) == value[low : low + size]
        with pytest.raises(OutOfRange):
            await files.read(url, 2_000_000, 10_000, 2_000_000, 2_010_000)

    using(check)
    assert faulty.gets() < len(lows) / 4


def test_a_read_anywhere_in_a_large_value_is_a_small_request(faulty: Faulty) -> None:
    value = os.urandom(1 << 20) * 48
    url = faulty.put("/v", value)

    async def check(files: RemoteFiles) -> None:
        for offset in (40 << 20, 10 << 20, (30 << 20) + 5, 20 << 20):
            assert await files.read(url, offset, 100, 0, len(value)) == value[offset : offset + 100]

    using(check)
    assert faulty.gets() == 4
    for _, _, asked in faulty.requests:
        first, _, last = (asked or "").removeprefix("bytes=").partition("-")
        assert int(last) - int(first) < PART // 4


def test_a_cancelled_reader_does_not_fail_another(faulty: Faulty) -> None:
    url = faulty.put("/v", VALUE, "slow")

    async def main(files: RemoteFiles) -> None:
        scope = trio.CancelScope()

        async def leaves() -> None:
            with scope:
                await files.read(url, 0, 10, 0, 100)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(leaves)
            await trio.to_thread.run_sync(faulty.arrived.wait)

            async def stays() -> None:
                assert bytes(await files.read(url, 0, 10, 0, 100)) == VALUE[:10]

            nursery.start_soon(stays)
            await trio.testing.wait_all_tasks_blocked()
            scope.cancel()
            await trio.testing.wait_all_tasks_blocked()
            faulty.release()

    using(main)
    assert faulty.gets() == 1


# -- protocols


def test_options_that_cannot_be_used_are_a_read_error() -> None:
    with pytest.raises(ReadError, match="nosuch"):
        read("s3://x/y", options=Options(storage={"s3": {"nosuch": 1}}, retries=0))
    with pytest.raises(ReadError, match="cannot be used with these options"):
        read("memory://x/y", options=Options(storage={"memory": {"skip_instance_cache": True}}, retries=0))


# -- values that are read in full


@pytest.mark.parametrize("fault", [None, "endless", "whole"])
def test_a_value_over_document_limit_is_an_error(faulty: Faulty, fault: object) -> None:
    url = faulty.put("/v", VALUE, forever=fault)
    options = Options(retries=2, read_timeout=100.0, document_limit=len(VALUE) - 1)

    async def one(files: RemoteFiles) -> None:
        with pytest.raises(ReadError, match=rf"more than {len(VALUE) - 1} bytes$"):
            await read_all(files, url)

    using(one, options)
    assert faulty.gets() == 1  # not retried
    exactly = Options(retries=0, document_limit=len(VALUE))
    assert fault == "endless" or using(lambda files: read_all(files, url), exactly) == VALUE


def test_counting_the_bytes_of_an_endless_value_ends_with_an_error(faulty: Faulty) -> None:
    url = faulty.put("/v", VALUE, forever="endless")
    faulty.head("/v", forever="unsized")

    async def one(files: RemoteFiles) -> None:
        with pytest.raises(ReadError, match=r"more than 1000000 bytes$"):
            await files.size(url)

    using(one, Options(retries=2, document_limit=1_000_000))
    assert faulty.gets() == 1


def test_a_local_zip_file_that_is_replaced_is_not_read_from_the_cache_on_disk(tmp_path: Path) -> None:
    options = Options(cache_dir=str(tmp_path / "cache"))
    for value in (b"old!", b"new!"):
        with zipfile.ZipFile(tmp_path / "t.zip", "w") as file:
            file.writestr("m", value)
        assert using(lambda files: files.read(f"zip://m::{tmp_path}/t.zip", 0, 4, 0, 4), options) == value


def test_a_value_over_document_limit_is_an_error_with_other_protocols(s3: S3, tmp_path: Path) -> None:
    s3.client.put_object(Bucket=s3.bucket, Key="large", Body=VALUE)
    fsspec.filesystem("memory").pipe_file("/large", VALUE)
    with zipfile.ZipFile(tmp_path / "t.zip", "w") as file:
        file.writestr("large", VALUE)
    for url in (f"s3://{s3.bucket}/large", "memory://large", f"zip://large::{tmp_path}/t.zip"):
        options = Options(retries=0, document_limit=len(VALUE), storage={"s3": s3.options})
        one = lambda files, url=url: read_all(files, url)  # noqa: E731
        assert using(one, options) == VALUE
        with pytest.raises(ReadError, match=rf"more than {len(VALUE) - 1} bytes$"):
            using(one, dataclasses.replace(options, document_limit=len(VALUE) - 1))


# -- S3


def s3_options(s3: S3, **more: Any) -> Options:
    return Options(storage={"s3": {**s3.options, **more}}, retries=0, read_timeout=100.0)


@pytest.mark.parametrize(("status", "gets"), [(451, 1), (500, 3)])
def test_a_refused_value_of_a_bucket_is_no_outage(s3: S3, faulty: Faulty, status: int, gets: int) -> None:
    """The bucket has answered before, so in an outage requests would be retried until read_timeout=."""
    faulty.put("/tests/good", VALUE)
    faulty.put("/tests/v", VALUE, forever=status)
    options = dataclasses.replace(s3_options(s3, endpoint_url=faulty.url), retries=2)

    async def one(files: RemoteFiles) -> None:
        await files.read("s3://tests/good", 0, 10, 0, 10)
        faulty.requests.clear()
        with pytest.raises(ReadError) as caught:
            await files.read("s3://tests/v", 0, 10, 0, 10)
        assert caught.type is ReadError

    using(one, options)
    assert faulty.gets() <= gets

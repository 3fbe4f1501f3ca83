"""Targets of unknown size: one request returns both the size and the first bytes."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest

from tests.servers import S3, Faulty, Nginx
from tests.store.test_remotefiles import OPTIONS, using
from zarrfs.config.options import parse
from zarrfs.errors import OutOfRange, TargetChanged, TargetMissing
from zarrfs.net.http import HttpSystem
from zarrfs.net.request_queue import PART
from zarrfs.net.responses import Fetched
from zarrfs.store.remotefiles import RemoteFiles

VALUE = os.urandom(10_000)


@pytest.mark.parametrize("more", [0, 1000])
def test_one_request_returns_the_size_and_the_first_part(faulty: Faulty, more: int) -> None:
    value = os.urandom(PART + more) if more else VALUE
    url = faulty.put("/first", value)

    async def check(files: RemoteFiles) -> None:
        assert await files.size(url, begin=True) == len(value)
        assert await files.read(url, 0, len(value), 0, len(value)) == value

    using(check)
    wanted = [f"bytes=0-{PART - 1}", f"bytes={PART}-{PART + more - 1}"]
    assert sorted(asked or "" for _, _, asked in faulty.requests) == wanted[: 2 if more else 1]


def test_the_size_is_found_without_range_support_and_for_an_empty_value(faulty: Faulty) -> None:
    async def check(files: RemoteFiles) -> bytes:
        size = await files.size(url, begin=True)
        assert size == len(wanted)
        return bytes(await files.read(url, 0, size, 0, size))

    for wanted, fault in ((VALUE, "whole"), (b"", None), (os.urandom(PART + 5), "whole")):
        url = faulty.put("/first", wanted, forever=fault)
        assert using(check) == wanted
    url = faulty.url + "/none"
    with pytest.raises(TargetMissing):
        using(check)


@pytest.mark.parametrize("kind", ["nginx", "s3", "untold"])
def test_the_error_of_a_short_target_has_its_size_and_the_requested_range(
    nginx: Nginx, faulty: Faulty, s3: S3, kind: str
) -> None:
    """With "untold", the first response has no size; the size is known after the first bytes."""
    (nginx.plain.root / "short").write_bytes(VALUE)
    s3.client.put_object(Bucket=s3.bucket, Key="short", Body=VALUE)
    urls = {"nginx": f"{nginx.plain.url}/short", "untold": faulty.put("/short", VALUE, 416)}
    url = urls.get(kind, f"s3://{s3.bucket}/short")
    storage = {"s3": s3.options}
    options = dataclasses.replace(OPTIONS, storage=storage)
    reads = [(20_000, 50), (9000, 5000), (10_000, 7), (1 << 20, 9 * PART)]

    async def check(files: RemoteFiles) -> None:
        if kind == "untold":
            with pytest.raises(OutOfRange, match=r"has at most 20000 bytes, bytes \[20000, 20050\) were asked for$"):
                await files.read(url, 20_000, 50, 20_000, 20_050)
            assert await files.read(url, 5, 5, 5, 10) == VALUE[5:10]
        for offset, length in reads:
            with pytest.raises(OutOfRange) as caught:
                await files.read(url, offset, length, offset, offset + length)
            assert caught.value.reason == f"has 10000 bytes, bytes [{offset}, {offset + length}) were asked for"

    using(check, options)


def test_a_target_that_changes_after_its_first_bytes_is_an_error(faulty: Faulty) -> None:
    url = faulty.put("/first", bytes(PART) + b"one")

    async def check(files: RemoteFiles) -> None:
        size = await files.size(url, begin=True)
        faulty.put("/first", bytes(PART) + b"three")
        with pytest.raises(TargetChanged):
            await files.read(url, PART, 3, 0, size)

    using(check)


def test_a_target_that_grows_after_its_size_was_shown_is_not_cut(faulty: Faulty) -> None:
    """A listing shows the size; when the value is read later, it is longer."""
    url = faulty.put("/first", b"one")

    async def check(files: RemoteFiles) -> None:
        assert await files.size(url) == 3
        faulty.put("/first", b"three")
        for _ in range(2):
            with pytest.raises(TargetChanged, match="has grown since its size was shown"):
                await files.read(url, 0, 3, 0, 3)

    using(check)


def test_the_size_of_a_target_that_has_changed_since_it_was_read_is_an_error(faulty: Faulty) -> None:
    url = faulty.put("/first", b"one")

    async def check(files: RemoteFiles) -> None:
        assert await files.read(url, 0, 3, 0, 3) == b"one"
        faulty.put("/first", b"three")
        with pytest.raises(TargetChanged, match="has 5 bytes, and had 3 when it was first read"):
            await files.size(url)

    using(check)


def test_a_target_that_has_grown_since_its_block_was_kept_on_disk_is_not_cut(faulty: Faulty, tmp_path: Path) -> None:
    """The size comes from the disk, and the bytes come from the server, which has a longer version."""
    value = os.urandom(PART + 1000)
    url = faulty.put("/first", value)
    options = parse([f"cache_dir={tmp_path}"]).options

    async def sized(files: RemoteFiles) -> None:
        assert await files.size(url, begin=True) == len(value)

    async def check(files: RemoteFiles) -> None:
        await sized(files)
        assert not faulty.requests
        for _ in range(2):
            with pytest.raises(TargetChanged, match="has grown since its size was shown"):
                await files.read(url, PART, 1000, 0, len(value))

    for _ in range(100):  # while the disk is busy, no block is kept
        faulty.requests.clear()
        using(sized, options)
        if not faulty.requests:
            break
    faulty.put("/first", os.urandom(PART + 5000), tag="2")
    using(check, options)


def test_the_sizes_of_many_targets_take_one_request_each(faulty: Faulty, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many requests as host_requests= admits are under way at a time."""
    import trio

    urls = [faulty.put(f"/first{number}", VALUE) for number in range(100)]
    fetch, under_way, most = HttpSystem.fetch, 0, 0

    async def counted(self: HttpSystem, path: str, start: int, stop: int | None) -> Fetched:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        try:
            return await fetch(self, path, start, stop)
        finally:
            under_way -= 1

    async def check(files: RemoteFiles) -> None:
        async with trio.open_nursery() as nursery:
            for url in urls:
                nursery.start_soon(files.size, url, True)

    monkeypatch.setattr(HttpSystem, "fetch", counted)
    using(check, parse(["host_requests=4"]).options)
    assert len(faulty.requests) == 100
    assert most == 4


def test_the_size_of_a_block_on_disk_needs_no_request(faulty: Faulty, tmp_path: Path) -> None:
    url = faulty.put("/first", VALUE)
    options = parse([f"cache_dir={tmp_path}"]).options

    async def check(files: RemoteFiles) -> None:
        size = await files.size(url, begin=True)
        assert await files.read(url, 0, size, 0, size) == VALUE

    for _ in range(100):  # while the disk is busy, no block is kept
        before = faulty.gets()
        using(check, options)
        if faulty.gets() == before:
            break
    assert faulty.gets() == before
    assert OPTIONS.cache_dir is None

"""Targets of unknown size over HTTP: their size comes with their first bytes, in one request."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.servers import Faulty
from tests.store.test_remotefiles import OPTIONS, PART, using
from zarrfs.config.options import parse
from zarrfs.errors import TargetChanged, TargetMissing
from zarrfs.store.remotefiles import RemoteFiles

VALUE = os.urandom(10_000)


def test_one_request_returns_the_size_and_the_bytes(faulty: Faulty) -> None:
    url = faulty.put("/first", VALUE)

    async def check(files: RemoteFiles) -> None:
        assert await files.size(url, begin=True) == len(VALUE)
        assert await files.read(url, 0, len(VALUE), 0, len(VALUE)) == VALUE

    using(check)
    assert faulty.requests == [("GET", "/first", f"bytes=0-{PART - 1}")]


def test_a_large_value_goes_on_after_its_first_part(faulty: Faulty) -> None:
    value = os.urandom(PART + 1000)
    url = faulty.put("/first", value)

    async def check(files: RemoteFiles) -> None:
        assert await files.size(url, begin=True) == len(value)
        assert await files.read(url, 0, len(value), 0, len(value)) == value

    using(check)
    assert sorted(asked or "" for _, _, asked in faulty.requests) == [
        f"bytes=0-{PART - 1}", f"bytes={PART}-{PART + 999}",
    ]  # fmt: skip


def test_servers_that_answer_otherwise(faulty: Faulty) -> None:
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


def test_a_target_that_changes_after_its_first_bytes(faulty: Faulty) -> None:
    url = faulty.put("/first", bytes(PART) + b"one")

    async def check(files: RemoteFiles) -> None:
        size = await files.size(url, begin=True)
        faulty.put("/first", bytes(PART) + b"three")
        with pytest.raises(TargetChanged):
            await files.read(url, PART, 3, 0, size)

    using(check)


def test_many_are_asked_for_within_the_bound_of_a_server(faulty: Faulty) -> None:
    import trio

    urls = [faulty.put(f"/first{number}", VALUE) for number in range(100)]

    async def check(files: RemoteFiles) -> None:
        async with trio.open_nursery() as nursery:
            for url in urls:
                nursery.start_soon(files.size, url, True)
        assert files.blocks.stats()["cache"]["blocks"] == 100

    using(check, parse(["host_requests=4"]).options)
    assert len(faulty.requests) == 100


def test_the_size_of_a_block_on_disk_needs_no_request(faulty: Faulty, tmp_path: Path) -> None:
    url = faulty.put("/first", VALUE)
    options = parse([f"cache_dir={tmp_path}", "cache_min_free=0B"]).options

    async def check(files: RemoteFiles) -> None:
        size = await files.size(url, begin=True)
        assert await files.read(url, 0, size, 0, size) == VALUE

    using(check, options)
    before = faulty.gets()
    using(check, options)
    assert faulty.gets() == before
    assert OPTIONS.cache_dir is None

"""Targets of unknown size: one request returns both the size and the first bytes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.servers import Faulty
from tests.store.test_remotefiles import using
from zarrfs.config.options import parse
from zarrfs.errors import TargetChanged, TargetMissing
from zarrfs.net.request_queue import PART
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

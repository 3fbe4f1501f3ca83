"""Helpers that run a BlobReader on trio and check its errors."""

from __future__ import annotations

import gc
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest
import trio

from tests.archives.compiled import blobref
from tests.conftest import open_descriptors
from zarrfs.archives.blob_reader import BlobReader
from zarrfs.archives.blobrefs import sized
from zarrfs.config.options import Options
from zarrfs.errors import ReadError, to_errno

T = TypeVar("T")
DATA = bytes(range(256)) * 40
REF = blobref(DATA)
URL = sized(REF, len(DATA))


def run(
    places: tuple[Path | str, ...] | Path | str, body: Callable[[BlobReader], Awaitable[T]], **options: Any
) -> T:
    """Run `body` on trio with a BlobReader of `places`. If all places are local, check that no descriptor leaks."""
    places = places if isinstance(places, tuple) else (places,)

    async def main() -> T:
        reader = BlobReader(tuple(map(str, places)), Options(**options))
        try:
            return await body(reader)
        finally:
            await reader.aclose()

    before = len(open_descriptors())
    result = trio.run(main)
    if len(open_descriptors()) > before and not any("://" in str(place) for place in places):
        gc.collect()  # exceptions raised on the way keep their frames, and the open files in them, alive
        assert len(open_descriptors()) <= before
    return result


async def whole(reader: BlobReader, url: str = URL, length: int = len(DATA)) -> bytes:
    return bytes(await reader.read(url, 0, length, 0, length))


def fails(
    places: tuple[Path | str, ...] | Path | str, error: type[ReadError], match: str, url: str = URL, **options: Any
) -> ReadError:
    """Check that reading `url` raises exactly `error`, not as ENOENT, ENOTDIR or EISDIR, and return the exception."""

    async def body(reader: BlobReader) -> None:
        await reader.read(url, 0, 1, 0, 1)

    with pytest.raises(ReadError, match=match) as caught:
        run(places, body, **options)
    assert type(caught.value) is error
    assert to_errno(caught.value) not in (2, 20, 21)
    return caught.value

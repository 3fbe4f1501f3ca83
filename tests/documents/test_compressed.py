"""Compressed documents, read from disk and compiled."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
from collections.abc import Callable
from pathlib import Path

import pytest
import trio
import zstandard

from zarrfs.config.options import Options
from zarrfs.errors import SourceError
from zarrfs.sources import open_plan
from zarrfs.sources.prepare import prepare

FORMATS: dict[str, Callable[[bytes], bytes]] = {
    "gzip": gzip.compress,
    "zstd": zstandard.compress,
    "pzstd": lambda data: b"\x50\x2a\x4d\x18\x04\0\0\0size" + zstandard.compress(data),
    "xz": lzma.compress,
    "bzip2": bz2.compress,
}
TEXT = json.dumps({"version": 1, "refs": {f"k{number}": f"v{number}" for number in range(1000)}}).encode()


def planned(directory: Path, data: bytes, **options: object) -> bytes:
    """Plan the document `data` and return the value of k999."""
    path = directory / "refs.json.x"
    path.write_bytes(data)
    chosen = Options(**options)  # type: ignore[arg-type]
    store = open_plan(prepare(str(path), chosen), chosen)
    return bytes(trio.run(store.get, "k999"))


@pytest.mark.parametrize("name", FORMATS)
def test_every_compression_format_is_read(name: str, tmp_path: Path) -> None:
    assert planned(tmp_path, FORMATS[name](TEXT)) == b"v999"


@pytest.mark.parametrize("name", FORMATS)
def test_two_members_are_one_document(name: str, tmp_path: Path) -> None:
    compress = FORMATS[name]
    assert planned(tmp_path, compress(TEXT[:5000]) + compress(TEXT[5000:])) == b"v999"


@pytest.mark.parametrize("name", FORMATS)
def test_truncated_and_damaged_data_is_refused(name: str, tmp_path: Path) -> None:
    data = FORMATS[name](TEXT)
    for bad in (data[: len(data) // 2], data[:20] + b"\xff" * 20 + data[40:]):
        with pytest.raises(SourceError, match=r"refs\.json\.x: (damaged|not JSON)"):
            planned(tmp_path, bad)


@pytest.mark.parametrize("name", FORMATS)
def test_a_bomb(name: str, tmp_path: Path) -> None:
    """A small file that expands beyond document_limit is refused."""
    with pytest.raises(SourceError, match=r"more than 1048576 bytes"):
        planned(tmp_path, FORMATS[name](b" " * (1 << 24)), document_limit=1 << 20)
    assert planned(tmp_path, FORMATS[name](TEXT), document_limit=len(TEXT)) == b"v999"

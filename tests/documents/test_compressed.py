"""Compressed documents: every format is read, and what is damaged, cut or too large is refused."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trio
import zstandard

from zarrfs.config.options import Options
from zarrfs.documents.document import Document
from zarrfs.documents.json_document import JsonDocument
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


def parsed(data: bytes, limit: int = 1 << 20) -> Any:
    return JsonDocument(Document("refs.json.x", data, "/", None), limit).whole()


@pytest.mark.parametrize("name", FORMATS)
def test_a_document_in_one_or_two_members_is_read_and_damaged_data_is_refused(name: str) -> None:
    compress = FORMATS[name]
    data = compress(TEXT)
    assert parsed(data) == parsed(compress(TEXT[:5000]) + compress(TEXT[5000:])) == json.loads(TEXT)
    for bad in (data[: len(data) // 2], data[:20] + b"\xff" * 20 + data[40:]):
        with pytest.raises(SourceError, match=r"refs\.json\.x: (damaged|not JSON)"):
            parsed(bad)
    assert parsed(data, len(TEXT)) == json.loads(TEXT)
    with pytest.raises(SourceError, match=f"more than {len(TEXT) - 1} bytes"):
        parsed(data, len(TEXT) - 1)


@pytest.mark.parametrize("name", ["pzstd", "xz"])
def test_a_source_may_be_compressed_and_a_bomb_is_refused(name: str, tmp_path: Path) -> None:
    path = tmp_path / "refs.json.x"
    path.write_bytes(FORMATS[name](TEXT))
    assert bytes(trio.run(open_plan(prepare(str(path), Options()), Options()).get, "k999")) == b"v999"
    path.write_bytes(FORMATS[name](b" " * (1 << 24)))
    with pytest.raises(SourceError, match=r"more than 1048576 bytes"):
        prepare(str(path), Options(document_limit=1 << 20))

"""What mutated samples have found (tests/soak/fuzz.py): each of these was a traceback, a hang or too much memory."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.conftest import PROGRAM
from tests.unit.parquetsets import write_set, zarray
from tests.unit.test_documents_large import peak
from zarrfs.sources.parquetset import json_text


def test_a_parquet_set_is_read_with_little_address_space(tmp_path: Path) -> None:
    root = write_set(tmp_path / "set", {"a/.zarray": zarray([1], [1])}, {"a": [b"x"]})
    done = subprocess.run(
        ["prlimit", f"--as={1 << 30}", PROGRAM, "info", root], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_the_text_of_a_long_attribute_takes_memory_in_proportion() -> None:
    """The Parquet layout shows members of .zmetadata as ujson writes them: 4 MiB of text took half a gigabyte."""
    value = {"a/b": "x/" * (2 << 20)}
    assert peak(lambda: json_text(value)) < 64 << 20
    assert json_text({"t": 'a"/\\', "e": 1e-7}) == b'{"t":"a\\"\\/\\\\","e":1e-7}'

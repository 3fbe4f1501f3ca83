"""Regression tests for what mutated samples found (tests/soak/fuzz.py): tracebacks, hangs and excessive memory."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.conftest import PROGRAM, run
from tests.references.parquetsets import write_set, zarray
from zarrfs.references.parquet_metadata import json_text

# Prints the peak growth of its process in bytes
LONG_TEXT = """
from tests.documents.test_json_document_large import peak
from zarrfs.references.parquet_metadata import json_text
print(peak(lambda: json_text({"a/b": "x/" * (2 << 20)})))
"""


def test_a_parquet_set_is_read_with_little_address_space(tmp_path: Path) -> None:
    root = write_set(tmp_path / "set", {"a/.zarray": zarray([1], [1])}, {"a": [b"x"]})
    done = subprocess.run(
        ["prlimit", f"--as={1 << 30}", PROGRAM, "info", root], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_the_text_of_a_long_attribute_takes_memory_in_proportion() -> None:
    """The Parquet layout shows members of .zmetadata as ujson writes them: 4 MiB of text once took 0.5 GB."""
    done = subprocess.run([sys.executable, "-c", LONG_TEXT], capture_output=True, text=True, timeout=60, check=True)
    assert int(done.stdout) < 64 << 20
    assert json_text({"t": 'a"/\\', "e": 1e-7}) == b'{"t":"a\\"\\/\\\\","e":1e-7}'


@pytest.mark.parametrize(
    ("old", "new", "status", "said"),
    [
        (b"\xc3\xa9", b"\xc3\x28", 1, "bad zip file: 'utf-8' codec can't decode"),  # a name with the UTF-8 flag
        (b"\x21\x00", b"\xff\xff", 0, ""),  # a date in month 15
        (b"\x21\x00", b"\x00\x00", 0, ""),
    ],
    ids=["name", "month 15", "month 0"],
)
def test_bad_zip_headers_cause_no_traceback(tmp_path: Path, old: bytes, new: bytes, status: int, said: str) -> None:
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as file:
        file.writestr(zipfile.ZipInfo("\u00e9", (1980, 1, 1, 0, 0, 0)), "x")
    data = (tmp_path / "a.zip").read_bytes()
    assert old in data
    (tmp_path / "a.zip").write_bytes(data.replace(old, new))
    done = run("ls", "-l", tmp_path / "a.zip")
    assert done.returncode == status
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == status
    assert "Traceback" not in done.stderr

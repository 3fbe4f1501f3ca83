"""Entries that break a rule: they are listed, stat works, and reading them fails with EIO and one line in the log."""

from __future__ import annotations

import base64
import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import run
from tests.icechunk.repositories import write_virtual
from tests.mounts.mounting import log_of, mounted
from tests.references.parquetsets import write_set, zarray

BAD: dict[str, Any] = {
    "text offset": ["f.nc", "100", 50],
    "negative offset": ["f.nc", -1, 50],
    "negative length": ["f.nc", 0, -50],
    "float length": ["f.nc", 0, 50.5],
    "huge offset": ["f.nc", 2**63, 1],
    "four items": ["f.nc", 1, 2, 3],
    "no items": [],
    "no length": ["f.nc", 5],
    "null": None,
    "null url": [None, 0, 1],
    "empty url": ["", 0, 1],
    "number": 17,
    "base64": "base64:!!!",
    "data url": ["data:;base64,!!!"],
    "data range": ["data:,hello", 2, 9],
}


def _unreadable(path: Path) -> None:
    """Check that a file has attributes and that neither open(2) nor a read gives bytes."""
    assert path.stat().st_size == 1  # not 0: tar(1) does not open an empty file
    with pytest.raises(OSError, match="Input/output") as caught:
        path.read_bytes()
    assert caught.value.errno == errno.EIO


def test_a_bad_reference_is_an_error_for_its_reader_alone(tmp_path: Path) -> None:
    refs = {f"t/{name}": value for name, value in BAD.items()} | {"t/good": "fine", "t/../x": "no path"}
    (source := tmp_path / "set.json").write_text(json.dumps({"version": 1, "refs": refs}))
    with mounted(source, tmp_path / "mnt") as root:
        assert sorted(os.listdir(root / "t")) == sorted([*BAD, "good"])
        assert (root / "t/good").read_text() == "fine"
        for name in BAD:
            _unreadable(root / "t" / name)
            assert sum(f"t/{name}: " in line and "ERROR" in line for line in log_of(root).splitlines()) == 1, name
    checked = run("check", source)
    assert checked.returncode == 1
    assert all(f"t/{name}: " in checked.stdout for name in [*BAD, "../x"]), checked.stdout
    assert json.loads(run("info", "--json", source).stdout)["broken"] == len(BAD)


def test_a_data_url_may_have_any_length(tmp_path: Path) -> None:
    data = os.urandom(300_000)
    url = f"data:;base64,{base64.b64encode(data).decode()}"
    (source := tmp_path / "set.json").write_text(json.dumps({"a": [url], "b": [url, 1000, 250_000]}))
    with mounted(source, tmp_path / "mnt") as root:
        assert (root / "a").read_bytes() == data
        assert (root / "b").read_bytes() == data[1000:251_000]


def test_a_bad_row_of_a_parquet_set(tmp_path: Path) -> None:
    data = "data:;base64," + base64.b64encode(bytes(300_000)).decode()
    rows = [["/x", -1, 5], ["/x", 5, -1], ["", 1, 1], b"base64:!!", b"fine", [data], None]
    set_ = write_set(tmp_path / "set", {"a/.zarray": zarray([8], [1])}, {"a": rows}, 8)
    with mounted(set_, tmp_path / "mnt") as root:
        assert sorted(os.listdir(root / "a")) == [".zarray", *"012345"]
        for name in "0123":
            _unreadable(root / "a" / name)
            assert sum(f"row {name}: " in line for line in log_of(root).splitlines()) == 1
        assert (root / "a/4").read_bytes() == b"fine"
        assert (root / "a/5").read_bytes() == bytes(300_000)
    checked = run("check", set_)
    assert checked.returncode == 1
    assert all(f"a/{name}: " in checked.stdout for name in "0123"), checked.stdout


def test_a_bad_location_in_an_icechunk_repository(tmp_path: Path) -> None:
    repository = write_virtual(tmp_path / "repo", "vcc://archive/numbers.bin", None)
    with mounted(repository, tmp_path / "mnt") as root:
        assert sorted(os.listdir(root / "virtual/c")) == ["0", "1"]
        for name in "01":
            _unreadable(root / "virtual/c" / name)
            assert sum(f"virtual/c/{name}: " in line for line in log_of(root).splitlines()) == 1
        assert json.loads((root / "virtual/zarr.json").read_bytes())["shape"] == [20]
    checked = run("check", repository)
    assert checked.returncode == 1
    assert "virtual/c/0: " in checked.stdout
    assert json.loads(run("info", "--json", repository).stdout)["broken"] == 2

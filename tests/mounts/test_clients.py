"""Real readers on real mounts: xarray, zarr-python, h5py."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import h5py
import numpy as np
import xarray
import zarr

from tests.conftest import DATA
from tests.mounts.mounting import mounted


def compare_with_files(root: Path, consolidated: bool) -> None:
    """Assert that xarray reads the same values from the combined set at `root` as h5py does from its source files."""
    files = [h5py.File(DATA / f"references/data/day{day}.nc") for day in range(3)]
    compared = 0
    with xarray.open_dataset(root, engine="zarr", consolidated=consolidated, decode_cf=False) as dataset:
        for name, variable in dataset.variables.items():
            parts = [file[name][...] for file in files if name in file]
            expected = np.concatenate(parts) if "time" in variable.dims else parts[0]
            np.testing.assert_array_equal(variable.values, expected, err_msg=str(name))
            compared += 1
    assert compared >= 4


def test_xarray_reads_a_combined_set_as_h5py_reads_its_files(references: Path, tmp_path: Path) -> None:
    with mounted(references / "combined_v1.json", tmp_path / "mnt") as root:
        compare_with_files(root, consolidated=False)


def check_hierarchy(name: str, root: Path) -> int:
    """Compare every array in `expected.NAME.json` with its digest there; return the number of arrays."""
    expected = json.loads((DATA / f"zarr/expected.{name}.json").read_text())
    for path, about in expected.items():
        array = zarr.open_array(root / path, mode="r")
        values = np.ascontiguousarray(array[...])
        if not about["dtype"].startswith("|V"):
            values = values.astype(np.dtype(about["dtype"]), copy=False)
        assert hashlib.sha256(values.tobytes()).hexdigest() == about["sha256"], path
    return len(expected)


def test_h5py_reads_a_whole_file_reference(tmp_path: Path) -> None:
    document = tmp_path / "refs.json"
    source = DATA / "references/data/day0.nc"
    document.write_text(json.dumps({"version": 1, "refs": {"day0.nc": [str(source)]}}))
    with mounted(document, tmp_path / "mnt") as root, h5py.File(root / "day0.nc") as shown, h5py.File(source) as own:
        assert sorted(shown) == sorted(own)
        np.testing.assert_array_equal(shown["t2m"][...], own["t2m"][...])

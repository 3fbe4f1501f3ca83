"""zarr-python writes through a writable mount, and its own model of a hierarchy holds on one."""

from __future__ import annotations

import subprocess
from pathlib import Path

import numpy as np
import pytest
import zarr

from tests.conftest import DATA
from tests.mounts.mounting import mounted
from tests.mounts.test_writes_faults import upper
from tests.mounts.treemodel import differences, snapshot

# -- the same program on a mount and on a plain directory


def write_everything(root: Path, version: int) -> None:
    """Create groups and arrays, set attributes, resize, overwrite, delete, and consolidate."""
    group = zarr.open_group(root, mode="a", zarr_format=version, path=f"new{version}")  # type: ignore[arg-type]
    data = np.arange(10_000, dtype="<i4").reshape(100, 100)
    whole = group.create_array("whole", shape=data.shape, chunks=(30, 30), dtype=data.dtype, fill_value=-1)
    whole[...] = data
    whole.attrs["units"] = "m"
    inner = group.create_group("inner")
    inner.attrs.update({"title": "täst"})
    gone = inner.create_array("gone", shape=(10,), chunks=(3,), dtype="f8")
    gone[...] = 1.5
    del inner["gone"]
    small = inner.create_array("small", shape=(40,), chunks=(7,), dtype="<i2", fill_value=0)
    small[...] = np.arange(40)
    small.resize((13,))
    small.append(np.arange(5, dtype="<i2"))
    small[2:9] = 77
    group.create_array("replaced", shape=(4,), chunks=(2,), dtype="u1")[...] = 9
    group.create_array("replaced", shape=(6,), chunks=(3,), dtype="u1", overwrite=True)[...] = 8
    zarr.consolidate_metadata(root, path=f"new{version}", zarr_format=version)  # type: ignore[arg-type]


def read_everything(root: Path, version: int) -> None:
    group = zarr.open_consolidated(root, path=f"new{version}", zarr_format=version)  # type: ignore[arg-type]
    np.testing.assert_array_equal(group["whole"][...], np.arange(10_000).reshape(100, 100))  # type: ignore[index]
    expected = np.concatenate([np.arange(13), np.arange(5)])
    expected[2:9] = 77
    np.testing.assert_array_equal(group["inner/small"][...], expected)  # type: ignore[index]
    np.testing.assert_array_equal(group["replaced"][...], np.full(6, 8))  # type: ignore[index]
    assert group["whole"].attrs["units"] == "m"
    assert group["inner"].attrs["title"] == "täst"
    assert "gone" not in group["inner"]  # type: ignore[operator]


def without_times(root: Path) -> dict[str, dict[str, object]]:
    return {key: {**about, "mtime": None} for key, about in snapshot(root).items()}


@pytest.mark.filterwarnings("ignore:Consolidated metadata")
def test_new_arrays_are_written_over_a_reference_set(references: Path, tmp_path: Path) -> None:
    source = references / "combined_v1.json"
    for write in (True, False):
        with mounted(source, tmp_path / "mnt", upper(tmp_path)) as root:
            for version in (2, 3):
                if write:
                    write_everything(root, version)
                read_everything(root, version)


def change_existing(root: Path) -> None:
    """Change a v2 hierarchy: metadata, chunks, whole arrays."""
    group = zarr.open_group(root, mode="r+")
    for number, (name, array) in enumerate(sorted(group.arrays())):
        if number % 4 == 0:
            del group[name]
        elif number % 4 == 1:
            array.attrs["patched"] = number
        elif number % 4 == 2 and array.ndim and array.dtype.kind in "iuf":
            array[0] = 7
    group.attrs["patched"] = True


def test_existing_arrays_are_changed_as_in_a_plain_directory(tmp_path: Path) -> None:
    for copy in ("source", "plain"):
        subprocess.run(["cp", "-a", DATA / "zarr/v3_hier", tmp_path / copy], check=True)
    before = snapshot(tmp_path / "source")
    change_existing(tmp_path / "plain")
    for write in (True, False):
        with mounted(tmp_path / "source", tmp_path / "mnt", upper(tmp_path)) as root:
            if write:
                change_existing(root)
            assert differences(without_times(root), without_times(tmp_path / "plain")) == []
    assert snapshot(tmp_path / "source") == before

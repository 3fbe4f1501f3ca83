"""A mounted reference set of `zarrfs refs from-store`: it has the tree and the bytes of the store."""

from __future__ import annotations

import subprocess
from pathlib import Path

import numpy as np
import pytest
import zarr

from tests.conftest import run
from tests.mounts.mounting import mounted


@pytest.mark.parametrize("form", ["json", "json.zst", "index", "parq"])
def test_references_to_a_store_mount_as_the_store(form: str, tmp_path: Path) -> None:
    store = tmp_path / "store.zarr"
    group = zarr.open_group(str(store), mode="w", zarr_format=2)
    group.create_array("x/y", data=np.arange(1000).reshape(20, 50), chunks=(7, 9))
    written = tmp_path / f"set.{form}"
    done = run("refs", "from-store", store, "-O", written)
    assert (done.returncode, done.stderr) == (0, "")
    with mounted(written, tmp_path / "mnt") as mountpoint:
        found = zarr.open_group(str(mountpoint), mode="r", zarr_format=2)["x/y"][:]
        assert (found == np.arange(1000).reshape(20, 50)).all()
        if form != "parq":  # the Parquet layout stores the metadata in another form
            compared = subprocess.run(["diff", "-r", store, mountpoint], capture_output=True, text=True, check=False)
            assert (compared.returncode, compared.stdout) == (0, "")

"""The warning in the log when a change makes consolidated metadata stale."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import zarr

from tests.mounts.mounting import log_of, mounted
from tests.mounts.remotevalues import wait_for

WARNING = "consolidate it again"


@pytest.mark.parametrize(("version", "document"), [(2, ".zmetadata"), (3, "zarr.json")])
def test_stale_consolidated_metadata_is_logged_once(version: int, document: str, tmp_path: Path) -> None:
    store, plain = tmp_path / "store", tmp_path / "plain"
    group = zarr.open_group(store, mode="w", zarr_format=version)  # type: ignore[arg-type]
    for name in ("a", "b"):
        group.create_array(name, data=np.arange(4))
    shutil.copytree(store, plain)
    zarr.consolidate_metadata(str(store), zarr_format=version)  # type: ignore[arg-type]
    for source, count in ((store, 1), (plain, 0)):
        with mounted(source, tmp_path / f"mnt-{source.name}", "rw") as root:
            changed = zarr.open_group(root, mode="r+", zarr_format=version, use_consolidated=False)  # type: ignore[arg-type]
            changed["a"][0] = 7  # type: ignore[index]
            assert WARNING not in log_of(root), "chunks are not repeated"
            for name in ("a", "b"):
                changed[name].attrs["units"] = "K"
            wait_for(lambda root=root, count=count: log_of(root).count(WARNING) >= count)  # type: ignore[misc]
            (root / "a").rename(root / "c")  # after this reply the daemon has checked all changes
        lines = [line for line in log_of(root).splitlines() if WARNING in line]
        assert len(lines) == count
        assert all(f" {document}: no longer matches the metadata of its nodes (a/" in line for line in lines)

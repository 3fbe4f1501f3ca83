"""Mounts over real HTTP servers: documents and targets behind URLs; and a store in a zip file."""

from __future__ import annotations

import errno
import json
import shutil
from pathlib import Path

import pytest
import zarr

from tests.conftest import DATA
from tests.faultproxy import FaultProxy, proxy
from tests.mounts.mounting import log_of, mounted
from tests.mounts.remotevalues import cut, publish, read_all, whole
from tests.mounts.remotevalues import document as write_document
from tests.mounts.test_clients import check_hierarchy
from tests.mounts.test_samples import REFERENCES, files_below, sha256
from tests.mounts.test_semantics import error_of
from tests.servers import Faulty, Nginx, faulty, nginx

__all__ = ["faulty", "nginx", "proxy"]


def publish_references(root: Path) -> None:
    """Copy the sample sets below `root`, with targets relative to the documents."""
    target = root / "references"
    if not target.exists():
        shutil.copytree(DATA / "references", target)
        for document in target.glob("*.json"):
            # both "@DATA@/x" and "file://@DATA@/x" become relative
            text = document.read_text().replace("file://@DATA@", "data").replace("@DATA@", "data")
            document.write_text(text)


def test_a_reference_set_with_its_targets_on_a_web_server(nginx: Nginx, tmp_path: Path) -> None:
    publish_references(nginx.plain.root)
    with mounted(f"{nginx.plain.url}/references/combined_v1.json", tmp_path / "mnt") as root:
        expected = REFERENCES["combined_v1"]
        found = files_below(root)
        assert found.keys() == expected.keys()
        for key, path in found.items():
            assert (path.stat().st_size, sha256(path)) == (expected[key]["size"], expected[key]["sha256"]), key


def test_a_store_in_a_zip_file(tmp_path: Path) -> None:
    shutil.make_archive(str(tmp_path / "store"), "zip", DATA / "zarr/v2_hier")
    with mounted(tmp_path / "store.zip", tmp_path / "mnt") as root:
        assert check_hierarchy("v2_hier", root) > 10


def test_a_target_that_fails_is_an_error_until_it_recovers(faulty: Faulty, tmp_path: Path) -> None:
    value = bytes(range(250)) * 40
    faults: list[object] = [404, 403, 500, "truncate", "elsewhere", "short", "reset"]  # a reset is an outage: last
    urls = {f"x{number}": faulty.put(f"/{number}.bin", value, forever=fault) for number, fault in enumerate(faults)}
    document = tmp_path / "refs.json"
    document.write_text(json.dumps({"version": 1, "refs": {name: [url, 1000, 2000] for name, url in urls.items()}}))
    with mounted(document, tmp_path / "mnt", "retries=1,read_timeout=3s") as root:
        for (name, url), fault in zip(urls.items(), faults, strict=True):
            assert error_of((root / name).read_bytes) == (errno.EACCES if fault == 403 else errno.EIO), fault
            [line] = [line for line in log_of(root).splitlines() if "ERROR" in line and f" {name}: " in line]
            assert url in line
        for number, name in enumerate(urls):
            faulty.put(f"/{number}.bin", value)
            assert (root / name).read_bytes() == value[1000:3000]


def test_a_chunk_that_cannot_be_fetched_is_no_fill_value(faulty: Faulty, tmp_path: Path) -> None:
    """zarr-python fills in an absent chunk with the fill value, but must raise for a chunk whose target fails."""
    meta = {"zarr_format": 2, "shape": [4], "chunks": [2], "dtype": "<i4", "fill_value": 7, "order": "C",
            "compressor": None, "filters": None}  # fmt: skip
    url = faulty.put("/chunk.bin", bytes(8), forever=500)
    document = tmp_path / "refs.json"
    document.write_text(json.dumps({"version": 1, "refs": {"a/.zarray": json.dumps(meta), "a/0": [url, 0, 8]}}))
    with mounted(document, tmp_path / "mnt", "retries=0") as root:
        array = zarr.open_array(root / "a", mode="r")
        assert (array[2:] == 7).all()
        with pytest.raises(OSError, match="Input/output error"):
            array[:2]


def test_values_that_fit_in_memory_are_fetched_once(nginx: Nginx, proxy: FaultProxy, tmp_path: Path) -> None:
    """Each read drops its pages from the page cache."""
    values = cut(publish(nginx.plain.root, "fits.bin", 24 << 20), "v", 512 << 10)
    source = write_document(tmp_path / "refs.json", {f"{proxy.url}/fits.bin": values})
    with mounted(source, tmp_path / "mnt", "memory_limit=1GiB") as root:
        assert read_all(root, whole(values), 4).right == len(values)
        fetched = proxy.counts["GET"]
        assert read_all(root, whole(values), 4).right == len(values)
        assert proxy.counts["GET"] == fetched

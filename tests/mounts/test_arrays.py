"""Arrays as flat files on real mounts, read by NumPy and by programs that do not support Zarr."""

from __future__ import annotations

import errno
import hashlib
import io
import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

from tests.mounts.mounting import log_of, mounted
from tests.servers import Faulty
from tests.zarrsamples import DRAFT, ROOT, SAMPLES

Array = np.ndarray[Any, Any]


def mapped(path: Path) -> Array:
    """Map a file as an array; the file stays in use as long as the array exists."""
    found: Array = np.load(path, mmap_mode="r")
    return found


@pytest.mark.parametrize("source", [ROOT, ROOT / "v0_int16_12", ROOT / "v3_draft"], ids=lambda source: source.name)
def test_numpy_reads_every_sample(tmp_path: Path, source: Path) -> None:
    """All samples are in one mount; an array and an experimental store are the root of a mount of their own."""
    samples = [sample for sample in SAMPLES + DRAFT if sample.store.is_relative_to(source)]
    samples = [sample for sample in samples if sample not in DRAFT or source == sample.store]
    with mounted(source, tmp_path / "mnt", "view=arrays") as mountpoint:
        for sample in samples:
            array = sample.store / sample.path
            path = mountpoint / ("array.npy" if array == source else f"{array.relative_to(source)}.npy")
            if not sample.decoded:
                with pytest.raises(OSError, match="Input/output error"):
                    path.read_bytes()
                continue
            assert mapped(path).shape == np.load(path).shape == sample.shape, sample.label
            for data in (np.load(path).tobytes(), mapped(path).tobytes()):
                assert not sample.defined or hashlib.sha256(data).hexdigest() == sample.sha256, sample.label
            if sample.attributes is not None:
                assert json.loads(path.with_suffix(".json").read_text()) == sample.attributes, sample.label
    assert samples


def large(path: Path) -> Array:
    """Make a store with an array `x` of 8 MiB in 32 chunks; return its values."""
    items = np.random.default_rng(0).integers(0, 1000, (1024, 2048)).astype("<i4")
    group = zarr.open_group(path, mode="w", zarr_format=2)
    group.create_array("x", shape=items.shape, chunks=(128, 512), dtype="<i4")[:] = items
    return items


def npy(items: Array) -> bytes:
    """Return the .npy file of an array."""
    out = io.BytesIO()
    np.save(out, items)
    return out.getvalue()


def test_a_damaged_chunk_is_eio_on_its_own_pages_only(tmp_path: Path) -> None:
    items = large(tmp_path / "x.zarr")
    wanted = npy(items)
    damaged = {2 * row for row in range(512, 640)}  # a page is half a row, less the 128 bytes of the header
    (tmp_path / "x.zarr/x/4.0").write_bytes(b"damaged")  # rows 512 to 639, columns 0 to 511
    with mounted(tmp_path / "x.zarr", tmp_path / "mnt", "view=arrays") as mountpoint:
        descriptor = os.open(mountpoint / "x.npy", os.O_RDONLY)
        try:
            for at in range(0, len(wanted), 4096):  # in order, so that the kernel reads ahead into the damaged pages
                if at // 4096 not in damaged:
                    assert os.pread(descriptor, 4096, at) == wanted[at : at + 4096]
                    continue
                with pytest.raises(OSError, match=os.strerror(errno.EIO)):
                    os.pread(descriptor, 4096, at)
        finally:
            os.close(descriptor)
    assert "4.0" in log_of(tmp_path / "mnt")


def test_a_changed_chunk_is_seen_when_the_file_is_opened_again(tmp_path: Path) -> None:
    items = large(tmp_path / "x.zarr")
    with mounted(tmp_path / "x.zarr", tmp_path / "mnt", "view=arrays") as mountpoint:
        assert (mountpoint / "x.npy").read_bytes() == npy(items)
        items[700:800] = 5
        zarr.open_array(tmp_path / "x.zarr/x", mode="r+")[700:800] = 5
        time.sleep(1.5)
        assert (mountpoint / "x.npy").read_bytes() == npy(items)


def test_an_array_is_read_to_its_end_once_its_document_can_be_read(tmp_path: Path, faulty: Faulty) -> None:
    about = {"zarr_format": 2, "shape": [2], "chunks": [2], "dtype": "|u1", "fill_value": 7, "order": "C"}
    document = json.dumps(about | {"compressor": None, "filters": None}).encode()
    refs = {".zgroup": '{"zarr_format": 2}', "x/.zarray": [faulty.put("/x", document, forever=403)]}
    (tmp_path / "refs.json").write_text(json.dumps({"version": 1, "refs": refs}))
    with mounted(tmp_path / "refs.json", tmp_path / "mnt", "view=arrays", "retries=0") as mountpoint:
        with os.scandir(mountpoint) as entries:
            assert sorted(entry.name for entry in entries) == ["x", "x.json", "x.npy"]
        with pytest.raises(PermissionError):
            (mountpoint / "x.npy").read_bytes()
        faulty.put("/x", document)
        assert np.load(mountpoint / "x.npy").tolist() == [7, 7]
        assert (mountpoint / "x.npy").stat().st_size == 130

"""A mounted directory whose files change: new values become visible, and an open file stays one version."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.mounts.mounting import mounted

SIZE = 8 << 20


@pytest.fixture
def source(tmp_path: Path) -> Path:
    directory = tmp_path / "store"
    directory.mkdir()
    (directory / ".zgroup").write_text('{"zarr_format": 2}')
    (directory / "chunk").write_bytes(b"A" * SIZE)
    return directory


def replace(path: Path, data: bytes, keep_time: bool = False) -> None:
    """Replace a file as a Zarr store does: write a new one in the same directory, and rename it."""
    before = path.stat()
    beside = path.with_name("partial")
    beside.write_bytes(data)
    if keep_time:
        os.utime(beside, ns=(before.st_atime_ns, before.st_mtime_ns))
    beside.rename(path)


def test_an_open_file_stays_one_version_and_a_new_one_is_the_newest(source: Path, tmp_path: Path) -> None:
    with mounted(source, tmp_path / "mnt", "attr_timeout=0") as root:
        old = os.open(root / "chunk", os.O_RDONLY)
        assert os.pread(old, 4096, 0) == b"A" * 4096
        replace(source / "chunk", b"B" * (SIZE // 2))
        assert (root / "chunk").read_bytes() == b"B" * (SIZE // 2)
        assert os.fstat(old).st_size == SIZE
        assert os.pread(old, SIZE, 0) == b"A" * SIZE
        before = (source / "chunk").stat()
        (source / "chunk").write_bytes(b"C" * (SIZE // 2))  # in place
        os.utime(source / "chunk", ns=(before.st_atime_ns, before.st_mtime_ns))
        assert (root / "chunk").read_bytes() == b"C" * (SIZE // 2)
        (source / "chunk").unlink()
        assert os.pread(old, 4096, SIZE // 2) == b"A" * 4096
        os.close(old)
        assert not (root / "chunk").exists()


def test_a_replaced_file_is_seen_despite_the_kernels_cache(source: Path, tmp_path: Path) -> None:
    with mounted(source, tmp_path / "mnt", "attr_timeout=60s") as root:
        old = os.open(root / "chunk", os.O_RDONLY)
        assert os.pread(old, 4096, 0) == b"A" * 4096
        replace(source / "chunk", b"B" * SIZE, keep_time=True)
        new = os.open(root / "chunk", os.O_RDONLY)  # the kernel has cached the old attributes
        assert os.pread(new, SIZE, 0) == b"B" * SIZE
        assert os.pread(old, SIZE, 0) == b"A" * SIZE
        assert os.pread(new, 4096, SIZE // 2) == b"B" * 4096
        os.close(old)
        os.close(new)

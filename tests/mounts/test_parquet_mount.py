"""Reference sets in the Parquet layout, read through a real mount."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import time
from pathlib import Path

import fsspec
import kerchunk.df
import numpy as np
import pytest
import xarray
import zarr
from fsspec.implementations.reference import LazyReferenceMapper

from tests.conftest import run
from tests.mounts.mounting import log_of, mounted
from tests.mounts.test_clients import compare_with_files
from tests.mounts.test_samples import files_below
from tests.mounts.test_semantics import error_of
from tests.references.parquetsets import Reference, write_set, zarray
from tests.servers import S3, Nginx, nginx, s3

__all__ = ["nginx", "s3"]


@pytest.fixture
def combined(references: Path, tmp_path: Path) -> Path:
    """Write the combined sample set with kerchunk, in the Parquet layout; return its path."""
    refs = json.loads((references / "combined_v1.json").read_text())["refs"]
    kerchunk.df.refs_to_dataframe(refs, str(tmp_path / "combined.parq"), record_size=100)
    return tmp_path / "combined.parq"


def test_a_set_that_kerchunk_has_written(combined: Path, tmp_path: Path) -> None:
    """xarray reads the same as h5py does from the files; attributes, listings and user.zarrfs.source are right."""
    with mounted(combined, tmp_path / "mnt") as root:
        for consolidated in (True, False):
            compare_with_files(root, consolidated)
        document = (combined / ".zmetadata").stat()
        for path in files_below(root).values():
            status = path.stat()
            assert (status.st_mtime_ns, status.st_mode & 0o777) == (document.st_mtime_ns, 0o444)
            assert status.st_size == len(path.read_bytes())
        place = json.loads(os.getxattr(root / "sub/c/0.0", "user.zarrfs.source"))
        assert (place["url"].rpartition("/")[2], place["offset"], place["length"]) == ("day0.nc", 18368, 8000)
        assert error_of(os.stat, root / "t2m/99.0.0") == errno.ENOENT
        assert error_of(os.listdir, root / "t2m/0.0.0") == errno.ENOTDIR


def test_a_long_listing_with_holes(tmp_path: Path) -> None:
    """The listing takes several readdir requests and several record files."""
    rows: list[Reference] = [None if number % 3 == 1 else b"%d" % number for number in range(5000)]
    root = write_set(tmp_path / "set", {"a/.zarray": zarray([50, 100], [1, 1])}, {"a": rows}, 700)
    expected = [".zarray", *(f"{n // 100}.{n % 100}" for n in range(5000) if n % 3 != 1)]
    with mounted(root, tmp_path / "mnt") as mount:
        assert sorted(os.listdir(mount / "a")) == sorted(expected)
        listed = run("ls", root, "a").stdout.split()
        assert listed == expected
        for name in ("0.0", "49.98", "8.0"):
            number = int(name.split(".")[0]) * 100 + int(name.split(".")[1])
            assert (mount / "a" / name).read_bytes() == b"%d" % number
        array = zarr.open_array(mount / "a", mode="r")
        assert array[0, 1] == 7  # the chunk is absent: the fill value


def test_a_lost_record_file_is_an_error_for_its_own_keys_only(tmp_path: Path) -> None:
    rows: list[Reference] = [b"%d" % (number % 10) for number in range(40)]
    root = write_set(tmp_path / "set", {"a/.zarray": zarray([40], [1]), "a/.zattrs": {}}, {"a": rows}, 10)
    (root / "a/refs.2.parq").unlink()
    (root / "a/refs.2.parq").symlink_to("nowhere")
    with mounted(root, tmp_path / "mnt") as mount:
        assert len(os.listdir(mount / "a")) == 42
        assert error_of(os.stat, mount / "a/25") == errno.EIO
        assert error_of((mount / "a/20").read_bytes) == errno.EIO
        assert (mount / "a/19").read_bytes() == b"9"
        array = zarr.open_array(mount / "a", mode="r")
        assert array[39] == ord("9")
        with pytest.raises(OSError, match="Input/output error"):
            array[25]
        assert f"{root}/a/refs.2.parq: is a symbolic link" in log_of(mount)
    checked = json.loads(run("check", "--json", root).stdout)
    assert (checked["ok"], checked["missing"], checked["clean"]) == (33, 10, False)


def write_sparse(root: Path, target: Path) -> np.ndarray:
    """Write a set with fsspec, which omits two of its five record files; return the values of its array."""
    values = np.full(50, 7, np.uint8)
    theirs = LazyReferenceMapper.create(str(root), fs=fsspec.filesystem("file"), record_size=10, engine="pyarrow")
    theirs[".zgroup"] = json.dumps({"zarr_format": 2})
    theirs["a/.zarray"] = json.dumps(zarray([50], [1]))
    theirs["a/.zattrs"] = json.dumps({"_ARRAY_DIMENSIONS": ["x"]})
    for number in (3, 20, 29, 41):
        theirs[f"a/{number}"], values[number] = [str(target), number, 1], number
    theirs.flush()
    target.write_bytes(bytes(range(50)))
    assert sorted(os.listdir(root / "a")) == ["refs.0.parq", "refs.2.parq", "refs.4.parq"]
    return values


def test_the_chunks_of_a_record_file_that_was_not_written_are_absent(nginx: Nginx, tmp_path: Path) -> None:
    values = write_sparse(nginx.plain.root / "sparse.parq", tmp_path / "target")
    source, options = f"{nginx.plain.url}/sparse.parq", ("-o", "allow=file")
    with mounted(source, tmp_path / "mnt", "allow=file") as mount:
        assert error_of(os.stat, mount / "a/15") == errno.ENOENT
        np.testing.assert_array_equal(zarr.open_array(mount / "a", mode="r")[...], values)
        dataset = xarray.open_dataset(mount, engine="zarr", consolidated=True, decode_cf=False)
        np.testing.assert_array_equal(dataset["a"].values, values)
        assert sorted(os.listdir(mount / "a")) == sorted([".zarray", ".zattrs", "3", "20", "29", "41"])
        assert log_of(mount).count("count as absent") == 1
    assert json.loads(run("check", "--json", *options, source).stdout)["absent_records"] == 2
    about = json.loads(run("info", "--json", *options, source).stdout)
    assert (about["record_files"], about["absent_records"]) == (5, 2)


def test_a_record_file_within_the_mount_is_a_loop(tmp_path: Path) -> None:
    """The chunk is in another directory, because the kernel looks up only one name of a directory at a time."""
    root = write_set(tmp_path / "set", {"a/.zarray": zarray([1], [1])}, {})
    (root / "a").mkdir()
    (root / "a/refs.0.parq").symlink_to(tmp_path / "mnt/.zmetadata")
    with mounted(root, tmp_path / "mnt") as mount:
        assert error_of((mount / "a/0").read_bytes) == errno.EIO


def test_a_listing_returns_the_names_it_has_before_it_fails(tmp_path: Path) -> None:
    """Each later getdents64(2) fails too: after a clean end, the missing chunks would read as fill values."""
    metadata = {"v/.zarray": {"shape": [1]}, "v/.zattrs": {}, "v/sub/.zgroup": {}}
    write_set(tmp_path / "set", metadata, {})
    libc, buffer = ctypes.CDLL(None, use_errno=True), ctypes.create_string_buffer(32768)
    with mounted(tmp_path / "set", tmp_path / "mnt") as root:
        descriptor = os.open(root / "v", os.O_RDONLY | os.O_DIRECTORY)
        try:
            for _ in range(2):
                found = b""
                while (count := libc.getdents64(descriptor, buffer, len(buffer))) > 0:
                    found += buffer.raw[:count]
                for name in (b".zarray", b".zattrs", b"sub"):
                    assert name + b"\0" in found
                for _ in range(3):
                    assert libc.getdents64(descriptor, buffer, len(buffer)) == -1
                    assert ctypes.get_errno() == errno.EIO
                os.lseek(descriptor, 0, os.SEEK_SET)
        finally:
            os.close(descriptor)


def test_a_set_written_again_with_equal_metadata_is_another_set(s3: S3, tmp_path: Path) -> None:
    """The ETag of `.zmetadata` is a hash of its content, so only its time says that the record files are new."""

    def upload(value: bytes) -> None:
        root = write_set(tmp_path / "set", {"a/.zarray": zarray([8], [1])}, {"a": [value] * 8}, 4)
        for path in files_below(root).values():
            s3.client.upload_file(str(path), s3.bucket, f"again/{path.relative_to(root)}")

    upload(b"old")
    options = f"s3.endpoint_url={s3.endpoint},s3.key=a,s3.secret=b,retries=0,allow=all"
    with mounted(f"s3://{s3.bucket}/again", tmp_path / "mnt", options) as root:
        assert (root / "a/0").read_bytes() == b"old"
        time.sleep(1.1)  # S3 has times in whole seconds
        upload(b"new")
        assert error_of((root / "a/4").read_bytes) == errno.EIO
        assert run("refresh", root).returncode == 0
        assert [(root / f"a/{number}").read_bytes() for number in range(8)] == [b"new"] * 8

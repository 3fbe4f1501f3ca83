"""Views read by tensorstore, which rejects unknown metadata."""

from __future__ import annotations

import json
import os
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import numcodecs
import numpy as np
import pytest
import tensorstore
import zarr
from click.testing import CliRunner

from tests.mounts.mounting import mounted
from zarrfs.cli import main

DRIVERS = {2: "zarr", 3: "zarr3"}
SHAPE, CHUNKS = (7, 10), (4, 6)
Values = np.ndarray[Any, Any]


class Source(NamedTuple):
    """A store, and the values of its arrays by name."""

    path: Path
    values: dict[str, Values]


def opened(path: Path, version: int, **how: Any) -> Any:
    place = {"driver": "file", "path": str(path), "file_io_sync": False}
    return tensorstore.open({"driver": DRIVERS[version], "kvstore": place}, **how).result()


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Source:
    """Write arrays with zarr-python that views change."""
    path, values = tmp_path_factory.mktemp("small") / "small.zarr", dict[str, Values]()
    zarr.create_group(path, zarr_format=3)
    group = zarr.open_group(path, mode="a")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # from zarr-python, about types and codecs that v3 has no names for
        for name, how in {
            "checksums": {"compressors": [zarr.codecs.ZstdCodec(level=1, checksum=True)]},
            "shards": {"shards": (4, 6), "chunks": (2, 3)},
            "turned": {"filters": [zarr.codecs.TransposeCodec(order=(1, 0))]},
        }.items():
            given: dict[str, Any] = {"shape": SHAPE, "chunks": CHUNKS, "dtype": "<i4", **how}
            array = group.create_array(name, **given)
            array[:3] = np.arange(30).reshape(3, 10).astype(array.dtype)
            values[name] = np.asarray(array[...])
    inverted = zarr.create_array(  # v3 has no name for Base64: its view shows decoded chunks
        path / "decoded", shape=SHAPE, chunks=CHUNKS, dtype="<i4", zarr_format=2, compressors=numcodecs.Base64()
    )
    inverted[:3] = np.arange(30).reshape(3, 10)
    values["decoded"] = np.asarray(inverted[...])
    return Source(path, values)


@pytest.mark.parametrize("version", [2, 3])
def test_tensorstore_reads_every_array(source: Source, version: int, tmp_path: Path) -> None:
    """Arrays that the version has no names for are left out; their directories are empty, and have the reason."""
    left_out = {"decoded"} if version == 3 else set()
    with mounted(source.path, tmp_path / "mnt", f"view=v{version}") as mountpoint:
        assert {name for name in source.values if not os.listdir(mountpoint / name)} == left_out
        if left_out:
            assert json.loads(os.getxattr(mountpoint, "user.zarrfs.left_out")).keys() == left_out
        for name, expected in source.values.items():
            if name == "decoded":  # in base64, which tensorstore does not know
                continue
            found = opened(mountpoint / name, version).read().result()
            assert found.dtype == expected.dtype
            assert np.array_equal(found, expected), name


@pytest.mark.parametrize("version", [2, 3])
def test_arrays_of_types_that_numpy_lacks_are_left_out_and_the_rest_is_shown(version: int, tmp_path: Path) -> None:
    """`zarrfs check` reads their files, and says that it decodes none of them."""
    group = zarr.open_group(tmp_path / "z", mode="w", zarr_format=version)
    group.create_array("good", shape=(2,), chunks=(2,), dtype="i2")[:] = [1, 2]
    unknown = ["bfloat16", "int4", "float8_e5m2"]
    for name in unknown:
        array = opened(tmp_path / "z" / name, version, create=True, dtype=name, shape=[2])
        array[...] = np.ones(2, array.dtype.numpy_dtype)
    document, member, others = {
        2: (".zarray", "dtype", ["<i3", "<f32", "<M8[q]"]),
        3: ("zarr.json", "data_type", [{"name": "our.type", "configuration": {}}, "complex_bfloat16"]),
    }[version]
    for at, other in enumerate(others):
        text = json.dumps(json.loads((tmp_path / "z/bfloat16" / document).read_text()) | {member: other})
        unknown.append(f"other{at}")
        (tmp_path / "z" / unknown[-1]).mkdir()
        (tmp_path / "z" / unknown[-1] / document).write_text(text)
    readers: dict[str, Callable[[Path], Any]] = {
        "v2": lambda path: zarr.open_array(path / "good", mode="r")[:],
        "v3": lambda path: zarr.open_array(path / "good", mode="r")[:],
        "arrays": lambda path: np.load(path / "good.npy"),
        "netcdf": lambda path: h5py.File(path / "z.nc")["good"][:],
    }
    for view, read in readers.items():
        with mounted(tmp_path / "z", tmp_path / "mnt", f"view={view}") as mountpoint:
            assert list(read(mountpoint)) == [1, 2]
            assert not any(os.listdir(mountpoint / name) for name in {*os.listdir(mountpoint)} & {*unknown})
            reasons = json.loads(os.getxattr(mountpoint, "user.zarrfs.left_out"))
            assert sorted(reasons) == sorted(unknown)
            assert all("type" in reason for reason in reasons.values())
    result = CliRunner().invoke(main, ["check", str(tmp_path / "z")])
    assert result.exit_code == 0, result.output
    for name in unknown:
        assert re.search(rf"^{name}: .*type.* only read$", result.output, re.MULTILINE)

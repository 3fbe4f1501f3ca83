"""Views read by tensorstore, which has data types that numpy lacks, and which rejects unknown metadata."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import netCDF4
import numcodecs
import numpy as np
import pytest
import tensorstore
import zarr

from tests.mounts.mounting import mounted

SMALL = {
    "bfloat16": 1.5, "float8_e4m3fn": 2.0, "float8_e5m2": 0.0, "float8_e3m4": -1.0, "int4": -3, "int2": 1,
}  # fill values by data type  # fmt: skip
LITTLE, BIG = ({"name": "bytes", "configuration": {"endian": endian}} for endian in ("little", "big"))
DRIVERS = {2: "zarr", 3: "zarr3"}
SHAPE, CHUNKS = (7, 10), (4, 6)
Values = np.ndarray[Any, Any]


class Source(NamedTuple):
    """A store, and the values of its arrays by name."""

    path: Path
    values: dict[str, Values]


def opened(path: Path, version: int, **how: Any) -> Any:
    place = {"driver": "file", "path": str(path), "file_io_sync": False}
    return tensorstore.open({"driver": DRIVERS[version], "kvstore": place, **how}).result()


def write(path: Path, version: int, metadata: dict[str, Any], values: Values) -> Values:
    """Create an array and write the first three rows of `values`; return the array as tensorstore reads it."""
    opened(path, version, metadata=metadata, create=True)[:3].write(values[:3]).result()
    found: Values = opened(path, version).read().result()
    return found


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Source:
    """Write small-number arrays of both versions with tensorstore, and with zarr-python arrays that views change."""
    path, values = tmp_path_factory.mktemp("small") / "small.zarr", dict[str, Values]()
    zarr.create_group(path, zarr_format=3)
    for name, fill in SMALL.items():
        numbers = (np.arange(70).reshape(SHAPE) % 4 - 2).astype(getattr(ml_dtypes, name))
        document: dict[str, Any] = {"shape": [*SHAPE], "chunks": [*CHUNKS], "dtype": name, "fill_value": fill}
        values[f"{name}_v2"] = write(path / f"{name}_v2", 2, {**document, "compressor": None}, numbers)
        inner = {"chunk_shape": [2, 3], "codecs": [LITTLE, {"name": "zstd", "configuration": {"level": 1}}]}
        pipelines: dict[str, list[Any]] = {"little": [LITTLE], "big": [BIG], "gzip": [LITTLE, {"name": "gzip"}]}
        pipelines["shards"] = [{"name": "sharding_indexed", "configuration": inner}]
        for label, codecs in pipelines.items():
            grid = {"name": "regular", "configuration": {"chunk_shape": [*CHUNKS]}}
            document = {"shape": [*SHAPE], "data_type": name, "chunk_grid": grid, "codecs": codecs, "fill_value": fill}
            values[f"{name}_{label}"] = write(path / f"{name}_{label}", 3, document, numbers)
    group = zarr.open_group(path, mode="a")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # from zarr-python, about types and codecs that v3 has no names for
        for name, how in {
            "checksums": {"compressors": [zarr.codecs.ZstdCodec(level=1, checksum=True)]},
            "shards": {"shards": (4, 6), "chunks": (2, 3)},
            "turned": {"filters": [zarr.codecs.TransposeCodec(order=(1, 0))]},
            "text": {"dtype": "S5", "fill_value": b"ab"},
            "fields": {"dtype": np.dtype([("a", "<i4"), ("b", "<f8")])},
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
    """The exceptions are base64 in v2 and fixed-length text in v3, for which tensorstore has no names."""
    with mounted(source.path, tmp_path / "mnt", f"view=v{version}") as mountpoint:
        for name, expected in source.values.items():
            document = mountpoint / name / {2: ".zarray", 3: "zarr.json"}[version]
            if name == {2: "decoded", 3: "text"}[version] or not document.exists():  # left out of the view
                continue
            if expected.dtype.fields:
                for field in expected.dtype.names or ():
                    found = opened(mountpoint / name, version, field=field).read().result()
                    assert found.tolist() == expected[field].tolist()
                continue
            array = opened(mountpoint / name, version)
            if name == "text":  # tensorstore shows items as a dimension of bytes, which numpy 2.4 rejects
                assert array.shape == (*SHAPE, 5)
                continue
            found = array.read().result()
            assert found.dtype == expected.dtype
            assert np.array_equal(found, expected), name


def test_numpy_reads_the_bits_of_small_numbers(source: Source, tmp_path: Path) -> None:
    with mounted(source.path, tmp_path / "mnt", "view=arrays") as mountpoint:
        for name, expected in source.values.items():
            found = np.load(mountpoint / f"{name}.npy")
            kind = name.rpartition("_")[0]
            if kind in SMALL:
                bits = found[kind]
                found = bits.astype(bits.dtype.newbyteorder("<")).view(expected.dtype)
            assert np.array_equal(found, expected), name


def test_netcdf_has_bfloat16_as_float_and_small_integers_as_bytes(source: Source, tmp_path: Path) -> None:
    mount = mounted(source.path, tmp_path / "mnt", "view=netcdf")
    with mount as mountpoint, netCDF4.Dataset(mountpoint / "small.nc") as file:
        file.set_auto_maskandscale(False)
        shown = {name: file[name] for name in file.variables if name.rpartition("_")[0] in SMALL}
        for name, variable in shown.items():
            kind = name.rpartition("_")[0]
            assert variable.dtype == {"bfloat16": "f4", "int2": "i1", "int4": "i1"}[kind]
            assert np.array_equal(variable[...], source.values[name].astype(variable.dtype)), name
        assert len(shown) == 3 * 5

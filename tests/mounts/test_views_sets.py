"""Views of reference sets, and reference sets of views: xarray, fsspec and zarr-python read the original values."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from pathlib import Path

import fsspec
import h5py
import kerchunk.df
import numpy as np
import pytest
import xarray as xr
from kerchunk.hdf import SingleHdf5ToZarr

from tests.mounts.mounting import mounted
from tests.zarrsamples import SAMPLES

NAMES = "v0_int32_01", "v1_float64_06", "v1_str160_19", "v0_uint64_13"
SOME = [sample for sample in SAMPLES if sample.label in NAMES]


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # from zarr-python, about types and codecs that v3 has no names for
        yield


def write_file(path: Path) -> None:
    """Write a file as netCDF would: dimension scales, and masked, scaled, filtered and big-endian variables."""
    rng = np.random.default_rng(5)
    air = rng.normal(size=(4, 6, 5)).astype("f4")
    air[1, 2, 3] = -9e9
    with h5py.File(path, "w") as file:
        file.attrs["title"] = "a file"
        for name, values in {"time": np.arange(4) * 6, "y": np.arange(6.0), "x": np.arange(5, dtype="i4")}.items():
            file.create_dataset(name, data=values).make_scale(name)
        file["time"].attrs.update({"units": "hours since 2020-01-01", "calendar": "standard"})
        shuffled = {"chunks": (2, 3, 5), "shuffle": True, "compression": "gzip"}
        file.create_dataset("air", data=air, fillvalue=np.float32(-9e9), **shuffled)
        file["air"].attrs.update({"units": "K", "_FillValue": np.float32(-9e9)})
        packed = rng.integers(-1, 100, (6, 5)).astype("i2")
        file.create_dataset("packed", data=packed, chunks=(6, 2), fletcher32=True, fillvalue=np.int16(-1))
        file["packed"].attrs.update({"scale_factor": 0.01, "add_offset": 1.0, "_FillValue": np.int16(-1)})
        file.create_dataset("big", data=np.linspace(1, 2, 5).astype(">f8"))
        file.create_dataset("never", shape=(6,), dtype="f8", chunks=(3,), fillvalue=np.nan)
        dimensions = {"air": "time y x", "packed": "y x", "big": "x", "never": "y"}
        for name, scales in dimensions.items():
            for number, scale in enumerate(scales.split()):
                file[name].dims[number].attach_scale(file[scale])


@pytest.fixture
def kerchunk_set(tmp_path: Path) -> tuple[Path, xr.Dataset]:
    """Make a reference set of a file with kerchunk; return it and the data that xarray reads from it by fsspec."""
    write_file(tmp_path / "file.h5")
    document = SingleHdf5ToZarr(str(tmp_path / "file.h5"), inline_threshold=50).translate()
    (tmp_path / "set.json").write_text(json.dumps(document))
    fs = fsspec.filesystem("reference", fo=str(tmp_path / "set.json"), remote_protocol="file")
    held = xr.open_zarr(fs.get_mapper(""), consolidated=False, chunks=None, zarr_format=2).load()
    with h5py.File(tmp_path / "file.h5") as file:
        assert np.array_equal(held["air"].fillna(-9e9), file["air"])
        assert np.array_equal(held["big"], file["big"])
    assert held["air"].isnull().sum() == 1
    assert held["time"].dtype.kind == "M"
    return tmp_path / "set.json", held


@pytest.mark.parametrize(("view", "form"), [("v2", "json"), ("v3", "parquet")])
def test_xarray_reads_a_kerchunk_set_as_the_file_itself(
    kerchunk_set: tuple[Path, xr.Dataset], tmp_path: Path, view: str, form: str
) -> None:
    path, held = kerchunk_set
    if form == "parquet":
        refs = json.loads(path.read_text())
        kerchunk.df.refs_to_dataframe(refs.get("refs", refs), str(tmp_path / "set.parq"), record_size=3)
        path = tmp_path / "set.parq"
    with mounted(path, tmp_path / "mnt", f"view={view}") as mountpoint:
        assert (mountpoint / "zarr.json").exists() == (view == "v3")
        with xr.open_zarr(mountpoint, consolidated=False, chunks=None) as seen:
            xr.testing.assert_identical(seen.load(), held)
        chunks = sorted(path.name for path in (mountpoint / "air").iterdir() if path.name[0].isdigit())
        assert chunks == ["0.0.0", "0.1.0", "1.0.0", "1.1.0"]

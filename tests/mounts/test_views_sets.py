"""Views of reference sets, and reference sets of views: xarray, fsspec and zarr-python read the original values."""

from __future__ import annotations

import hashlib
import json
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path

import fsspec
import h5py
import numpy as np
import pytest
import xarray as xr
import zarr
from kerchunk.hdf import SingleHdf5ToZarr

from tests.conftest import run
from tests.mounts.mounting import mounted
from tests.references.refsets import done, entries, refs
from tests.zarrsamples import ROOT, SAMPLES, Sample

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


@pytest.mark.parametrize("view", ["v2", "v3"])
@pytest.mark.parametrize("form", ["json", "parquet"])
def test_xarray_reads_a_kerchunk_set_as_the_file_itself(
    kerchunk_set: tuple[Path, xr.Dataset], tmp_path: Path, view: str, form: str
) -> None:
    path, held = kerchunk_set
    if form == "parquet":
        done("convert", "--to", form, "--record-size", "3", path, tmp_path / "set.parq")
        path = tmp_path / "set.parq"
    with mounted(path, tmp_path / "mnt", f"view={view}") as mountpoint:
        assert (mountpoint / "zarr.json").exists() == (view == "v3")
        with xr.open_zarr(mountpoint, consolidated=False, chunks=None) as seen:
            xr.testing.assert_identical(seen.load(), held)
        chunks = sorted(path.name for path in (mountpoint / "air").iterdir() if path.name[0].isdigit())
        assert chunks == ["0.0.0", "0.1.0", "1.0.0", "1.1.0"]


@pytest.mark.parametrize("form", ["json", "parquet"])
def test_a_set_is_made_of_a_view_of_a_set(kerchunk_set: tuple[Path, xr.Dataset], form: str, tmp_path: Path) -> None:
    path, held = kerchunk_set
    if form == "parquet":
        done("convert", path, tmp_path / "set.parq")
        path = tmp_path / "set.parq"
    done("from-store", "--view", "v3", path, "-O", tmp_path / "v3.json")
    assert refs("from-store", "--relative", "--view", "v3", path, "-O", tmp_path / "r.json").exit_code == 2
    fs = fsspec.filesystem("reference", fo=str(tmp_path / "v3.json"), remote_protocol="file", asynchronous=False)
    with xr.open_zarr(fs.get_mapper(""), consolidated=False, chunks=None, zarr_format=3) as seen:
        xr.testing.assert_identical(seen.load(), held)


@pytest.mark.parametrize("view", ["v2", "v3"])
@pytest.mark.parametrize("sample", SOME, ids=lambda sample: sample.label)
def test_a_set_of_a_view_needs_no_mount(tmp_path: Path, sample: Sample, view: str) -> None:
    done("from-store", "--view", view, sample.store, "-O", tmp_path / "set.json")
    found = entries(tmp_path / "set.json")
    chunks = [value for value in found.values() if isinstance(value, list)]
    assert chunks
    assert all(Path(url).stat().st_size == length for url, _offset, length in chunks)
    fs = fsspec.filesystem("reference", fo=str(tmp_path / "set.json"), remote_protocol="file", asynchronous=False)
    array = zarr.open_array(fs.get_mapper(""), mode="r", zarr_format=int(view[1]))  # type: ignore[arg-type]
    values = np.asarray(array[...]).astype(str(sample.dtype))
    assert hashlib.sha256(values.tobytes()).hexdigest() == sample.sha256
    assert array.attrs.asdict() == sample.attributes


@pytest.mark.parametrize("relative", [False, True])
def test_inner_chunks_of_shards_are_ranges(tmp_path: Path, relative: bool) -> None:
    shutil.copytree(ROOT / "v3_hier", tmp_path / "store")
    done("from-store", "--view", "v2", *["--relative"] * relative, tmp_path / "store", "-O", tmp_path / "set.json")
    found = entries(tmp_path / "set.json")
    url, offset, length = found["shard/5/4"]
    assert url.startswith("store/") if relative else url == str(tmp_path / "store/shard/c/1/1")
    assert offset + length <= (tmp_path / "store/shard/c/1/1").stat().st_size
    sample = next(sample for sample in SAMPLES if sample.label == "v3_hier-shard")
    with mounted(tmp_path / "set.json", tmp_path / "mnt") as mountpoint:
        values = np.asarray(zarr.open_array(mountpoint / "shard", mode="r", zarr_format=2)[...])
    assert hashlib.sha256(values.astype(str(sample.dtype)).tobytes()).hexdigest() == sample.sha256


def test_nodes_that_a_version_cannot_hold_are_reported(tmp_path: Path) -> None:
    store = ROOT / "v0_pickled_snappy"
    found = refs("from-store", "--view", "v2", store, "-O", tmp_path / "set.json")
    assert found.exit_code == 0
    why = "codec blosc with snappy, which today's readers lack: it would have to be decoded"
    assert f"/: left out of view=v2: {why}" in found.stderr
    assert not entries(tmp_path / "set.json")
    assert run("refs", "from-store", "--view", "arrays", ROOT / "v3_hier", "-O", tmp_path / "x.json").returncode == 2

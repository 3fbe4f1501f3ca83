"""view=netcdf in process: values, attributes and coordinates, arrays left out, and cached headers."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

import h5py
import netCDF4
import numpy as np
import pytest
import trio
import trio.testing
import xarray as xr
import zarr
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from trio.testing import MockClock

from tests.sources.opening import open_source
from tests.views.arraystores import Shape, shapes, write
from tests.views.netcdfviews import converted, netcdf_view
from tests.zarrsamples import DRAFT, SAMPLES, STORES
from zarrfs.config.options import Options
from zarrfs.errors import ReadError, UsageError
from zarrfs.views.hierarchy import Node
from zarrfs.views.netcdf import name_of
from zarrfs.views.netcdf_header import write as write_header
from zarrfs.views.netcdf_model import describe
from zarrfs.zarr.documents import parse_document

ENGINES: tuple[Literal["netcdf4", "h5netcdf"], ...] = ("netcdf4", "h5netcdf")


def dataset() -> xr.Dataset:
    """Return a typical data set of xarray: coordinates, missing data, times, text."""
    time = np.array(["2000-01-01", "2000-01-02T06", "NaT"], "M8[ns]")
    t = np.linspace(270, 290, 12).reshape(3, 4)
    t[1, 2] = np.nan
    return xr.Dataset(
        {
            "t": (("time", "lat"), t, {"units": "K", "long_name": "température", "valid_range": [0, 400]}),
            "p": (("time", "lat"), np.arange(12, dtype=">f4").reshape(3, 4)),
            "flag": (("lat",), np.array([1, 2, 3, 4], "i1"), {"flag_values": [1, 2], "flag_meanings": "a b"}),
            "station": (("lat",), np.array([b"ab", b"c", b"de", b"f"])),
            "wet": (("lat",), np.array([True, False, True, True])),
            "one": ((), np.float64(3.5)),
            "lag": (("time",), np.array([1, 2, 3], "m8[s]")),
            "half": (("time",), np.array([1.5, np.nan, -2], "f2")),
            "big": (("time",), np.array([1, 2, 2**63], ">u8")),
        },
        {"time": time, "lat": np.linspace(-90, 90, 4, dtype="f4"), "height": ((), 2.0, {"units": "m"})},
        {"title": "a data set", "level": 3, "ratio": 0.5, "list": [1, 2], "empty": ""},
    )


@pytest.mark.parametrize("version", [2, 3])
def test_a_data_set_is_equal_to_its_zarr_source(tmp_path: Path, version: Literal[2, 3]) -> None:
    packed = {"dtype": "i2", "scale_factor": 0.01, "add_offset": 280.0, "_FillValue": -32768}
    dataset().to_zarr(tmp_path / "z", zarr_format=version, consolidated=False, encoding={"t": packed})
    assert converted(tmp_path / "z", tmp_path / "x.nc") == {}
    wanted = xr.open_zarr(tmp_path / "z", consolidated=False, decode_timedelta=True).load()
    for engine in ENGINES:
        with xr.open_dataset(tmp_path / "x.nc", engine=engine, decode_timedelta=True) as found:
            xr.testing.assert_equal(found.load(), wanted)
            assert set(found.coords) == set(wanted.coords)
            for name, variable in found.variables.items():
                assert variable.dims == wanted[name].dims
                plain = {key: np.asarray(value).tolist() for key, value in variable.attrs.items()}
                assert plain == {key: np.asarray(value).tolist() for key, value in wanted[name].attrs.items()}
            assert {key: np.asarray(value).tolist() for key, value in found.attrs.items()} == wanted.attrs
            assert found["t"].encoding["_FillValue"] == -32768
    with netCDF4.Dataset(tmp_path / "x.nc") as file:
        assert file["t"].dtype == "i2"
        assert file["t"].getncattr("valid_range").dtype == "i2"
        assert isinstance(file["t"].units, str)


SMALL = settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def shown(file: Any, items: np.ndarray[Any, Any]) -> None:
    """Assert that the variable `x` of an HDF5 file equals the items of the array."""
    kind = items.dtype.kind
    found = file["x"][()]
    if kind == "S":
        assert found.shape == (*items.shape, items.itemsize)
        assert found.tobytes() == items.tobytes()
    elif not items.size:
        assert found.size == 0
    elif kind == "U":
        joined = np.ascontiguousarray(found).view(f"S{found.shape[-1]}")[..., 0]
        assert np.char.decode(joined, "utf-8").tolist() == items.tolist()
    elif kind in "mM":
        np.testing.assert_array_equal(found, items.view(items.dtype.str[0] + "i8"))
    else:
        assert file["x"].dtype == (np.dtype("i1") if kind == "b" else items.dtype)
        np.testing.assert_array_equal(found, items)


@SMALL
@given(how=shapes())
def test_any_array_is_equal_to_its_items(tmp_path_factory: pytest.TempPathFactory, how: Shape) -> None:
    """Shapes, chunks, types, byte and memory orders, shards, fill values and absent chunks vary."""
    base = tmp_path_factory.mktemp("any")
    group = zarr.open_group(base / "z", mode="w", zarr_format=how.version)
    items = write(group, "x", how)
    left_out = converted(base / "z", base / "x.nc")
    if np.dtype(how.dtype).kind in "Vc":
        assert "NetCDF-4 has no such type" in left_out["x"]
        return
    assert left_out == {}
    with h5py.File(base / "x.nc") as file:
        shown(file, items)


def test_unsupported_nodes_and_attributes_are_left_out_with_a_reason(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = zarr.open_group(tmp_path / "z", mode="w", zarr_format=2)
    good = root.create_array("good", shape=(2,), chunks=(2,), dtype="i2")
    good[:] = [1, 2]
    good.attrs.update({"NAME": "n", "a/b": 1, "deep": {"a": [1]}, "none": None, "yes": True, "huge": 2**70})
    changes: dict[str, dict[str, Any]] = {
        "objects": {"dtype": "|O", "filters": [{"id": "pickle"}]}, "other": {"dtype": "<q9"},
        "fields": {"dtype": [["a", "<i4"]], "fill_value": None}, "deep": {"shape": [1] * 33, "chunks": [1] * 33},
        "quad": {"dtype": "<f16"}, "atto": {"dtype": "<M8[as]"}, "huge": {"shape": [2**61], "dtype": "<f8"},
        "lacking": {"compressor": {"id": "nowhere"}}, "steps": {"dtype": "<m8[10m]"}, "years": {"dtype": "<M8[Y]"},
        "fields of objects": {"dtype": [["a", "<i4"], ["b", "|O"]], "fill_value": None}, "complex": {"dtype": "<c8"},
        "lone": {"dtype": "<U1", "fill_value": "\ud800"}, "-name": {}, "end ": {}, os.fsdecode(b"latin\xe9"): {},
        "-group/a": {}, "e\u0301": {},
    }  # fmt: skip
    for name, change in changes.items():
        (tmp_path / "z" / name).mkdir(parents=True)
        document = json.loads((tmp_path / "z/good/.zarray").read_text()) | change
        (tmp_path / "z" / name / ".zarray").write_text(json.dumps(document))
    left_out = converted(tmp_path / "z", tmp_path / "x.nc")
    assert set(left_out) == {*changes, "-group", "good"}
    assert left_out["good"].startswith('attributes ["NAME", "a/b"]')
    assert left_out["lacking"] == "nowhere: numcodecs has no such codec here"
    for name in ("quad", "complex"):
        assert "NetCDF-4 has no such type" in left_out[name]
    assert len([record for record in caplog.records if "left out" in record.message]) == len(left_out)
    with netCDF4.Dataset(tmp_path / "x.nc") as file:
        assert list(file.variables) == ["good"]
        assert not file.groups
        assert {name: file["good"].getncattr(name) for name in file["good"].ncattrs() if name != "_FillValue"} == {
            "deep": '{"a": [1]}', "none": "null", "yes": "true", "huge": str(2**70),
        }  # fmt: skip


def test_dimensions_that_clash_or_have_no_valid_name_are_phony(tmp_path: Path) -> None:
    root = zarr.open_group(tmp_path / "z", mode="w", zarr_format=2)

    def array(name: str, shape: tuple[int, ...], dims: list[str] | None, dtype: str = "i2") -> None:
        made = root.create_array(name, shape=shape, chunks=shape or (), dtype=dtype, fill_value=None)
        made[...] = np.arange(np.prod(shape, dtype=int)).reshape(shape)
        if dims is not None:
            made.attrs["_ARRAY_DIMENSIONS"] = dims

    array("x", (3,), ["x"])
    array("ax", (9,), ["x"])  # x is the name of a coordinate of another extent
    array("lat", (2, 3), ["y", "x"])  # not a coordinate variable, although
    array("at", (4,), ["lat"])  # a dimension has its name
    array("y2", (5,), ["y"])  # the dimension y with another extent
    array("same", (2, 2), ["y", "y"])
    array("odd", (2,), ["a/b"])
    array("two", (2, 2), None)
    array("below", (3,), ["sub"])  # a dimension with the name of a group
    array("string4", (2,), ["x2"], "S4")  # the name of the dimension of its characters
    array("single", (2, 3), ["y", "strlen"], "S1")  # as kerchunk refers to the text of a NetCDF file
    sub = root.create_group("sub", attributes={"title": "below"})
    sub.create_array("x", shape=(7,), chunks=(7,), dtype="i1")[:] = range(7)
    assert converted(tmp_path / "z", tmp_path / "x.nc") == {}
    with netCDF4.Dataset(tmp_path / "x.nc") as file:
        file.set_auto_mask(False)
        assert {name: variable.dimensions for name, variable in file.variables.items()} == {
            "x": ("x",), "ax": ("phony_dim_9",), "lat": ("y", "x"), "at": ("lat",), "y2": ("phony_dim_5",),
            "same": ("y", "y"), "odd": ("phony_dim_2",), "two": ("phony_dim_2", "phony_dim_2_2"),
            "below": ("phony_dim_3",), "string4": ("x2", "string4"), "single": ("y", "strlen"),
        }  # fmt: skip
        np.testing.assert_array_equal(file["lat"][:], np.arange(6).reshape(2, 3))
        assert file["sub"].title == "below"
        assert file["sub/x"][:].tolist() == list(range(7))


NAMES = st.text(st.characters(exclude_categories=("Cs",), exclude_characters="/\0"), min_size=1, max_size=4).filter(
    lambda name: name[0] != "."
) | st.sampled_from(["x", "lat", "phony_dim_2", "string3", "_nc4_non_coord_x", "_gap"])
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3), max_leaves=5,
)  # fmt: skip
ATTRIBUTES = st.dictionaries(
    st.text(max_size=4) | st.sampled_from(["NAME", "CLASS", "_FillValue", "missing_value", "units", "-x"]),
    VALUES, max_size=4,
)  # fmt: skip
DIMENSIONS = st.lists(st.tuples(st.integers(0, 3), NAMES | st.sampled_from(["a/b", ""])), min_size=1, max_size=3)
TYPES = st.sampled_from(["<i2", "|u1", ">f4", "|b1", "<c8", "|S3", "<M8[s]", "<m8[h]", "<f2", "|V3"])
DOCUMENTS = st.dictionaries(
    st.lists(NAMES, min_size=1, max_size=3).map("/".join), st.tuples(TYPES, DIMENSIONS, ATTRIBUTES, st.booleans()),
    max_size=6,
)  # fmt: skip


@SMALL
@given(arrays=DOCUMENTS, attributes=ATTRIBUTES)
def test_any_names_and_attributes_make_a_readable_file(
    arrays: dict[str, tuple[str, list[tuple[int, str]], dict[str, Any], bool]], attributes: dict[str, Any]
) -> None:
    nodes = {"": Node("", parse_document(".zgroup", {"zarr_format": 2}, attributes))}
    for path, (dtype, dims, own, named) in arrays.items():
        if any(path.startswith(f"{other}/") for other in arrays):
            continue  # no node is below an array
        for depth in range(1, path.count("/") + 1):
            above = "/".join(path.split("/")[:depth])
            nodes[above] = nodes[""]._replace(path=above)
        document = {
            "zarr_format": 2, "shape": [extent for extent, _ in dims], "chunks": [1] * len(dims), "dtype": dtype,
            "fill_value": None, "order": "C", "compressor": None, "filters": None,
        }  # fmt: skip
        more = {"_ARRAY_DIMENSIONS": [name for _, name in dims]} if named else {}
        nodes[path] = Node(path, parse_document(".zarray", document, own | more), childless=True)
    described = describe(nodes.values(), {})
    header = json.loads(write_header(described.text))
    assert [place is not None for place in header["places"]] == [one.nbytes > 0 for one in described.variables]
    content = bytearray(header["size"])
    for address, text in header["texts"]:
        content[address : address + len(text) // 2] = bytes.fromhex(text)

    def read(group: Any) -> int:
        for variable in group.variables.values():
            variable.set_auto_maskandscale(False)
            variable.set_auto_chartostring(False)
            assert variable[...].shape == variable.shape
            assert all(variable.getncattr(name) is not None for name in variable.ncattrs())
        return len(group.variables) + sum(map(read, group.groups.values()))

    with netCDF4.Dataset("x", memory=bytes(content)) as file:
        assert read(file) == len(described.variables)


def test_the_file_is_named_after_the_source() -> None:
    assert name_of("/data/forecast.zarr") == "forecast"
    assert name_of("s3://bucket/air.json.zst") == "air"
    assert name_of("https://host/a/refs.parq/?key=1") == "refs"
    assert name_of("/") == "data"


LARGEST = sorted(store for store in STORES if store.name.endswith("hier"))


@pytest.mark.parametrize("store", [*LARGEST, DRAFT[0].store], ids=lambda store: store.name)
def test_every_sample_becomes_a_valid_file_with_its_recorded_values(tmp_path: Path, store: Path) -> None:
    """The stores are of zarr 0.3 to 3; ncdump, h5dump and ncks read the files, too."""
    samples = [one for one in SAMPLES + DRAFT if one.store == store]
    left_out = converted(store, tmp_path / "x.nc")
    for command in ["ncdump"], ["h5dump", "-H"], ["ncks", "-m"]:
        subprocess.run([*command, tmp_path / "x.nc"], stdout=subprocess.DEVNULL, check=True)
    with h5py.File(tmp_path / "x.nc") as file:
        for sample in samples:
            path = sample.path or "array"
            if path not in file:
                odd = isinstance(sample.dtype, list) or np.dtype(sample.dtype).kind in "VOc"
                assert not sample.decoded or odd or "unit of time" in left_out[sample.path]
            else:
                found = file[path][()]
                assert found.shape[: len(sample.shape)] == sample.shape
                if np.dtype(sample.dtype).kind == "U":
                    found = np.char.decode(found.view(f"S{found.shape[-1]}")[..., 0], "utf-8")
                if np.dtype(sample.dtype).kind in "Uf":
                    found = found.astype(sample.dtype)
                assert not sample.defined or hashlib.sha256(found.tobytes()).hexdigest() == sample.sha256


def test_without_the_extra_the_error_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "h5py", None)
    zarr.open_group(tmp_path / "z", mode="w")
    with pytest.raises(UsageError, match=r"the package h5py: .* extra netcdf"):
        open_source(str(tmp_path / "z"), Options(view="netcdf"))


# -- variable-length text

WORDS = ["Zürich", "", "東京", "a longer name than others"]


def text_source(path: Path, version: Literal[2, 3]) -> None:
    data = {
        "name": (("station",), np.array(WORDS, object)), "one": ((), np.array("alone", object)),
        "table": (("a", "b"), np.array([["x", "yy"], ["", "é"]], object)), "t": (("station",), np.arange(4.0)),
    }  # fmt: skip
    xr.Dataset(data).to_zarr(path, zarr_format=version, consolidated=False, encoding={"name": {"chunks": (3,)}})


@pytest.mark.parametrize("version", [2, 3])
def test_text_of_any_length_is_shown_as_characters(tmp_path: Path, version: Literal[2, 3]) -> None:
    text_source(tmp_path / "z", version)
    assert converted(tmp_path / "z", tmp_path / "x.nc") == {}
    for engine in ENGINES:
        with xr.open_dataset(tmp_path / "x.nc", engine=engine) as found:
            assert found["name"].values.tolist() == WORDS
            assert found["table"].values.tolist() == [["x", "yy"], ["", "é"]]
            assert (found["one"].item(), found["t"].values.tolist()) == ("alone", [0, 1, 2, 3])
    with netCDF4.Dataset(tmp_path / "x.nc") as file:
        assert file["name"].dimensions == ("station", "string25")


def test_variable_length_bytes_and_json_text_are_shown_as_characters(tmp_path: Path) -> None:
    """kerchunk writes the text of HDF5 files as JSON. Other objects, and text that ends with NUL, are left out."""
    import numcodecs

    root = zarr.open_group(tmp_path / "z", mode="w", zarr_format=2)
    root.create_array("good", shape=(2,), chunks=(2,), dtype="i2")[:] = [1, 2]
    document = json.loads((tmp_path / "z/good/.zarray").read_text()) | {
        "dtype": "|O", "shape": [3], "chunks": [2], "compressor": None, "fill_value": None,
    }  # fmt: skip
    for name, codec, items in (
        ("raw", numcodecs.VLenBytes(), [b"ab", b"c\xff\0d"]), ("json", numcodecs.JSON(), ["ab", None]),
        ("pairs", numcodecs.JSON(), [[1, 2], "a"]), ("nul", numcodecs.VLenUTF8(), ["a\0", "b"]),
    ):  # fmt: skip
        (tmp_path / "z" / name).mkdir()
        filters = [{"id": codec.codec_id}]
        (tmp_path / "z" / name / ".zarray").write_text(json.dumps(document | {"filters": filters}))
        array = np.empty(2, object)
        array[:] = items
        (tmp_path / "z" / name / "0").write_bytes(codec.encode(array))  # the second chunk is missing
    left_out = converted(tmp_path / "z", tmp_path / "x.nc")
    assert left_out == {
        "pairs": "objects of the type list: NetCDF-4 has no such type",
        "nul": "an item that ends with NUL, which NetCDF would drop",
    }
    with netCDF4.Dataset(tmp_path / "x.nc") as file:
        file.set_auto_chartostring(False)
        assert [row.tobytes() for row in file["raw"][:].filled(b"")] == [b"ab\0\0", b"c\xff\0d", b"\0\0\0\0"]
        assert netCDF4.chartostring(file["json"][:]).tolist() == ["ab", "", ""]


def test_too_much_text_is_left_out(tmp_path: Path) -> None:
    root = zarr.open_group(tmp_path / "z", mode="w", zarr_format=3)
    root.create_array("many", shape=(2**21,), chunks=(2**20,), dtype="string")
    long = root.create_array("long", shape=(2**10,), chunks=(2**10,), dtype="string")
    long[0] = "x" * 2**16
    reasons = converted(tmp_path / "z", tmp_path / "x.nc")
    assert set(reasons) == {"many", "long"}
    assert reasons["many"].startswith("text in more than 1,048,576 items")
    assert reasons["long"] == "1,024 items as long as the longest, 65,536 bytes: more than 32 MiB"


@pytest.mark.parametrize("array", ["name", "one"])
def test_the_file_is_an_error_while_text_or_a_scalar_cannot_be_read(tmp_path: Path, array: str) -> None:
    text_source(tmp_path / "z", 3)
    zarr.open_group(tmp_path / "z").create_array("number", shape=(), dtype="f8")[...] = 5
    chunk = next(path for path in (tmp_path / "z" / array / "c").parent.rglob("c*") if path.name in ("c", "0"))
    chunk = chunk / "0" if chunk.is_dir() else chunk
    good = chunk.read_bytes()
    chunk.write_bytes(b"damaged")

    async def main() -> None:
        async with netcdf_view(tmp_path / "z") as view:
            for _ in range(2):
                with pytest.raises(ReadError, match=f"{array}/c.*zstd: damaged"):
                    await view.info("x.nc")
            assert await view.left_out("x.nc") == {}
            chunk.write_bytes(good)
            (tmp_path / "x.nc").write_bytes(await view.get("x.nc"))

    trio.run(main, clock=MockClock(autojump_threshold=0))
    with netCDF4.Dataset(tmp_path / "x.nc") as file:
        assert (file["name"][:].tolist(), file["number"][...].item()) == (WORDS, 5)

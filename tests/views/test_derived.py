"""view=v2 and view=v3 of arrays whose stored chunks that version cannot express: decoded, or as ranges of shards."""

from __future__ import annotations

import base64
import contextlib
import functools
import http.server
import itertools
import json
import os
import threading
import warnings
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar, Literal

import google_crc32c
import numcodecs
import numpy as np
import pytest
import trio
import xarray
import zarr
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as of_numpy
from numcodecs.abc import Codec
from trio.testing import MockClock
from zarr.core.buffer import default_buffer_prototype

import zarrfs
from tests.servers import Faulty
from tests.sources.zarrstores import put_exact
from tests.store.contract import StoreContract, Tree, keys, listed
from tests.views.viewstores import GROUP_2, v2, v3, viewed, written
from zarrfs.config.options import Options
from zarrfs.errors import NotFound, ReadError, TargetChanged
from zarrfs.sources import open_source
from zarrfs.store.api import Info, Kind
from zarrfs.store.directory import FileSystemStore
from zarrfs.views.chunknames import InnerNames
from zarrfs.views.derived import _same
from zarrfs.views.translated import TranslatedView
from zarrfs.zarr.documents import parse_node
from zarrfs.zarr.grid import Grid
from zarrfs.zarr.keys import NESTED, KeyTemplate
from zarrfs.zarr.model import ArrayMetadata

numbers = itertools.count()
ROWS = np.arange(6, dtype="<i4").reshape(2, 3)
SHARDED: dict[str, Any] = {
    "shape": [7, 9], "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [4, 4]}},
    "codecs": [{"name": "sharding_indexed", "configuration": {
        "chunk_shape": [2, 2], "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}, "crc32c"],
        "index_codecs": [{"name": "bytes", "configuration": {"endian": "little"}}, "crc32c"],
    }}],
}  # fmt: skip


class Inverted(Codec):  # type: ignore[misc]
    """A codec that inverts all bits, and is registered in the test process only."""

    codec_id = "zarrfs-test-inverted"

    def encode(self, buf: Any) -> bytes:
        data = buf if isinstance(buf, bytes) else np.ascontiguousarray(buf).reshape(-1).view(np.uint8)
        return (np.frombuffer(data, np.uint8) ^ 0xFF).tobytes()

    def decode(self, buf: Any, out: Any = None) -> Any:
        return numcodecs.compat.ndarray_copy(self.encode(buf), out)


@pytest.fixture(autouse=True, scope="module")
def _codec() -> Iterator[None]:
    numcodecs.register_codec(Inverted)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # zarr-python warns about dtypes and codecs that v3 does not specify
        yield
    del numcodecs.registry.codec_registry[Inverted.codec_id]


def memory(tree: Tree) -> zarr.storage.MemoryStore:
    """Return `tree` as an in-memory store of zarr-python."""
    buffer = default_buffer_prototype().buffer
    return zarr.storage.MemoryStore({key: buffer.from_bytes(value) for key, value in tree.items()})


async def contents(view: TranslatedView) -> Tree:
    """Return all keys and values of a view, after checking names and sizes."""
    found = {}
    for key in await keys(view):
        found[key] = bytes(await view.get(key))
        assert (await view.info(key)).size == len(found[key]), key
    return found


def seen(root: Path, version: Literal[2, 3]) -> tuple[Tree, dict[str, str]]:
    """Return the contents of a view of `root`, the form of its root array, and the nodes left out with reasons."""

    async def main() -> tuple[Tree, dict[str, str]]:
        view = TranslatedView(FileSystemStore(str(root)), version)
        tree, form = await contents(view), await view.chunk_form("")
        left_out = await view.left_out("")
        await view.aclose()
        return tree, {"form": form[0] if form else "", **left_out}

    return trio.run(main)


# -- zarr-python reads the same values from a view of any array

DTYPES: tuple[Any, ...] = (
    "|u1", "<i2", ">i4", ">f8", "<c8", "|b1", "|S5", ">U2", "<M8[s]", "|V3", [("a", ">i4"), ("b", "<f8")],
    [("a", "<i2"), ("b", "|S3"), ("c", ">M8[s]")],
)  # fmt: skip


@st.composite
def arrays(draw: st.DrawFn) -> tuple[np.ndarray[Any, Any], tuple[int, ...]]:
    """Draw (values, chunk shape)."""
    dtype = np.dtype(draw(st.sampled_from(DTYPES)))
    shape = draw(of_numpy.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=7))
    size = int(np.prod(shape)) * dtype.itemsize
    if dtype.kind in "USM" or dtype.fields or dtype.kind == "b":
        values = draw(of_numpy.arrays(dtype, shape))
    else:
        values = np.frombuffer(draw(st.binary(min_size=size, max_size=size)), dtype).reshape(shape)
    return values, tuple(draw(st.integers(1, 5)) for _ in shape)


def write(draw: st.DrawFn, root: Path, values: np.ndarray[Any, Any], chunks: tuple[int, ...]) -> zarr.Array[Any]:
    """Write all of `values` or the first half, with codecs that v2 or v3 may lack; return the array."""
    size = values.dtype.itemsize
    fill = np.zeros((), values.dtype)[()]
    if values.dtype.kind in "iuf":
        fill = values.dtype.type(draw(st.sampled_from([0, 1])))
    if draw(st.booleans()):
        filters = draw(st.sampled_from([[], [Inverted()], [numcodecs.CRC32(), numcodecs.Shuffle(4)]]))
        if values.dtype.kind in "iu" and draw(st.booleans()):  # a filter of items after a filter of bytes
            filters = [Inverted(), numcodecs.Delta(values.dtype.str)]
        how: dict[str, Any] = {
            "zarr_format": 2, "filters": filters or None, "order": draw(st.sampled_from("CF")),
            "compressors": draw(st.sampled_from([None, numcodecs.Zlib(1), Inverted(), numcodecs.Base64()])),
            "chunk_key_encoding": {"name": "v2", "separator": draw(st.sampled_from("./"))},
        }  # fmt: skip
        if filters and filters[0].codec_id == "crc32":
            how["compressors"] = None if (int(np.prod(chunks)) * size) % 4 else how["compressors"]
            how["filters"] = None if (int(np.prod(chunks)) * size) % 4 else how["filters"]
    else:
        turned = draw(st.permutations(range(values.ndim)))
        shards = None
        if values.ndim and values.dtype.kind != "V" and draw(st.booleans()):  # zarr-python cannot write V in shards
            shards = tuple(draw(st.integers(1, 3)) * step for step in chunks)
        endian = None if size == 1 or values.dtype.kind in "SV" else draw(st.sampled_from(["little", "big"]))
        how = {
            "zarr_format": 3, "shards": shards, "serializer": zarr.codecs.BytesCodec(endian=endian),
            "filters": [zarr.codecs.TransposeCodec(order=turned)] if values.ndim else [],
            "compressors": draw(st.sampled_from([[], [zarr.codecs.ZstdCodec()], [zarr.codecs.Crc32cCodec()]])),
            "chunk_key_encoding": {
                "name": draw(st.sampled_from(["default", "v2"])), "separator": draw(st.sampled_from("./")),
            },
        }  # fmt: skip
    array = zarr.create_array(
        str(root), shape=values.shape, chunks=chunks, dtype=values.dtype, fill_value=fill, **how,
        config={"write_empty_chunks": True},
    )  # fmt: skip
    part = slice(0, values.shape[0] // 2) if values.ndim and draw(st.booleans()) else ...
    array[part] = values[part]
    return zarr.open_array(str(root), mode="r")


def items(array: zarr.Array[Any]) -> np.ndarray[Any, Any]:
    """Read an array with its own dtype: zarr-python drops the length of text and bytes that are scalars."""
    return np.asarray(array[...], array.dtype)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_zarr_python_reads_the_same_from_both_views(tmp_path_factory: pytest.TempPathFactory, data: Any) -> None:
    values, chunks = data.draw(arrays())
    root = tmp_path_factory.getbasetemp() / f"array{next(numbers)}"
    array = write(data.draw, root, values, chunks)
    for version in 2, 3:
        tree, about = seen(root, version)  # type: ignore[arg-type]
        read = zarr.open_array(memory(tree), mode="r", zarr_format=version)  # type: ignore[arg-type]
        assert about.keys() == {"form"}
        assert read.shape == array.shape
        assert items(read).astype(array.dtype).tobytes() == items(array).tobytes()
        if not values.dtype.fields:
            assert read.dtype.newbyteorder("=") == array.dtype.newbyteorder("=")
        if about["form"] == "decoded":
            assert all(len(value) == read.nbytes // max(read.size, 1) * np.prod(read.chunks, dtype=int)
                       for key, value in tree.items() if key.rpartition("/")[2][0].isdigit())  # fmt: skip
        if about["form"] == "as stored":
            assert array.metadata.zarr_format == version


def test_a_dtype_without_a_v3_name_becomes_raw_bytes_with_its_layout_in_an_attribute(tmp_path: Path) -> None:
    dtype = np.dtype([("a", "<i4"), ("b", ">f8", (2,)), ("c", "|V3")])
    values = np.zeros(5, dtype)
    values["a"], values["b"] = range(5), [[at, at / 2] for at in range(5)]
    layout = [["a", "<i4"], ["b", ">f8", [2]], ["", "|V3"]]
    about = v2(shape=[5], chunks=[3], dtype=layout, fill_value=None, compressor={"id": "zlib", "level": 1})
    tree = {".zarray": about, "0": zlib.compress(values[:3].tobytes()), "1": zlib.compress(values[2:].tobytes())}
    found, form = seen(written(tmp_path, tree), 3)
    assert form == {"form": "rewritten in metadata"}
    array = zarr.open_array(memory(found), mode="r")
    assert array.attrs["zarrfs.dtype"] == layout
    assert np.asarray(array[:3]).tobytes() == values[:3].tobytes()


@pytest.mark.parametrize("layout", [[["a", ">i2", [2]]], [["a", ">i2", [2]], ["b", "<i4"]]])
def test_items_decoded_to_raw_bytes_have_the_byte_order_of_the_layout_attribute(tmp_path: Path, layout: Any) -> None:
    values = np.zeros(1, [tuple(field) for field in layout])
    values["a"] = [1, 2]
    about = v2(shape=[1], chunks=[1], dtype=layout, fill_value=None, filters=[{"id": "base64"}])
    found, form = seen(written(tmp_path, {".zarray": about, "0": base64.b64encode(values.tobytes())}), 3)
    assert form == {"form": "decoded"}
    array = zarr.open_array(memory(found), mode="r")
    shown: Any = array.attrs["zarrfs.dtype"]
    read = np.frombuffer(np.asarray(array[:]).tobytes(), [tuple(field) for field in shown])
    assert read["a"].tolist() == [[1, 2]]


def test_arrays_with_unusual_codecs_and_chunks_are_decoded(tmp_path: Path) -> None:
    """Labels, JSON, text, chunks cut short at the edge, long doubles, and pickles: those of objects stay out of v3."""
    labels = np.array(["a", "ccc", "", "a"], object)
    category = numcodecs.Categorize(["a", "ccc"], dtype=object)
    tree = {
        ".zgroup": GROUP_2,
        "labels/.zarray": v2(shape=[4], chunks=[4], dtype="|O", fill_value="", filters=[category.get_config()]),
        "labels/0": bytes(category.encode(labels)),
        "pickle/.zarray": v2(shape=[4], chunks=[4], dtype="|O", fill_value=None, filters=[{"id": "pickle"}]),
        "pickle/0": bytes(numcodecs.Pickle().encode(labels)),
        "short/.zarray": v2(shape=[3, 5], chunks=[2, 4], fill_value=7, compressor={"id": Inverted.codec_id}),
        "short/0.0": Inverted().encode(np.arange(8, dtype="<i4")),
        "short/1.1": Inverted().encode(np.array([5], "<i4")),
        "rows/.zarray": v2(shape=[2, 3], chunks=[2, 3], order="F", filters=[{"id": "pickle"}]),
        "rows/0.0": bytes(numcodecs.Pickle().encode(np.asfortranarray(ROWS))),
        "json/.zarray": v2(shape=[2, 3], chunks=[2, 3], filters=[numcodecs.JSON().get_config()]),
        "json/0.0": numcodecs.JSON().encode(ROWS),
        "text/.zarray": v2(shape=[3], chunks=[2], dtype="|O", fill_value="", compressor={"id": Inverted.codec_id},
                           filters=[{"id": "vlen-utf8"}]),
        "text/0": Inverted().encode(numcodecs.VLenUTF8().encode(np.array(["a", "né"], object))),
        "long/.zarray": v2(shape=[2], chunks=[2], dtype="<f16", compressor={"id": Inverted.codec_id}),
        "long/0": Inverted().encode(np.array([1.5, 2.5], "<f16")),
    }  # fmt: skip
    root = written(tmp_path, tree)
    found, about = seen(root, 3)
    assert {path: why.partition(";")[0] for path, why in about.items() if path != "form"} == {
        "pickle": "dtype: v3 has no objects"
    }
    group = zarr.open_group(memory(found), mode="r", use_consolidated=False)
    assert np.asarray(group["labels"][...]).tolist() == labels.tolist()  # type: ignore[index]
    assert np.asarray(group["short"][...]).tolist() == [[0, 1, 2, 3, 7], [4, 5, 6, 7, 7], [7, 7, 7, 7, 5]]  # type: ignore[index]
    assert np.frombuffer(found["short/1.1"], "<i4").tolist() == [5, *[7] * 7]
    as_v2 = seen(root, 2)[0]
    for tree_of, version in (found, 3), (as_v2, 2):
        text = zarr.open_array(memory(tree_of), path="text", mode="r", zarr_format=version)  # type: ignore[arg-type]
        assert np.asarray(text[...]).tolist() == ["a", "né", ""]
    for name in ("rows", "json"):
        assert np.asarray(group[name][...]).tolist() == ROWS.tolist()  # type: ignore[index]
    assert np.asarray(group["long"][...]).view("<f16").tolist() == [1.5, 2.5]  # type: ignore[index]
    assert as_v2["pickle/0"] == tree["pickle/0"]


@pytest.mark.parametrize("labels", [["male", "female"], []])
@pytest.mark.parametrize("fill", ["unknown", "male", "", None])
def test_absent_chunks_of_labels_are_the_fill_value(tmp_path: Path, labels: list[str], fill: str | None) -> None:
    category = numcodecs.Categorize(labels, dtype=object)
    about = v2(shape=[4], chunks=[2], dtype="|O", fill_value=fill, filters=[category.get_config()])
    root = written(tmp_path, {".zarray": about, "0": bytes([1, 2])})
    for version in 2, 3:
        tree, form = seen(root, version)  # type: ignore[arg-type]
        read = zarr.open_array(memory(tree), mode="r", zarr_format=version)[...]  # type: ignore[arg-type]
        assert form == {"form": "decoded"}
        assert np.asarray(read).tolist() == (labels or ["", ""]) + [fill or ""] * 2


@pytest.mark.parametrize(
    ("dtype", "codec", "form"),
    [
        (">i4", numcodecs.Delta("<i4"), "decoded"), ("<f4", numcodecs.Delta("<i4"), "decoded"),
        ("|S4", numcodecs.Delta("<i4"), "decoded"),
        ("<M8[ns]", numcodecs.AsType("<i8", "<M8[s]"), "decoded"),
        ("<u4", numcodecs.Delta("<i4"), "rewritten in metadata"),
        ("<M8[ns]", numcodecs.Delta("<i8"), "rewritten in metadata"),
    ],
)  # fmt: skip
def test_a_filter_of_another_dtype_gets_the_bytes_of_the_items(
    tmp_path: Path, dtype: str, codec: Codec, form: str
) -> None:
    """Zarr v2 reinterprets bytes between a filter and the array; a v3 reader would use the numbers as values."""
    values = np.array([1, 1000, 3, 2**30, 0], "<u4" if np.dtype(dtype).itemsize == 4 else "<i8").view(dtype)
    about = v2(shape=[5], chunks=[5], dtype=dtype, fill_value=None, filters=[codec.get_config()])
    root = written(tmp_path, {".zarray": about, "0": np.asarray(codec.encode(values)).tobytes()})
    tree, shown = seen(root, 3)
    assert shown == {"form": form}
    read = np.asarray(zarr.open_array(memory(tree), mode="r")[...])
    assert read.tolist() == values.tolist() == zarrfs.read_array(root).tolist()


@pytest.mark.parametrize(
    ("dtype", "codec", "form"),
    [
        ("<f8", numcodecs.Quantize(1, "<f8", "<f4"), "decoded"),
        ("|u1", numcodecs.Delta("|u1", "<i2"), "decoded"),
        ("<f8", numcodecs.Quantize(1, "<f8", "<f8"), "rewritten in metadata"),
        ("<i4", numcodecs.Delta("<i4", "<i8"), "rewritten in metadata"),
        ("<f8", numcodecs.Shuffle(4), "rewritten in metadata"),
    ],
)  # fmt: skip
def test_only_filters_that_current_v3_readers_misread_are_decoded(
    tmp_path: Path, dtype: str, codec: Codec, form: str
) -> None:
    values = np.array([1, 2, 3, 5], dtype)
    about = codec.get_config()
    if about["id"] == "shuffle":
        del about["elementsize"]  # the default is 4 in v2, and the array's item size in v3
    document = v2(shape=[4], chunks=[4], dtype=dtype, fill_value=None, filters=[about], compressor={"id": "zlib"})
    stored = numcodecs.Zlib().encode(codec.encode(values))
    tree, shown = seen(written(tmp_path, {".zarray": document, "0": stored}), 3)
    assert shown == {"form": form}
    assert np.asarray(zarr.open_array(memory(tree), mode="r")[...]).tolist() == values.tolist()


@pytest.mark.parametrize("version", [2, 3])
def test_shuffle_without_an_element_size_in_v3_uses_the_item_size(tmp_path: Path, version: int) -> None:
    values = np.arange(6, dtype="<f8")
    codecs = [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "numcodecs.shuffle"}]
    grid = {"name": "regular", "configuration": {"chunk_shape": [6]}}
    root = written(tmp_path, {"zarr.json": v3(shape=[6], data_type="float64", codecs=codecs, chunk_grid=grid),
                              "c/0": numcodecs.Shuffle(8).encode(values)})  # fmt: skip
    assert zarrfs.read_array(root).tolist() == values.tolist()
    tree, _shown = seen(root, version)
    assert np.asarray(zarr.open_array(memory(tree), mode="r")[...]).tolist() == values.tolist()


@pytest.mark.parametrize(("coded", "endian"), [("<i2", "big"), (">i2", "little"), ("<i2", "little")])
def test_filtered_items_shown_as_v2_have_the_byte_order_of_the_filter(tmp_path: Path, coded: str, endian: str) -> None:
    """In v3, their byte order is that of the codec "bytes"."""
    about = v3(
        shape=[3], data_type="uint8", codecs=[
            {"name": "numcodecs.astype", "configuration": {"decode_dtype": "|u1", "encode_dtype": coded}},
            {"name": "bytes", "configuration": {"endian": endian}},
        ], chunk_grid={"name": "regular", "configuration": {"chunk_shape": [3]}},
    )  # fmt: skip
    stored = np.array([1, 2, 3], "i2").astype(">i2" if endian == "big" else "<i2")
    tree, shown = seen(written(tmp_path, {"zarr.json": about, "c/0": stored.tobytes()}), 2)
    assert shown == {"form": "rewritten in metadata" if (coded, endian) == ("<i2", "little") else "decoded"}
    assert np.asarray(zarr.open_array(memory(tree), mode="r", zarr_format=2)[...]).tolist() == [1, 2, 3]


@pytest.mark.parametrize(
    ("dtype", "fill", "values"),
    [
        ("<U2", "", ["ab", "c"]), ("|S3", "AAAA", [b"ab", b"c"]), ("<M8[s]", 0, [5, 6]), ("<m8[s]", 0, [5, 6]),
        ("|b1", False, [True, True]), ("<i2", 1, [5, 6]), ("<c16", [0.0, 0.0], [5, 6]),
    ],
)  # fmt: skip
def test_xarray_opens_a_data_set_with_arrays_of_any_type(tmp_path: Path, dtype: str, fill: Any, values: Any) -> None:
    """xarray refuses a _FillValue attribute of text, bytes and dates."""
    items = np.array(values, dtype)
    attributes = json.dumps({"_ARRAY_DIMENSIONS": ["t"]}).encode()
    tree = {".zgroup": GROUP_2, "a/.zattrs": attributes, "a/0": items.tobytes(), "b/.zattrs": attributes}
    tree["b/.zattrs"] = json.dumps({"_ARRAY_DIMENSIONS": ["t"], "_FillValue": fill}).encode()
    tree["a/.zarray"] = v2(shape=[2], chunks=[2], dtype=dtype, fill_value=fill)
    tree["b/.zarray"] = v2(shape=[2], chunks=[2], dtype=dtype, fill_value=None)
    root = written(tmp_path, tree | {"b/0": items.tobytes()})
    found = xarray.open_zarr(memory(seen(root, 3)[0]), consolidated=False)
    as_it_is = xarray.open_zarr(root, consolidated=False)
    for name in "a", "b":
        assert found[name].values.tolist() == as_it_is[name].values.tolist() == np.array(values, dtype).tolist()


def test_xarray_opens_a_data_set_of_v3_with_a_scalar_as_v2(tmp_path: Path) -> None:
    """zarr-python writes no dimension names for a scalar; xarray requires _ARRAY_DIMENSIONS on every v2 array."""
    made = xarray.Dataset({"a": ("t", [5, 6])}, coords={"crs": 1, "height": 2.5})
    made.to_zarr(tmp_path / "z", zarr_format=3, consolidated=False)
    found = xarray.open_zarr(memory(seen(tmp_path / "z", 2)[0]), consolidated=False)
    xarray.testing.assert_equal(found.load(), made)


# -- failures

Check = Callable[[TranslatedView, Path], Awaitable[None]]


def on_view(base: Path, version: Literal[2, 3], check: Check, **how: Any) -> None:
    async def main() -> None:
        view = TranslatedView(FileSystemStore(str(base)), version, **how)
        await check(view, base)
        await view.aclose()

    trio.run(main, clock=MockClock(autojump_threshold=0))


ODD = v2(compressor={"id": Inverted.codec_id})
CHUNK = Inverted().encode(np.arange(100, dtype="<i4"))


@pytest.mark.parametrize("version", [2, 3])
def test_a_chunk_that_cannot_be_decoded_fails_alone(tmp_path: Path, version: Literal[2, 3]) -> None:
    async def check(view: TranslatedView, base: Path) -> None:
        assert bytes(await view.get("a/0.0")) == np.arange(100, dtype="<i4").tobytes()
        assert bytes(await view.get("a/0.0", 5, 7)) == np.arange(100, dtype="<i4").tobytes()[5:12]
        assert (await view.info("a/0.1")).size == 400
        with pytest.raises(ReadError, match=r"a/0\.1: .*decodes to 5 bytes, not 400"):
            await view.get("a/0.1")
        for call in (view.info, view.open):
            with pytest.raises(NotFound):
                await call("a/1.1")
        value = await view.open("a/0.0")
        (base / "a/0.0").write_bytes(Inverted().encode(np.ones(100, "<i4")))
        await trio.sleep(1.1)
        with pytest.raises(TargetChanged):
            await value.read(0, 4)
        assert bytes(await view.get("a/0.0", 0, 4)) == b"\1\0\0\0"
        assert (await view.locate("a/0.0")) == {"decoded_from": await view.lower.locate("a/0.0")}

    on_view(written(tmp_path, {"a/.zarray": ODD, "a/0.0": CHUNK, "a/0.1": b"short"}), version, check)


def test_opening_a_chunk_again_after_a_rewrite_reads_the_new_data(tmp_path: Path) -> None:
    def text(items: list[str]) -> bytes:
        return bytes(numcodecs.VLenUTF8().encode(np.array(items, object)))

    numbers = v2(filters=[{"id": "base64"}])
    texts = v2(shape=[2], chunks=[2], dtype="|O", fill_value="", filters=[{"id": "vlen-utf8"}],
               compressor={"id": "zarrfs-test-inverted"})  # fmt: skip
    tree = {"a/.zarray": numbers, "a/0.0": base64.b64encode(bytes(400)), "b/.zarray": texts,
            "b/0": Inverted().encode(text(["a", "b"]))}  # fmt: skip

    async def check(view: TranslatedView, base: Path) -> None:
        old = await view.open("a/0.0")
        await view.get("a/0.0")
        await view.get("b/0")
        (base / "a/0.0").write_bytes(base64.b64encode(bytes([7]) * 400))
        (base / "b/0").write_bytes(Inverted().encode(text(["longer", "b"])))
        for key in "a/0.0", "b/0":
            os.utime(base / key, (1, 1))
        assert bytes(await view.get("a/0.0")) == bytes([7]) * 400
        assert bytes(await view.get("b/0")) == text(["longer", "b"])
        with pytest.raises(TargetChanged):
            await old.read(0, 4)

    on_view(written(tmp_path, tree), 3, check)


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *arguments: object) -> None:
        """Log nothing."""


def test_decoded_chunks_are_read_from_a_server_whose_listing_has_no_sizes(tmp_path: Path) -> None:
    about = v2(filters=[{"id": "base64"}], dimension_separator=".")
    base = written(tmp_path, {".zgroup": GROUP_2, "a/.zarray": about, "a/0.0": base64.b64encode(bytes(400))})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(_Quiet, directory=base))
    threading.Thread(target=server.serve_forever, daemon=True).start()

    async def main() -> None:
        view = open_source(f"http://127.0.0.1:{server.server_port}/", Options(view="v3"))
        try:
            assert "0.0" in [info.name for info in await listed(view, "a")]
            value = await view.open("a/0.0")
            for _ in range(2):
                assert bytes(await value.read(0, 400)) == bytes(await view.get("a/0.0")) == bytes(400)
        finally:
            await view.aclose()

    try:
        trio.run(main)
    finally:
        server.shutdown()
        server.server_close()


def test_an_open_chunk_of_a_server_is_never_decoded_from_its_next_version(faulty: Faulty) -> None:
    """The store's cached metadata is that of the old version until the bytes are read."""
    about = v2(shape=[300_000], chunks=[300_000], dtype="|u1", filters=[{"id": "base64"}], dimension_separator=".")
    first, then = (base64.b64encode(np.random.default_rng(seed).bytes(300_000)) for seed in (1, 2))
    url = put_exact(faulty, "replaced", {"a/.zarray": about, ".zgroup": GROUP_2})
    faulty.put("/replaced/a/0", first)

    async def main() -> None:
        options = Options(view="v3", retries=0, metadata_ttl=3600.0, array_cache=0, memory_limit=64 << 10, prefetch=0)
        view = open_source(url, options)
        try:
            value = await view.open("a/0")
            assert bytes(await value.read(0, 300_000)) == base64.b64decode(first)
            faulty.put("/replaced/a/0", then, tag="2")
            for _ in range(2):
                with pytest.raises(TargetChanged):
                    await value.read(0, 300_000)
            again = await view.open("a/0")
            assert bytes(await again.read(0, 300_000)) == base64.b64decode(then)
        finally:
            await view.aclose()

    trio.run(main)


class _Replaced(FileSystemStore):
    """A directory store that replaces a chunk between stat and read, once for each of `versions`."""

    chunk = Path()
    versions: ClassVar[list[bytes]] = []

    async def get(self, key: str, start: int = 0, length: int | None = None) -> Any:
        if key == "a/0.0" and self.versions:
            new = self.chunk.with_name("new")
            new.write_bytes(self.versions.pop())
            os.utime(new, (len(self.versions) + 1, 1))
            new.rename(self.chunk)
        return await super().get(key, start, length)


@pytest.mark.parametrize("times", [1, 2, 3])
def test_a_chunk_that_is_replaced_while_it_is_read_is_decoded_from_one_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    base = written(tmp_path, {".zgroup": GROUP_2, "a/.zarray": ODD, "a/0.0": CHUNK})
    new = Inverted().encode(bytes([7]) * 400)
    monkeypatch.setattr(_Replaced, "chunk", base / "a/0.0")

    async def main() -> None:
        view = TranslatedView(_Replaced(str(base)), 3)
        try:
            value = await view.open("a/0.0")
            monkeypatch.setattr(_Replaced, "versions", [new] * times)
            with pytest.raises(ReadError) as caught:
                await value.read(0, 400)
            assert isinstance(caught.value, TargetChanged) == (times < 3), "or it never stays as it is"
            assert bytes(await view.get("a/0.0")) == bytes([7]) * 400
        finally:
            await view.aclose()

    trio.run(main)


def test_transcode_off_leaves_out_arrays_that_need_decoding(tmp_path: Path) -> None:
    async def check(view: TranslatedView, _base: Path) -> None:
        assert [info.name for info in await listed(view, "a")] == []
        why = f"codec {Inverted.codec_id}, which today's readers of Zarr v2 lack"
        assert await view.left_out("") == {"a": f"{why}: it would have to be decoded, and nothing is (transcode=off)"}
        assert await view.chunk_form("a") is None

    on_view(written(tmp_path, {"a/.zarray": ODD, "a/0.0": CHUNK}), 2, check, decode=False)


# -- shards


def shard(chunks: dict[int, bytes], count: int = 4) -> bytes:
    """Assemble a shard of `count` inner chunks."""
    data, entries = b"", []
    for number in range(count):
        found = chunks.get(number)
        entries += [len(data), len(found)] if found is not None else [2**64 - 1] * 2
        data += found or b""
    index = np.array(entries, "<u8").tobytes()
    return data + index + google_crc32c.value(index).to_bytes(4, "little")


def shards_of(tree: Tree, per_shard: tuple[int, int] = (2, 2)) -> Tree:
    """Return the shards that hold the inner chunks of `tree`; the keys of both are chunk indices ("0/0")."""
    found: dict[tuple[int, ...], dict[int, bytes]] = {}
    for key, data in tree.items():
        index = tuple(map(int, key.split("/")))
        at = tuple(number // per for number, per in zip(index, per_shard, strict=True))
        place = index[0] % per_shard[0] * per_shard[1] + index[1] % per_shard[1]
        found.setdefault(at, {})[place] = data
    return {"/".join(map(str, at)): shard(chunks) for at, chunks in found.items()}


INDEXES = st.tuples(st.integers(0, 3), st.integers(0, 4))


class TestShardsAsV2(StoreContract):
    """The store contract for sharded arrays shown as v2, whose inner chunks may have any size."""

    tree: ClassVar[Tree] = {f"{row}/{column}": bytes([row, column]) * 20 for row, column in [(0, 0), (1, 3), (3, 4)]}
    file = "1/3"
    trees = st.dictionaries(INDEXES, st.binary(max_size=300), min_size=1, max_size=12).map(
        lambda tree: {f"{row}/{column}": data for (row, column), data in tree.items()}
    )
    made: ClassVar[Tree]
    place: Path

    @contextlib.asynccontextmanager
    async def open(self, tree: Tree) -> AsyncIterator[TranslatedView]:
        chunks = {key: data for key, data in tree.items() if key not in self.made}
        source = {f"c/{key}": data for key, data in shards_of(chunks).items()}
        async with viewed(self.place, {"zarr.json": v3(**SHARDED), **source}, 2) as view:
            yield view

    def usable(self, tree: Tree) -> Tree:
        # a shard makes a directory for each of its rows of inner chunks: leave none of them empty
        rows = {int(key[0]) // 2 for key in tree if key not in self.made}
        every = {f"{2 * row + more}/{int(key[2])}": data for row in rows for more in (0, 1)
                 for key, data in tree.items() if key not in self.made and int(key[0]) // 2 == row}  # fmt: skip
        return {**self.made, **every}


@pytest.fixture(autouse=True, scope="class")
def _place(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> None:
    cls = request.cls
    if cls is None:
        return
    cls.place = tmp_path_factory.mktemp("shards")
    tree = {"zarr.json": v3(**SHARDED)}
    cls.made = {key: data for key, data in seen(written(cls.place, tree), 2)[0].items() if key[0] == "."}
    cls.tree = TestShardsAsV2.usable(cls, TestShardsAsV2.tree)


def test_listing_shards_reads_only_the_indexes_that_it_needs(tmp_path: Path) -> None:
    tree = {f"{row}/{column}": b"x" * (row + 1) for row in range(4) for column in range(5) if (row, column) != (1, 1)}
    source = {"zarr.json": v3(**SHARDED)} | {f"c/{key}": data for key, data in shards_of(tree).items()}

    async def check(view: TranslatedView, base: Path) -> None:
        read: list[tuple[str, int]] = []
        get = view.lower.get

        async def counted(key: str, start: int = 0, length: int | None = None) -> Any:
            read.append((key, start))
            return await get(key, start, length)

        view.lower.get = counted  # type: ignore[method-assign]
        assert [info.name for info in await listed(view, "")] == [".zarray", "0", "1", "2", "3"]
        assert {key for key, _start in read} == {"zarr.json"}
        read.clear()
        assert [(info.name, info.size) for info in await listed(view, "1")] == [("0", 2), ("2", 2), ("3", 2), ("4", 2)]
        assert sorted(key for key, _start in read) == ["c/0/0", "c/0/1", "c/0/2"]
        assert min(start for _key, start in read) > 0  # only the index, at the end of the shard
        read.clear()
        assert bytes(await view.get("0/1")) == b"x"
        with pytest.raises(NotFound):
            await view.info("1/1")
        assert read == []
        where = await view.locate("1/0")
        assert where == {"url": (base / "c/0/0").as_uri(), "offset": 2, "length": 2}
        assert await view.chunk_form("") == ("re-laid by ranges", "")

    on_view(written(tmp_path, source), 2, check)


def test_a_damaged_index_is_an_error_for_the_chunks_of_its_shard_only(tmp_path: Path) -> None:
    tree = {f"{row}/{column}": b"1234" for row in range(4) for column in range(5)}
    source = {"zarr.json": v3(**SHARDED)} | {f"c/{key}": data for key, data in shards_of(tree).items()}
    damaged = bytearray(source["c/1/0"])
    damaged[-20] ^= 1  # a bit of the index, whose checksum no longer matches
    source["c/1/0"] = bytes(damaged)
    source["c/1/1"] = b"no index"

    async def check(view: TranslatedView, _base: Path) -> None:
        names = await listed(view, "2")
        assert [(info.name, bool(info.unreadable)) for info in names] == [
            ("0", True), ("1", True), ("2", True), ("3", True), ("4", False),
        ]  # fmt: skip
        for key, why in (("2/0", "checksum does not match"), ("3/1", "checksum"), ("2/3", "shorter than the index")):
            for call in (view.info, view.get):
                with pytest.raises(ReadError, match=f"c/1/.: .*{why}"):
                    await call(key)
        for key in ("0/0", "1/1", "2/4"):
            assert bytes(await view.get(key)) == b"1234"

    on_view(written(tmp_path, source), 2, check)


@settings(max_examples=40, deadline=None)
@given(
    template=st.sampled_from([NESTED, KeyTemplate(), KeyTemplate("", "c.", ".", "", "c")]), data=st.data(),
    inner=st.tuples(st.integers(1, 3), st.integers(1, 60)), extents=st.tuples(st.integers(1, 9), st.integers(1, 300)),
)  # fmt: skip
def test_names_of_inner_chunks_are_sorted_and_complete(
    template: KeyTemplate, inner: tuple[int, int], extents: tuple[int, int], data: st.DataObject
) -> None:
    """Compare with names made one by one and sorted, resuming after any name; a huge grid is never enumerated."""
    found = parse_node("zarr.json", v3(
        shape=extents, chunk_grid={"name": "regular", "configuration": {"chunk_shape": inner}}, data_type="int8",
        codecs=["bytes"],
    ))  # fmt: skip
    assert isinstance(found, ArrayMetadata)
    names = InnerNames(found, template, Grid(extents, (1, 1)))
    grid = found.grid
    shards = sorted(data.draw(st.sets(st.tuples(*(st.integers(0, count - 1) for count in grid.counts)), max_size=5)))
    if template == NESTED:
        row = data.draw(st.integers(0, extents[0] - 1))
        directory, shards = str(row), [(at,) for _row, at in shards]
        every = {(column,): str(column) for column in range(extents[1]) if (column // inner[1],) in shards}
    else:
        directory = ""
        every = {at: template.key(at) for at in itertools.product(*map(range, extents))
                 if (at[0] // inner[0], at[1] // inner[1]) in shards}  # fmt: skip
    after = data.draw(st.just("") | st.sampled_from(sorted(every.values()) or [""]) | st.text("0123.c", max_size=4))
    wanted = sorted((name, at) for at, name in every.items() if name > after)
    assert list(names.inner_names(directory, sorted(set(shards)), after)) == wanted
    huge = InnerNames(found, template, Grid((10**12, 10**12), (1, 1)))
    assert len(list(itertools.islice(huge.inner_names(directory, sorted(set(shards)), ""), 3))) <= 3


def test_documents_of_decoded_arrays_name_no_compressor_or_filter(tmp_path: Path) -> None:
    root = written(tmp_path, {".zarray": ODD, "0.0": CHUNK})
    two, three = json.loads(seen(root, 2)[0][".zarray"]), json.loads(seen(root, 3)[0]["zarr.json"])
    assert (two["compressor"], two["filters"]) == (None, None)
    assert three["codecs"] == [{"name": "bytes", "configuration": {"endian": "little"}}]


def test_a_shard_of_another_size_is_another_version() -> None:
    """A change of size counts even if a coarse timestamp stays the same; an unknown size equals any size."""
    found = Info("c/0", Kind.FILE, 100, None, 7)
    assert _same(found, found._replace(size=None))
    assert not _same(found, found._replace(size=101))
    assert not _same(found, found._replace(mtime_ns=8))

"""view=v2 and view=v3 of arrays of every kind: shown with the same values, as ranges of shards, or left out."""

from __future__ import annotations

import contextlib
import itertools
import json
import warnings
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
from numcodecs.abc import Codec
from trio.testing import MockClock
from zarr.core.buffer import default_buffer_prototype

from tests.store.contract import StoreContract, Tree, keys, listed
from tests.views.arraystores import Shape, shapes, write
from tests.views.viewstores import GROUP_2, Timeless, v2, v3, viewed, written
from zarrfs.errors import ReadError, TargetChanged
from zarrfs.store.api import Value
from zarrfs.store.directory import FileSystemStore
from zarrfs.views.translated import TranslatedView

numbers = itertools.count()
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
    """Return the contents of a view of `root`, and the nodes left out with reasons."""

    async def main() -> tuple[Tree, dict[str, str]]:
        view = TranslatedView(FileSystemStore(str(root)), version)
        tree = await contents(view)
        left_out = await view.left_out("")
        await view.aclose()
        return tree, left_out

    return trio.run(main)


# -- zarr-python reads the same values from a view of any array


def encoding(draw: st.DrawFn, how: Shape) -> dict[str, Any]:
    """Draw filters, a compressor and chunk keys, which the other version may lack."""
    dtype, size = np.dtype(how.dtype), int(np.prod(how.chunks)) * np.dtype(how.dtype).itemsize
    names = ["v2"] if how.version == 2 else ["default", "v2"]
    keys = {"name": draw(st.sampled_from(names)), "separator": draw(st.sampled_from("./"))}
    if how.version == 3:
        endian = None if dtype.itemsize == 1 or dtype.kind in "SV" else draw(st.sampled_from(["little", "big"]))
        turned = tuple(draw(st.permutations(range(len(how.shape)))))
        return {
            "serializer": zarr.codecs.BytesCodec(endian=endian), "chunk_key_encoding": keys,
            "filters": [zarr.codecs.TransposeCodec(order=turned)] if turned else [],
            "compressors": draw(st.sampled_from([[], [zarr.codecs.ZstdCodec()], [zarr.codecs.Crc32cCodec()]])),
        }  # fmt: skip
    filters: list[Any] = [[], [Inverted()]] + ([] if size % 4 else [[numcodecs.CRC32(), numcodecs.Shuffle(4)]])
    if dtype.kind in "iu":
        delta = numcodecs.Delta(dtype.str)
        filters += [[delta], [Inverted(), delta]]  # a filter of items after a filter of bytes
    if dtype.kind == "b":
        filters.append([numcodecs.PackBits()])
    if dtype == "<f8":
        filters += [[numcodecs.FixedScaleOffset(0, 1, "<f8", "<f4")], [numcodecs.AsType("<f4", "<f8")]]
    compressors = [
        None, numcodecs.Zlib(1), Inverted(), numcodecs.Base64(), numcodecs.GZip(1), numcodecs.Zstd(3),
        numcodecs.LZ4(), *(numcodecs.Blosc("lz4", 3, shuffle) for shuffle in (-1, 0, 1, 2)),
    ]  # fmt: skip
    return {
        "filters": draw(st.sampled_from(filters)) or None, "compressors": draw(st.sampled_from(compressors)),
        "chunk_key_encoding": keys,
    }  # fmt: skip


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(how=shapes(3), data=st.data())
def test_zarr_python_reads_the_same_from_both_views(
    tmp_path_factory: pytest.TempPathFactory, how: Shape, data: Any
) -> None:
    root = tmp_path_factory.getbasetemp() / f"array{next(numbers)}"
    group = zarr.open_group(root, mode="w", zarr_format=how.version)  # type: ignore[arg-type]
    write(group, "x", how, **encoding(data.draw, how))
    array = zarr.open_array(root / "x", mode="r")
    items = np.asarray(array[...], array.dtype)
    for version in 2, 3:
        tree, left_out = seen(root, version)  # type: ignore[arg-type]
        if left_out:
            assert version != how.version
            assert not any(key.startswith("x/") for key in tree)
            continue
        read = zarr.open_array(memory(tree), path="x", mode="r", zarr_format=version)  # type: ignore[arg-type]
        assert read.shape == items.shape
        assert np.asarray(read[...], read.dtype).astype(items.dtype).tobytes() == items.tobytes()
        np.testing.assert_array_equal(read.fill_value, array.fill_value)
        if not items.dtype.fields:
            assert read.dtype.newbyteorder("=") == items.dtype.newbyteorder("=")


@pytest.mark.parametrize(
    ("dtype", "codec", "shown"),
    [
        (">i4", numcodecs.Delta("<i4"), False), ("<f4", numcodecs.Delta("<i4"), False),
        ("|S4", numcodecs.Delta("<i4"), False), ("<M8[ns]", numcodecs.AsType("<i8", "<M8[s]"), False),
        ("<u4", numcodecs.Delta("<i4"), False), ("<M8[ns]", numcodecs.Delta("<i8"), False),
        ("<f8", numcodecs.Quantize(1, "<f8", "<f4"), False), ("|u1", numcodecs.Delta("|u1", "<i2"), False),
        ("<f8", numcodecs.Quantize(1, "<f8", "<f8"), True), ("<i4", numcodecs.Delta("<i4", "<i8"), True),
        ("<f8", numcodecs.Shuffle(4), True),
    ],
)  # fmt: skip
def test_arrays_whose_filters_v3_readers_misread_are_left_out(
    tmp_path: Path, dtype: str, codec: Codec, shown: bool
) -> None:
    """Zarr v2 reinterprets bytes between a filter and the array; a v3 reader would use the numbers as values."""
    values = np.array([1, 1000 % 256, 3, 200], "i4" if np.dtype(dtype).itemsize == 4 else "i8")
    values = values.astype("u1") if dtype == "|u1" else values.view(dtype)
    if dtype == "<f8":
        values = np.array([1, 2, 3, 5], dtype)
    about = codec.get_config()
    if about["id"] == "shuffle":
        del about["elementsize"]  # the default is 4 in v2, and the array's item size in v3
    document = v2(shape=[4], chunks=[4], dtype=dtype, fill_value=None, filters=[about], compressor={"id": "zlib"})
    stored = numcodecs.Zlib().encode(np.asarray(codec.encode(values)))
    tree, left_out = seen(written(tmp_path, {".zarray": document, "0": stored}), 3)
    assert (left_out == {}) == shown
    if shown:
        assert np.asarray(zarr.open_array(memory(tree), mode="r")[...]).tolist() == values.tolist()
    else:
        assert tree == {}
        assert about["id"] in left_out[""]


@pytest.mark.parametrize("version", [2, 3])
def test_shuffle_without_an_element_size_in_v3_uses_the_item_size(tmp_path: Path, version: int) -> None:
    values = np.arange(6, dtype="<f8")
    shuffle = {"name": "numcodecs.shuffle", "configuration": {}}
    codecs = [{"name": "bytes", "configuration": {"endian": "little"}}, shuffle]
    grid = {"name": "regular", "configuration": {"chunk_shape": [6]}}
    root = written(tmp_path, {"zarr.json": v3(shape=[6], data_type="float64", codecs=codecs, chunk_grid=grid),
                              "c/0": numcodecs.Shuffle(8).encode(values)})  # fmt: skip
    tree, _left_out = seen(root, version)
    assert np.asarray(zarr.open_array(memory(tree), mode="r")[...]).tolist() == values.tolist()


@pytest.mark.parametrize(
    ("plain", "coded", "endian"),
    [("|u1", "<i2", "big"), ("|u1", ">i2", "little"), ("|i1", "<i2", "little"), ("|u1", "<i2", "little")],
)
def test_filtered_items_shown_as_v2_have_the_type_and_byte_order_of_the_filter(
    tmp_path: Path, plain: str, coded: str, endian: str
) -> None:
    """In v3, their byte order is that of the codec "bytes", and zarr-python converts decoded items to the array's."""
    about = v3(
        shape=[3], data_type="uint8", codecs=[
            {"name": "numcodecs.astype", "configuration": {"decode_dtype": plain, "encode_dtype": coded}},
            {"name": "bytes", "configuration": {"endian": endian}},
        ], chunk_grid={"name": "regular", "configuration": {"chunk_shape": [3]}},
    )  # fmt: skip
    stored = np.array([1, 2, 3], "i2").astype(">i2" if endian == "big" else "<i2")
    tree, left_out = seen(written(tmp_path, {"zarr.json": about, "c/0": stored.tobytes()}), 2)
    assert (left_out == {}) == ((plain, coded, endian) == ("|u1", "<i2", "little"))
    if not left_out:
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


def on_view(base: Path, version: Literal[2, 3], check: Check) -> None:
    async def main() -> None:
        view = TranslatedView(FileSystemStore(str(base)), version)
        await check(view, base)
        await view.aclose()

    trio.run(main, clock=MockClock(autojump_threshold=0))


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
    sorted_by_name = False
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


def test_a_damaged_index_is_an_error_for_the_chunks_of_its_shard_only(tmp_path: Path) -> None:
    tree = {f"{row}/{column}": b"1234" for row in range(4) for column in range(5)}
    source = {"zarr.json": v3(**SHARDED)} | {f"c/{key}": data for key, data in shards_of(tree).items()}
    damaged = bytearray(source["c/1/0"])
    damaged[-20] ^= 1  # a bit of the index, whose checksum no longer matches
    source["c/1/0"] = bytes(damaged)
    source["c/1/1"] = b"no index"

    async def check(view: TranslatedView, base: Path) -> None:
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
        assert await view.locate("1/0") == {"url": (base / "c/0/0").as_uri(), "offset": 8, "length": 4}

    on_view(written(tmp_path, source), 2, check)


def test_a_shard_that_is_replaced_is_read_by_its_own_index_or_is_an_error(tmp_path: Path) -> None:
    """The bytes at an old offset would be those of another chunk."""
    source = {"zarr.json": v3(**SHARDED), "c/0/0": shards_of({"0/0": b"1234", "0/1": b"5678"})["0/0"]}

    async def check(view: TranslatedView, base: Path) -> None:
        assert bytes(await view.get("0/1")) == b"5678"
        original = view.lower.open

        async def opened(key: str) -> Value:
            if key == "c/0/0":
                (base / key).write_bytes(shards_of({"0/0": b"123456", "0/1": b"78"})["0/0"])
            return await original(key)

        (base / "c/0/0").write_bytes(shards_of({"0/0": b"12345", "0/1": b"678"})["0/0"])  # with an index of its own
        assert bytes(await view.get("0/1")) == b"678"
        view.lower.open = opened  # type: ignore[method-assign]
        with pytest.raises(TargetChanged):
            await view.open("0/1")

    on_view(written(tmp_path, source), 2, check)


def test_a_shard_of_another_size_is_read_by_its_own_index_though_the_store_has_no_times(tmp_path: Path) -> None:
    base = written(tmp_path, {"zarr.json": v3(**SHARDED), "c/0/0": shards_of({"0/0": b"1234", "0/1": b"5678"})["0/0"]})

    async def main() -> None:
        view = TranslatedView(Timeless(str(base)), 2)
        assert bytes(await view.get("0/1")) == b"5678"
        (base / "c/0/0").write_bytes(shards_of({"0/0": b"12345", "0/1": b"67890"})["0/0"])
        assert bytes(await view.get("0/1")) == b"67890"
        await view.aclose()

    trio.run(main)


def test_shards_of_a_slow_store_without_times_are_read(tmp_path: Path) -> None:
    class Slow(Timeless):
        async def open(self, key: str) -> Value:
            await trio.sleep(2)
            return await super().open(key)

    tree = {"zarr.json": v3(**SHARDED), "c/0/0": shards_of({"0/0": b"1234", "0/1": b"5678"})["0/0"]}

    async def main() -> None:
        view = TranslatedView(Slow(str(written(tmp_path, tree))), 2)
        for key, wanted in ("0/0", b"1234"), ("0/1", b"5678"):
            assert bytes(await view.get(key)) == wanted
        await view.aclose()

    trio.run(main, clock=MockClock(autojump_threshold=0))

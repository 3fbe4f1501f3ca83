"""Random arrays that zarr-python writes are equal when zarr-python reads them through views of both versions."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numcodecs
import numpy as np
import pytest
import zarr
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as of_numpy

from tests.mounts.mounting import mounted

_numbers = itertools.count()
DTYPES = (
    "|b1", "|i1", "|u1", "<i2", ">i2", "<i4", ">u4", "<i8", ">i8", "<u8", "<f2", ">f4", "<f4", "<f8", ">f8", "<c8",
    ">c16", "|S5", "<U3", ">U2", "<M8[s]", ">M8[ms]", "<m8[D]",
)  # fmt: skip
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3), max_leaves=6,
)  # fmt: skip

ATTRIBUTES = st.dictionaries(st.text(max_size=4), JSON)


@pytest.fixture(scope="module")
def views(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, dict[int, Path]]]:
    """Mount both views of an empty directory; yield the directory and the views by version. Later writes are seen."""
    place = tmp_path_factory.mktemp("views")
    (place / "source").mkdir()
    with (
        mounted(place / "source", place / "v2", "view=v2") as two,
        mounted(place / "source", place / "v3", "view=v3") as three,
    ):
        yield place / "source", {2: two, 3: three}


@st.composite
def arrays(draw: st.DrawFn) -> tuple[np.ndarray[Any, Any], tuple[int, ...]]:
    """Generate the values of an array and its chunk shape."""
    dtype = np.dtype(draw(st.sampled_from(DTYPES)))
    shape = draw(of_numpy.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=7))
    elements = of_numpy.from_dtype(dtype, allow_nan=False) if dtype.kind in "fc" else None
    values = draw(of_numpy.arrays(dtype, shape, elements=elements))
    return values, tuple(draw(st.integers(1, 5)) for _ in shape)


@st.composite
def v2_codecs(draw: st.DrawFn, dtype: np.dtype[Any]) -> tuple[list[Any], Any]:
    """Generate the filters and the compressor of a v2 array."""
    text = dtype.str
    choices: list[list[Any]] = [[], [numcodecs.Shuffle(dtype.itemsize), numcodecs.Zlib(1)], [numcodecs.CRC32()]]
    if dtype.kind in "iu":
        choices += [[numcodecs.Delta(text)], [numcodecs.Delta(text), numcodecs.Shuffle(dtype.itemsize)]]
        # zarr-python 3.1 cannot read items that a filter widened from one byte to several
        wider = [numcodecs.AsType(">i8" if text[0] == "<" else "<i8", text)]
        choices += [wider] * (dtype.itemsize > 1 and text[1:] != "u8")
        choices += [[numcodecs.Delta(text), numcodecs.FixedScaleOffset(0, 1, text)]] * (dtype.itemsize < 4)
    if dtype.kind == "b":
        choices.append([numcodecs.PackBits()])
    shuffle = draw(st.sampled_from([-1, 0, 1, 2]))
    blosc = numcodecs.Blosc(draw(st.sampled_from(["lz4", "zstd", "zlib", "blosclz", "lz4hc"])), 3, shuffle)
    compressors = (
        None, blosc, numcodecs.Zlib(2), numcodecs.GZip(1), numcodecs.Zstd(3), numcodecs.LZ4(), numcodecs.BZ2(1),
        numcodecs.LZMA(),
    )  # fmt: skip
    return draw(st.sampled_from(choices)), draw(st.sampled_from(compressors))


def fill_of(draw: st.DrawFn, dtype: np.dtype[Any]) -> Any:
    if dtype.kind in "MmSU":
        return np.zeros((), dtype)[()]
    if dtype.kind in "fc":
        return dtype.type(draw(st.sampled_from([0, 1.5, np.nan, np.inf, -np.inf])))
    return dtype.type(draw(st.integers(0, 1)))


def check(seen: Any, array: Any, **more: Any) -> None:
    """Check that both arrays have equal values, fill values (also NaN) and attributes, and that `seen` has `more`."""
    assert isinstance(seen, zarr.Array)
    np.testing.assert_array_equal(seen[...], array[...], strict=False)
    assert seen.dtype.newbyteorder("=") == array.dtype.newbyteorder("=")
    assert seen.chunks == array.chunks
    np.testing.assert_array_equal(seen.fill_value, array.fill_value)
    assert seen.attrs.asdict() == {**array.attrs.asdict(), **more}


def opened(place: Path, version: Any) -> Any:
    return zarr.open_group(str(place), mode="r", zarr_format=version, use_consolidated=False)


def write_part(draw: st.DrawFn, array: Any, values: np.ndarray[Any, Any]) -> None:
    """Write all values, or only the first half, so that chunks are missing."""
    part = slice(0, values.shape[0] // 2) if values.ndim and draw(st.booleans()) else ...
    array[part] = values[part]


@settings(max_examples=30, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_a_v2_array_is_equal_in_both_views(views: tuple[Path, dict[int, Path]], data: st.DataObject) -> None:
    source, seen = views
    name = f"two{next(_numbers)}/g/a"
    values, chunks = data.draw(arrays())
    filters, compressor = data.draw(v2_codecs(values.dtype))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        array = zarr.create_array(
            str(source), name=name, shape=values.shape, chunks=chunks, dtype=values.dtype, zarr_format=2,
            order=data.draw(st.sampled_from("CF")), filters=filters or None, compressors=compressor,
            chunk_key_encoding={"name": "v2", "separator": data.draw(st.sampled_from("./"))},
            fill_value=fill_of(data.draw, values.dtype), attributes=data.draw(ATTRIBUTES),
        )  # fmt: skip
        write_part(data.draw, array, values)
        array = zarr.open_array(str(source / name), mode="r", zarr_format=2)
        for version in 3, 2:
            check(opened(seen[version], version)[name], array)


@settings(max_examples=30, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_a_v3_array_is_equal_in_both_views(views: tuple[Path, dict[int, Path]], data: st.DataObject) -> None:
    source, seen = views
    name = f"three{next(_numbers)}/g/a"
    values, chunks = data.draw(arrays())
    endian = data.draw(st.sampled_from(["little", "big"]))
    turnable = values.dtype.itemsize > 1 and values.dtype.kind != "S"
    serializer = zarr.codecs.BytesCodec(endian=endian if turnable else None)
    shuffle = data.draw(st.sampled_from(["shuffle", "bitshuffle"]))
    blosc = zarr.codecs.BloscCodec(cname="zstd", clevel=1, shuffle=shuffle)
    compressors = [], [blosc], [zarr.codecs.GzipCodec()], [zarr.codecs.ZstdCodec()], [blosc, zarr.codecs.Crc32cCodec()]
    turned = [] if data.draw(st.booleans()) else [zarr.codecs.TransposeCodec(order=range(values.ndim)[::-1])]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        array = zarr.create_array(
            str(source), name=name, shape=values.shape, chunks=chunks, dtype=values.dtype, zarr_format=3,
            filters=turned, serializer=serializer, compressors=data.draw(st.sampled_from(compressors)),
            chunk_key_encoding={
                "name": data.draw(st.sampled_from(["default", "v2"])), "separator": data.draw(st.sampled_from("./")),
            },
            fill_value=fill_of(data.draw, values.dtype), attributes=data.draw(ATTRIBUTES),
        )  # fmt: skip
        write_part(data.draw, array, values)
        array = zarr.open_array(str(source / name), mode="r", zarr_format=3)
        check(opened(seen[3], 3)[name], array)
        scalar: dict[str, Any] = {} if values.ndim else {"_ARRAY_DIMENSIONS": []}  # xarray needs it for a scalar
        check(opened(seen[2], 2)[name], array, **scalar)

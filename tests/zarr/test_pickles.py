"""The safe reader of the pickles of zarr 0.3: nothing is executed, and no document takes long."""

from __future__ import annotations

import collections
import contextlib
import functools
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.zarr.test_dtypes import STRUCTS
from tests.zarrsamples import SAMPLES
from zarrfs.zarr.documents import parse_node
from zarrfs.zarr.errors import MetadataError
from zarrfs.zarr.model import ArrayMetadata

PICKLED = [sample for sample in SAMPLES if sample.store.name.startswith("v0_pickled")]


def metadata(**members: Any) -> dict[str, Any]:
    """Return the members that zarr 0.3.0 pickled."""
    return {
        "shape": (5, 4), "chunks": (2, 3), "dtype": np.dtype("<i4"), "cname": b"blosclz", "clevel": 5, "shuffle": 1,
        "fill_value": None, **members,
    }  # fmt: skip


def read(data: bytes) -> ArrayMetadata:
    found = parse_node("__zmeta__", data)
    assert isinstance(found, ArrayMetadata)
    return found


@settings(max_examples=60)
@given(STRUCTS, st.integers(0, 5), st.booleans())
def test_every_dtype_is_read_from_every_protocol(dtype: np.dtype[Any], protocol: int, align: bool) -> None:
    """The padding of aligned structs is read as fields of bytes."""
    if align and dtype.fields:
        dtype = np.dtype(dtype.descr, align=True)
    found = read(pickle.dumps(metadata(dtype=dtype), protocol)).dtype
    assert found.itemsize == dtype.itemsize
    if not dtype.fields:
        assert found.numpy == dtype
    else:
        assert {name: at for name, (_t, at) in dtype.fields.items()}.items() <= {
            name: field[1] for name, field in (found.numpy.fields or {}).items()
        }.items()


def test_array_fields_are_read_and_array_dtypes_are_refused() -> None:
    fields = np.dtype([("a", "<i4"), ("s", ">f4", (2, 3)), ("t", "|S3", 4)])
    for protocol in range(6):
        assert read(pickle.dumps(metadata(dtype=fields), protocol)).dtype.numpy == fields
        with pytest.raises(MetadataError, match="a dtype that is an array"):
            read(pickle.dumps(metadata(dtype=np.dtype(("<i4", (2,)))), protocol))


FILLS = [
    (3, "<i4", 3), (True, "|b1", True), (np.float32(2.5), ">f8", 2.5), (np.bool_(True), "|b1", True),
    (np.bytes_(b"ab"), "|S3", b"ab"), ("né", "<U3", "né"), (np.str_("né"), ">U3", "né"), (b"", "|S2", b""),
    (np.datetime64(5, "s"), "<M8[s]", 5), (1 << 70, "<f8", float(1 << 70)), (np.complex64(1 + 2j), "<c16", 1 + 2j),
    (1 + 2j, "<c16", 1 + 2j), (b"abc", "|V3", np.void(b"abc")), (float("inf"), "<f4", np.inf), (0, "|S2", b"0"),
]  # fmt: skip


@pytest.mark.parametrize("protocol", [0, 2, 5])
def test_fill_values_are_read(protocol: int) -> None:
    for fill, dtype, expected in FILLS:
        found = read(pickle.dumps(metadata(dtype=np.dtype(dtype), fill_value=fill), protocol))
        assert found.fill is not None
        assert np.frombuffer(found.fill, dtype)[0] == np.array(expected, dtype)


def test_a_pickle_of_python_2_is_read() -> None:
    """Its strings are bytes, and its builtins have another module."""
    data = (
        b"(dp0\nS'shape'\np1\n(I5\nI4\ntp2\nsS'chunks'\n(I2\nI3\ntsS'dtype'\ncnumpy\ndtype\np3\n(S'f8'\nI0\nI1\ntRp4\n"
        b"(I3\nS'>'\nNNNI-1\nI-1\nI0\ntbsS'cname'\nS'lz4'\nsS'clevel'\nL5L\nsS'shuffle'\nI01\nsS'fill_value'\n"
        b"cnumpy.core.multiarray\nscalar\n(g4\nS'@\\x04\\x00\\x00\\x00\\x00\\x00\\x00'\ntRs."
    )
    found = read(data)
    assert (found.shape, found.dtype.text, found.codecs[1].configuration["cname"]) == ((5, 4), ">f8", "lz4")
    assert found.fill == np.array([2.5], ">f8").tobytes()


class Evil:
    """An object that runs a command when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.path}",)


def test_no_code_runs(tmp_path: Path) -> None:
    for bad, rule in [
        (Evil(tmp_path / "x"), "names|opcode"),
        (functools.partial(subprocess.run, ["touch", tmp_path / "x"]), "names|opcode"),
        (collections.OrderedDict(), "names 'collections OrderedDict'"), ([1], "EMPTY_LIST|LIST"),
        ({1, 2}, "builtin__ set|EMPTY_SET|LIST"), (np.zeros(3), "_reconstruct|opcode"), (np.dtype, "fill_value"),
    ]:  # fmt: skip
        for protocol in range(6):
            with pytest.raises(MetadataError, match=rule):
                parse_node("__zmeta__", pickle.dumps(metadata(fill_value=bad), protocol))
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    "data",
    [
        b"", b".", b"(", b"(dp0\n", b"N.", b"I1\n.", b"(I1\nI2\nt.", b"}.", b"g5\n.", b"0.", b"R.", b"b.", b"s.",
        b"cnumpy\ndtype\nNR.", b"cnumpy\ndtype\n(tR.", b"cos\nsystem\n(S'true'\ntR.", b"\x80\x05", b"p0\n.",
        b"L" + b"9" * 6000 + b"L\n.", b"\x8a\xff" + b"1" * 10, b"B\xff\xff\xff\x7f", b"\x8d" + b"\xff" * 8,
        b"\x80\x02" + b"N" * (1 << 16) + b".",
        b"}I1\nI2\ns.", b"NNb.", b"cnumpy\ndtype\n(S'i4'\ntR(I9\ntb.", b"\x8c\x01ab.", b"}" * 10 + b"\x86" * 9 + b".",
        b"}Vdtype\ncnumpy\ndtype\n(Vi4\ntR(I3\n)" + b"\x85" * 5000 + b"NNNtbs.",
    ],
    ids=range(29),
)  # fmt: skip
def test_damaged_pickles_are_refused(data: bytes) -> None:
    with pytest.raises(MetadataError):
        parse_node("__zmeta__", data)


def bombs() -> list[bytes]:
    """Return small pickles whose unpickling would take hours, or all memory."""
    pairs = b"\x80\x02}N\x85q\x00" + b"".join(b"h%ch%c\x86q%c" % (at, at, at + 1) for at in range(60))
    memo = b"\x80\x02}r\xff\xff\xff\x7f."
    field = b"(I3\nV|\nN(Va\nVb\nt}(Va\n(g%d\nI0\ntVb\n(g%d\nI%d\ntuI-1\nI-1\nI0\ntbp%d\ns"
    dtypes = b"}Vfirst\ncnumpy\ndtype\np99\n(Vu1\ntR(I3\nV|\nNNNI-1\nI-1\nI0\ntbp0\ns"
    for at in range(24):
        dtypes += b"V%d\ng99\n(VV%d\ntR" % (at, 2 << at) + field % (at, at, 1 << at, at + 1)
    value = pairs[:2] + b"}X\x0a\0\0\0fill_value" + pairs[3:] + b"s."
    return [pairs + b"Ns.", value, memo, dtypes + b"Vdtype\ng24\ns."]


def test_no_document_takes_much_time_or_memory() -> None:
    code = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30));"
        "from zarrfs.zarr.pickles import load; from zarrfs.zarr.errors import MetadataError\n"
        "for bomb in sys.argv[1:]:\n"
        "  try: load(bytes.fromhex(bomb))\n"
        "  except MetadataError as exc: print('refused')"
    )
    given = [bomb.hex() for bomb in bombs()]
    done = subprocess.run([sys.executable, "-c", code, *given], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "refused\n" * len(given)


@settings(max_examples=60)
@given(st.sampled_from([(sample.store / "__zmeta__").read_bytes() for sample in PICKLED]), st.data())
def test_a_mutated_pickle_is_an_array_or_a_metadata_error(data: bytes, draw: st.DataObject) -> None:
    changed = bytearray(data)
    for _ in range(draw.draw(st.integers(1, 4))):
        at = draw.draw(st.integers(0, len(changed) - 1))
        changed[at : at + draw.draw(st.integers(0, 3))] = draw.draw(st.binary(max_size=3))
    with contextlib.suppress(MetadataError):
        read(bytes(changed))

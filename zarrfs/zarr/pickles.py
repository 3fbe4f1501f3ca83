"""A safe reader of the pickled `__zmeta__` of zarr 0.3.

The unpickler imports nothing: the few names that numpy and zarr 0.3 wrote stand for functions of this module. Opcodes
are checked before, because some allocate memory, or take time, out of proportion to the document. Source: PEP 307 and
pickletools; numpy's dtype.__reduce__ and scalar.__reduce__; zarr 0.3.0.
"""

from __future__ import annotations

import io
import pickle
import pickletools
from collections.abc import Callable
from typing import Any

import numpy as np

from zarrfs.zarr import dtypes, fillvalues
from zarrfs.zarr.errors import MetadataError
from zarrfs.zarr.jsontext import JSON

_LENGTH_MAX = 64 << 10  # bytes; zarr 0.3 wrote less than 1000
_SHARED_MAX = 16  # tuples that a pickle may refer to again: nested, they would take exponential time to hash
_STRUCT_MAX = 64 << 10  # bytes of an item; bounds the fields of fields that share a dtype
_OPCODES = frozenset((
    "INT", "LONG", "BININT", "BININT1", "BININT2", "LONG1", "LONG4", "FLOAT", "BINFLOAT", "UNICODE", "BINUNICODE",
    "SHORT_BINUNICODE", "BINUNICODE8", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "STRING", "BINSTRING",
    "SHORT_BINSTRING", "NONE", "NEWTRUE", "NEWFALSE", "EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3",
    "EMPTY_DICT", "DICT", "MARK", "SETITEM", "SETITEMS", "PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE", "GET", "BINGET",
    "LONG_BINGET", "GLOBAL", "STACK_GLOBAL", "REDUCE", "BUILD", "PROTO", "FRAME", "STOP",
))  # fmt: skip
# what damaged pickles raise
_ERRORS = (
    pickle.UnpicklingError, ValueError, LookupError, TypeError, AttributeError, OverflowError, EOFError,
    RecursionError,
)  # fmt: skip


class _Dtype:
    """A dtype that is complete once its state is set."""

    def __init__(self, text: str | bytes, *_options: Any) -> None:
        self._text, self.numpy = _text(text), np.dtype("V1")

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _version, order, subarray, names, fields, *more = state
        if names is not None:
            parts = [fields[name] for name in names]
            padded = np.dtype({
                "names": [_text(name) for name in names], "formats": [part[0].numpy for part in parts],
                "offsets": [part[1] for part in parts], "itemsize": int(self._text[1:]),
            })  # fmt: skip
            if padded.itemsize > _STRUCT_MAX:
                raise ValueError(f"fields of more than {_STRUCT_MAX} bytes")
            self.numpy = np.dtype(padded.descr)  # padding becomes fields
        elif subarray is not None:
            base, shape = subarray
            self.numpy = np.dtype((base.numpy, tuple(map(int, shape)) if isinstance(shape, tuple) else int(shape)))
        else:
            unit = ""
            if self._text[:1] in ("M", "m") and len(more) > 3 and more[3]:
                name, number, _per, _event = more[3][1] if len(more[3]) == 2 else more[3]
                unit = f"[{number}{_text(name)}]"
            self.numpy = dtypes.parse_v2(f"{_text(order)}{self._text}{unit}").numpy


def _scalar(dtype: _Dtype, data: bytes) -> Any:
    if dtype.numpy.itemsize != len(data) or dtype.numpy.names or dtype.numpy.hasobject:
        raise MetadataError("fill_value: a scalar of another size, or of fields")
    return fillvalues.value_of(data, dtype.numpy)


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Callable[..., Any]:
        """Return the function for a name. It is a new one, so that a pickle cannot change it."""
        known: dict[str, Callable[..., Any]] = {
            "dtype": lambda text, *options: _Dtype(text, *options),
            "scalar": lambda dtype, data: _scalar(dtype, data),
            "encode": lambda text, _encoding: text.encode("latin-1"),
            "bytes": lambda: b"",  # protocol 0 pickles b"" as a call
            "complex": lambda real, imaginary: [float(real), float(imaginary)],
        }
        names = (
            "numpy dtype", "numpy.core.multiarray scalar", "numpy._core.multiarray scalar", "_codecs encode",
            "__builtin__ bytes", "builtins bytes", "__builtin__ complex", "builtins complex",
        )  # fmt: skip
        if f"{module} {name}" not in names:
            raise MetadataError(f"a pickle that names {f'{module} {name}'[:60]!r}, which zarr never wrote")
        return known[name]


def load(data: bytes) -> dict[str, JSON]:
    """Return the members of a pickled document as in the JSON of zarr 0.4. Raise MetadataError for other pickles."""
    if len(data) > _LENGTH_MAX:
        raise MetadataError(f"a pickle of more than {_LENGTH_MAX} bytes")
    try:
        _check_opcodes(data)
        document = {_text(key): value for key, value in _Unpickler(io.BytesIO(data), encoding="bytes").load().items()}
        dtype: np.dtype[Any] = document["dtype"].numpy
        if dtype.subdtype:
            raise MetadataError("a dtype that is an array")
        document |= {"dtype": dtypes.DataType(dtype, dtype.kind).text, "cname": _text(document["cname"])}
    except _ERRORS as error:
        raise MetadataError(f"a damaged pickle: {str(error)[:100]}") from None
    return document


def _check_opcodes(data: bytes) -> None:
    """Raise MetadataError for opcodes that zarr never wrote, and ValueError for a memo longer than the pickle."""
    tuples: set[int] = set()  # places in the memo that hold tuples
    places = shared = 0
    last = ""
    argument: Any
    for opcode, argument, _at in pickletools.genops(data):
        name = opcode.name
        if name not in _OPCODES:
            raise MetadataError(f"a pickle with the opcode {name}, which zarr never wrote")
        if name in ("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"):
            place = places if name == "MEMOIZE" else int(argument)
            if place > len(data):  # the memo is a list up to this place
                raise ValueError("a place beyond the pickle")
            places += 1
            if last.startswith("TUPLE"):
                tuples.add(place)
        elif name in ("GET", "BINGET", "LONG_BINGET") and int(argument) in tuples:
            shared += 1
            if shared > _SHARED_MAX:
                raise MetadataError(f"a pickle that refers to tuples more than {_SHARED_MAX} times")
        last = name


def _text(value: Any) -> Any:
    return value.decode("latin-1") if isinstance(value, bytes) else value

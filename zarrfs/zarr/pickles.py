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
from typing import Any, NamedTuple

from zarrfs.zarr import dtypes, fillvalues
from zarrfs.zarr.errors import MetadataError
from zarrfs.zarr.jsontext import JSON

_LENGTH_MAX = 64 << 10  # bytes; zarr 0.3 wrote less than 1000
_SHARED_MAX = 16  # tuples that a pickle may refer to again: nested, they would take exponential time to hash
_STRUCT_MAX = 64 << 10  # bytes of an item; bounds the fields of fields that share a dtype
_VERSION = 3  # of the state of a dtype; version 4 adds a metadata member
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
    """A dtype under construction: `text` is complete once the state is set."""

    def __init__(self, text: str | bytes, *_options: Any) -> None:
        self.text: Any = _text(text)
        self.shape: tuple[int, ...] = ()  # of a field that is an array

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.text, self.shape = _with_state(self.text, state)

    def whole(self) -> Any:
        """Return the text. Raise ValueError if the dtype has a shape, which only a field can have."""
        if self.shape:
            raise ValueError("a dtype that is an array")
        return self.text


class _Scalar(NamedTuple):
    """A numpy scalar."""

    dtype: _Dtype
    data: bytes


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Callable[..., Any]:
        """Return the function for a name. It is a new one, so that a pickle cannot change it."""
        known: dict[str, Callable[..., Any]] = {
            "dtype": lambda text, *options: _Dtype(text, *options),
            "scalar": lambda dtype, data: _Scalar(dtype, data),
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
        found = _Unpickler(io.BytesIO(data), encoding="bytes").load()
        if not isinstance(found, dict):
            raise MetadataError("a pickle that is no dict")
        document = {_text(key): value for key, value in found.items()}
        for name in ("dtype", "cname"):
            value = document.get(name)
            document[name] = value.whole() if isinstance(value, _Dtype) else _text(value)
        document["fill_value"] = _fill(document.get("fill_value"))
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


def _fill(value: Any) -> JSON:
    """Convert a fill value to the form that legacy.fill_in_v2() takes."""
    if not isinstance(value, _Scalar):
        return value
    dtype = dtypes.parse_v2(value.dtype.whole())
    if dtype.itemsize != len(value.data) or dtype.fields:
        raise MetadataError("fill_value: a scalar of another size, or of fields")
    return fillvalues.value_of(value.data, dtype)


def _with_state(text: str, state: tuple[Any, ...]) -> tuple[Any, tuple[int, ...]]:
    """Return (text, shape) of a dtype created as `text` ("i4", "V12") and then given numpy's pickled `state`."""
    if state[0] not in (_VERSION, _VERSION + 1):
        raise ValueError("a dtype with a state that is not known")
    order, subarray, names, fields = state[1:5]
    order = _text(order)
    if names is not None:
        return _fields(names, fields, int(text[1:])), ()
    if subarray is not None:
        base, shape = subarray
        return base.whole(), shape if isinstance(shape, tuple) else (shape,)
    unit = ""
    if text[:1] in ("M", "m") and len(state) > 8 and state[8]:
        base, number, _per, _event = state[8][1] if len(state[8]) == 2 else state[8]
        unit = f"[{number}{_text(base)}]"
    return f"{order}{text}{unit}", ()


def _fields(names: Any, fields: Any, itemsize: int) -> list[JSON]:
    """Return a list of fields, with padding as fields without a name where numpy aligned them."""
    if not isinstance(names, tuple) or not names or not isinstance(fields, dict):
        raise ValueError("fields without names")
    found: list[JSON] = []
    at = 0
    for name in names:
        dtype, offset = fields[name][:2]
        if not isinstance(dtype, _Dtype) or type(offset) is not int or offset < at:
            raise ValueError("fields that overlap")
        if offset > at:
            found.append(["", f"|V{offset - at}"])
        found.append([_text(name), dtype.text, *([list(dtype.shape)] if dtype.shape else [])])
        at = offset + dtypes.parse_v2([found[-1]]).itemsize
        if at > _STRUCT_MAX:
            raise ValueError(f"fields of more than {_STRUCT_MAX} bytes")
    if at < itemsize:
        found.append(["", f"|V{itemsize - at}"])
    return found

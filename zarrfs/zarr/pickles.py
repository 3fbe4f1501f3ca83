"""A safe reader of pickles, for the `__zmeta__` of zarr 0.3.0 and for chunks of numbers that numcodecs pickled.

It interprets a whitelist of opcodes and never unpickles: no function is called, and no name is imported. A few
functions, most of them of numpy, are emulated; a pickle with any other name is rejected. Source: PEP 307 and
pickletools; numpy's dtype.__reduce__ and scalar.__reduce__, ndarray.__reduce__ and ndarray.__reduce_ex__; zarr 0.3.0.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable, Set
from typing import Any, NamedTuple

from zarrfs.zarr import dtypes, fillvalues
from zarrfs.zarr.errors import MetadataError
from zarrfs.zarr.jsontext import JSON

_LENGTH_MAX = 1 << 20  # bytes; zarr 0.3 wrote less than 1000
_VERSION = 3  # of the state of a dtype; version 4 adds a metadata member

_MARK = object()
_LITERALS = {
    "INT", "LONG", "BININT", "BININT1", "BININT2", "LONG1", "LONG4", "FLOAT", "BINFLOAT", "UNICODE", "BINUNICODE",
    "SHORT_BINUNICODE", "BINUNICODE8", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8",
}  # fmt: skip
_STRINGS = {"STRING", "BINSTRING", "SHORT_BINSTRING"}  # str of Python 2, which is bytes
_CONSTANTS: dict[str, JSON] = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_CODECS = ("_codecs encode",)
_DTYPE = ("numpy dtype",)
_SCALAR = ("numpy.core.multiarray scalar", "numpy._core.multiarray scalar")
_BYTES = ("__builtin__ bytes", "builtins bytes")  # protocol 0 pickles b"" as the call bytes()
_COMPLEX = ("__builtin__ complex", "builtins complex")  # fill values
_KNOWN = frozenset((*_CODECS, *_DTYPE, *_SCALAR, *_BYTES, *_COMPLEX))
_NDARRAY = ("numpy ndarray",)
_RECONSTRUCT = ("numpy.core.multiarray _reconstruct", "numpy._core.multiarray _reconstruct")
_FROM_BUFFER = ("numpy.core.numeric _frombuffer", "numpy._core.numeric _frombuffer")


class _Name(NamedTuple):
    """A name that an unpickler would import."""

    text: str


class _Type:
    """A dtype under construction: `text` is complete once BUILD has set the state."""

    def __init__(self, text: str) -> None:
        self.text: Any = text
        self.shape: tuple[int, ...] = ()  # of a field that is an array

    def whole(self) -> Any:
        """Return the text. Raise ValueError if the dtype has a shape, which only a field can have."""
        if self.shape:
            raise ValueError("a dtype that is an array")
        return self.text


class _Scalar(NamedTuple):
    """A numpy scalar."""

    type: _Type
    data: bytes


class PickledArray:
    """A pickled array of items of a fixed size."""

    def __init__(self, dtype: JSON = None, shape: tuple[int, ...] = (), data: bytes | bytearray = b"") -> None:
        self.dtype = dtype  # as in a document of v2
        self.shape = shape
        self.data = data  # items in memory order


def load_array(data: bytes) -> PickledArray:
    """Return the array in a pickle, as numpy writes it. Raise MetadataError for all other pickles."""
    try:
        found = _ArrayMachine().run(data)
    except (ValueError, IndexError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise MetadataError(f"a damaged pickle: {str(error)[:100]}") from None
    if not isinstance(found, PickledArray) or found.dtype is None:
        raise MetadataError("a pickle that is no array of items of a fixed size")
    return found


def load(data: bytes) -> dict[str, JSON]:
    """Return the members of a pickled document as in the JSON of zarr 0.4. Raise MetadataError for other pickles."""
    if len(data) > _LENGTH_MAX:
        raise MetadataError(f"a pickle of more than {_LENGTH_MAX} bytes")
    try:
        found = _Machine().run(data)
        if isinstance(found, dict):
            found = {key: value.whole() if isinstance(value, _Type) else value for key, value in found.items()}
    except (ValueError, IndexError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise MetadataError(f"a damaged pickle: {str(error)[:100]}") from None
    if not isinstance(found, dict) or not all(isinstance(key, str | bytes) for key in found):
        raise MetadataError("a pickle that is no dict")
    document = {_text(key): value for key, value in found.items()}
    if isinstance(document.get("dtype"), bytes):
        document["dtype"] = _text(document["dtype"])
    if isinstance(document.get("cname"), bytes):
        document["cname"] = _text(document["cname"])
    document["fill_value"] = _fill(document.get("fill_value"))
    return document


def _text(value: str | bytes) -> str:
    return value.decode("latin-1") if isinstance(value, bytes) else value


def _fill(value: Any) -> JSON:
    """Convert a fill value to the form that fillvalues.from_v0_v1() takes."""
    if not isinstance(value, _Scalar):
        return value
    dtype = dtypes.parse_v2(value.type.whole())
    if dtype.itemsize != len(value.data) or dtype.fields:
        raise MetadataError("fill_value: a scalar of another size, or of fields")
    return fillvalues.value_of(value.data, dtype)


class _Machine:
    """An interpreter of pickle opcodes, with their stack and memo."""

    known = _KNOWN  # names that a pickle may refer to
    literals: Set[str] = _LITERALS  # opcodes whose argument is the object

    def __init__(self) -> None:
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}
        self._steps: dict[str, Callable[[Any], None]] = {
            "GLOBAL": self._global, "STACK_GLOBAL": self._stack_global, "REDUCE": self._reduce, "BUILD": self._build,
            "DICT": self._dict, "SETITEM": self._setitem, "SETITEMS": self._setitems,
        }  # fmt: skip

    def run(self, data: bytes) -> Any:
        """Return the object that a pickle describes. Damaged pickles raise many kinds of errors, see load()."""
        argument: Any
        for opcode, argument, _at in pickletools.genops(data):
            name = opcode.name
            if name == "STOP":
                return self._stack.pop()
            if name in self.literals:
                self._stack.append(argument)
            elif name in _STRINGS:
                self._stack.append(argument.encode("latin-1") if isinstance(argument, str) else argument)
            elif name in _CONSTANTS:
                self._stack.append(_CONSTANTS[name])
            elif name == "EMPTY_DICT":
                self._stack.append({})
            elif name == "MARK":
                self._stack.append(_MARK)
            elif name == "TUPLE":
                self._stack.append(tuple(self._above_mark()))
            elif name in _TUPLES:
                self._stack.append(tuple(self._top(_TUPLES[name])))
            elif name in ("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"):
                self._memo[len(self._memo) if name == "MEMOIZE" else int(argument)] = self._stack[-1]
            elif name in ("GET", "BINGET", "LONG_BINGET"):
                self._stack.append(self._memo[int(argument)])
            elif name in self._steps:
                self._steps[name](argument)
            elif name not in ("PROTO", "FRAME"):
                raise MetadataError(f"a pickle with the opcode {name}, which zarr never wrote")
        raise ValueError("no end")

    def _top(self, number: int) -> list[Any]:
        found = self._stack[-number:]
        if len(found) < number or any(item is _MARK for item in found):
            raise ValueError("an empty stack")
        del self._stack[-number:]
        return found

    def _above_mark(self) -> list[Any]:
        found = []
        while (item := self._stack.pop()) is not _MARK:
            found.append(item)
        return found[::-1]

    def _global(self, argument: str) -> None:
        if argument not in self.known:
            raise MetadataError(f"a pickle that names {argument[:60]!r}, which zarr never wrote")
        self._stack.append(_Name(argument))

    def _stack_global(self, _argument: None) -> None:
        module, name = self._top(2)
        self._global(f"{module} {name}")

    def _reduce(self, _argument: None) -> None:
        """Emulate a call of one of the few known functions."""
        name, arguments = self._top(2)
        if not isinstance(name, _Name) or not isinstance(arguments, tuple):
            raise ValueError("a call of what is no function")  # noqa: TRY004
        if name.text in _CODECS:
            text, encoding = arguments
            if encoding != "latin1" or not isinstance(text, str):
                raise ValueError("bytes in an encoding that Python does not use")
            self._stack.append(text.encode("latin-1"))
        elif name.text in _DTYPE:
            self._stack.append(_Type(_text(arguments[0])))
        elif name.text in _SCALAR:
            dtype, data = arguments
            if not isinstance(dtype, _Type) or not isinstance(data, bytes):
                raise ValueError("a scalar without dtype and bytes")
            self._stack.append(_Scalar(dtype, data))
        elif name.text in _COMPLEX:
            real, imaginary = arguments
            self._stack.append([float(real), float(imaginary)])
        elif arguments == ():
            self._stack.append(b"")
        else:
            raise ValueError("bytes of something")

    def _build(self, _argument: None) -> None:
        dtype, state = self._top(2)
        if not isinstance(dtype, _Type) or not isinstance(state, tuple):
            raise ValueError("a state of what is no dtype")  # noqa: TRY004
        dtype.text, dtype.shape = _with_state(dtype.text, state)
        self._stack.append(dtype)

    def _dict(self, _argument: None) -> None:
        items = self._above_mark()
        self._stack.append(dict(zip(items[::2], items[1::2], strict=True)))

    def _setitem(self, _argument: None) -> None:
        key, value = self._top(2)
        self._into({key: value})

    def _setitems(self, _argument: None) -> None:
        items = self._above_mark()
        self._into(dict(zip(items[::2], items[1::2], strict=True)))

    def _into(self, items: dict[Any, Any]) -> None:
        if not isinstance(self._stack[-1], dict):
            raise ValueError("members of what is no dict")  # noqa: TRY004
        self._stack[-1].update(items)


class _ArrayMachine(_Machine):
    """An interpreter of pickled arrays."""

    known = _KNOWN | {*_NDARRAY, *_RECONSTRUCT, *_FROM_BUFFER}
    literals = _LITERALS | {"BYTEARRAY8"}

    def _reduce(self, argument: None) -> None:
        name = self._stack[-2]
        text = name.text if isinstance(name, _Name) else ""
        if text in _RECONSTRUCT:
            self._top(2)
            self._stack.append(PickledArray())
        elif text in _FROM_BUFFER:
            data, dtype, shape, _order = self._top(2)[1]
            self._stack.append(_pickled(dtype, shape, data))
        elif text in _NDARRAY:
            raise ValueError("a call of ndarray")
        else:
            super()._reduce(argument)

    def _build(self, argument: None) -> None:
        array, state = self._stack[-2:]
        if not isinstance(array, PickledArray):
            super()._build(argument)
            return
        self._top(2)
        _version, shape, dtype, _fortran, data = state
        self._stack.append(_pickled(dtype, shape, data))


def _pickled(dtype: Any, shape: Any, data: Any) -> PickledArray:
    if not isinstance(dtype, _Type) or not isinstance(shape, tuple) or not isinstance(data, bytes | bytearray):
        raise ValueError("an array without dtype, shape and bytes")  # noqa: TRY004
    return PickledArray(dtype.whole(), shape, data)


def _with_state(text: Any, state: tuple[Any, ...]) -> tuple[Any, tuple[int, ...]]:
    """Return (text, shape) of a dtype created as `text` ("i4", "V12") and then given numpy's pickled `state`."""
    if not isinstance(text, str) or state[0] not in (_VERSION, _VERSION + 1):
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
        if not isinstance(dtype, _Type) or type(offset) is not int or offset < at:
            raise ValueError("fields that overlap")
        if offset > at:
            found.append(["", f"|V{offset - at}"])
        found.append([_text(name), dtype.text, *([list(dtype.shape)] if dtype.shape else [])])
        at = offset + dtypes.parse_v2([found[-1]]).itemsize
    if at < itemsize:
        found.append(["", f"|V{itemsize - at}"])
    return found

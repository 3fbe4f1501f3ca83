"""Representations of a chunk between the codecs of its pipeline, and the interface of a codec.

"Representation" is a term of the Zarr v3 core specification: every codec maps a decoded representation to an encoded
one, each of which is an array of known type and shape, or bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from zarrfs.zarr.errors import CodecError
from zarrfs.zarr.jsontext import JSON

Array = np.ndarray[Any, Any]
OBJECTS_LIMIT = 1 << 30  # bytes of a chunk whose items have no fixed size
_ARRAY_MAX = 1 << 62  # bytes; more than any machine addresses
_SLACK = 64 << 10  # bytes


class Representation(NamedTuple):
    """An array of known type and shape, or bytes (`dtype` is None)."""

    dtype: np.dtype[Any] | None
    shape: tuple[int, ...]
    limit: int  # bytes at most
    exact: bool  # always `limit` bytes

    @classmethod
    def array(cls, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Representation:
        """Make the representation of an array. Raise CodecError if no machine could hold it."""
        size = math.prod(shape) * dtype.itemsize
        if size > _ARRAY_MAX:
            raise CodecError("chunk", f"{size} bytes")
        return cls(dtype, shape, OBJECTS_LIMIT, False) if dtype.hasobject else cls(dtype, shape, size, True)

    def compressed(self, least: int = 0) -> Representation:
        """Return the form of a compressor's output for this input: up to twice its size + 64 KiB, or `least` bytes."""
        return Representation(None, (), max(2 * self.limit + _SLACK, least), False)

    def longer(self, count: int) -> Representation:
        """Return the representation of bytes with the size of this one and `count` more."""
        return Representation(None, (), self.limit + count, self.exact)

    def require_bytes(self, untyped: bool) -> None:
        """Raise CodecError if a codec that takes bytes would get an array.

        Pipelines of Zarr v2 (`untyped`) may have such codecs as filters, which then get the bytes of the array.
        """
        if self.dtype is not None and (self.dtype.hasobject or not untyped):
            raise CodecError("chunk", "a codec made for bytes comes before the one that makes them")

    @property
    def items(self) -> int:
        """The number of items of an array."""
        return math.prod(self.shape)

    def convert(self, name: str, value: Any, untyped: bool) -> Any:
        """Return `value`, the output of codec `name`, in this representation. Raise CodecError if it does not fit.

        With `untyped`, the bytes of arrays are reinterpreted, as in pipelines of Zarr v2. Otherwise the data type has
        to be the same except for the byte order, and values are converted.
        """
        if self.dtype is not None and self.dtype.hasobject:
            if not isinstance(value, np.ndarray) or value.dtype != self.dtype or value.size != self.items:
                raise CodecError(name, f"does not decode to {self.items} objects")
            return value.reshape(self.shape)
        if self.dtype is None or untyped or not isinstance(value, np.ndarray):
            size = value.nbytes if isinstance(value, np.ndarray | memoryview) else len(value)
            if size > self.limit or (self.exact and size != self.limit):
                raise CodecError(name, f"decodes to {size} bytes, not {self.limit}")
            return value if self.dtype is None else _viewed(value, self.dtype).reshape(self.shape)
        if value.dtype.newbyteorder("=") != self.dtype.newbyteorder("=") or value.size != self.items:
            raise CodecError(name, f"decodes to {value.size} of {value.dtype}, not {self.items} of {self.dtype}")
        return value.astype(self.dtype, copy=False).reshape(self.shape)


def _viewed(value: Any, dtype: np.dtype[Any]) -> Array:
    """View the bytes of `value`, a whole number of items, as items of `dtype`."""
    if not isinstance(value, np.ndarray):
        return np.frombuffer(value, dtype) if len(value) else np.empty(0, dtype)
    if value.dtype == dtype:
        return value
    return np.ascontiguousarray(value).reshape(-1).view(dtype)


class PipelineContext(NamedTuple):
    """The properties of an array that its codecs share."""

    untyped: bool  # Zarr v2 and before: filters get bytes, and interpret them as the type in their configuration
    fill: bytes | None = None
    fill_object: JSON = None
    itemsize: int = 4  # bytes, of the array; 0 for objects
    filtered: bool = False  # an earlier codec changes values, so that the fill value of its output is undefined


Decode = Callable[[Any], Any]  # array or bytes -> array or bytes, which Representation.convert() then checks
Codec = tuple[Decode, Representation]  # how to decode, and the encoded representation
# (configuration, decoded representation, context) -> codec; raises CodecError
CodecFactory = Callable[[Mapping[str, JSON], Representation, PipelineContext], Codec]

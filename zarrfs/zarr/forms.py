"""What a chunk is between two codecs of its pipeline, and how a codec says that it decodes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from zarrfs.zarr.errors import JSON, CodecError

Array = np.ndarray[Any, Any]
OBJECTS_LIMIT = 1 << 30  # bytes of a chunk whose items have no fixed size
_LARGEST = 1 << 62  # bytes: what no machine has
_SLACK = 64 << 10


class Form(NamedTuple):
    """An array of known type and shape, or bytes (`dtype` is None)."""

    dtype: np.dtype[Any] | None
    shape: tuple[int, ...]
    limit: int  # bytes at most
    exact: bool  # and no fewer

    @classmethod
    def array(cls, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Form:
        """CodecError where nobody could hold it."""
        size = math.prod(shape) * dtype.itemsize
        if size > _LARGEST:
            raise CodecError("chunk", f"{size} bytes")
        return cls(dtype, shape, OBJECTS_LIMIT, False) if dtype.hasobject else cls(dtype, shape, size, True)

    def packed(self) -> Form:
        """Bytes that a compressor makes of this: not known how many, but no compressor makes more than twice."""
        return Form(None, (), 2 * self.limit + _SLACK, False)

    def longer(self, count: int) -> Form:
        """Bytes, `count` more than this has."""
        return Form(None, (), self.limit + count, self.exact)

    def need_bytes(self, lax: bool) -> None:
        """CodecError for an array: in v2 (`lax`) codecs made for bytes may be filters too, and get its bytes."""
        if self.dtype is not None and (self.dtype.hasobject or not lax):
            raise CodecError("chunk", "a codec made for bytes comes before the one that makes them")

    @property
    def items(self) -> int:
        """Of an array."""
        return math.prod(self.shape)

    def fit(self, name: str, value: Any, lax: bool) -> Any:
        """`value`, which codec `name` decoded, in this form. CodecError where it is not.

        `lax`: as in Zarr v2, where filters look at bytes and see the type that they were told. Otherwise
        another byte order is another way to store the same values.
        """
        size = value.nbytes if isinstance(value, np.ndarray | memoryview) else len(value)
        if self.dtype is None:
            if size > self.limit or (self.exact and size != self.limit):
                raise CodecError(name, f"decodes to {size} bytes, not {self.limit}")
            return value
        if self.dtype.hasobject:
            if not isinstance(value, np.ndarray) or value.dtype != self.dtype or value.size != self.items:
                raise CodecError(name, f"does not decode to {self.items} objects")
            return value.reshape(self.shape)
        if lax or not isinstance(value, np.ndarray):
            if size != self.limit:
                raise CodecError(name, f"decodes to {size} bytes, not {self.limit}")
            return _viewed(value, self.dtype).reshape(self.shape)
        if value.dtype.newbyteorder("=") != self.dtype.newbyteorder("=") or value.size != self.items:
            raise CodecError(name, f"decodes to {value.size} of {value.dtype}, not {self.items} of {self.dtype}")
        return value.astype(self.dtype, copy=False).reshape(self.shape)


def _viewed(value: Any, dtype: np.dtype[Any]) -> Array:
    """The bytes of `value` as items of `dtype`, which there is a whole number of."""
    if not isinstance(value, np.ndarray):
        return np.frombuffer(value, dtype) if len(value) else np.empty(0, dtype)
    if value.dtype == dtype:
        return value
    return np.ascontiguousarray(value).reshape(-1).view(dtype)


class Context(NamedTuple):
    """What the codecs of one array share."""

    lax: bool  # Zarr v2 and before
    fill: bytes | None = None
    fill_object: JSON = None
    filtered: bool = False  # codecs before this one change values: nobody says what becomes of the fill value


Decode = Callable[[Any], Any]  # an array or bytes -> an array or bytes, which Form.fit() then checks
# configuration, what goes in on encoding, the array -> how to decode, what comes out on encoding. CodecError.
Builder = Callable[[Mapping[str, JSON], Form, Context], tuple[Decode, Form]]

"""Codecs from arrays to arrays, and objects in bytes: what numcodecs calls filters.

numcodecs decodes them; here is checked that no more comes out of them than the chunk has. Source: Zarr v3 core and
its registered codecs; the documents of numcodecs.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np

from zarrfs.zarr.errors import JSON, CodecError
from zarrfs.zarr.forms import OBJECTS_LIMIT, Array, Builder, Context, Decode, Form
from zarrfs.zarr.frames import unshuffle

_NUMBERS = "biufcmM"  # kinds of dtypes that filters have to do with
_OBJECT = np.dtype(object)


def transpose(configuration: Mapping[str, JSON], form: Form, context: Context) -> tuple[Decode, Form]:
    """The axes in another order; nothing is copied."""
    order = configuration.get("order")
    axes = range(len(form.shape))
    if order in ("C", "F"):  # of drafts
        order = list(axes if order == "C" else reversed(axes))
    if form.dtype is None or not isinstance(order, list | tuple) or sorted(order) != list(axes):
        raise CodecError("transpose", f"order {order} is not one of {len(axes)} axes")
    stored = form._replace(shape=tuple(form.shape[axis] for axis in order))
    inverse = tuple(order.index(axis) for axis in axes)
    return lambda value: value.transpose(inverse), stored


def converting(name: str, inner: str = "dtype", outer: str = "astype") -> Builder:
    """A filter of numcodecs that goes from dtype `inner` (of the array) to dtype `outer`, item by item."""

    def build(configuration: Mapping[str, JSON], form: Form, context: Context) -> tuple[Decode, Form]:
        import numcodecs

        options = dict(configuration)
        if form.dtype is not None:
            options.setdefault(inner, form.dtype.str)
        codec = numcodecs.get_codec({**options, "id": name})
        plain, coded = np.dtype(getattr(codec, inner)), np.dtype(getattr(codec, outer))
        for dtype in (plain, coded):
            if dtype.kind not in _NUMBERS:
                raise CodecError(name, f"dtype {dtype} is not one of numbers")

        def decode(value: Any) -> Array:
            with np.errstate(all="ignore"):
                found: Array = codec.decode(value)
            return found

        return decode, _converted(name, form, plain, coded, context)

    return build


def _converted(name: str, form: Form, plain: np.dtype[Any], coded: np.dtype[Any], context: Context) -> Form:
    """What items of `plain` are after each was made one of `coded`."""
    if form.dtype is None:  # a filter after one that makes bytes
        return Form(None, (), form.limit // plain.itemsize * coded.itemsize, form.exact)
    if form.dtype.newbyteorder("=") == plain.newbyteorder("="):
        return Form.array(coded, form.shape)
    if not context.lax or form.dtype.hasobject or form.limit % plain.itemsize:
        raise CodecError(name, f"made for {plain}, the array has {form.dtype}")
    return Form.array(coded, (form.limit // plain.itemsize,))


def unchanged(configuration: Mapping[str, JSON], form: Form, context: Context) -> tuple[Decode, Form]:
    """bitround: bits were set to zero, nothing is to be undone."""
    return lambda value: value, form


def packbits(configuration: Mapping[str, JSON], form: Form, context: Context) -> tuple[Decode, Form]:
    """Eight booleans to a byte, after a byte that says how many bits of the last are unused."""
    if form.dtype is None or form.dtype.itemsize != 1:
        raise CodecError("packbits", "packs nothing but booleans")
    items, dtype = form.items, form.dtype

    def decode(value: Array) -> Array:
        packed = np.asarray(value).reshape(-1).view(np.uint8)
        if packed[0] != -items % 8:
            raise CodecError("packbits", f"{packed[0]} unused bits where {items} items leave {-items % 8}")
        return np.unpackbits(packed[1:], count=items).view(dtype)

    return decode, Form.array(np.dtype(np.uint8), (1 + -(-items // 8),))


def shuffle(configuration: Mapping[str, JSON], form: Form, context: Context) -> tuple[Decode, Form]:
    """First bytes of all items, then second ones, ..."""
    form.need_bytes(context.lax)
    itemsize = configuration.get("elementsize", 4)
    if type(itemsize) is not int or itemsize < 0:
        raise CodecError("shuffle", f"elementsize {itemsize} is no number of bytes")

    def decode(value: Any) -> Array:
        coded = np.frombuffer(value, np.uint8)
        if itemsize <= 1:
            return coded
        if coded.size % itemsize:
            raise CodecError("shuffle", f"{coded.size} bytes are no whole items of {itemsize}")
        target = np.empty_like(coded)
        unshuffle(coded, target, itemsize)
        return target

    return decode, form.longer(0)


def categorize(configuration: Mapping[str, JSON], form: Form, context: Context) -> tuple[Decode, Form]:
    """Numbers of labels, 0 for the empty text."""
    import numcodecs

    codec = numcodecs.get_codec({**configuration, "id": "categorize"})
    if form.dtype is None or codec.dtype != form.dtype or codec.astype.kind not in "iu":
        raise CodecError("categorize", f"from {codec.dtype} to {codec.astype}, the array has {form.dtype}")
    return codec.decode, Form.array(codec.astype, form.shape)


def variable(name: str) -> Builder:
    """Objects of any length, each after its length, all after their number."""

    def build(configuration: Mapping[str, JSON], form: Form, context: Context) -> tuple[Decode, Form]:
        import numcodecs

        _objects(name, form)
        items, codec = form.items, numcodecs.get_codec({**configuration, "id": name})
        if name == "vlen-array" and codec.dtype.kind not in _NUMBERS:
            raise CodecError(name, f"dtype {codec.dtype} is not one of numbers")

        def decode(value: Any) -> Array:
            if len(value) < 4 + 4 * items or struct.unpack_from("<I", value) != (items,):
                raise CodecError(name, f"does not hold {items} objects")
            found: Array = codec.decode(value)
            return found

        return decode, Form(None, (), OBJECTS_LIMIT, False)

    return build


def json2(configuration: Mapping[str, JSON], form: Form, context: Context) -> tuple[Decode, Form]:
    """A list in JSON: the items, nested as the array is, then its dtype and shape."""
    _objects("json2", form)
    encoding = configuration.get("encoding", "utf-8")

    def decode(value: Any) -> Array:
        document = json.loads(str(value, encoding), strict=bool(configuration.get("strict", True)))
        *values, dtype, shape = document
        if not isinstance(shape, list) or np.prod(shape, dtype=object) != form.items or dtype != "|O":
            raise CodecError("json2", f"{dtype} of shape {shape} where {form.items} objects are expected")
        for _ in shape[1:]:
            values = [item for row in values for item in row]
        if len(values) != form.items:
            raise CodecError("json2", f"{len(values)} objects where {form.items} are expected")
        found = np.empty(form.items, object)
        for at, item in enumerate(values):
            found[at] = item
        return found

    return decode, Form(None, (), OBJECTS_LIMIT, False)


def _objects(name: str, form: Form) -> None:
    if form.dtype is None or form.dtype != _OBJECT:
        raise CodecError(name, f"holds objects, the array has {'bytes' if form.dtype is None else form.dtype}")

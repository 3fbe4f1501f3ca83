"""Codecs that numcodecs calls filters: from arrays to arrays, and from arrays of objects to bytes.

numcodecs decodes most of them; this module limits the size of their input and output. Source: Zarr v3 core and its
registered codecs; the documentation of numcodecs.
"""

from __future__ import annotations

import json
import operator
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np

from zarrfs.zarr.errors import CodecError
from zarrfs.zarr.jsontext import JSON
from zarrfs.zarr.representation import (
    OBJECTS_LIMIT,
    Array,
    Codec,
    CodecFactory,
    Decode,
    PipelineContext,
    Representation,
)

_NUMBERS = "biufcmM"  # kinds of dtypes that filters convert
_OBJECT = np.dtype(object)
_JSON_LIMIT = OBJECTS_LIMIT >> 3  # bytes of JSON text; parsed objects take up to 26 times as much memory
_FIXED = {"vlen-utf8": "U", "vlen-bytes": "S"}  # fixed-length kinds for which zarr-python 3.0 used these codecs in v2
_ENCODINGS = "utf-8", "ascii", "latin-1"  # of JSON; others that Python has may take quadratic time


def transpose(configuration: Mapping[str, JSON], decoded: Representation, context: PipelineContext) -> Codec:
    """Make the codec that permutes axes; decoding copies nothing. parse_codecs() has checked the order."""
    order: Any = configuration["order"]
    stored = decoded._replace(shape=tuple(decoded.shape[axis] for axis in order))
    inverse = tuple(np.argsort(order))
    return lambda value: value.transpose(inverse), stored


def _library(name: str, options: Mapping[str, JSON]) -> tuple[Any, Decode]:
    """Return a codec of numcodecs, and how to decode by it."""
    import numcodecs

    codec = numcodecs.get_codec({**options, "id": name})

    def decode(value: Any) -> Any:
        if isinstance(value, np.ndarray):  # numcodecs flattens in memory order, which a transpose changes
            value = np.ascontiguousarray(value)
        with np.errstate(all="ignore"):
            return codec.decode(value)

    return codec, decode


def checksum(name: str) -> CodecFactory:
    """Return the factory of a codec that adds four bytes."""

    def build(configuration: Mapping[str, JSON], decoded: Representation, context: PipelineContext) -> Codec:
        decoded.require_bytes(context.untyped)
        return _library(name, configuration)[1], decoded.longer(4)

    return build


def shuffle(configuration: Mapping[str, JSON], decoded: Representation, context: PipelineContext) -> Codec:
    """Make the codec that stores the first bytes of all items, then the second ones, and so on."""
    decoded.require_bytes(context.untyped)
    size = configuration.get("elementsize")  # Zarr v3 may lack it; zarr-python does the same
    size = operator.index((context.itemsize or 4) if size is None else size)
    return _library("shuffle", {**configuration, "elementsize": size})[1], decoded.longer(0)


def packbits(configuration: Mapping[str, JSON], decoded: Representation, context: PipelineContext) -> Codec:
    """Make the codec of eight booleans in a byte. The first byte counts the unused bits of the last one."""
    dtype = decoded.dtype
    if dtype is None or dtype.itemsize != 1 or not (context.untyped or dtype.kind == "b"):
        raise CodecError("packbits", "packs nothing but booleans")
    encoded = Representation.array(np.dtype(np.uint8), (1 + -(-decoded.items // 8),))
    return _library("packbits", configuration)[1], encoded


def converting(name: str) -> CodecFactory:
    """Return the factory of a filter that converts items between two dtypes of numbers."""
    names = ("decode_dtype", "encode_dtype") if name == "astype" else ("dtype", "astype")

    def build(configuration: Mapping[str, JSON], decoded: Representation, context: PipelineContext) -> Codec:
        usual = {} if decoded.dtype is None else {names[0]: decoded.dtype.str}
        codec, decode = _library(name, {**usual, **configuration})
        plain, coded = (np.dtype(getattr(codec, member)) for member in names)
        for dtype in (plain, coded):
            if dtype.kind not in _NUMBERS:
                raise CodecError(name, f"dtype {dtype} is not one of numbers")
        if coded.kind == "c" != plain.kind:
            raise CodecError(name, f"{coded} to {plain} would drop the imaginary part")
        if decoded.dtype is None:  # the filter follows a codec that makes bytes
            return decode, Representation(None, (), decoded.limit // plain.itemsize * coded.itemsize, decoded.exact)
        if decoded.dtype.newbyteorder("=") == plain.newbyteorder("="):
            return decode, Representation.array(coded, decoded.shape)
        if not context.untyped or decoded.dtype.hasobject or decoded.limit % plain.itemsize:
            raise CodecError(name, f"made for {plain}, the array has {decoded.dtype}")
        return decode, Representation.array(coded, (decoded.limit // plain.itemsize,))

    return build


def bitround(configuration: Mapping[str, JSON], decoded: Representation, context: PipelineContext) -> Codec:
    """Make the codec bitround. Encoding is lossy (it sets bits to zero), and decoding changes nothing."""
    return lambda value: value, decoded


def categorize(configuration: Mapping[str, JSON], decoded: Representation, context: PipelineContext) -> Codec:
    """Make the codec that stores labels as numbers, with 0 for the empty text."""
    labels, dtype = configuration.get("labels"), decoded.dtype
    coded = np.dtype(str(configuration.get("astype", "u1")))
    given = np.dtype(str(configuration.get("dtype")))
    if dtype is None or dtype.kind not in "SUO" or given != dtype or coded.kind not in "iu":
        raise CodecError("categorize", f"from {given} to {coded}, the array has {dtype}")
    if not isinstance(labels, list) or not all(isinstance(label, str) for label in labels):
        raise CodecError("categorize", "labels that are not text")
    known = np.array(["", *labels], object)  # items of the dtype could take far more memory than the document

    def decode(value: Any) -> Array:
        numbers = np.frombuffer(value, coded)
        return known[np.where((numbers >= 0) & (numbers < len(known)), numbers, 0)].astype(dtype, copy=False)

    return decode, Representation.array(coded, decoded.shape)


def variable(name: str) -> CodecFactory:
    """Return the factory of a codec that stores the number of objects, then length in bytes and contents of each."""

    def build(configuration: Mapping[str, JSON], decoded: Representation, context: PipelineContext) -> Codec:
        import numcodecs

        fixed = decoded.dtype if decoded.dtype is not None and decoded.dtype.kind == _FIXED.get(name) else None
        if fixed is None:
            _require_objects(name, decoded)
        items, codec = decoded.items, numcodecs.get_codec({**configuration, "id": name})
        limit = OBJECTS_LIMIT if fixed is None else 4 + items * (4 + fixed.itemsize) + (64 << 10)
        if name == "vlen-array" and codec.dtype.kind not in _NUMBERS:
            raise CodecError(name, f"dtype {codec.dtype} is not one of numbers")

        def decode(value: Any) -> Array:
            if len(value) < 4 + 4 * items or struct.unpack_from("<I", value) != (items,):
                raise CodecError(name, f"does not hold {items} objects")
            found: Array = codec.decode(value)
            return found if fixed is None else found.astype(fixed)

        return decode, Representation(None, (), limit, False)

    return build


def json_list(name: str) -> CodecFactory:
    """Return the factory of a JSON list: objects, nested as in the array, then the dtype and, in json2, the shape."""

    def build(configuration: Mapping[str, JSON], decoded: Representation, context: PipelineContext) -> Codec:
        _require_objects(name, decoded)
        encoding = configuration.get("encoding", "utf-8")
        if encoding not in _ENCODINGS:
            raise CodecError(name, f"encoding {str(encoding)[:60]} is not one of {', '.join(_ENCODINGS)}")

        def decode(data: Any) -> Array:
            values = json.loads(str(data, encoding), strict=bool(configuration.get("strict", True)))
            shape = values.pop() if name == "json2" else list(decoded.shape)
            dtype = values.pop()
            if not isinstance(shape, list) or np.prod(shape, dtype=object) != decoded.items or dtype != "|O":
                raise CodecError(name, f"{dtype} of shape {shape} where {decoded.items} objects are expected")
            for _ in shape[1:]:
                values = [item for row in values for item in row]
            if len(values) != decoded.items:
                raise CodecError(name, f"{len(values)} objects where {decoded.items} are expected")
            found = np.empty(decoded.items, object)
            for at, value in enumerate(values):
                found[at] = value
            return found

        return decode, Representation(None, (), _JSON_LIMIT, False)

    return build


def _require_objects(name: str, decoded: Representation) -> None:
    if decoded.dtype is None or decoded.dtype != _OBJECT:
        raise CodecError(name, f"holds objects, the array has {'bytes' if decoded.dtype is None else decoded.dtype}")

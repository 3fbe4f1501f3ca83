"""Translation of arrays of any generation to Zarr v2 or v3: the metadata in that version, and the form of the chunks.

Chunks keep their stored bytes if readers of that version can decode them. In v2, which has no shards, the inner chunks
of shards become chunks. All other chunks are decoded, and the metadata then has neither a compressor nor filters,
except for the codec of text or bytes of any length.
"""

from __future__ import annotations

import dataclasses
import enum
from typing import Any, Literal, NamedTuple

from zarrfs.zarr import dtypes, v2, v3
from zarrfs.zarr.dtypes import DataType
from zarrfs.zarr.errors import MetadataError
from zarrfs.zarr.jsontext import JSON
from zarrfs.zarr.keys import KeyTemplate
from zarrfs.zarr.model import SHARDING, ArrayMetadata, CodecSpec
from zarrfs.zarr.pipelines import PREFIX, bytes_codec
from zarrfs.zarr.readers import unsupported_codec

Version = Literal[2, 3]

LAYOUT = "zarrfs.dtype"  # the attribute with the dtype, in the notation of v2, of items that are shown as raw bytes
_ANY_LENGTH = {"T": "vlen-utf8", "B": "vlen-bytes"}  # the codec of text and bytes of any length


class ChunkForm(enum.StrEnum):
    """The form in which a view shows the chunks of an array."""

    STORED = "as stored"  # the array already has the version of the view
    REWRITTEN = "rewritten in metadata"  # stored chunks with new metadata
    RANGES = "re-laid by ranges"  # chunks are byte ranges of shards
    DECODED = "decoded"  # chunks hold the decoded items


class Translation(NamedTuple):
    """An array as it appears in Zarr v2 or v3."""

    array: ArrayMetadata  # as the view shows it
    document: dict[str, JSON]  # the members of its document, `.zarray` or `zarr.json`
    keys: KeyTemplate  # of its chunks
    form: ChunkForm
    inner: bool = False  # its chunks are the inner chunks of shards
    reason: str = ""  # why it is decoded


def translate_stored(array: ArrayMetadata, version: Version) -> Translation | None:
    """Translate an array whose chunks can be shown as stored; return None if translate() has to find another form.

    Takes a fraction of a millisecond, and imports neither numpy nor a codec.
    """
    try:
        return None if unsupported_codec(array, version) else _stored(array, version)
    except MetadataError:
        return None


def translate(array: ArrayMetadata, version: Version, decode: bool = True) -> Translation:
    """Translate an array. Raise MetadataError with the reason if the version cannot express it.

    Without `decode`, it is also raised for an array that would have to be decoded. Call it in a thread, because the
    first use of a codec of another package starts a process, which may take long.
    """
    problem = unsupported_codec(array, version)
    stored: Translation | None = None
    try:
        stored = _stored(array, version)
    except MetadataError as exc:
        problem = str(exc)
    if problem is None:
        assert stored is not None
        return stored
    inner = _inner(array)
    if version == 2 and inner is not None and not unsupported_codec(inner, version):
        try:
            return _translation(inner, version, ChunkForm.RANGES, inner=True)
        except MetadataError:
            pass
    try:
        decoded = _translation(plain(inner or array, version), version, ChunkForm.DECODED, inner is not None, problem)
        _check_decoder(inner or array)
    except MetadataError as exc:
        if stored is not None:  # a reader that has the package of the codec can decode the stored chunks
            return stored
        known = str(exc) in problem or array.dtype.kind == "O"
        raise MetadataError(problem if known else f"{problem}; {exc}") from exc
    if not decode:
        raise MetadataError(f"{problem}: it would have to be decoded, and nothing is (transcode=off)")
    return decoded


def plain(array: ArrayMetadata, version: Version) -> ArrayMetadata:
    """Return `array` with uncompressed chunks in order C, and a data type that `version` has.

    Raise MetadataError for objects that are neither text nor bytes.
    """
    dtype, fill = array.dtype, array.fill
    if dtype.kind in _ANY_LENGTH:
        return dataclasses.replace(array, codecs=(CodecSpec(_ANY_LENGTH[dtype.kind]),))
    if not dtype.itemsize:
        text = array.fill_object if isinstance(array.fill_object, str) else None
        dtype = _labels(array, len(text or ""))
        fill = None if text is None else text.encode("utf-32-le", "surrogatepass").ljust(dtype.itemsize, b"\0")
    elif dtype.fields and (dtype.mixed or dtype.endian == "big") and (dtype.name or (version == 3 and _in_v3(dtype))):
        dtype = dtypes.little_endian(dtype)
        fill = fill and _converted(fill, array.dtype, dtype)
    codecs = (bytes_codec(dtype),)
    fill_object = array.fill_object if dtype.name else None
    found = dataclasses.replace(array, dtype=dtype, fill=fill, fill_object=fill_object, codecs=codecs)
    return _opaque(found) if version == 3 else found


def convert(items: Any, target: DataType) -> Any:
    """Convert decoded items, a numpy array, to `target`, the data type that plain() gave to their array."""
    return items if target.kind == "V" and not target.fields else items.astype(target.numpy())


# -- helpers


def _stored(array: ArrayMetadata, version: Version) -> Translation:
    """Translate an array whose chunks are shown as stored. Raise MetadataError if the version cannot express it."""
    form = ChunkForm.STORED if array.generation == f"v{version}" else ChunkForm.REWRITTEN
    return _translation(_opaque(array) if version == 3 else array, version, form)


def _translation(
    array: ArrayMetadata, version: Version, form: ChunkForm, inner: bool = False, reason: str = ""
) -> Translation:
    module = v3 if version == 3 else v2
    return Translation(array, module.array_json(array), module.chunk_keys(array), form, inner, reason)


def _opaque(array: ArrayMetadata) -> ArrayMetadata:
    """Return `array` with raw bytes as its data type, and its dtype as an attribute, if v3 has no data type for it.

    An array with filters of items is returned unchanged.
    """
    dtype, names = array.dtype, [spec.name for spec in array.codecs]
    if dtype.kind not in "fcV" or "bytes" not in names or {*names[: names.index("bytes")]} - {"transpose"}:
        return array
    if _in_v3(dtype):
        return array
    raw = dtypes.raw(dtype.itemsize)
    codecs = tuple(bytes_codec(raw) if spec.name == "bytes" else spec for spec in array.codecs)
    attributes = {**array.attributes, LAYOUT: dtypes.as_v2(dtype)}
    return dataclasses.replace(array, dtype=raw, codecs=codecs, attributes=attributes)


def _in_v3(dtype: DataType) -> bool:
    """Return whether v3 has a data type for such items in little-endian order."""
    try:
        dtypes.as_v3(dtypes.little_endian(dtype))
    except MetadataError:
        return False
    return True


def _labels(array: ArrayMetadata, length: int) -> DataType:
    """Return the fixed-size text type of at least `length` characters that holds every label of a categorised array.

    Raise MetadataError for other objects.
    """
    for spec in array.codecs:
        labels = spec.configuration.get("labels")
        if spec.name != f"{PREFIX}categorize" or not isinstance(labels, list):
            continue
        if all(isinstance(label, str) for label in labels):
            return dtypes.text_of(max([length, *map(len, labels)]))
    raise MetadataError("objects that are neither text nor bytes")


def _converted(fill: bytes, source: DataType, target: DataType) -> bytes:
    import numpy as np

    item: bytes = convert(np.frombuffer(fill, source.numpy()), target).tobytes()
    return item


def _inner(array: ArrayMetadata) -> ArrayMetadata | None:
    """Return the array of inner chunks; None if chunks are not shards, or can only be decoded whole."""
    if not any(spec.name == SHARDING for spec in array.codecs):
        return None
    from zarrfs.zarr.codecs import inner_array

    return inner_array(array)


def _check_decoder(array: ArrayMetadata) -> None:
    """Raise MetadataError if no chunk of `array` can be decoded."""
    from zarrfs.zarr.codecs import check_codecs

    for reason in check_codecs(array):
        raise MetadataError(reason)

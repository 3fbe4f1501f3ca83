"""Arrays whose stored chunks current readers of Zarr v2 and v3 misread, or have only dropped support for.

A codec that a reader does not have at all is not among them: it may be installed. Source: zarr-python 3.1; the wheels
of numcodecs 0.16, which have neither snappy nor a zstd that reads frames of zstd 0.7; stores of zarr 0.3 to 3.1.
"""

from __future__ import annotations

from collections.abc import Mapping

from zarrfs.zarr.dtypes import DataType, parse_v2
from zarrfs.zarr.jsontext import JSON
from zarrfs.zarr.model import ArrayMetadata, CodecSpec
from zarrfs.zarr.pipelines import PREFIX


def misread_codec(array: ArrayMetadata, version: int) -> str | None:
    """Return why readers of `version` cannot decode chunks of `array`; None if they can."""
    if version == 3 and array.generation != "v3" and (reason := _reinterpreting(array) or _resizing(array)):
        return reason
    return _unread(array.codecs, array.dtype, array.generation in ("v0", "v1"))


def _reinterpreting(array: ArrayMetadata) -> str | None:
    """Return the reason if the first filter is configured for another data type than that of the array.

    Readers of v2 reinterpret the decoded bytes as items of the array; readers of v3 use the decoded numbers. For
    integers of the same size and byte order, there is no difference.
    """
    specs = [spec for spec in array.codecs if spec.name != "transpose"]
    configuration = specs[0].configuration if specs else {}
    text = configuration.get("decode_dtype", configuration.get("dtype"))
    own = array.dtype
    if not own.itemsize or not isinstance(text, str):
        return None
    made = parse_v2(text)
    alike = made.kind in "iu" and own.kind in "iumM" and (made.itemsize, made.endian) == (own.itemsize, own.endian)
    if made == own or alike:
        return None
    return f"codec {specs[0].name.removeprefix(PREFIX)} for items of {text}, which the array does not have"


def _resizing(array: ArrayMetadata) -> str | None:
    """Return the reason if a filter encodes to items of another size that zarr-python reads as the array's.

    These are the items of more than one byte in an array of single bytes, and those whose size quantize changes.
    """
    itemsize = array.dtype.itemsize
    for name, configuration, _shards in array.codecs:
        short = name.removeprefix(PREFIX)
        text = configuration.get("encode_dtype" if short == "astype" else "astype")
        if short not in ("astype", "delta", "fixedscaleoffset", "quantize") or not isinstance(text, str):
            continue
        given, itemsize = itemsize, parse_v2(text).itemsize
        if itemsize > array.dtype.itemsize == 1 or (short == "quantize" and itemsize != given):
            return f"codec {short} to items of {text}, which today's readers of Zarr v3 take for those of the array"
    return None


def _unread(codecs: tuple[CodecSpec, ...], dtype: DataType, old: bool) -> str | None:
    for name, configuration, shards in codecs:
        short = name.removeprefix(PREFIX)
        if short == "blosc" and (inner := _unread_blosc(configuration, old)):
            return f"codec blosc with {inner}, which today's readers lack"
        if short == "categorize" and dtype.kind in "OS":
            return f"codec categorize of {'objects' if dtype.kind == 'O' else 'bytes'}, which today's readers lack"
        if short in ("vlen-utf8", "vlen-bytes") and dtype.itemsize:
            return f"codec {short} of items of a fixed length, which today's readers lack"
        if shards and (reason := _unread(shards.codecs, dtype, old)):
            return reason
    return None


def _unread_blosc(configuration: Mapping[str, JSON], old: bool) -> str:
    """Return the inner codec of Blosc if readers lack it, or "". `old`: the chunks were written by zarr 0 or 1."""
    cname = configuration.get("cname")
    return "snappy" if cname == "snappy" else "zstd 0.7" if old and cname == "zstd" else ""

"""Lists of codecs in documents of Zarr v3, and the configuration of the codec of shards, sharding_indexed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from zarrfs.zarr.errors import CodecError, MetadataError
from zarrfs.zarr.jsontext import JSON, named
from zarrfs.zarr.model import SHARDING, CodecSpec

_INDEX_CODECS: JSON = [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}]


class Shards(NamedTuple):
    """The configuration of the codec for shards of one shape."""

    inner_shape: tuple[int, ...]
    codecs: tuple[CodecSpec, ...]  # of inner chunks
    index_codecs: tuple[CodecSpec, ...]
    index_location: str  # start or end


def parse_codecs(value: JSON) -> tuple[CodecSpec, ...]:
    """Parse a list of codecs. Raise MetadataError."""
    if not isinstance(value, list) or not value:
        raise MetadataError("codecs: not a list, or empty")
    found = [named(item, "codecs") for item in value]
    # endian: the name of the codec "bytes" before the specification was accepted
    return tuple(CodecSpec("bytes" if name == "endian" else name, configuration) for name, configuration in found)


def parse_shards(configuration: Mapping[str, JSON], shape: tuple[int, ...]) -> Shards:
    """Parse the configuration of the codec for shards of `shape`. Raise CodecError."""
    inner = configuration.get("chunk_shape")
    if not isinstance(inner, list | tuple) or len(inner) != len(shape):
        raise CodecError(SHARDING, f"chunk_shape {inner} where shards have {len(shape)} dimensions")
    if any(type(step) is not int or step < 1 or whole % step for step, whole in zip(inner, shape, strict=True)):
        raise CodecError(SHARDING, f"shards of {list(shape)} are no whole number of chunks of {list(inner)}")
    location = configuration.get("index_location", "end")
    if location not in ("start", "end"):
        raise CodecError(SHARDING, f"index_location {location} is not known")
    try:
        codecs = parse_codecs(configuration.get("codecs"))
        index_codecs = parse_codecs(configuration.get("index_codecs", _INDEX_CODECS))
    except MetadataError as exc:
        raise CodecError(SHARDING, str(exc)) from None
    return Shards(tuple(inner), codecs, index_codecs, location)

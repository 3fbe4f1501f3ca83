"""Lists of codecs in documents of Zarr v3, with the configuration of the codec of shards, sharding_indexed."""

from __future__ import annotations

from typing import Any

from zarrfs.zarr.errors import CodecError, MetadataError
from zarrfs.zarr.jsontext import JSON, named
from zarrfs.zarr.model import SHARDING, CodecSpec, Shards

_INDEX_CODECS: JSON = [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}]
_NESTED_MAX = 8  # shards within shards


def parse_codecs(value: JSON, shape: tuple[int, ...], depth: int = 0) -> tuple[CodecSpec, ...]:
    """Parse a list of codecs for chunks of `shape`, and those of shards in it. Raise MetadataError."""
    if not isinstance(value, list) or not value:
        raise MetadataError("codecs: not a list, or empty")
    found = []
    for item in value:
        name, configuration = named(item, "codecs")
        shards = _parse_shards(configuration, shape, depth) if name == SHARDING else None
        if name == "transpose":
            order: Any = configuration.get("order")
            valid = isinstance(order, list) and all(type(at) is int for at in order)
            if not valid or sorted(order) != [*range(len(shape))]:
                raise CodecError(name, f"order {order} is not a permutation of {len(shape)} axes")
            shape = tuple(shape[at] for at in order)
        # endian: the name of the codec "bytes" before the specification was accepted
        found.append(CodecSpec("bytes" if name == "endian" else name, configuration, shards))
    return tuple(found)


def _parse_shards(configuration: dict[str, JSON], shape: tuple[int, ...], depth: int) -> Shards:
    if depth == _NESTED_MAX:
        raise MetadataError(f"codecs: more than {_NESTED_MAX} shards within shards")
    inner = configuration.get("chunk_shape")
    if not isinstance(inner, list) or len(inner) != len(shape):
        raise CodecError(SHARDING, f"chunk_shape {inner} where shards have {len(shape)} dimensions")
    if any(type(step) is not int or step < 1 or whole % step for step, whole in zip(inner, shape, strict=True)):
        raise CodecError(SHARDING, f"shards of {list(shape)} are not a whole number of chunks of {inner}")
    location = configuration.get("index_location", "end")
    if location not in ("start", "end"):
        raise CodecError(SHARDING, f"index_location {location} is not known")
    counts = tuple(whole // step for step, whole in zip(inner, shape, strict=True))
    codecs = parse_codecs(configuration.get("codecs"), tuple(inner), depth + 1)
    index_codecs = parse_codecs(configuration.get("index_codecs", _INDEX_CODECS), (*counts, 2), depth + 1)
    return Shards(tuple(inner), counts, codecs, index_codecs, location == "start")

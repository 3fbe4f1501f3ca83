"""Hypothesis strategies for mutated samples: damaged bytes and JSON documents."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import random
from collections.abc import Callable
from typing import Any

import zstandard
from hypothesis import strategies as st

TOKENS = (
    b'"', b"{", b"}", b"[", b"]", b",", b":", b"\\", b"\0", b"\xff", b"\xef\xbb\xbf", b"\n", b"\v", b"null", b"true",
    b"NaN", b"-0", b"1e400", b"-1", b"9" * 25, b"9" * 5000, b"1." + b"0" * 5000, b'"\\ud800"', b"\\u0000", b"\\udc00",
    b"../", b"/", b"//", b".", b"{{", b"}}", b"{{u}}", b"{{ 9**9**9 }}", b"{% for i in range(9**9) %}x{% endfor %}",
    b"base64:", b"base64:!", b'"' + b"x" * 300_000 + b'"', b"[" * 2000, b'{"a":' * 2000, b"[]," * 100_000,
    b" " * 1_500_000,
    b"\n" + b" " * 1_100_000, b"\\n" * 100_000, b'"version"', b'"refs"', b'"templates"', b'"gen"', b'"zarr_format"',
    b'"mode"', b'"data"', b'"path"', b'"size"', b'"shape"', b'"chunks"', b'"dtype"', b'"fill_value"', b'"codecs"',
)  # fmt: skip
NUMBERS = tuple(
    number.to_bytes(size, "little")
    for size in (1, 2, 4, 8)
    for number in sorted({0, 1, 255, 2 ** (8 * size) - 1, 2 ** (8 * size - 1), 2 ** (8 * size - 1) - 1})
    if number < 2 ** (8 * size)
)
WORDS = (
    "zarr_format", "node_type", "array", "group", "shape", "chunks", "dtype", "fill_value", "order", "filters", "id",
    "compressor", "name", "configuration", "codecs", "bytes", "endian", "sharding_indexed", "chunk_shape", "zlib",
    "blosc", "data_type", "<f4", "|O", "|V0", "<M8[s]", "NaN", "0x7fc00000", "separator", "/", ".", "..",
    "must_understand",
    "version", "refs", "templates", "gen", "key", "url", "offset", "length", "dimensions", "start", "stop", "step",
    "path", "mode", "mtime", "size", "encoding", "data", "utf-8", "base64", "blobvec", "sha1-", "record_size",
    "metadata",
    "consolidated_metadata", "kind", "inline", ".zgroup", ".zarray", ".zattrs", "zarr.json", "a/b", "{{u}}",
    "{{ 1//0 }}",
)  # fmt: skip
SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 70), st.floats(),
    st.sampled_from([1 << 31, 1 << 62, 1 << 63, 1 << 64, 10**30, 10**400, -(1 << 63), 0o100644, 0o040755, 0o120777]),
    st.text(max_size=4), st.sampled_from(WORDS), st.sampled_from(["x" * 300, "x/" * 200, "\ud800", "x" * 5000]),
)  # fmt: skip
JSONS = st.recursive(
    SCALARS,
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.sampled_from(WORDS), inner, max_size=4)),
    max_leaves=10,
)
_CHANGES = ("cut", "end", "double", "swap", "flip", "overwrite", "insert", "insert", "random")
PACKERS: dict[str, Callable[[bytes], bytes]] = {
    "": bytes, "gz": lambda data: gzip.compress(data, 1), "zst": zstandard.compress, "xz": lzma.compress,
    "bz2": bz2.compress,
}  # fmt: skip


@st.composite
def bytes_of(draw: st.DrawFn, data: bytes, tokens: tuple[bytes, ...] = TOKENS + NUMBERS) -> bytes:
    """Draw `data` with one to three changes: pieces cut, repeated, swapped, overwritten or inserted."""
    chance = random.Random(draw(st.integers(0, 2**64)))  # even offsets: st.integers() prefers small ones
    for _ in range(draw(st.integers(1, 3))):
        at = chance.randint(0, len(data))
        size = chance.randint(1, 1 + min(len(data) - at, 40))
        match draw(st.sampled_from(_CHANGES)):
            case "cut":
                data = data[:at] + data[at + size :]
            case "end":
                data = data[:at]
            case "double":
                data = data[:at] + data[at : at + size] * draw(st.sampled_from((2, 2, 1000))) + data[at + size :]
            case "swap":
                data = data[:at] + data[at + size : at + 2 * size] + data[at : at + size] + data[at + 2 * size :]
            case "flip" if at < len(data):
                data = data[:at] + bytes((data[at] ^ 1 << draw(st.integers(0, 7)),)) + data[at + 1 :]
            case "overwrite":
                token = draw(st.sampled_from(tokens))
                data = data[:at] + token + data[at + len(token) :]
            case "insert":
                data = data[:at] + draw(st.sampled_from(tokens)) + data[at:]
            case _:
                data = data[:at] + draw(st.binary(max_size=9)) + data[at + size :]
    return data


def _places(value: Any) -> list[tuple[Any, Any]]:
    found: list[tuple[Any, Any]] = []
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        found += [(value, key), *_places(inner)]
    return found


@st.composite
def document_of(draw: st.DrawFn, data: bytes) -> bytes:
    """Draw a JSON document with one to three parts replaced, removed, renamed or added; mutate other data as bytes."""
    try:
        document = json.loads(data)
    except ValueError:
        return draw(bytes_of(data))
    chance = random.Random(draw(st.integers(0, 2**64)))
    for _ in range(draw(st.integers(1, 3))):
        places = _places(document)
        if not places:
            break
        container, key = chance.choice(places)
        match draw(st.sampled_from(("value", "value", "gone", "renamed", "more"))):
            case "gone":
                del container[key]
            case "renamed" if isinstance(container, dict):
                container[draw(st.sampled_from(WORDS) | st.text(max_size=6))] = container.pop(key)
            case "more" if isinstance(container, list):
                container.insert(key, draw(JSONS))
            case _:
                container[key] = draw(JSONS)
    text = json.dumps(document, ensure_ascii=draw(st.booleans()), indent=draw(st.sampled_from((None, 1))))
    return text.encode("utf-8", "surrogatepass")


def text_of(data: bytes) -> st.SearchStrategy[bytes]:
    """Return a strategy for mutants of a JSON document."""
    return st.one_of(document_of(data), bytes_of(data))

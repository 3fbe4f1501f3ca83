"""Metadata documents of every generation: which names they have, and what they say.

Source: Zarr v3 core; Zarr v2 specification; zarr-legacy-persistence (0.4.0); stores written by zarr 0.3 to 3.1.
"""

from __future__ import annotations

import dataclasses
import json
import marshal
from collections.abc import Callable

from zarrfs.system.buffers import Buffer
from zarrfs.zarr import ATTRIBUTE_DOCUMENTS as ATTRIBUTE_DOCUMENTS
from zarrfs.zarr import DOCUMENTS as DOCUMENTS
from zarrfs.zarr import NODE_DOCUMENTS as NODE_DOCUMENTS
from zarrfs.zarr import legacy, pickled, v2, v3
from zarrfs.zarr.errors import JSON, MetadataError
from zarrfs.zarr.model import ArrayMetadata, GroupMetadata

DOCUMENT_MAX = 256 << 20  # bytes: no longer one is read
Metadata = ArrayMetadata | GroupMetadata

_ALIKE = 1024  # documents of arrays that are remembered
_arrays: dict[bytes, ArrayMetadata] = {}


def _array_v2(document: dict[str, JSON], attributes: dict[str, JSON]) -> ArrayMetadata:
    """As v2.array(): in hierarchies of thousands of arrays, most say the same."""
    try:
        text = marshal.dumps(document, 2)  # tells NaN from null, and 1 from 1.0
    except ValueError:  # too deep
        return v2.array(document, attributes)
    found = _arrays.get(text)
    if found is None:
        found = v2.array(document, {})
        if len(_arrays) >= _ALIKE:
            _arrays.clear()
        _arrays[text] = found
    return dataclasses.replace(found, attributes=attributes)


_PARSERS: dict[str, Callable[[dict[str, JSON], dict[str, JSON]], Metadata]] = {
    ".zarray": _array_v2,
    ".zgroup": v2.group,
    "__zmeta__": legacy.array_v0,
    "meta": legacy.array_v1,
}


def is_litter(name: str) -> bool:
    """Whether a file of that name was left behind by a writer: `__zattr__.lock`, `0.0.<uuid>.partial`."""
    return name.endswith((".lock", ".partial"))


def parse_node(name: str, data: Buffer, attributes: Buffer | None = None) -> Metadata:
    """The node that the document called `name` (one of NODE_DOCUMENTS) makes. MetadataError names the rule.

    `attributes`: of the document that ATTRIBUTE_DOCUMENTS names, where there is one. A `meta` that is no document
    of Zarr at all (another program's) is legacy.OtherFile.
    """
    if name == "__zmeta__" and bytes(data[:1]) != b"{":
        document = pickled.load(bytes(data))
    elif name == "meta":
        document = legacy.load_meta(data, load_json)
    else:
        document = load_json(data)
    return parse_document(name, document, None if attributes is None else load_json(attributes))


def parse_document(name: str, document: JSON, attributes: JSON = None) -> Metadata:
    """As parse_node(), of documents that are parsed (by consolidated())."""
    if not isinstance(document, dict):
        raise MetadataError("not a JSON object")
    try:
        if name == "zarr.json":
            return v3.node(document)
        if attributes is None:
            attributes = {}
        elif not isinstance(attributes, dict):
            raise MetadataError(f"{ATTRIBUTE_DOCUMENTS[name]} is not a JSON object")
        return _PARSERS[name](document, attributes)
    except RecursionError:
        raise MetadataError("JSON too deep") from None


def _unique(pairs: list[tuple[str, JSON]]) -> dict[str, JSON]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise MetadataError("a JSON object with two members of the same name")
    return found


def load_json(data: Buffer) -> JSON:
    """JSON that may have NaN, Infinity and -Infinity, as old writers left it. MetadataError."""
    try:
        return _DECODER.decode(str(data, "utf-8-sig" if data[:1] == b"\xef" else "utf-8"))
    except ValueError as error:  # also text that is no UTF-8, and numbers of too many digits
        raise MetadataError(f"not JSON: {error}") from None
    except RecursionError:
        raise MetadataError("JSON too deep") from None


_DECODER = json.JSONDecoder(object_pairs_hook=_unique)


def dump_json(value: JSON) -> bytes:
    """Strict JSON, indented as zarr-python does. ValueError for a NaN."""
    return json.dumps(value, indent=2, allow_nan=False).encode()

"""The experimental Zarr v3 of zarr-python 2.10 to 2.18, which separates documents from chunks.

The root has `zarr.json` (the entry point), `meta/root/a.group.json`, `meta/root/a/b.array.json` and
`data/root/a/b/c0/1`. Source: stores that zarr-python 2.18 wrote, and its _storage/v3.py, which reads the same subset.
"""

from __future__ import annotations

from zarrfs.system.buffers import Buffer
from zarrfs.zarr.errors import MetadataError, Unsupported
from zarrfs.zarr.jsontext import JSON, load_json
from zarrfs.zarr.keys import DRAFT, KeyTemplate
from zarrfs.zarr.layout import Layout, node_attributes, regular_grid, required
from zarrfs.zarr.model import ArrayMetadata, GroupMetadata

META_ROOT, DATA_ROOT = "meta/root", "data/root"
_PROTOCOL = "https://purl.org/zarr/spec/protocol/core/3."
_CODEC = "https://purl.org/zarr/spec/codec/"
_KINDS = ("array", "group")


def entry_point(data: Buffer) -> str | None:
    """Return the suffix of the names of metadata documents in an experimental store, from its `zarr.json`.

    Return None for a `zarr.json` of Zarr v3. Raise MetadataError.
    """
    document = load_json(data)
    version = document.get("zarr_format") if isinstance(document, dict) else None
    if not isinstance(version, str):
        return None
    suffix = document.get("metadata_key_suffix", ".json")
    if not version.startswith(_PROTOCOL):
        raise MetadataError(f"zarr_format {version[:60]!r} is not known")
    if not isinstance(suffix, str) or "/" in suffix or "\0" in suffix:
        raise MetadataError("metadata_key_suffix: not the end of a name")
    _check_extensions(document)
    return suffix


def document_keys(path: str, suffix: str) -> tuple[str, str]:
    """Return the keys of an array's document and of a group's document for a node at `path` ("" is the root)."""
    head = f"{META_ROOT}/{path}" if path else META_ROOT
    return f"{head}.array{suffix}", f"{head}.group{suffix}"


def node_of_key(key: str, suffix: str) -> tuple[str, str] | None:
    """Return (path, "array" or "group") of the node whose document is at `key`; None for other keys."""
    for kind in _KINDS:
        end = f".{kind}{suffix}"
        if key == META_ROOT + end:
            return "", kind
        path = key[len(META_ROOT) + 1 : -len(end)]
        if key.startswith(META_ROOT + "/") and key.endswith(end) and path and not path.endswith("/"):
            return path, kind
    return None


def data_directory(path: str) -> str:
    """Return the key of the directory to which the chunk keys of the array at `path` are relative."""
    return f"{DATA_ROOT}/{path}" if path else DATA_ROOT


def parse(kind: str, data: Buffer) -> ArrayMetadata | GroupMetadata:
    """Parse the document of a node of `kind` ("array" or "group"). Raise MetadataError."""
    document = load_json(data)
    if not isinstance(document, dict):
        raise MetadataError("not a JSON object")
    attributes = node_attributes(document)
    _check_extensions(document)
    try:
        return _array(document, attributes) if kind == "array" else GroupMetadata("v3-draft", attributes)
    except RecursionError:
        raise MetadataError("JSON too deep") from None


def _check_extensions(document: dict[str, JSON]) -> None:
    extensions = document.get("extensions", [])
    if not isinstance(extensions, list):
        raise MetadataError("extensions: not a list")
    for extension in extensions:
        if not isinstance(extension, dict) or extension.get("must_understand") is not False:
            name = extension.get("extension") if isinstance(extension, dict) else extension
            raise Unsupported(f"extension {str(name)[:60]!r} must be understood, and is not known")


def _array(document: dict[str, JSON], attributes: dict[str, JSON]) -> ArrayMetadata:
    from zarrfs.zarr import v2

    if document.get("storage_transformers"):
        raise Unsupported("storage_transformers: none is known")
    attributes = dict(attributes)
    value = required(document, "data_type")
    if isinstance(value, dict):  # an extension: zarr-python 2 used one for each type that is not a number
        value = required(value, "type")
    about = required(document, "chunk_grid")
    if not isinstance(about, dict) or about.get("type", "regular") != "regular":
        raise MetadataError("chunk_grid: not a regular one")
    separator = about.get("separator", "/")
    if separator not in (".", "/"):
        raise MetadataError("chunk_grid: the separator is neither . nor /")
    keys = DRAFT if separator == "/" else KeyTemplate(prefix=DRAFT.prefix, scalar=DRAFT.scalar)
    members = {
        "dtype": value, "fill_value": document.get("fill_value"), "order": document.get("chunk_memory_layout", "C"),
        "filters": attributes.pop("filters", None),  # zarr-python 2 stored them as an attribute
        "compressor": _compressor(document.get("compressor")),
    }  # fmt: skip
    grid = regular_grid(required(document, "shape"), required(about, "chunk_shape"))
    return v2.parse_array(members, attributes, Layout(grid, keys), "v3-draft")


def _compressor(value: JSON) -> JSON:
    """Convert a compressor to the form that it has in documents of v2."""
    if value is None:
        return None
    name, configuration = (value.get("codec"), value.get("configuration", {})) if isinstance(value, dict) else ("", {})
    if not isinstance(name, str) or not name.startswith(_CODEC) or not isinstance(configuration, dict):
        raise MetadataError("compressor: expected a codec and its configuration")
    short = name[len(_CODEC) :].partition("/")[0]
    if short in ("lz4", "gzip", "zlib", "blosc", "bz2", "lzma", "zstd"):
        return {**configuration, "id": short}
    raise Unsupported(f"compressor {name[:60]!r} is not known")

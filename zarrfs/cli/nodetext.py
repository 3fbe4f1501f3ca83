"""Formatting of groups and arrays, the nodes of `zarrfs info --json`, for the terminal and the HTML page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from zarrfs.config.values import human

_HEADER = ("", "shape", "dtype", "chunks", "codecs", "initialised", "decoded", "stored", "ratio")
_NUMBERS = 5  # columns from here on are numbers


def table(nodes: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield `nodes` as a tree, one line each, with facts in columns; the first node is the root."""
    if not nodes:
        return
    rows = [_HEADER, *(_row(node, nodes[0]["path"]) for node in nodes)]
    widths = [max(len(row[column]) for row in rows if len(row) > 2) for column in range(len(_HEADER))]
    widths[0] = max(len(row[0]) for row in rows)
    for row in rows if any("shape" in node for node in nodes) else rows[1:]:
        cells = (
            f"{cell:>{width}}" if column >= _NUMBERS else f"{cell:{width}}"
            for column, (cell, width) in enumerate(zip(row, widths, strict=False))
        )
        yield "  ".join(cells).rstrip()


def _row(node: dict[str, Any], top: str) -> tuple[str, ...]:
    path = node["path"]
    depth = 0 if path == top else path.removeprefix(top).strip("/").count("/") + 1
    name = "  " * depth + (path.rpartition("/")[2] or "/")
    if "shape" not in node:
        return name, f"problem: {node['problem']}" if node.get("problem") else f"group {node['generation'] or ''}"
    ratio = node.get("ratio")
    return (
        name,
        extents(node["shape"]),
        dtype(node["dtype"]),
        chunks(node),
        ",".join(codecs(node)),
        initialised(node),
        size(node["logical_bytes"]),
        size(node.get("stored_bytes")),
        f"{ratio:.1f}" if ratio else "",
    )


def extents(counts: list[int]) -> str:
    """Format a shape, such as 4x1000."""
    return "x".join(map(str, counts)) or "scalar"


def dtype(text: Any) -> str:
    """Format a data type; a structured type as the names of its fields."""
    if isinstance(text, str):
        return text
    return f"{{{','.join(str(field[0]) for field in text)}}}"


def chunks(node: dict[str, Any]) -> str:
    """Format the shape of chunks, or the shapes of shards and of the chunks in them."""
    inner = node.get("inner_chunks")
    return extents(node["chunks"]) + (f" of {extents(inner)}" if inner is not None else "")


def codecs(node: dict[str, Any]) -> list[str]:
    """Return the codecs in the order of encoding: blosc(lz4), sharding(bytes,zstd)."""
    return [_codec(codec) for codec in node["codecs"]]


def _codec(codec: Any) -> str:
    if not isinstance(codec, dict):
        return str(codec)
    name, configuration = str(codec.get("name", "?")), codec.get("configuration") or {}
    if name == "sharding_indexed":
        return f"sharding({','.join(map(_codec, configuration.get('codecs') or ()))})"
    cname = configuration.get("cname") if name in ("blosc", "numcodecs.blosc") else None
    return f"blosc({cname})" if cname else name


def initialised(node: dict[str, Any]) -> str:
    """Format the number of stored chunks, and their share of the grid."""
    total = f"{node['chunks_total']:,}"
    if "chunks_initialised" not in node:
        return f"? of {total}"
    share = "" if node["initialised"] is None else f" {node['initialised']:.0%}"
    outside = f" +{node['outside_grid']:,} outside" if node["outside_grid"] else ""
    return f"{node['chunks_initialised']:,} of {total}{share}{outside}{' (not all seen)' if node['problem'] else ''}"


def size(count: int | None) -> str:
    """Format bytes; "?" for an unknown number."""
    return "?" if count is None else human(count)

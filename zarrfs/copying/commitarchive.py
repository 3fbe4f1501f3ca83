"""A merged tree as a file archive: a JSON list of entries, larger contents in blobs that are named by their hash.

Source: RFC 37 (file archive format).
"""

from __future__ import annotations

import stat
from typing import IO, Any

from zarrfs.archives.blob_writer import BlobDirectory
from zarrfs.archives.document_writer import DocumentWriter, blobs_rule, cut, encoded, inline_content
from zarrfs.copying.committree import Node, Tree
from zarrfs.errors import UsageError
from zarrfs.store.api import Kind
from zarrfs.store.destination import is_utf8

_REGION = 1 << 20  # bytes of a blob at most
_TYPES = {Kind.FILE: stat.S_IFREG, Kind.DIRECTORY: stat.S_IFDIR, Kind.SYMLINK: stat.S_IFLNK}


async def write_archive(tree: Tree, file: IO[bytes], blobs: BlobDirectory | None, inline: int) -> None:
    """Write all of `tree` to `file`; files of more than `inline` bytes, or with holes, go to `blobs`.

    UsageError where that takes blobs and there is no place for them; SourceError for what no archive can hold.
    """
    writer = DocumentWriter(file)
    async for node in tree.with_values_ahead(tree.nodes(_rule)):
        writer.add(encoded(node.key, await _fields(tree, node, blobs, inline), dictionary=False))
    if blobs is not None:
        blobs.finish()
    writer.close()


def _rule(node: Node) -> str | None:
    if not is_utf8(node.key):
        return "a name that is not UTF-8, which no archive can hold"
    if node.target is not None and not is_utf8(node.target):
        return "a symbolic link whose target is not UTF-8, which no archive can hold"
    return None


async def _fields(tree: Tree, node: Node, blobs: BlobDirectory | None, inline: int) -> dict[str, Any]:
    fields: dict[str, Any] = {"mode": _TYPES[node.kind] | node.mode}
    if node.mtime_ns is not None:
        fields["mtime"] = node.mtime_ns // 10**9
    if node.kind is Kind.SYMLINK:
        fields["data"] = node.target
    if node.kind is Kind.FILE:
        size = await tree.size(node)
        fields |= {"size": size, **await _content(tree, node, size, blobs, inline)}
    return fields


async def _content(
    tree: Tree, node: Node, size: int, blobs: BlobDirectory | None, inline: int
) -> dict[str, Any]:
    """encoding and data of a file; neither of one that is a hole."""
    extents = await tree.extents(node, size)
    if not extents:
        return {}
    if size <= inline:
        return inline_content(await tree.read(node, 0, size))
    if blobs is None:
        raise UsageError(f"{node.key}: {blobs_rule(size)}")
    regions = []
    for start, stop in cut(extents, _REGION):
        data = await tree.read(node, start, stop)
        regions.append([start, len(data), blobs.put(data)])
    return {"encoding": "blobvec", "data": regions}

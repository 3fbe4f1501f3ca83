"""A merged tree as a file archive: a JSON list of entries, larger contents in blobs that are named by their hash.

Sources: RFC 37 (file archive format), RFC 10 (blobrefs). Regions are cut as Flux cuts them, so equal files have equal
blobs, whoever writes them.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import os
import secrets
import stat
from typing import IO, Any

import orjson

from zarrfs.errors import SourceError, UsageError
from zarrfs.stage.committree import Node, Tree
from zarrfs.stage.destination import is_utf8, sync_file_system
from zarrfs.store.api import Kind

_REGION = 1 << 20  # bytes of a blob at most
_TYPES = {Kind.FILE: stat.S_IFREG, Kind.DIRECTORY: stat.S_IFDIR, Kind.SYMLINK: stat.S_IFLNK}


class BlobDirectory:
    """The directory `path`, with one file per blob that is named by its blobref. One that is there is not written."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._written = False

    def put(self, data: bytes) -> str:
        """The blobref of `data`, which is there from now on. SourceError where it cannot be written."""
        name = f"sha1-{hashlib.sha1(data, usedforsecurity=False).hexdigest()}"  # what Flux takes unless told otherwise
        path = os.path.join(self.path, name)
        with contextlib.suppress(FileNotFoundError):
            if os.stat(path).st_size == len(data):
                return name
        work = os.path.join(self.path, f".{name}.{secrets.token_hex(8)}.tmp")
        try:
            with open(work, "xb") as file:
                file.write(data)
            os.rename(work, path)
        except BaseException as exc:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(work)
            if isinstance(exc, OSError):
                raise SourceError(path, f"cannot be written: {(exc.strerror or str(exc)).lower()}") from exc
            raise
        self._written = True
        return name

    def finish(self) -> None:
        """Have all blobs on the disk."""
        if self._written:
            sync_file_system(self.path)


async def write_archive(tree: Tree, file: IO[bytes], blobs: BlobDirectory | None, inline: int) -> None:
    """Write all of `tree` to `file`; files of more than `inline` bytes, or with holes, go to `blobs`.

    UsageError where that takes blobs and there is no place for them; SourceError for what no archive can hold.
    """
    lead = b"[\n"
    async for node in tree.with_values_ahead(tree.nodes(_rule)):
        entry = await _entry(tree, node, blobs, inline)
        file.write(lead + orjson.dumps(entry))
        lead = b",\n"
    file.write(b"[]\n" if lead == b"[\n" else b"\n]\n")
    if blobs is not None:
        blobs.finish()


def _rule(node: Node) -> str | None:
    if not is_utf8(node.key):
        return "a name that is not UTF-8, which no archive can hold"
    if node.target is not None and not is_utf8(node.target):
        return "a symbolic link whose target is not UTF-8, which no archive can hold"
    return None


async def _entry(tree: Tree, node: Node, blobs: BlobDirectory | None, inline: int) -> dict[str, Any]:
    entry: dict[str, Any] = {"path": node.key, "mode": _TYPES[node.kind] | node.mode}
    if node.mtime_ns is not None:
        entry["mtime"] = node.mtime_ns // 10**9
    if node.kind is Kind.SYMLINK:
        entry["data"] = node.target
    if node.kind is Kind.FILE:
        size = await tree.size(node)
        entry |= {"size": size, **await _content(tree, node, size, blobs, inline)}
    return entry


async def _content(
    tree: Tree, node: Node, size: int, blobs: BlobDirectory | None, inline: int
) -> dict[str, Any]:
    """encoding and data of a file; neither of one that is a hole."""
    extents = await tree.extents(node, size)
    if not extents:
        return {}
    if size <= inline:
        return _inline(await tree.read(node, 0, size))
    if blobs is None:
        rule = f"{size:,} bytes, which go to a blob: name a directory for it (--blobs), or a larger --inline-threshold"
        raise UsageError(f"{node.key}: {rule}")
    regions = []
    for start, stop in extents:
        for at in range(start, stop, _REGION):
            data = await tree.read(node, at, min(at + _REGION, stop))
            regions.append([at, len(data), blobs.put(data)])
    return {"encoding": "blobvec", "data": regions}


def _inline(data: bytes) -> dict[str, str]:
    if b"\0" not in data:  # RFC 37 allows it in text, but the reader of Flux gives up the whole archive
        with contextlib.suppress(UnicodeDecodeError):
            return {"encoding": "utf-8", "data": data.decode()}
    return {"encoding": "base64", "data": base64.b64encode(data).decode()}

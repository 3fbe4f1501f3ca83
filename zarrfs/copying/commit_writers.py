"""Writer of a merged tree to a reference set.

Unchanged values keep their references; changed values are stored inline or in a new data file
beside the set, or stay in the upper directory.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple, Self

from zarrfs.archives.tree import Entry
from zarrfs.config import urls
from zarrfs.copying.commit_tree import MergedTree
from zarrfs.errors import SourceError
from zarrfs.references.keys import ZARR_METADATA, entry_rule
from zarrfs.references.writer import NOT_UTF8, kept_reference, moved_urls, reference_of
from zarrfs.store.api import Kind, Reference, split_key
from zarrfs.store.destination import is_utf8
from zarrfs.store.writing import NewFile
from zarrfs.system.buffers import write_all

if TYPE_CHECKING:
    from zarrfs.documents.plan import Plan


class NewSource(NamedTuple):
    """The path and format of a new source, with options."""

    path: str
    format: str  # one of commit.FORMATS
    replace: bool = False  # an existing file may be replaced
    inline: int = 1024  # bytes: files up to this size are stored in the document itself
    in_place: bool = False  # references: larger files stay in the upper directory
    relative: bool = False  # references: URLs of the data file are relative to the set
    blobs: str | None = None  # archive: the directory of blobs


async def references_of(
    tree: MergedTree, plan: Plan, data: DataFile, new: NewSource
) -> AsyncIterator[Reference]:
    """Yield a reference for every file of `tree`, over the source of `plan`, with URLs as the new set needs them.

    An entry that a set cannot hold is an error, or is left out, as in MergedTree.nodes(); an empty directory is left
    out with a warning.
    """
    moved = moved_urls(plan, data.directory)
    empty: Entry | None = None
    async for node in tree.nodes(lambda node: entry_rule(node.key, node.kind)):
        if empty is not None and not node.key.startswith(empty.key + "/"):
            await _warn_if_empty(tree, empty)
        empty = node if node.kind is Kind.DIRECTORY else None
        if node.kind is Kind.FILE and (reference := await _reference(tree, node, plan, moved, data, new)):
            yield reference
    if empty is not None:
        await _warn_if_empty(tree, empty)


async def _reference(
    tree: MergedTree, node: Entry, plan: Plan, moved: Callable[[str], str], data: DataFile, new: NewSource
) -> Reference | None:
    unchanged = tree.overlay.lower if not node.changed else None
    if unchanged is not None and plan.kind == "references":
        with tree.reading(node):
            where = await unchanged.locate(node.key, shown=False)
            if tree.refused(node, where.get("broken")):
                return None
            if "url" in where or "inline" in where:  # else a view makes the bytes, which no reference can name
                return await kept_reference(unchanged, plan, node.key, where, moved)
    size = await tree.size(node)
    if split_key(node.key)[1] in ZARR_METADATA or size <= new.inline:
        return Reference(node.key, bytes(await tree.read(node, 0, size)))
    if unchanged is not None and plan.kind == "zarr":
        with tree.reading(node):
            where = await unchanged.locate(node.key, shown=False)
            if "url" in where:
                return reference_of(plan, node.key, where, size)
    if unchanged is None and new.in_place:
        path = os.path.join(tree.overlay.upper.path, node.key)
        if not is_utf8(path):
            raise tree.error(node, NOT_UTF8)
        url = path if "::" in path else f"file://{path}"  # a URL with "::" would be read as a chain of URLs
        return Reference(node.key, None, url, 0, size)
    return await data.add(tree, node, size)


async def _warn_if_empty(tree: MergedTree, node: Entry) -> None:
    if await tree.is_empty(node):
        tree.warn(f"{node.key}: an empty directory, which a reference set cannot hold: left out")


class DataFile:
    """A new file beside the set `path`, to which values are appended: NAME.data or, if that exists, NAME.2.data etc.

    Existing files are not replaced, because the source or another set may refer to them. The file gets its name by
    finish(). Leaving the context with an exception removes the file, unless the new set is in place. Methods raise
    OSError if the file cannot be written, and SourceError if its name cannot be used. The first add() creates it.
    """

    def __init__(self, path: str, relative: bool) -> None:
        self._set = os.path.realpath(path)
        # where relative URLs of the set begin; None behind a symbolic link, where they have two meanings
        self.directory = None if os.path.islink(path) else os.path.dirname(os.path.abspath(path))
        self._shown, self._base = path, self.directory if relative else None
        self._before = self._identity()
        self._file: NewFile | None = None
        self._end = 0
        self._placed = False
        self.path = self._url = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.close()
        if self._placed and exc is not None and self._identity() == self._before:
            os.unlink(self.path)  # if the set was replaced, it is complete and refers to the file, which stays then

    def _identity(self) -> tuple[int, int] | None:
        """Return (device, inode) of the present set, which change when the new set replaces it; None without a set."""
        try:
            status = os.stat(self._set)
        except OSError:
            return None
        return status.st_dev, status.st_ino

    async def add(self, tree: MergedTree, node: Entry, size: int) -> Reference:
        """Append the bytes of a file of `tree`, keeping holes, and return a reference to these bytes."""
        file = self._file or self._open()
        start = self._end
        for low, high in await tree.extents(node, size):
            at = start + low
            async for piece in tree.pieces(node, low, high):
                at = write_all(file.descriptor, piece, at)
        self._end = start + size
        return Reference(node.key, None, self._url, start, size)

    def finish(self) -> None:
        """Move the file into place, and sync it and its directory entry to disk."""
        if self._file is None:
            return
        os.ftruncate(self._file.descriptor, self._end)
        os.fsync(self._file.descriptor)
        above, name = os.path.split(self.path)
        directory = os.open(above, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            self._file.place(directory, os.fsencode(name), replace=False)
            self._placed = True
            os.fsync(directory)
        except FileExistsError:
            raise SourceError(self.path, "was made by another command meanwhile: run this one again") from None
        finally:
            os.close(directory)

    def _open(self) -> NewFile:
        path, number = f"{self._set}.data", 1
        while os.path.lexists(path):
            number += 1
            path = f"{self._set}.{number}.data"
        directory = os.open(os.path.dirname(path), os.O_PATH | os.O_CLOEXEC)
        try:
            self._file = NewFile(directory)
        finally:
            os.close(directory)
        self.path = path
        self._url = path if self._base is None else os.path.relpath(path, self._base)
        if urls.protocols(self._url):  # a relative path is taken for a URL if the set is called "run::1.json"
            self._url = f"./{self._url}"
        if not is_utf8(self._url):
            raise SourceError(self._shown, NOT_UTF8)
        return self._file

"""A merged tree as a reference set: what is unchanged keeps its references, the rest is inline or in a file beside."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import AsyncIterator
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple, Self

from zarrfs.copying.committree import Node, Tree
from zarrfs.errors import SourceError
from zarrfs.references.fromstore import METADATA, url_of
from zarrfs.references.output import Output
from zarrfs.references.streams import NOT_UTF8, entries, reference_set, rewritten, written_urls
from zarrfs.store.api import Kind, Reference, key_rule, split_key
from zarrfs.store.destination import is_utf8
from zarrfs.store.overlay import Overlay
from zarrfs.store.upper import reserved

if TYPE_CHECKING:
    from zarrfs.documents.plan import Plan

_REMEMBERED = 1024  # directories: of nested chunks, neighbours share one


class Choices(NamedTuple):
    """Where the bytes of what was changed go."""

    inline: int = 1024  # bytes: values of up to as many are in the set itself
    in_place: bool = False  # larger ones stay in the upper
    relative: bool = False  # the data file is named as it lies from the set, not by its whole path


async def references_of(tree: Tree, plan: Plan, to: Output, data: DataFile, how: Choices) -> AsyncIterator[Reference]:
    """Every file that `tree`, over the source of `plan`, shows, as the set `to` names its bytes.

    What cannot be in a set is refused as by Tree.nodes; an empty directory is left out with a warning.
    """
    if plan.kind == "references":
        assert tree.overlay.lower is not None
        shown = _Shown(tree.overlay)
        lower = entries(reference_set(tree.overlay.lower, plan), plan)
        async for reference in rewritten(lower, written_urls(plan, to, alone=False)):
            if await shown(reference.key):
                yield reference
    async for node in _files(tree, changed=plan.kind == "references"):
        size = await tree.size(node)
        if split_key(node.key)[1] in METADATA or size <= how.inline:
            yield Reference(node.key, await tree.read(node, 0, size))
        elif node.status is None and plan.kind == "zarr":
            assert tree.overlay.lower is not None
            yield Reference(node.key, None, await url_of(tree.overlay.lower, plan, node.key, None), 0, size)
        elif node.status is not None and how.in_place:
            path = os.path.join(tree.overlay.upper.path, node.key)
            if not is_utf8(path):
                raise SourceError(tree.place(node), NOT_UTF8, node.key)
            yield Reference(node.key, None, f"file://{path}", 0, size)
        else:
            yield await data.add(tree, node, size)


async def _files(tree: Tree, changed: bool) -> AsyncIterator[Node]:
    """The files of a tree; the directories are told of where they hold nothing."""
    above: Node | None = None
    async for node in tree.nodes(_rule, changed):
        if above is not None and not node.key.startswith(above.key + "/"):
            await _tell_empty(tree, above)
        above = node if node.kind is Kind.DIRECTORY else None
        if node.kind is Kind.FILE:
            yield node
    if above is not None:
        await _tell_empty(tree, above)


async def _tell_empty(tree: Tree, node: Node) -> None:
    if await tree.is_empty(node):
        tree.warn(f"{node.key}: an empty directory, of which a reference set knows nothing: left out")


def _rule(node: Node) -> str | None:
    if node.kind is Kind.SYMLINK:
        return "a symbolic link, which no reference set can hold"
    if not is_utf8(node.key):
        return "a name that is not UTF-8, which no reference set can hold"
    return key_rule(node.key)


class _Shown:
    """Which files of its lower store an overlay shows."""

    def __init__(self, overlay: Overlay) -> None:
        self._overlay = overlay
        self._known: OrderedDict[str, frozenset[str] | None] = OrderedDict()

    async def __call__(self, key: str) -> bool:
        """Whether the file `key` of the lower store is what the overlay has there."""
        prefix, name = split_key(key)
        if prefix not in self._known:
            self._known[prefix] = await self._hidden(prefix)
            if len(self._known) > _REMEMBERED:
                self._known.popitem(last=False)
        hidden = self._known[prefix]
        return hidden is not None and name not in hidden and not reserved(name)

    async def _hidden(self, prefix: str) -> frozenset[str] | None:
        """Names in a directory that the lower store does not show; None: it shows nothing there."""
        if any(map(reserved, prefix.split("/"))) or await self._overlay.below(prefix) is None:
            return None
        names, hidden, opaque = self._overlay.upper.names(prefix)
        return None if opaque else frozenset(hidden.union(names))


class DataFile:
    """Values one after the other in a new file beside the set `to`: its name and ".data", or ".2.data" and so on.

    A file that is there stays: the source, or another set, may refer to it. Leaving the context with an exception
    removes it; without a value there is none. OSError where it cannot be written.
    """

    def __init__(self, to: Output, relative: bool) -> None:
        self._set = os.path.realpath(to.path)
        self._shown, self._base = to.path, to.base if relative else None
        self._descriptor, self._end = -1, 0
        self.path = self._url = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
        if self.path and exc is not None:
            os.unlink(self.path)

    async def add(self, tree: Tree, node: Node, size: int) -> Reference:
        """Write the bytes of a file of `tree`; holes stay holes."""
        if self._descriptor < 0:
            self._open()
        start = self._end
        for low, high in await tree.extents(node, size):
            at = start + low
            async for piece in tree.pieces(node, low, high):
                view = memoryview(piece).cast("B")
                while view:
                    count = os.pwrite(self._descriptor, view, at)
                    at, view = at + count, view[count:]
        self._end = start + size
        return Reference(node.key, None, self._url, start, size)

    def finish(self) -> None:
        """Have it on the disk, and its name."""
        if self._descriptor < 0:
            return
        os.ftruncate(self._descriptor, self._end)
        os.fsync(self._descriptor)
        directory = os.open(os.path.dirname(self.path), os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)

    def _open(self) -> None:
        number = 1
        while self._descriptor < 0:
            path = f"{self._set}.data" if number == 1 else f"{self._set}.{number}.data"
            try:
                self._descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o666)
            except FileExistsError:
                number += 1
        self.path = path
        self._url = path if self._base is None else os.path.relpath(path, self._base)
        if not is_utf8(self._url):
            raise SourceError(self._shown, NOT_UTF8)



"""-o view=arrays: groups of any Zarr generation as directories, each array as one flat file.

The array `x` of a group appears as `x.npy`, with its attributes in `x.json`. The attributes of the group are in
`.attributes.json`. An array at the root of the store is named `array`.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator

from zarrfs.concurrency.tasks import for_each
from zarrfs.errors import NotDirectory, NotFound, ReadError
from zarrfs.store.api import Info, check_key, join_key, name_rule, split_key
from zarrfs.views.hierarchy import Node
from zarrfs.views.view import File, Part, View, text_file, text_part
from zarrfs.zarr.errors import MetadataError
from zarrfs.zarr.jsontext import JSON
from zarrfs.zarr.model import ArrayMetadata

ATTRIBUTES = ".attributes.json"  # of a group
ROOT = "array"  # the name of an array at the root of its store
_SUFFIXES = (".json", ".npy")  # of the files of an array, sorted
_AT_ONCE = 64  # nodes to look up concurrently


class ArraysView(View):
    """A store of flat files. Arrays that no file can represent are left out with a warning.

    The files of a node whose document is invalid or unreadable are listed, and opening them raises ReadError.
    Documents are those of the first look. Reads of items fail if the document of the array has changed since.
    """

    name = "arrays"

    # -- the Store protocol

    async def list_dir(self, prefix: str, after: str = "") -> AsyncIterator[Info]:
        group = await self.find(prefix)
        if isinstance(group, File):
            raise NotDirectory(prefix)
        names = [] if group.childless else [info.name async for info in self.hierarchy.children(group)]
        taken = {name for name in names if name.endswith(_SUFFIXES)}
        # an entry has the name of its child, perhaps with a suffix: it may follow `after` if that starts with the name
        names = sorted(name for name in names if name >= after or after.startswith(name))
        ahead = {name: self.entry(name, file) for name, file in self._own_files(group).items()}
        for start in range(0, len(names), _AT_ONCE):
            batch = names[start : start + _AT_ONCE]
            for name in sorted(name for name in ahead if name < batch[0]):
                info = ahead.pop(name)
                if name > after:
                    yield info

            async def look(name: str) -> None:
                ahead.update((info.name, info) for info in await self._entries_of(group, name, taken))

            await for_each(look, batch)
        for name in sorted(ahead):
            if name > after:
                yield ahead[name]

    # -- keys

    async def find(self, key: str) -> File | Node:
        """Return the file at `key`, or the node whose directory it is. Raise NotFound."""
        prefix, name = split_key(check_key(key, root=True))
        group, rest = await self.hierarchy.find(prefix)
        if not key:
            return group
        if rest or (group.childless and prefix):
            raise NotFound(key)
        found = self._own_files(group).get(name)
        if not group.childless:
            child = await self.hierarchy.node(key)
            if child is not None and not child.childless:
                return child
            base, dot, suffix = name.rpartition(".")
            if found is None and base and dot + suffix in _SUFFIXES:
                array = await self.hierarchy.node(join_key(prefix, base))
                found = self._file(array, dot + suffix) if array is not None and array.may_be_array else None
        if found is None:
            raise NotFound(key)
        return found

    def _own_files(self, group: Node) -> dict[str, File]:
        """Return the files of a directory that are not of a child: those of a root array, or a group's attributes."""
        found: dict[str, File | None] = {}
        attributes = group.metadata.attributes if group.metadata is not None else {}
        if group.may_be_array:
            if not group.path:
                found = {ROOT + suffix: self._file(group, suffix) for suffix in _SUFFIXES}
            if not group.childless:  # a bad document, perhaps of a group
                found[ATTRIBUTES] = text_file(group, b"")
        elif group.problem is not None:
            self.leave_out(group.path, group.problem)
        elif attributes:
            try:
                found[ATTRIBUTES] = text_file(group, _json(dict(attributes)))
            except MetadataError as exc:
                self.leave_out(group.path, f"{ATTRIBUTES}: {exc}")
        return {name: file for name, file in found.items() if file is not None}

    async def _entries_of(self, group: Node, name: str, taken: set[str]) -> list[Info]:
        """Return the entries of the child `name` of a group; `taken`: names of children that its files might have."""
        path = join_key(group.path, name)
        try:
            node = await self.hierarchy.node(path)
        except ReadError as exc:  # perhaps only for now: a lookup reads the document again
            node = Node(path, None, exc.reason, (exc.where,))
        if node is None:
            return []
        found = [] if node.childless else [self.entry(name, node)]
        if not node.may_be_array:
            return found
        for suffix in _SUFFIXES:
            file, called = self._file(node, suffix), name + suffix
            other = await self.hierarchy.node(path + suffix) if called in taken else None
            rule = name_rule(called)
            if file is None or rule is not None or called == ATTRIBUTES or (other is not None and not other.childless):
                if file is not None:
                    self.leave_out(node.path, f"{suffix}: {rule or 'a group has that name'}")
                continue
            found.append(self.entry(called, file))
        return found

    # -- files

    def _file(self, node: Node, suffix: str) -> File | None:
        """Return the file of an array; None if no file can represent it."""
        from zarrfs.views.chunks import is_fortran
        from zarrfs.views.flat import flat_size, npy_header

        array = node.metadata
        if node.broken:
            return text_file(node, b"")
        try:
            if not isinstance(array, ArrayMetadata):
                raise MetadataError(node.problem or "no array")  # noqa: TRY301
            size, fortran = flat_size(array), is_fortran(array)
            header = npy_header(array.shape, array.dtype, fortran)
            if suffix == ".json":
                return text_file(node, _json(dict(array.attributes)))
        except MetadataError as exc:
            self.leave_out(node.path, str(exc))
            return None
        whole = len(header) + size
        return File(node, whole, (text_part(0, header), Part(len(header), whole, node)))


def _json(value: JSON) -> bytes:
    """Encode as JSON. NaN is written as NaN, as in the source."""
    try:
        return json.dumps(value, indent=2).encode()
    except RecursionError:  # since Python 3.12, json parses more levels than it writes
        raise MetadataError("JSON too deep") from None

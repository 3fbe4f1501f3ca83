"""How chunks are called in a view and in its source: one name for one name, directory for directory."""

from __future__ import annotations

from collections.abc import Callable

from zarrfs.store.api import join_key, split_key
from zarrfs.zarr.keys import KeyTemplate
from zarrfs.zarr.model import ArrayMetadata


class ChunkNames:
    """The chunk names of `array`, which the view calls as `shown` says.

    Both have the same separator, so what is a directory here is one there. Keys are relative to the array.
    """

    def __init__(self, array: ArrayMetadata, shown: KeyTemplate) -> None:
        self._grid, self._keys, self._shown = array.grid, array.keys, shown
        self._same = array.keys == shown
        above, self._prefix = split_key(array.keys.prefix) if array.ndim else ("", "")
        self._base = "" if self._same else "/".join(filter(None, (array.keys.directory, above)))

    def source(self, key: str) -> tuple[str | None, bool]:
        """(the key in the source, whether it is a directory) of a chunk or a directory of chunks; (None, False)."""
        index = self._shown.index(key, self._grid)
        if index is not None:
            return key if self._same else self._keys.key(index), False
        if self._shown.is_directory(key, self._grid):
            return self.directory(key), True
        return None, False

    def directory(self, key: str) -> str:
        """The directory in the source that has what the view has in the directory `key` of chunks ("" too)."""
        if self._same:
            return key
        if not key:
            return self._base
        return join_key(self._base, self._prefix + key)

    def shown_names(self, directory: str) -> Callable[[str, bool], str | None]:
        """The view's name for one in directory(`directory`), which may be a directory itself; None: no chunk's."""
        above, grid, keys, shown = self.directory(directory), self._grid, self._keys, self._shown
        start = above + "/" if above else ""
        cut = 0 if self._same or directory else len(self._prefix)

        def name_of(name: str, is_directory: bool) -> str | None:
            if is_directory:
                return name[cut:] if keys.is_directory(start + name, grid) else None
            index = keys.index(start + name, grid)
            if index is None:
                return None
            return name if self._same else split_key(shown.key(index))[1]

        return name_of

    def source_name(self, directory: str, name: str) -> str | None:
        """The name in directory(`directory`) of what the view calls `name`; None where it calls nothing so.

        "" is "", where a listing begins.
        """
        if self._same or not name:
            return name
        found, _is_directory = self.source(join_key(directory, name))
        return None if found is None else split_key(found)[1]

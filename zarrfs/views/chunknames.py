"""Translation of chunk keys between a view and its source, name by name and directory by directory."""

from __future__ import annotations

from collections.abc import Callable

from zarrfs.store.api import join_key, split_key
from zarrfs.zarr.keys import KeyTemplate
from zarrfs.zarr.model import ArrayMetadata


class ChunkNames:
    """The chunk names of `array` in its source, and in a view that names chunks by the template `view`.

    Both templates have the same separator, so directories correspond. All keys are relative to the array.
    """

    def __init__(self, array: ArrayMetadata, view: KeyTemplate) -> None:
        self._grid, self._keys, self._view = array.grid, array.keys, view
        self._same = array.keys == view
        above, self._prefix = split_key(array.keys.prefix) if array.ndim else ("", "")
        self._base = "" if self._same else "/".join(filter(None, (array.keys.directory, above)))

    def source(self, key: str) -> tuple[str | None, bool]:
        """Return (key in the source, is a directory) of a chunk or directory of chunks, or (None, False)."""
        index = self._view.index(key, self._grid)
        if index is not None:
            return key if self._same else self._keys.key(index), False
        if self._view.is_directory(key, self._grid):
            return self.directory(key), True
        return None, False

    def directory(self, key: str) -> str:
        """Return the source directory of the view's directory of chunks `key`, which may be ""."""
        if self._same:
            return key
        if not key:
            return self._base
        return join_key(self._base, self._prefix + key)

    def view_names(self, directory: str) -> Callable[[str, bool], str | None]:
        """Return a function (name in directory(`directory`), whether a directory) -> name in the view, or None.

        None: the name is not that of a chunk or a directory of chunks.
        """
        above, grid, keys, view = self.directory(directory), self._grid, self._keys, self._view
        start = above + "/" if above else ""
        cut = 0 if self._same or directory else len(self._prefix)

        def name_of(name: str, is_directory: bool) -> str | None:
            if is_directory:
                return name[cut:] if keys.is_directory(start + name, grid) else None
            index = keys.index(start + name, grid)
            if index is None:
                return None
            return name if self._same else split_key(view.key(index))[1]

        return name_of

    def source_name(self, directory: str, name: str) -> str | None:
        """Return the name in directory(`directory`) for the view's `name`; None if no chunk has it.

        "", where a listing begins, stays "".
        """
        if self._same or not name:
            return name
        found, _is_directory = self.source(join_key(directory, name))
        return None if found is None else split_key(found)[1]

"""The files of this machine that `zarrfs archive create` writes to an archive."""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncGenerator, Callable, Collection, Iterable, Iterator
from typing import Self

from zarrfs.archives.tree import Entry, Tree, entry_of
from zarrfs.archives.writer import archive_rule
from zarrfs.errors import NotDirectory, NotFound, SourceError, UsageError
from zarrfs.store.api import Info, Kind, Value
from zarrfs.store.directory import FileSystemStore, info_of
from zarrfs.store.keyglobs import Globs
from zarrfs.store.values import FileValue

_OWN = "is an output of this command"


class LocalTree(Tree):
    """The entries below the directory `base`.

    `excludes`: globs of names at any depth, or with a "/" of paths, which are left out with all below; `own`:
    paths of the outputs, which are left out, too. Raise UsageError if `base` cannot be opened.
    """

    def __init__(
        self, base: str, warn: Callable[[str], None], excludes: Iterable[str] = (), skip: bool = False,
        own: Collection[str] = (),
    ) -> None:  # fmt: skip
        try:
            store = FileSystemStore(base, allowed=("/",))  # links above a path that is named are followed
        except SourceError as exc:
            raise UsageError(str(exc)) from exc
        super().__init__(store, base, warn, skip)
        self._base, self._own = store, own
        self._excludes = Globs(excludes)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
        self._base.close()

    async def entries(self, paths: Iterable[str]) -> AsyncGenerator[Entry, None]:
        """Yield the entries at `paths` and below, each once, in an order that depends only on names.

        Raise SourceError, which names the entry and the rule, for one that cannot be read or archived, or has changed
        while it was read; UsageError for an invalid path.
        """
        named = [path for path in _named(paths) if not any(map(self._excludes.match, (path, *_above(path))))]
        kept = dict.fromkeys(named)
        for path in kept:
            info = await self._info(path)
            cover = next((above for above in _above(path) if above in kept), None)
            if cover is None:
                if self._is_own(path):
                    raise UsageError(f"{path or '.'}: {_OWN}, so it cannot be archived")
                async for entry in self.below(entry_of(path, info), archive_rule):
                    yield entry
                continue
            for above in _above(path):
                if len(above) >= len(cover) and (await self._info(above)).kind is Kind.SYMLINK:
                    rule = f"is below a symbolic link, which {cover or '.'} archives as a link: leave out one of them"
                    raise self.error(entry_of(path, info), rule)

    async def children(self, key: str) -> Iterator[Entry]:
        if (await self.store.info(key)).kind is not Kind.DIRECTORY:  # it is a link now, which would be followed
            raise NotDirectory(key)
        return (entry for entry in await super().children(key) if not self._left_out(entry))

    async def open(self, entry: Entry, size: int) -> Value:  # in this thread: the command has no other tasks
        descriptor = self._base.open_file(entry.key)
        return FileValue(descriptor, lambda status: info_of("", status, None))

    def _left_out(self, entry: Entry) -> bool:
        if self._excludes.match(entry.key):
            return True
        if any(entry.key.endswith(os.path.basename(path)) for path in self._own) and self._is_own(entry.key):
            self.warn(f"{self.error(entry, _OWN)}: left out")
            return True
        return False

    def _is_own(self, key: str) -> bool:
        """Return whether an entry is an output, also if links lead to it."""
        with contextlib.suppress(OSError):
            status = os.lstat(os.path.join(self._base.path, key))
            return any(os.path.exists(path) and os.path.samestat(status, os.stat(path)) for path in self._own)
        return False

    async def _info(self, path: str) -> Info:
        entry = entry_of(path, Info("", Kind.FILE))
        with self.reading(entry):
            try:
                return await self.store.info(path)
            except (NotFound, NotDirectory):
                raise self.error(entry, "no such file or directory") from None

    def error(self, entry: Entry, rule: str) -> SourceError:
        key = entry.key or "."
        return SourceError(key, rule) if self.source == "." else SourceError(self.source, rule, key)


def _named(paths: Iterable[str]) -> list[str]:
    """Normalise paths. Raise UsageError if one is empty, absolute, or has ".." or NUL."""
    found = []
    for path in paths:
        if not path or "\0" in path:
            raise UsageError("an empty path" if not path else f"{path!r}: a path with a NUL")
        if path.startswith("/"):
            more = f"say -C / {path.lstrip('/') or '.'}"
            raise UsageError(f"{path}: paths in an archive are relative: {more}, or -C with its directory")
        parts = [part for part in path.split("/") if part not in ("", ".")]
        if ".." in parts:
            raise UsageError(f"{path}: paths in an archive cannot contain ..: use -C DIR to start elsewhere")
        found.append("/".join(parts))
    return found


def _above(path: str) -> Iterator[str]:
    if path:
        yield ""
        yield from (path[:at] for at, character in enumerate(path) if character == "/")

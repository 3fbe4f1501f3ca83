"""Targets of references: the TargetReader interface, and its implementation for local files and URLs.

Forms of a target: an absolute path; file:///path, taken literally as by fsspec, or percent-decoded if there is no
such file; file://relative/path and relative paths, which are relative to `base`; data:..., which contains its bytes;
and protocol://... of the protocols that reference sets use. net/reach.py decides which targets a set may reach,
because a set that came over the network could name any file of the user who mounts it.
"""

from __future__ import annotations

import abc
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING
from urllib.parse import unquote_to_bytes

from zarrfs.concurrency.lru import LRU
from zarrfs.config import urls
from zarrfs.config.options import Options
from zarrfs.config.redaction import split_chain, without_secrets
from zarrfs.errors import OutOfRange, ReadError, TargetMissing
from zarrfs.net.reach import LOCAL, Trust
from zarrfs.system.buffers import Buffer
from zarrfs.system.localfiles import LocalFiles

if TYPE_CHECKING:
    from zarrfs.store.remotefiles import RemoteFiles


_KNOWN = 65_536  # URLs whose path is cached
_SHOWN = 80  # characters of a data: URL in messages


class TargetReader(abc.ABC):
    """A reader of ranges of targets: files, URLs, or blobs."""

    @abc.abstractmethod
    async def read(self, url: str, offset: int, length: int, low: int, high: int) -> Buffer:
        """Return exactly the bytes [offset, offset + length) of `url`, or raise a ReadError.

        [low, high) is the extent of the value that contains these bytes; all of it may be fetched in the same request.
        """

    @property
    @abc.abstractmethod
    def remote(self) -> bool:
        """Return whether any target is known to be read over a network."""

    @abc.abstractmethod
    async def prefetch(self, wanted: Sequence[tuple[str, int, int]]) -> None:
        """Fetch the beginnings of values (url, low, high) into the cache; leave errors to their readers.

        Return when they are cached; if cancelled, drop the requests that have not finished.
        """

    @abc.abstractmethod
    async def size(self, url: str, begin: bool = False) -> int:
        """Return the size of `url` in bytes, or raise a ReadError; with `begin`, fetch the first bytes as well."""

    @abc.abstractmethod
    def resolve(self, url: str, shown: bool = True) -> str:
        """Return `url` in the form that is requested: absolute, without credentials; a local file as its path.

        A percent-encoded file: URL stays one until the file is read, sized or prefetched. Unless `shown`, return `url`
        as the document has it.
        """

    @abc.abstractmethod
    async def aclose(self) -> None:
        """Close descriptors, connections and threads."""


class Targets(TargetReader):
    """A reader of local files and URLs; relative ones are resolved against `base`, which ends in "/".

    `origin` is the URL of the document that names the targets, "" for a local one.
    """

    def __init__(self, options: Options, base: str = "", origin: str = "") -> None:
        found = urls.protocols(base)
        self._base = base if found and found[0] not in LOCAL else urls.file_path(base)
        self._options, self._trust = options, Trust(options, origin)
        self.local = LocalFiles(*self._trust.local_roots(self._base))
        self._remote: RemoteFiles | None = None
        self._found: LRU[str, tuple[str | None, str]] = LRU(_KNOWN)

    async def read(self, url: str, offset: int, length: int, low: int, high: int) -> Buffer:
        try:
            if urls.is_data(url):
                return self._data(url, offset, length)
            path, remote = self._found.get(url) or await self._find(url)
            if path is None:
                return await self._remotely().read(remote, offset, length, low, high)
            return await self.local.read(path, offset, length)
        except ReadError as exc:
            exc.about(exc.where if urls.is_data(url) else self.resolve(url), offset, length)
            raise

    @property
    def remote(self) -> bool:
        return self._remote is not None

    async def prefetch(self, wanted: Sequence[tuple[str, int, int]]) -> None:
        # local targets are left to the page cache
        found = []
        for url, low, high in wanted:
            if urls.is_data(url):
                continue
            try:
                path, remote = await self._find(url)
            except ReadError:
                continue
            if path is None:
                found.append((remote, low, high))
        if found:
            await self._remotely().prefetch(found)

    async def size(self, url: str, begin: bool = False) -> int:
        if urls.is_data(url):
            return len(self._data(url))
        path, remote = await self._find(url)
        if path is None:
            return await self._remotely().size(remote, begin)
        return await self.local.size(path)

    def resolve(self, url: str, shown: bool = True) -> str:
        if urls.is_data(url) or not shown:
            return url
        try:
            path, remote = self._absolute(url)
        except ReadError:
            return without_secrets(url)
        if path is None:
            return without_secrets(remote)
        if (found := self._found.get(url)) is not None and found[0] is not None:
            return found[0]
        return f"file://{path}" if "%" in path and url.startswith("file:") else path  # perhaps percent-encoded

    async def aclose(self) -> None:
        await self.local.aclose()
        if self._remote is not None:
            await self._remote.aclose()

    def _data(self, url: str, offset: int = 0, length: int | None = None) -> bytes:
        """Return bytes that a data: URL contains; unless `length` is given, all of them."""
        shown = url if len(url) <= _SHOWN else f"{url[:_SHOWN]}..."
        try:
            data = urls.data_in(url)
        except ValueError as exc:
            raise ReadError(shown, f"malformed: {str(exc).lower()}") from None
        if length is None:
            return data
        if offset + length > len(data):
            raise OutOfRange(shown, f"has {len(data)} bytes, bytes [{offset}, {offset + length}) were asked for")
        return data[offset : offset + length]

    def _remotely(self) -> RemoteFiles:
        if self._remote is None:
            from zarrfs.store.remotefiles import RemoteFiles

            self._remote = RemoteFiles(self._options, self.local, self._trust)
        return self._remote

    async def _find(self, url: str) -> tuple[str | None, str]:
        """Return (path, "") of a local target, or (None, absolute URL); cached."""
        if (known := self._found.get(url)) is not None:
            return known
        path, remote = self._absolute(url)
        if path is not None:
            try:
                await self.local.size(path)
            except TargetMissing:
                decoded = os.fsdecode(unquote_to_bytes(os.fsencode(path)))
                if decoded == path or "\0" in decoded or not url.startswith("file:"):
                    raise
                await self.local.size(decoded)
                path = decoded
        return self._found.put(url, (path, remote))

    def _absolute(self, url: str) -> tuple[str | None, str]:
        """Return (path, "") or (None, absolute URL); raise AccessDenied or ReadError for a target that is refused."""
        if "\0" in url:
            raise ReadError(url.replace("\0", "\\0"), "a NUL character")
        relative = urls.relative_end(url)
        if relative is not None:
            before, path = relative
            here = not self._base or self._base.startswith("/")
            joined = os.path.join(self._base or os.getcwd(), path) if here else urls.join(self._base, path)
            if joined is None:
                base = without_secrets(self._base)
                raise ReadError(url, f"a relative target in {base}: give its base with -o base=")
            if not before:
                return (joined, "") if here else (None, joined)
            url = before + joined
        protocols = urls.protocols(url)
        if not protocols or (len(protocols) == 1 and protocols[0] in LOCAL):
            return urls.file_path(url) if protocols else url, ""
        shown = without_secrets(url)
        for protocol, link in zip(protocols, split_chain(url), strict=True):
            self._trust.admit(protocol, link, shown)
        return None, url

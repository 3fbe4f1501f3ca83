"""The files of a set in the Parquet layout: class Directory for local sets, class Remote for URLs.

Both have the same methods, which Directory documents.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

import trio

from zarrfs.config import urls
from zarrfs.config.redaction import without_secrets
from zarrfs.errors import AccessDenied, ReadError, TargetChanged, TargetMissing
from zarrfs.net.responses import Entry, System
from zarrfs.net.versions import note_unversioned
from zarrfs.references.keys import printable
from zarrfs.references.parquet_metadata import DOCUMENT, Bound
from zarrfs.system.buffers import Buffer
from zarrfs.system.localfiles import LocalFiles

if TYPE_CHECKING:
    from zarrfs.config.options import Options

_CHANGED = "has changed since it was first read: the set is another one now"
_GONE = "has gone since it was first read"
_RECORD = re.compile(r"refs\.(0|[1-9][0-9]{0,18})\.parq", re.ASCII)


class Directory:
    """The files of a set in a local directory, which must not change while it is in use.

    `limit` bounds the bytes of `.zmetadata`, `record` those of a record file.
    """

    def __init__(self, path: str, limit: int, record: Bound) -> None:
        self._path, self._document, self._record = path, Bound(limit), record
        self.local = LocalFiles()
        self._version: tuple[int, ...] | None = None  # of `.zmetadata`

    async def read(self, key: str) -> Buffer:
        """Return a whole file of the set. Raise ReadError if it cannot be read or is larger than its limit."""
        path, limit = os.path.join(self._path, key), self._document if key == DOCUMENT else self._record
        if key == DOCUMENT and self._version is None:
            # before reading, so that check() notices a change during the read
            self._version = await trio.to_thread.run_sync(_version, path)
        try:
            size = await self.local.size(path)
            found = await self.local.read(path, 0, size) if size <= limit.size else None
        except ReadError as exc:
            raise exc.at(self.shown(key)) from exc
        if found is None:
            raise ReadError(self.shown(key), str(limit))
        return found

    async def check(self) -> None:
        """Raise TargetChanged if `.zmetadata` has changed since read() first returned it.

        Call it after reading a file that must belong to the same version.
        """
        if await trio.to_thread.run_sync(_version, os.path.join(self._path, DOCUMENT)) != self._version:
            raise TargetChanged(self.shown(DOCUMENT), _CHANGED)

    async def absent(self, key: str, failure: TargetMissing) -> bool:
        """Return whether read() raised `failure` because the file does not exist although the set still does.

        Return False for a dangling link, as in git-annex: its target is unavailable, not absent. Raise TargetChanged
        as check() does.
        """
        found = await trio.to_thread.run_sync(_is_absent, self._path, key)
        await self.check()
        return found

    async def records(self, array: str) -> list[int] | None:
        """Return the sorted numbers of an array's record files; None if no reliable listing is available.

        Raise TargetChanged as check() does.
        """
        names = await trio.to_thread.run_sync(_names, self._path, array)
        if names is None:
            return None
        await self.check()
        return _numbers(names)

    def shown(self, key: str) -> str:
        """Return the name of a file for messages."""
        return os.path.join(self._path, printable(key))

    async def aclose(self) -> None:
        """Close descriptors and connections."""
        await self.local.aclose()


class Remote:
    """The files of a set at a URL. Each record file takes two requests: its own, and one that checks `.zmetadata`.

    A record file that is read again must be the one that was read first, because a set may be written again with an
    equal `.zmetadata`, whose ETag may be a hash of its content. `record` bounds the bytes of a record file.
    """

    def __init__(self, url: str, options: Options, record: Bound) -> None:
        from zarrfs.store.remotefiles import RemoteFiles

        self._url, self._record = url, record
        self._files = RemoteFiles(options)
        self.local = self._files.local
        self._version: Entry | None = None  # of `.zmetadata`
        self._records: dict[str, tuple[object, ...]] = {}  # identities of all record files that were read

    async def read(self, key: str) -> Buffer:
        system, path = await self._files.find(self._url)
        path = _below(system, path, key)
        if key == DOCUMENT and self._version is None and not system.immutable:
            try:
                self._version = await self._files.stat_at(system, path)
                if _identity(self._version)[1:] == (None, None):
                    note_unversioned(system.host(path), system.shown(path))
            except AccessDenied:  # a server may permit reads but not attributes
                self._version = None
        if key == DOCUMENT:
            return await self._files.read_all_at(system, path)
        stop = self._record.size + 1
        found = await self._files.blocks.ranges.call(system, path, lambda: system.fetch(path, 0, stop))
        if len(found.data) == stop:
            raise ReadError(self.shown(key), str(self._record))
        identity = len(found.data), found.tag, found.mtime_ns
        if self._records.setdefault(key, identity) != identity:
            raise TargetChanged(self.shown(key), _CHANGED)
        return bytes(found.data)

    async def check(self) -> None:
        """Raise TargetChanged as Directory.check() does, if the server reports attributes of `.zmetadata`."""
        if self._version is None:
            return
        system, path = await self._files.find(self._url)
        try:
            found = await self._files.stat_at(system, system.child(path, DOCUMENT))
        except TargetMissing:
            raise TargetChanged(self.shown(DOCUMENT), _GONE) from None
        if _identity(found) != _identity(self._version):
            raise TargetChanged(self.shown(DOCUMENT), _CHANGED)

    async def absent(self, key: str, failure: TargetMissing) -> bool:
        if failure.status not in (None, 404):  # such as 410: the file existed once
            return False
        system, path = await self._files.find(self._url)
        if self._version is not None:
            await self.check()
            return True
        try:
            if not system.immutable:  # no version to check: read it
                await self._files.read_all_at(system, system.child(path, DOCUMENT))
                return True
            await self._files.stat_at(system, system.child(path, DOCUMENT))
        except TargetMissing:
            raise TargetChanged(self.shown(DOCUMENT), _GONE) from None
        try:  # a member in the index of the zip file is not absent, even if the zip file is gone
            await self._files.stat_at(system, _below(system, path, key))
        except TargetMissing:
            return True
        return False

    async def records(self, array: str) -> list[int] | None:
        # The HTML listing of a web server is not reliable.
        system, path = await self._files.find(self._url)
        if urls.protocols(self._url)[0] in ("http", "https") or (self._version is None and not system.immutable):
            return None
        try:
            found = await self._files.listing_at(system, _below(system, path, array))
        except TargetMissing:  # object stores have no empty directories
            found = []
        except (ReadError, NotADirectoryError):
            return None
        if found is None:
            return None
        await self.check()
        return _numbers(entry.name for entry in found)

    def shown(self, key: str) -> str:
        head, _, archive = without_secrets(self._url).partition("::")
        url, mark, query = head.partition("?")
        directory = url if url.endswith("://") else f"{url.rstrip('/')}/"  # "zip://" for the root of a zip file
        return f"{directory}{printable(key)}{mark}{query}" + (f"::{archive}" if archive else "")

    async def aclose(self) -> None:
        await self._files.aclose()


def _below(system: System, path: str, key: str) -> str:
    for name in key.split("/") if key else ():
        path = system.child(path, name)
    return path


def _numbers(names: Iterable[str]) -> list[int]:
    return sorted(int(match[1]) for match in map(_RECORD.fullmatch, names) if match)


def _is_absent(root: str, key: str) -> bool:
    """Return whether a component of `key` does not exist in its directory, not even as a dangling link. Blocks."""
    flags = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC  # O_PATH needs no attributes, which this very mount may serve
    try:
        at = os.open(root, flags)
    except OSError:
        return False
    try:
        for name in key.split("/"):
            try:
                os.readlink(name, dir_fd=at)
            except FileNotFoundError:
                return True
            except OSError:
                pass  # EINVAL: not a link
            inner = os.open(name, flags, dir_fd=at)
            os.close(at)
            at = inner
    except OSError:
        pass
    finally:
        os.close(at)
    return False


def _names(root: str, key: str) -> list[str] | None:
    """Return the names in the directory `key` below `root`; [] if it does not exist. Blocks.

    Return None if a name of `key` is a link or on any other error. Links are not followed, because one may lead into
    this very mount, and the listing would then wait for itself.
    """
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
    try:
        at = os.open(root, flags)
    except OSError:
        return None
    try:
        for name in filter(None, key.split("/")):
            inner = os.open(name, flags | os.O_NOFOLLOW, dir_fd=at)
            os.close(at)
            at = inner
        return os.listdir(at)
    except FileNotFoundError:
        return []
    except OSError:
        return None
    finally:
        os.close(at)


def _version(path: str) -> tuple[int, ...] | None:
    """Return the attributes that identify a version of a file; None if it cannot be examined. Blocks."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _identity(entry: Entry) -> tuple[int | None, str | None, int | None]:
    return entry.size, entry.tag, None if entry.rough else entry.mtime_ns

"""Sources of blobs other than directories: a URL prefix, a Flux instance.

A source returns all bytes of a blob, and the caller verifies them. BlobReader reads directories itself.
"""

from __future__ import annotations

import abc
import dataclasses
import os
from typing import TYPE_CHECKING, Any

import trio

from zarrfs.archives.blob_files import wrong_length
from zarrfs.archives.blobrefs import LARGEST
from zarrfs.archives.source_kinds import FLUX, BlobSourceKind
from zarrfs.concurrency.tasks import for_each
from zarrfs.config.options import Options
from zarrfs.config.redaction import without_secrets
from zarrfs.errors import OutOfRange
from zarrfs.store.uri import path_of_uri
from zarrfs.system.buffers import Buffer
from zarrfs.system.memory import memory_limit

if TYPE_CHECKING:
    from zarrfs.archives.flux_blobs import FluxBlobs
    from zarrfs.store.remotefiles import RemoteFiles


class BlobSource(abc.ABC):
    """A source of whole blobs."""

    kind: BlobSourceKind
    shown: str

    @abc.abstractmethod
    async def fetch(self, blobref: str, declared: int | None) -> Buffer:
        """Return the bytes of a blob, not verified. `declared` is its length in bytes in the archive, or None.

        Raise TargetMissing if there is no such blob, OutOfRange if it has another length, or another ReadError.
        """

    @abc.abstractmethod
    async def aclose(self) -> None:
        """Release descriptors and connections."""


class BlobSources:
    """A factory of blob sources. All sources behind URLs share one RemoteFiles, made when it is first used."""

    def __init__(self, options: Options, others: bool = False) -> None:
        """With `others`, do not wait out the outage of a server, because the next source is tried instead."""
        self._others = others
        self._options = self._reduced(options)
        self.slots = trio.CapacityLimiter(options.host_requests)  # threads that wait for a source
        self._files: RemoteFiles | None = None

    def _reduced(self, options: Options) -> Options:
        # BlobReader caches whole blobs, so their blocks are not cached
        quarter = memory_limit(options) // 4  # BlobReader uses the rest for blobs
        return dataclasses.replace(
            options, cache_dir=None, memory_limit=quarter,
            wait_for_outages="none" if self._others else options.wait_for_outages,
        )  # fmt: skip

    def find(self, name: str) -> BlobSource | str:
        """Return the source of this name; the path for a directory."""
        if name == FLUX:  # an update may have replaced the helper since it was checked: reads report that
            from zarrfs.archives.flux_blobs import FluxBlobs

            return FluxSource(FluxBlobs(), self.slots, self._options.request_timeout)
        path = path_of_uri(name)
        if path is not None:
            return os.path.abspath(path)
        return UrlSource(name, self)

    def files(self) -> RemoteFiles:
        """Return the reader of URLs."""
        if self._files is None:
            from zarrfs.store.remotefiles import RemoteFiles

            self._files = RemoteFiles(self._options)
        return self._files

    async def whole(self, url: str, length: int, shown: str) -> Buffer:
        """Fetch all bytes of `url` in parts, uncached. Raise OutOfRange if it has not `length` bytes."""
        from zarrfs.net.request_queue import PART

        files = self.files()
        system, path = await files.find(url)
        ranges = files.blocks.ranges

        async def fetch(at: int) -> Buffer:
            end = min(at + PART, length)
            found = await ranges.fetch(system, path, at, end)
            size = at + len(found.data) if found.total is None else found.total
            if found.total not in (None, length) or len(found.data) != end - at:
                raise OutOfRange(shown, f"has {size} bytes, not {length}")
            return found.data

        if length <= PART:
            return await fetch(0)
        buffer = bytearray(length)

        async def put(at: int) -> None:
            data = await fetch(at)
            buffer[at : at + len(data)] = data

        await for_each(put, range(0, length, PART))
        return buffer

    def outages(self) -> list[str]:
        """Describe the outages of servers."""
        return [] if self._files is None else self._files.blocks.ranges.outages()

    def stats(self) -> dict[str, Any]:
        """Return counters of requests."""
        return {} if self._files is None else {"remote": self._files.stats()}

    async def aclose(self) -> None:
        """Close connections."""
        if self._files is not None:
            await self._files.aclose()


class UrlSource(BlobSource):
    """Blobs at PREFIX/BLOBREF."""

    kind = BlobSourceKind.URL

    def __init__(self, url: str, sources: BlobSources) -> None:
        self.shown = without_secrets(url)
        self._url, self._sources = url, sources

    async def fetch(self, blobref: str, declared: int | None) -> Buffer:
        url = blob_url(self._url, blobref)
        shown = without_secrets(url)
        if declared == 0:
            return b""
        length = await self._sources.files().size(url) if declared is None else declared
        if length > LARGEST:
            raise OutOfRange(shown, f"{length} bytes are more than a blob may have")
        return await self._sources.whole(url, length, shown)

    async def aclose(self) -> None:
        pass  # BlobSources closes the connections


class FluxSource(BlobSource):
    """The running Flux instance."""

    kind = BlobSourceKind.FLUX

    def __init__(self, blobs: FluxBlobs, slots: trio.CapacityLimiter, timeout: float) -> None:
        self.shown, self._blobs, self._slots, self._timeout = blobs.shown, blobs, slots, timeout

    async def fetch(self, blobref: str, declared: int | None) -> Buffer:
        async with self._slots:
            data = await self._blobs.load(blobref, self._timeout)
        if declared is not None and len(data) != declared:
            raise wrong_length(f"flux:{blobref}", len(data), declared)
        return data

    async def aclose(self) -> None:
        await self._blobs.aclose()


def blob_url(name: str, blobref: str) -> str:
    """Return the URL of a blob below a prefix: append its name to the first link of a chain, before any query."""
    link, mark, rest = name.partition("::") if "://[" not in name else (name, "", "")
    path, question, query = link.partition("?")
    return f"{path.rstrip('/')}/{blobref}{question}{query}{mark}{rest}"

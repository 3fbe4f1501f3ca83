"""Sources of blobs other than directories: a URL prefix, a database, a dump tar, a Flux instance.

A source returns all bytes of a blob, and the caller verifies them. BlobReader reads directories itself.
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import os
import stat
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import trio

from zarrfs.archives.blob_files import BlobLocation, wrong_length
from zarrfs.archives.blobrefs import LARGEST, hash_of
from zarrfs.archives.dump_reader import DumpIndex, Member, Steps, go_through, lay_out, run, run_remote
from zarrfs.archives.source_kinds import DUMP, FLUX, BlobSourceKind, is_remote_dump, source_kind
from zarrfs.cache.diskfiles import Handle
from zarrfs.concurrency.tasks import for_each
from zarrfs.config.options import Options
from zarrfs.config.redaction import without_secrets
from zarrfs.documents.compressed import is_tar
from zarrfs.errors import Loop, OutOfRange, ReadError, TargetMissing, UsageError, reason_of
from zarrfs.store.uri import path_of_uri
from zarrfs.system.buffers import Buffer
from zarrfs.system.memory import memory_limit
from zarrfs.system.own_mount import OWN_MOUNT, RULE

if TYPE_CHECKING:
    from zarrfs.archives.content_database import ContentDatabase
    from zarrfs.archives.flux_blobs import FluxBlobs
    from zarrfs.store.remotefiles import RemoteFiles

T = TypeVar("T")


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
        quarter = memory_limit(options) // 4  # for headers of tars; BlobReader uses the rest for blobs
        return dataclasses.replace(
            options, cache_dir=None, cache="none", memory_limit=quarter,
            wait_for_outages="none" if self._others else options.wait_for_outages,
        )  # fmt: skip

    def find(self, name: str) -> BlobSource | str:
        """Return the source of this name; the path for a directory, and for a file that is no longer a source."""
        if is_remote_dump(name):
            return DumpSource(name.removeprefix(DUMP), self)
        if name == FLUX:  # an update may have replaced the helper since it was checked: reads report that
            from zarrfs.archives.flux_blobs import FluxBlobs

            return FluxSource(FluxBlobs(), self.slots, self._options.request_timeout)
        path = path_of_uri(name)
        if path is not None and os.path.isdir(path):
            return os.path.abspath(path)
        try:
            kind = source_kind(name)
        except UsageError:
            return os.path.abspath(path or name)
        if kind is BlobSourceKind.DATABASE:
            from zarrfs.archives.content_database import ContentDatabase

            return DatabaseSource(ContentDatabase(os.path.abspath(path or name)), self.slots)
        if kind is BlobSourceKind.DUMP:
            return DumpSource(os.path.abspath(path or name), self)
        return UrlSource(name, self)

    def files(self) -> RemoteFiles:
        """Return the reader of URLs."""
        if self._files is None:
            from zarrfs.store.remotefiles import RemoteFiles

            self._files = RemoteFiles(self._options)
        return self._files

    async def bytes_of(self, url: str, start: int, stop: int, shown: str, total: int | None = None) -> Buffer:
        """Fetch the bytes [start, stop) of `url` in parts of part_size=, uncached.

        Raise OutOfRange if the file ends earlier, or if the server reports another size than `total`.
        """
        files = self.files()
        system, path = await files.find(url)
        ranges, part = files.blocks.ranges, self._options.part_size

        async def fetch(at: int) -> Buffer:
            end = min(at + part, stop)
            found = await ranges.fetch(system, path, at, end)
            size = at + len(found.data) if found.total is None else found.total
            if (total is not None and found.total not in (None, total)) or len(found.data) != end - at:
                raise OutOfRange(shown, f"has {size} bytes, not {stop if total is None else total}")
            return found.data

        if stop - start <= part:
            return await fetch(start)
        buffer = bytearray(stop - start)

        async def put(at: int) -> None:
            data = await fetch(at)
            buffer[at - start : at - start + len(data)] = data

        await for_each(put, range(start, stop, part))
        return buffer

    def adjust(self, options: Options) -> None:
        """Apply changed options."""
        self._options = self._reduced(options)
        self.slots.total_tokens = options.host_requests
        if self._files is not None:
            self._files.adjust(self._options)

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
    """Blobs at PREFIX/BLOBREF; if PREFIX turns out to be a dump tar, blobs in it."""

    kind = BlobSourceKind.URL

    def __init__(self, url: str, sources: BlobSources) -> None:
        self.shown = without_secrets(url)
        self._url, self._sources = url, sources
        self._dump: DumpSource | None = None
        self._looked = not url.partition("?")[0].lower().endswith(".tar")
        self._looking = trio.Lock()

    async def fetch(self, blobref: str, declared: int | None) -> Buffer:
        if not self._looked:
            async with self._looking:
                await self._look()
        if self._dump is not None:
            return await self._dump.fetch(blobref, declared)
        url = blob_url(self._url, blobref)
        shown = without_secrets(url)
        if declared == 0:
            return b""
        length = await self._sources.files().size(url) if declared is None else declared
        if length > LARGEST:
            raise OutOfRange(shown, f"{length} bytes are more than a blob may have")
        return await self._sources.bytes_of(url, 0, length, shown, length)

    async def _look(self) -> None:
        """Detect whether the URL is a tar."""
        if self._looked:
            return
        with contextlib.suppress(TargetMissing):
            head = bytes(await self._sources.bytes_of(self._url, 0, 512, self.shown))
            if is_tar(head):
                self._dump = DumpSource(self._url, self._sources)
        self._looked = True

    async def aclose(self) -> None:
        pass  # BlobSources closes the connections


class DatabaseSource(BlobSource):
    """The content.sqlite of a stopped Flux instance."""

    kind = BlobSourceKind.DATABASE

    def __init__(self, database: ContentDatabase, slots: trio.CapacityLimiter) -> None:
        self.shown, self._database, self._slots = database.shown, database, slots

    async def fetch(self, blobref: str, declared: int | None) -> Buffer:
        return await in_thread(self._slots, self._database.load, blobref, declared)

    async def aclose(self) -> None:
        self._database.close()


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


class DumpSource(BlobSource):
    """A tar of flux dump, local or behind a URL."""

    kind = BlobSourceKind.DUMP

    def __init__(self, name: str, sources: BlobSources) -> None:
        self._sources = sources
        self._name, self.local = name, "://" not in name
        self.shown = without_secrets(name)
        self._index: DumpIndex | None = None
        self._whole: DumpIndex | None = None  # the index of all headers of a local tar
        self._completing = threading.Lock()
        self._reading, self._searching = trio.Lock(), trio.Lock()
        # opened early, before a mount may hide the path; abandoned threads may still use it after aclose()
        self._file: Handle | None = None
        self._failure = "is closed"
        if self.local:
            try:
                self._file = Handle(os.open(name, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC))
            except OSError as exc:
                self._failure = reason_of(exc)

    def locate(self, blobref: str) -> BlobLocation | None:
        """Return the likely location of a blob in a local tar; None if unknown, as before get_ready()."""
        file, found = self._file, None if self._index is None else self._index.known(blobref)
        return None if file is None or found is None else BlobLocation(self._name, found.offset, found.size, file)

    async def get_ready(self) -> DumpIndex:
        """Return the index; make it on the first call. Raise ReadError if the tar cannot be read."""
        async with self._reading:
            if self._index is None:
                self._index = await self._indexed()
            return self._index

    async def fetch(self, blobref: str, declared: int | None) -> Buffer:
        """Return the bytes of a blob, verified."""
        index, where = await self.get_ready(), f"{self.shown}: {blobref}"
        hint = index.known(blobref)
        fits = hint is not None and declared in (None, hint.size)  # a document may declare two lengths for one blob
        data = await self._matching(hint, blobref) if hint is not None and fits else None
        if data is None and (blobref, declared) not in index.absent:
            async with self._searching:  # one search at a time: the next one profits from the members hashed
                data = await self._searched(index, blobref, declared, hint)
        if data is not None:
            if declared is not None and len(data) != declared:
                raise wrong_length(where, len(data), declared)
            return data
        if index.fault:
            raise ReadError(where, f"not in the tar, which is {index.fault}")
        raise TargetMissing(where, "no such blob")

    async def _searched(
        self, index: DumpIndex, blobref: str, declared: int | None, wrong: Member | None
    ) -> Buffer | None:
        """Search all members for a blob; `wrong` is a member that is known not to be it."""
        if not index.complete:
            index = self._index = await self._complete()
        found = index.known(blobref)  # another search may have found it meanwhile
        if found is not None and found != wrong and (data := await self._matching(found, blobref)) is not None:
            return data
        algorithm = blobref.partition("-")[0]
        for length in index.lengths() if declared is None else [declared]:
            if (algorithm, length) in index.hashed:
                continue
            for member in index.candidates(length):
                if (data := await self._matching(member, blobref)) is not None:
                    return data
            index.hashed.add((algorithm, length))
        index.absent.add((blobref, declared))
        return None

    async def _matching(self, member: Member, blobref: str) -> Buffer | None:
        """Hash a member and index it by its blobref; return its bytes if that is `blobref`, else None."""
        if member.size > LARGEST:
            return None
        data = await self._read(member.offset, member.size)
        found = await in_thread(self._sources.slots, hash_of, data, blobref)
        assert self._index is not None
        self._index.found(found, member)
        return data if found == blobref else None

    async def _indexed(self) -> DumpIndex:
        index = DumpIndex()
        if self.local:
            laid_out = await in_thread(self._sources.slots, self._run_local, lay_out, index)
        else:
            laid_out = await self._run_remote(lay_out, index)
        return index if laid_out else await self._complete()

    async def _complete(self) -> DumpIndex:
        """Return an index of all headers. Raise ReadError if the tar cannot be read."""
        if self.local:
            return await in_thread(self._sources.slots, self._complete_local)
        index = DumpIndex()
        await self._run_remote(go_through, index)
        return index

    def _complete_local(self) -> DumpIndex:
        with self._completing:  # a thread whose caller was cancelled still makes the index for the next caller
            if self._whole is None:
                index = DumpIndex()
                self._run_local(go_through, index)
                self._whole = index
            return self._whole

    async def _run_remote(self, steps: Callable[[int, DumpIndex], Steps[T]], index: DumpIndex) -> T:
        files = self._sources.files()
        size = await files.size(self._name)
        return await run_remote(steps(size, index), files, self._name, size)

    def _run_local(self, steps: Callable[[int, DumpIndex], Steps[T]], index: DumpIndex) -> T:
        file = self._file
        if file is None:
            raise ReadError(self.shown, self._failure)
        try:
            status = os.fstat(file)
        except OSError as exc:
            raise ReadError(self.shown, reason_of(exc)) from exc
        if status.st_dev == OWN_MOUNT.device:
            raise Loop(self.shown, RULE)
        if not stat.S_ISREG(status.st_mode):
            raise ReadError(self.shown, "not a regular file")
        return run(steps(status.st_size, index), lambda offset, length: self._pread(file, offset, length))

    async def _read(self, offset: int, length: int) -> Buffer:
        if self._file is not None:
            return await in_thread(self._sources.slots, self._pread, self._file, offset, length)
        return await self._sources.bytes_of(self._name, offset, offset + length, self.shown)

    def _pread(self, file: Handle, offset: int, length: int) -> bytes:
        try:
            data = os.pread(file, length, offset)
        except OSError as exc:
            raise ReadError(self.shown, reason_of(exc)) from exc
        if len(data) != length:
            raise ReadError(self.shown, f"ends before byte {offset + length}")
        return data

    async def aclose(self) -> None:
        self._file = None


def blob_url(name: str, blobref: str) -> str:
    """Return the URL of a blob below a prefix: append its name to the first link of a chain, before any query."""
    link, mark, rest = name.partition("::") if "://[" not in name else (name, "", "")
    path, question, query = link.partition("?")
    return f"{path.rstrip('/')}/{blobref}{question}{query}{mark}{rest}"


async def in_thread(slots: trio.CapacityLimiter, function: Callable[..., T], *args: Any) -> T:
    """Run `function(*args)` in a thread, which is abandoned if the caller is cancelled."""
    return await trio.to_thread.run_sync(function, *args, limiter=slots, abandon_on_cancel=True)

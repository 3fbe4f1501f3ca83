"""Places of blobs that are no directories, one interface: behind a URL, in a database, in a tar, in a Flux instance.

A place gives all bytes of a blob, which whoever asks verifies. Directories are read by blobs.py itself. What a place
is: blobrefs.py.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import stat
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import trio

from zarrfs.archives.blobfiles import Where
from zarrfs.archives.blobhash import hash_of
from zarrfs.archives.blobrefs import DUMP, PlaceKind, is_remote_dump, place_kind
from zarrfs.archives.dump_reader import DumpIndex, Member, Steps, go_through, lay_out, run, run_remote
from zarrfs.cache.diskfiles import Handle
from zarrfs.concurrency.tasks import at_once
from zarrfs.config.options import Options
from zarrfs.config.redaction import without_secrets
from zarrfs.documents.compressed import is_tar
from zarrfs.errors import Loop, OutOfRange, ReadError, TargetMissing, UsageError
from zarrfs.store.uri import path_of_uri
from zarrfs.system.buffers import Buffer
from zarrfs.system.memory import memory_limit

if TYPE_CHECKING:
    from zarrfs.archives.contentdb import ContentDb
    from zarrfs.archives.flux import FluxBlobs
    from zarrfs.store.remotefiles import RemoteFiles

T = TypeVar("T")

_MOST = 1 << 30  # bytes of a blob (RFC 10)


class Place(Protocol):
    """A place that gives whole blobs."""

    kind: PlaceKind
    shown: str

    async def fetch(self, blobref: str, declared: int | None) -> Buffer:
        """The bytes called `blobref`, not verified, of which the archive says that they are `declared`.

        TargetMissing where they are not here, OutOfRange where they are of another length, ReadError and its kinds.
        """
        ...

    async def aclose(self) -> None:
        """Give back what it holds."""
        ...


class Places:
    """Makes places; those behind URLs share one RemoteFiles, which is made when it is first used."""

    def __init__(self, options: Options) -> None:
        # blobs are kept whole, by their names: not as blocks of targets
        quarter = memory_limit(options) // 4  # for the headers of tars: the rest is for blobs
        self._options = dataclasses.replace(options, cache_dir=None, cache="none", memory_limit=quarter)
        self.slots = trio.CapacityLimiter(options.host_requests)  # threads that wait for a place
        self._files: RemoteFiles | None = None

    def find(self, place: str) -> Place | str:
        """The place that `place` names, or the path of a directory; also of what is no place any more."""
        if is_remote_dump(place):
            return DumpPlace(place.removeprefix(DUMP), self)
        path = path_of_uri(place)
        if path is not None and os.path.isdir(path):
            return os.path.abspath(path)
        try:
            kind = place_kind(place)
        except UsageError:
            return os.path.abspath(path or place)
        if kind is PlaceKind.DATABASE:
            from zarrfs.archives.contentdb import ContentDb

            return DatabasePlace(ContentDb(os.path.abspath(path or place)), self.slots)
        if kind is PlaceKind.FLUX:
            from zarrfs.archives.flux import FluxBlobs

            return FluxPlace(FluxBlobs(), self.slots, self._options.request_timeout)
        if kind is PlaceKind.DUMP:
            return DumpPlace(os.path.abspath(path or place), self)
        return UrlPlace(place, self)

    def files(self) -> RemoteFiles:
        """What reads URLs."""
        if self._files is None:
            from zarrfs.store.remotefiles import RemoteFiles

            self._files = RemoteFiles(self._options)
        return self._files

    async def bytes_of(self, url: str, start: int, stop: int, shown: str, total: int | None = None) -> Buffer:
        """The bytes [start, stop) of `url`, in parts of part_size=, kept nowhere.

        OutOfRange where it ends before, or is not of `total` bytes, as far as the server tells.
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

        await at_once(put, range(start, stop, part))
        return buffer

    async def size(self, url: str) -> int:
        """The size of `url` in bytes."""
        return await self.files().size(url)

    def adjust(self, options: Options) -> None:
        """Take over what may change of the options."""
        quarter = memory_limit(options) // 4
        self._options = dataclasses.replace(options, cache_dir=None, cache="none", memory_limit=quarter)
        self.slots.total_tokens = options.host_requests
        if self._files is not None:
            self._files.adjust(self._options)

    def stats(self) -> dict[str, Any]:
        """What was asked of servers, as Targets counts it."""
        return {} if self._files is None else {"remote": self._files.stats()}

    async def aclose(self) -> None:
        """Close connections."""
        if self._files is not None:
            await self._files.aclose()


class UrlPlace:
    """Blobs behind PREFIX/BLOBREF; or, where the prefix turns out to be a file that is a tar, those in it."""

    kind = PlaceKind.URL

    def __init__(self, url: str, places: Places) -> None:
        self.shown = without_secrets(url)
        self._url, self._places = url, places
        self._dump: DumpPlace | None = None
        self._looked = not url.partition("?")[0].lower().endswith(".tar")
        self._looking = trio.Lock()

    async def fetch(self, blobref: str, declared: int | None) -> Buffer:
        """As Place.fetch."""
        if not self._looked:
            async with self._looking:
                await self._look()
        if self._dump is not None:
            return await self._dump.fetch(blobref, declared)
        url = blob_url(self._url, blobref)
        shown = without_secrets(url)
        if declared == 0:
            return b""
        length = await self._places.size(url) if declared is None else declared
        if length > _MOST:
            raise OutOfRange(shown, f"{length} bytes are more than a blob may have")
        return await self._places.bytes_of(url, 0, length, shown, length)

    async def _look(self) -> None:
        """Find out whether the URL is a tar."""
        if self._looked:
            return
        with contextlib.suppress(TargetMissing):
            head = bytes(await self._places.bytes_of(self._url, 0, 512, self.shown))
            if is_tar(head):
                self._dump = DumpPlace(self._url, self._places)
        self._looked = True

    async def aclose(self) -> None:
        """As Place.aclose: connections are those of Places."""


class DatabasePlace:
    """The content.sqlite of a stopped Flux instance."""

    kind = PlaceKind.DATABASE

    def __init__(self, database: ContentDb, slots: trio.CapacityLimiter) -> None:
        self.shown, self._database, self._slots = database.shown, database, slots

    async def fetch(self, blobref: str, declared: int | None) -> Buffer:
        """As Place.fetch."""
        return await in_thread(self._slots, self._database.load, blobref, declared)

    async def aclose(self) -> None:
        """As Place.aclose."""
        self._database.close()


class FluxPlace:
    """The running Flux instance."""

    kind = PlaceKind.FLUX

    def __init__(self, blobs: FluxBlobs, slots: trio.CapacityLimiter, timeout: float) -> None:
        self.shown, self._blobs, self._slots, self._timeout = blobs.shown, blobs, slots, timeout

    async def fetch(self, blobref: str, declared: int | None) -> Buffer:
        """As Place.fetch."""
        data = await in_thread(self._slots, self._blobs.load, blobref, self._timeout)
        if declared is not None and len(data) != declared:
            where = f"flux:{blobref}"
            raise OutOfRange(where, f"a blob of {len(data)} bytes, where the archive says {declared}")
        return data

    async def aclose(self) -> None:
        """As Place.aclose."""
        self._blobs.close()


class DumpPlace:
    """The tar of flux dump, a file or behind a URL."""

    kind = PlaceKind.DUMP

    def __init__(self, place: str, places: Places) -> None:
        self._places = places
        self._place, self.local = place, "://" not in place
        self.shown = without_secrets(place)
        self._index: DumpIndex | None = None
        self._whole: DumpIndex | None = None  # of a local tar: of all headers
        self._going = threading.Lock()
        self._reading, self._searching = trio.Lock(), trio.Lock()
        self.forbidden_device: int | None = None  # st_dev of the mount that asks
        # opened before anything is mounted over it; threads that are left behind may still use it when all ends
        self._file: Handle | None = None
        self._failure = "is closed"
        if self.local:
            try:
                self._file = Handle(os.open(place, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC))
            except OSError as exc:
                self._failure = (exc.strerror or str(exc)).lower()

    def where(self, blobref: str) -> Where | None:
        """Where a blob should lie in a file; None where that is not known (yet: get_ready())."""
        file, found = self._file, None if self._index is None else self._index.known(blobref)
        return None if file is None or found is None else Where(self._place, found.offset, found.size, file)

    async def get_ready(self) -> DumpIndex:
        """The index, which is made when it is first asked for. ReadError."""
        async with self._reading:
            if self._index is None:
                self._index = await self._indexed()
            return self._index

    async def fetch(self, blobref: str, declared: int | None) -> Buffer:
        """As Place.fetch; what it gives has the right hash."""
        index, where = await self.get_ready(), f"{self.shown}: {blobref}"
        hint = index.known(blobref)
        fits = hint is not None and declared in (None, hint.size)  # of two lengths that a document says, one is wrong
        data = await self._matching(hint, blobref) if hint is not None and fits else None
        if data is None and (blobref, declared) not in index.absent:
            async with self._searching:  # one at a time: what it goes past is noted, and found at once the next time
                data = await self._searched(index, blobref, declared, hint)
        if data is not None:
            if declared is not None and len(data) != declared:
                raise OutOfRange(where, f"a blob of {len(data)} bytes, where the archive says {declared}")
            return data
        if index.fault:
            raise ReadError(where, f"not in the tar, which is {index.fault}")
        raise TargetMissing(where, "no such blob")

    async def _searched(
        self, index: DumpIndex, blobref: str, declared: int | None, wrong: Member | None
    ) -> Buffer | None:
        """The bytes of the first member that is that blob; `wrong` is not."""
        if not index.complete:
            index = self._index = await self._complete()
        found = index.known(blobref)  # by the search that went before
        if found is not None and found != wrong and (data := await self._matching(found, blobref)) is not None:
            return data
        for length in index.lengths() if declared is None else [declared]:
            for member in index.candidates(length):
                if (data := await self._matching(member, blobref)) is not None:
                    return data
        index.absent.add((blobref, declared))
        return None

    async def _matching(self, member: Member, blobref: str) -> Buffer | None:
        """The bytes of a member, if they are that blob; notes what blob they are."""
        if member.size > _MOST:
            return None
        data = await self._read(member.offset, member.size)
        found = await in_thread(self._places.slots, hash_of, data, blobref)
        assert self._index is not None
        self._index.found(found, member)
        return data if found == blobref else None

    async def _indexed(self) -> DumpIndex:
        index = DumpIndex()
        if self.local:
            laid_out = await in_thread(self._places.slots, self._run_local, lay_out, index)
        else:
            laid_out = await self._run_remote(lay_out, index)
        return index if laid_out else await self._complete()

    async def _complete(self) -> DumpIndex:
        """The index of all headers. ReadError."""
        if self.local:
            return await in_thread(self._places.slots, self._complete_local)
        index = DumpIndex()
        await self._run_remote(go_through, index)
        return index

    def _complete_local(self) -> DumpIndex:
        with self._going:  # a thread whose caller waits no longer goes on: the next one has its index
            if self._whole is None:
                index = DumpIndex()
                self._run_local(go_through, index)
                self._whole = index
            return self._whole

    async def _run_remote(self, steps: Callable[[int, DumpIndex], Steps[T]], index: DumpIndex) -> T:
        files = self._places.files()
        size = await files.size(self._place)
        return await run_remote(steps(size, index), files, self._place, size)

    def _run_local(self, steps: Callable[[int, DumpIndex], Steps[T]], index: DumpIndex) -> T:
        file = self._file
        if file is None:
            raise ReadError(self.shown, self._failure)
        try:
            status = os.fstat(file)
        except OSError as exc:
            raise ReadError(self.shown, (exc.strerror or str(exc)).lower()) from exc
        if status.st_dev == self.forbidden_device:
            raise Loop(self.shown, "lies in the mount that refers to it")
        if not stat.S_ISREG(status.st_mode):
            raise ReadError(self.shown, "not a regular file")
        return run(steps(status.st_size, index), lambda offset, length: self._pread(file, offset, length))

    async def _read(self, offset: int, length: int) -> Buffer:
        if self._file is not None:
            return await in_thread(self._places.slots, self._pread, self._file, offset, length)
        return await self._places.bytes_of(self._place, offset, offset + length, self.shown)

    def _pread(self, file: Handle, offset: int, length: int) -> bytes:
        try:
            data = os.pread(file, length, offset)
        except OSError as exc:
            raise ReadError(self.shown, (exc.strerror or str(exc)).lower()) from exc
        if len(data) != length:
            raise ReadError(self.shown, f"ends before byte {offset + length}")
        return data

    async def aclose(self) -> None:
        """As Place.aclose."""
        self._file = None


def blob_url(place: str, blobref: str) -> str:
    """The URL of a blob behind the prefix `place`: in the first link of a chain, before a query."""
    link, mark, rest = place.partition("::") if "://[" not in place else (place, "", "")
    path, question, query = link.partition("?")
    return f"{path.rstrip('/')}/{blobref}{question}{query}{mark}{rest}"


async def in_thread(slots: trio.CapacityLimiter, function: Callable[..., T], *args: Any) -> T:
    """`function(*args)` in a thread, which is left behind where its caller is cancelled."""
    return await trio.to_thread.run_sync(function, *args, limiter=slots, abandon_on_cancel=True)

"""BlobReader, which reads blobs from their places, and returns no byte of a blob that this process has not hashed.

Source: RFC 10 (blobrefs). A place (-o blobs=) is a directory or a URL, where a blob is at PLACE/BLOBREF, or flux:, the
running Flux instance. A blob is read whole from the first place that has it, hashed, and cached in memory. With
cache_dir=, blobs that come from a URL or from Flux are also cached on disk, and hashed again when they are read.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import logging
import os
import stat
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

import trio

from zarrfs.archives.blobrefs import canonical, hash_of, wrong_length
from zarrfs.archives.source_kinds import FLUX
from zarrfs.cache.memory import BlockCache, arrived
from zarrfs.concurrency.lru import LRU
from zarrfs.concurrency.tasks import for_each
from zarrfs.config.options import Options
from zarrfs.config.redaction import without_secrets
from zarrfs.errors import AccessDenied, Loop, OutOfRange, ReadError, TargetMissing, WrongHash, reason_of
from zarrfs.net.versions import TargetVersion
from zarrfs.store.targets import TargetReader
from zarrfs.store.uri import path_of_uri
from zarrfs.system.buffers import Buffer, read_all
from zarrfs.system.memory import memory_limit
from zarrfs.system.own_mount import OWN_MOUNT, RULE

if TYPE_CHECKING:
    from zarrfs.archives.flux_blobs import FluxBlobs
    from zarrfs.cache.disk import DiskCache
    from zarrfs.store.remotefiles import RemoteFiles

log = logging.getLogger(__name__)

T = TypeVar("T")

_THREADS = 16  # that read directories, and hash
_HASHED_HERE = 32 << 10  # bytes hashed on the trio loop: at most 50 us, while a thread would take 100 us
_WARNINGS = 4096  # warnings remembered, so that each is logged once


class _Place(NamedTuple):
    """A place of blobs: a value of -o blobs=, without secrets for messages; its path, if it is a directory."""

    source: str
    shown: str
    directory: str | None

    def at(self, blobref: str) -> str:
        """Return where this place has a blob, for messages."""
        return blob_url(self.shown, blobref) if self.directory is None else f"{self.directory}/{blobref}"


def _place(source: str) -> _Place:
    path = None if source == FLUX else path_of_uri(source)
    return _Place(source, without_secrets(source), None if path is None else os.path.abspath(path))


class BlobReader(TargetReader):
    """A TargetReader for blobs; its URLs are blobrefs with a length, as sized() returns them.

    Reads raise TargetMissing (no place has the blob), WrongHash, OutOfRange (the blob has another length),
    AccessDenied, Loop (the file is in the mount being served), or ReadError (any other failure, such as an I/O error,
    a timeout, or a blob larger than memory). None of them becomes ENOENT.
    """

    def __init__(self, sources: tuple[str, ...], options: Options | None = None) -> None:
        """Read from `sources`, the values of -o blobs=, in this order. No server is contacted yet."""
        options = options or Options()
        self._places = [_place(source) for source in sources]
        self._remote = any(place.directory is None for place in self._places)
        self._disk: DiskCache | None = None
        if self._remote and options.cache_dir is not None:
            from zarrfs.cache.disk import DiskCache

            self._disk = DiskCache(options.cache_dir, options.cache_size)
        # blobs are cached here, and their blocks nowhere; with several places, the next one is tried in an outage
        self._options = dataclasses.replace(
            options, cache_dir=None, memory_limit=memory_limit(options) // 4,
            wait_for_outages="none" if len(sources) > 1 else options.wait_for_outages,
        )  # fmt: skip
        self._cache: BlockCache[Buffer] = BlockCache(memory_limit(options) * (3 if self._remote else 4) // 4)
        self._threads = trio.CapacityLimiter(_THREADS)
        self._files: RemoteFiles | None = None
        self._flux: FluxBlobs | None = None
        self._warned: LRU[str, bool] = LRU(_WARNINGS)

    # -- the TargetReader

    @property
    def remote(self) -> bool:
        return self._remote

    async def read(self, url: str, offset: int, length: int, low: int, high: int) -> Buffer:
        blobref, size = _split(url)
        if offset + length > size:
            raise OutOfRange(blobref, f"has {size} bytes, not {offset + length}")
        if size > self._cache.max_bytes:
            raise ReadError(blobref, f"a blob of {size} bytes does not fit in memory (-o memory_limit=)")
        try:
            data = await self._cache.get(url, size, functools.partial(self._find, blobref, size))
        except ReadError as exc:
            exc.about(blobref, offset, length)
            raise
        if length == size and not self._remote:
            self._cache.discard(url)  # the kernel's page cache has it
        return memoryview(data)[offset : offset + length]

    async def prefetch(self, wanted: Sequence[tuple[str, int, int]]) -> None:
        if not self._remote:
            urls = [url for url in dict.fromkeys(url for url, _, _ in wanted) if not self._cache.has(url)]
            for url, data in await trio.to_thread.run_sync(self._from_directories, urls, limiter=self._threads):
                self._cache.put_ahead(url, data)
            return
        room, started = min(self._options.prefetch, self._cache.max_bytes // 4), []
        for url in dict.fromkeys(url for url, _, _ in wanted if not self._cache.has(url)):
            blobref, size = _split(url)
            room -= size
            ahead = self._cache.ahead(url, size, functools.partial(self._find, blobref, size)) if room >= 0 else None
            if ahead is None:
                break
            started.append(ahead)
        await arrived(started)

    async def size(self, url: str, begin: bool = False) -> int:
        return _split(url)[1]

    def _from_directories(self, urls: Sequence[str]) -> list[tuple[str, Buffer]]:
        """Read many small blobs of the first place in one call, verified.

        Leave out a blob that cannot be read: reading it alone reports the error.
        """
        found: list[tuple[str, Buffer]] = []
        room = self._cache.max_bytes // 8
        for url in urls if self._places else ():
            with contextlib.suppress(ReadError):
                blobref, size = _split(url)
                room -= size
                if room >= 0:
                    found.append((url, _read_file(self._places[0].at(blobref), blobref, size)))
        return found

    def resolve(self, url: str, shown: bool = True) -> str:
        """Return where `url` is read from: the first place that is remote or has such a file, else the first."""
        blobref, _ = _split(url)
        found = [place for place in self._places if place.directory is None or os.path.exists(place.at(blobref))]
        return next((place.at(blobref) for place in found or self._places), blobref)

    async def aclose(self) -> None:
        self._cache.drop(lambda key: True)
        for closing in self._flux, self._files:
            if closing is not None:
                await closing.aclose()
        if self._disk is not None:
            self._disk.close()

    # -- finding

    async def _find(self, blobref: str, size: int) -> Buffer:
        """Return the blob from the first place that has the right one.

        If none has, raise the first error other than TargetMissing: what is behind a place that fails is not known to
        be absent.
        """
        failures: list[ReadError] = []
        for place in self._places:
            try:
                data = await self._load(place, blobref, size)
            except TargetMissing:
                continue
            except ReadError as exc:
                failures.append(exc)
                continue
            for failure in failures:
                # once for a place that fails, but for each of its bad blobs
                bad = isinstance(failure, WrongHash | OutOfRange)
                what = failure.where if bad else failure.where.replace(blobref, "")
                if what not in self._warned:
                    self._warned.put(what, True)
                    log.warning("%s; read from %s instead", failure, place.at(blobref))
            return data
        if failures:
            raise failures[0]
        shown = ", ".join(place.shown for place in self._places)
        raise TargetMissing(
            blobref, f"no such blob: {f'in none of these places ({shown})' if shown else 'no blobs= given'}"
        )

    async def _load(self, place: _Place, blobref: str, size: int) -> Buffer:
        """Return a verified blob from a place, or from its cache on disk."""
        if place.directory is not None:
            return await self._in_thread(_read_file, place.at(blobref), blobref, size)
        if self._disk is not None and (kept := await self._in_thread(self._kept, blobref, size)) is not None:
            return kept
        data = await (self._from_flux if place.source == FLUX else self._from_url)(place.source, blobref, size)
        if self._disk is None and size <= _HASHED_HERE:
            return _verified(place.at(blobref), blobref, data)
        return await self._in_thread(self._keep, place.at(blobref), blobref, data)

    def _kept(self, blobref: str, size: int) -> Buffer | None:
        """Return a blob from the cache on disk; None if it does not have it."""
        assert self._disk is not None
        found = self._disk.read(blobref, 0, size)
        if found is None or found.version.size != size:  # another length than the archive says
            return None
        data = cast(Buffer, found.block)
        return data if hash_of(data, blobref) == blobref else None

    def _keep(self, where: str, blobref: str, data: Buffer) -> Buffer:
        """Verify a blob, and cache it on disk."""
        _verified(where, blobref, data)
        if self._disk is not None:
            self._disk.write(blobref, 0, data, TargetVersion(blobref, len(data)), time.time())
        return data

    async def _in_thread(self, function: Callable[..., T], *arguments: Any) -> T:
        return await trio.to_thread.run_sync(function, *arguments, limiter=self._threads, abandon_on_cancel=True)

    async def _from_flux(self, _source: str, blobref: str, size: int) -> Buffer:
        if self._flux is None or self._flux.ended:
            from zarrfs.archives.flux_blobs import FluxBlobs

            self._flux = FluxBlobs()
        return await self._flux.load(blobref, size, self._options.request_timeout)

    async def _from_url(self, place: str, blobref: str, size: int) -> Buffer:
        """Fetch a blob in parts that are not cached, because its hash may be found wrong."""
        if self._files is None:
            from zarrfs.store.remotefiles import RemoteFiles

            self._files = RemoteFiles(self._options)
        from zarrfs.net.request_queue import PART

        url = blob_url(place, blobref)
        shown, ranges = without_secrets(url), self._files.blocks.ranges
        data = bytearray(size)
        with trio.move_on_after(self._options.read_timeout):
            system, path = await self._files.find(url)

            async def put(at: int) -> None:
                end = min(at + PART, size)
                found = await ranges.fetch(system, path, at, end)
                if found.total not in (None, size) or len(found.data) != end - at:
                    raise wrong_length(shown, found.total or at + len(found.data), size)
                data[at:end] = found.data

            await for_each(put, range(0, size, PART))
            return data
        reason = f"not read within {self._options.read_timeout:g} s (-o read_timeout=)"
        raise ReadError(shown, "; ".join([reason, *ranges.reasons()]))


def _verified(where: str, blobref: str, data: Buffer) -> Buffer:
    if hash_of(data, blobref) != blobref:
        raise WrongHash(where, "its bytes have another hash than its name says")
    return data


def _read_file(path: str, blobref: str, size: int) -> Buffer:
    """Return the blob in a local file, verified. Raise the errors that BlobReader documents. Blocks."""
    try:
        descriptor = _opened(path)
        try:
            status = os.fstat(descriptor)
            if status.st_dev == OWN_MOUNT.device:
                raise Loop(path, RULE)
            if not stat.S_ISREG(status.st_mode):
                raise ReadError(path, "not a regular file")
            if status.st_size != size:
                raise wrong_length(path, status.st_size, size)
            return _verified(path, blobref, read_all(descriptor, size, 0))
        finally:
            os.close(descriptor)
    except OSError as exc:
        if exc.errno == errno.ENOENT and os.path.isdir(os.path.dirname(path)):
            raise TargetMissing(path, "no such blob") from exc
        if exc.errno in (errno.ENOENT, errno.ENOTDIR):
            raise ReadError(path, "the directory of blobs is not there") from exc
        raise (AccessDenied if exc.errno in (errno.EACCES, errno.EPERM) else ReadError)(path, reason_of(exc)) from exc


def _opened(path: str) -> int:
    # O_NONBLOCK: opening a FIFO must not block. Symlinks are followed, because the blob is verified by its hash.
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
    if OWN_MOUNT.device is None:
        return os.open(path, flags)
    found = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        if OWN_MOUNT.has(found):
            raise Loop(path, RULE)
        return os.open(f"/proc/self/fd/{found}", flags)
    finally:
        os.close(found)


def blob_url(name: str, blobref: str) -> str:
    """Return the URL of a blob below a prefix: append its name to the first link of a chain, before any query."""
    if name == FLUX:
        return name + blobref
    link, mark, rest = name.partition("::") if "://[" not in name else (name, "", "")
    path, question, query = link.partition("?")
    return f"{path.rstrip('/')}/{blobref}{question}{query}{mark}{rest}"


def _split(url: str) -> tuple[str, int]:
    """Return (blobref, length) of a URL."""
    blobref, _, length = url.partition(":")
    if canonical(blobref) != blobref or not length:
        raise ReadError(url, "not a blobref with a length")
    return blobref, int(length)

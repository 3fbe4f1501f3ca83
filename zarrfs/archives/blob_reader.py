"""BlobReader, which reads blobs from their sources, and returns no byte of a blob before the hash is verified.

Source: RFC 10 (blobrefs). A blob source is a directory with one file per blob, named by its blobref, or a BlobSource
(blob_sources.py). Blobs of a BlobSource are fetched whole, verified and cached in memory, and with cache_dir= also
written to the directory of blobs there (blob_cache.py).

A blob in a directory is verified in place (blob_files.py): when it is first read, and again if its file has changed,
which is checked after every read.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
from collections.abc import Iterator, Sequence
from typing import Any

import trio

from zarrfs.archives import blob_files
from zarrfs.archives.blob_cache import BackgroundWriter, DiskBlobs, MemoryBlobs
from zarrfs.archives.blob_files import ANOTHER_HASH, BlobFiles, OpenBlob, wrong_length
from zarrfs.archives.blob_sources import BlobSource, BlobSources
from zarrfs.archives.blobrefs import canonical, hash_of
from zarrfs.concurrency.lru import LRU
from zarrfs.config.options import Options
from zarrfs.errors import OutOfRange, ReadError, TargetChanged, TargetMissing, WrongHash
from zarrfs.store.targets import TargetReader
from zarrfs.system.buffers import Buffer
from zarrfs.system.memory import memory_limit

log = logging.getLogger(__name__)

MAX_OPEN = 128  # open descriptors; opening one more closes the least recently used one
_WARNINGS = 65_536  # warnings remembered, so that each is logged once
_HASHING = 4  # blobs hashed at the same time
_HASHED_HERE = 32 << 10  # bytes of a blob hashed on the trio loop: at most 50 us, while a thread would take 100 us
# in seconds: a blob requested again within _SAME after a timeout has a timeout of _LAST_ATTEMPT
_SAME, _LAST_ATTEMPT = 1.0, 1.0
_LATE = 1024  # blobs remembered after a timeout
_ATTEMPTS = 3  # a read fails if the file of its blob has changed this often


class _Queue:
    """The readers that wait for the verification of one blob."""

    __slots__ = ("lock", "readers")

    def __init__(self) -> None:
        self.lock = trio.Lock()
        self.readers = 0


class BlobReader(TargetReader):
    """A TargetReader for blobs: its URLs are blobrefs, or blobrefs with a length as sized() returns them.

    Reads raise TargetMissing (no source has the blob), WrongHash, OutOfRange (the blob has another length),
    AccessDenied, TargetChanged (the file keeps changing), Loop (the file is in the mount being served), or ReadError
    (any other failure, such as an I/O error, a timeout, or a file that is not regular). None of them becomes ENOENT.
    """

    has_whole = True

    def __init__(self, sources: tuple[str, ...], options: Options | None = None) -> None:
        """Read from `sources`, the values of -o blobs=, in this order. No server is contacted yet."""
        options = options or Options()
        self._factory = BlobSources(options, others=len(sources) > 1)
        # a str is the path of a directory
        self._sources: list[str | BlobSource] = [self._factory.find(source) for source in sources]
        remote = [number for number, source in enumerate(self._sources) if not isinstance(source, str)]
        self._disk: DiskBlobs | None = None
        if remote and options.cache_dir is not None:
            self._disk = DiskBlobs(options.cache_dir, options.cache_size)
            self._sources.insert(remote[0], self._disk.directory)
        self._remote = bool(remote)
        self._timeout = options.read_timeout
        self._memory = MemoryBlobs(memory_limit(options) * 3 // 4)  # the rest is for BlobSources
        self._writer = None if self._disk is None else BackgroundWriter(self._disk, self._memory)
        self._ahead = min(options.prefetch, self._memory.limit // 4)  # bytes
        self._files = BlobFiles()
        self._late: LRU[tuple[str, str], float] = LRU(_LATE)  # trio's time of the last timeout of a blob
        self._open: LRU[str, OpenBlob] = LRU(MAX_OPEN, _close)
        self._queues: dict[str, _Queue] = {}
        self._limiter = trio.CapacityLimiter(_HASHING)
        self._warned: set[str] = set()
        self._closed = False
        self._reads = 0
        self._fetched: dict[str, list[int]] = {}  # by kind of source: [blobs, bytes]

    # -- the TargetReader

    @property
    def remote(self) -> bool:
        return self._remote

    async def read(self, url: str, offset: int, length: int, low: int, high: int) -> Buffer:
        blobref, declared = _split(url)
        try:
            return await self._read(blobref, declared, offset, length)
        except ReadError as exc:
            exc.about(blobref, offset, length)
            raise

    async def _read(self, blobref: str, declared: int | None, offset: int, length: int) -> Buffer:
        for _ in range(_ATTEMPTS):
            blob = await self._acquire(blobref, declared)
            if offset + length > blob.size:
                self._release(blob)
                raise OutOfRange(blob.shown, f"has {blob.size} bytes, not {offset + length}")
            try:
                data = (
                    await blob_files.read(blob, offset, length)
                    if blob.data is None else memoryview(blob.data)[offset : offset + length]
                )  # fmt: skip
            finally:
                self._release(blob)
            if data is not None:
                self._reads += 1
                return data
            self._retire(blobref, blob)  # its file has changed: verify it again
        raise TargetChanged(blob.shown, "keeps changing")

    async def get_ready(self, url: str) -> None:
        """Do nothing: the first read connects."""

    async def prefetch(self, wanted: Sequence[tuple[str, int, int]]) -> None:
        if not self._remote:  # blobs in local files are left to the page cache
            return
        room, urls = self._ahead, {url: None for url, _, _ in wanted}
        async with trio.open_nursery() as nursery:
            for url in urls:
                with contextlib.suppress(ReadError):
                    blobref, declared = _split(url)
                    known = blobref in self._open or blobref in self._queues or self._memory.has(blobref)
                    if declared is None or known:
                        continue
                    room -= declared
                    if room < 0:
                        break
                    nursery.start_soon(self._fetch_ahead, blobref, declared)

    async def _fetch_ahead(self, blobref: str, declared: int) -> None:
        with contextlib.suppress(ReadError):
            self._release(await self._acquire(blobref, declared))

    async def size(self, url: str, begin: bool = False) -> int:
        blob = await self._acquire(*_split(url))
        self._release(blob)
        return blob.size

    def whole(self, url: str) -> memoryview | None:
        """Return all bytes of a small blob in a directory, verified. Blocks; may run in any thread.

        None means that only read() can tell: the blob is large, or may be in a source that is not searched here.
        If all sources are directories and none has the blob, raise the first error other than TargetMissing, if any.
        """
        blobref, declared = _split(url)
        failures: list[ReadError] = []
        for source in self._sources:
            if not isinstance(source, str):
                return None
            path = self._path(source, blobref)
            try:
                data = self._files.whole(path, blobref, declared)
            except ReadError as exc:
                failures.append(exc)
                continue
            self._warn(failures, blobref, path)
            return data
        _raise_gravest(failures)
        return None

    def _path(self, directory: str, blobref: str) -> str:
        """Return where a directory has a blob. In the disk cache, this counts as a use of the blob. Blocks."""
        if self._disk is not None and directory == self._disk.directory:
            self._disk.touch(blobref)
        return os.path.join(directory, blobref)

    def resolve(self, url: str, shown: bool = True) -> str:
        """Return where `url` is read from: the first existing file in a directory, else the first other source.

        If all sources are directories and none has the file, return its path in the first directory.
        """
        blobref, _ = _split(url)
        paths = self._paths(blobref)
        remote = [f"{source.shown}: {blobref}" for source in self._sources if not isinstance(source, str)]
        if len(paths) + len(remote) > 1:
            paths = [path for path in paths if os.path.exists(path)] or remote or paths
        return (paths + remote)[0] if paths or remote else blobref

    def _paths(self, blobref: str) -> list[str]:
        return [os.path.join(source, blobref) for source in self._sources if isinstance(source, str)]

    def stats(self) -> dict[str, Any]:
        """Return counters, for the log."""
        remote: dict[str, Any] = {}
        if not all(isinstance(source, str) for source in self._sources):
            remote = {
                **self._factory.stats(),
                "blobs_fetched": {kind: count for kind, (count, _) in self._fetched.items()},
                "blob_bytes_fetched": {kind: count for kind, (_, count) in self._fetched.items()},
                "blobs_held": len(self._memory), "blob_bytes_held": self._memory.bytes,
            }
        if self._writer is not None:
            remote["blob_disk"] = self._writer.stats()
        return {
            **remote, "blob_reads": self._reads, "blobs_open": len(self._open),
            "blobs_verified": self._files.hashed, "blob_bytes_verified": self._files.hashed_bytes,
        }  # fmt: skip

    async def aclose(self) -> None:
        self._closed = True
        for blobref, blob in list(self._open.items()):
            self._retire(blobref, blob)
        self._memory.clear()
        for source in self._sources:
            if not isinstance(source, str):
                await source.aclose()
        await self._factory.aclose()
        if self._writer is not None:
            await self._writer.aclose()

    # -- open blobs; these methods run on the loop

    async def _acquire(self, blobref: str, declared: int | None) -> OpenBlob:
        """Return a verified blob, with one more user. Only one of several waiting readers verifies it."""
        blob = self._take(blobref)
        if blob is None:
            queue = self._queues.setdefault(blobref, _Queue())
            queue.readers += 1
            try:
                async with queue.lock:
                    blob = self._take(blobref)
                    if blob is None:
                        blob = await self._find(blobref, declared)
                        if blob.data is None:
                            self._keep(blobref, blob)
            finally:
                queue.readers -= 1
                if not queue.readers:
                    del self._queues[blobref]
        if declared is not None and blob.size != declared:
            self._release(blob)
            raise wrong_length(blob.shown, blob.size, declared)
        return blob

    def _take(self, blobref: str) -> OpenBlob | None:
        if self._closed:
            raise ReadError(blobref, "the reader is closed")
        blob = self._open.use(blobref)
        if blob is not None:
            blob.users += 1
            return blob
        data = self._memory.get(blobref)
        return None if data is None else _in_memory(blobref, data)

    def _keep(self, blobref: str, blob: OpenBlob) -> None:
        blob.users += 1
        self._open.put(blobref, blob)
        if self._closed:
            self._retire(blobref, blob)

    def _retire(self, blobref: str, blob: OpenBlob) -> None:
        """Remove a blob from the open ones. It is closed now, or when its last user releases it."""
        if self._open.get(blobref) is blob:
            del self._open[blobref]
        _close(blob)

    def _release(self, blob: OpenBlob) -> None:
        if blob.data is not None:
            return
        blob.users -= 1
        if blob.retired and not blob.users:
            os.close(blob.fd)

    # -- finding

    async def _find(self, blobref: str, declared: int | None) -> OpenBlob:
        """Return the blob from the first source that has the right one.

        If none has, raise the first error other than TargetMissing, else TargetMissing.
        """
        failures: list[ReadError] = []
        for source in self._sources:
            try:
                blob = await self._look(source, blobref, declared)
            except ReadError as exc:
                failures.append(exc)
            else:
                self._warn(failures, blobref, blob.shown)
                return blob
        _raise_gravest(failures)
        shown = ", ".join(source if isinstance(source, str) else source.shown for source in self._sources)
        raise TargetMissing(blobref, f"no such blob: in none of {shown}" if shown else "no such blob: no blobs= given")

    async def _look(self, source: str | BlobSource, blobref: str, declared: int | None) -> OpenBlob:
        """Return the verified blob from one source, read in place if that is a directory. Raise ReadError."""
        if isinstance(source, str):
            return await trio.to_thread.run_sync(self._examine, source, blobref, declared, limiter=self._limiter)
        return await self._fetch(source, blobref, declared)

    @contextlib.contextmanager
    def _in_time(self, source: BlobSource, blobref: str) -> Iterator[None]:
        """Raise ReadError if the body takes longer than -o read_timeout=.

        Within a second after such a timeout, the same blob has a timeout of one second at most: other tasks that
        waited for it request it again then, and the kernel repeats its read.
        """
        key = source.shown, blobref
        again = trio.current_time() - self._late.get(key, -math.inf) < _SAME
        try:
            with trio.fail_after(min(_LAST_ATTEMPT, self._timeout) if again else self._timeout):
                yield
        except trio.TooSlowError:
            self._late.put(key, trio.current_time())
            location, limit = f"{source.shown}: {blobref}", f"{self._timeout:g} s (-o read_timeout=)"
            reason = "; ".join([f"not read within {limit}", *self._factory.outages()])
            raise ReadError(location, reason) from None

    def _examine(self, directory: str, blobref: str, declared: int | None) -> OpenBlob:
        return self._files.examine(self._path(directory, blobref), blobref, declared)

    async def _fetch(self, source: BlobSource, blobref: str, declared: int | None) -> OpenBlob:
        """Fetch a blob from a BlobSource, verify it, and cache it in memory."""
        async with contextlib.AsyncExitStack() as stack:
            with self._in_time(source, blobref):
                await stack.enter_async_context(self._memory.room(blobref, declared))
                data = await source.fetch(blobref, declared)
            here = len(data) <= _HASHED_HERE
            found = (
                hash_of(data, blobref) if here
                else await trio.to_thread.run_sync(
                    hash_of, data, blobref, limiter=self._limiter, abandon_on_cancel=True
                )
            )  # fmt: skip
            if found != blobref:
                raise WrongHash(f"{source.shown}: {blobref}", ANOTHER_HASH)
            count = self._fetched.setdefault(source.kind.value, [0, 0])
            count[0], count[1] = count[0] + 1, count[1] + len(data)
            self._files.count(len(data))
            if not self._closed:
                self._memory.add(blobref, data)
            if self._writer is not None:
                await self._writer.write(blobref, data)
        return _in_memory(f"{source.shown}: {blobref}", data)

    def _warn(self, failures: list[ReadError], blobref: str, path: str) -> None:
        """Log once for each failing source or bad blob that `path` was read instead."""
        for failure in failures:
            bad = isinstance(failure, WrongHash | OutOfRange | TargetChanged)
            what = failure.where if bad else failure.where.replace(blobref, "")
            known = isinstance(failure, TargetMissing) or what in self._warned
            if not known and len(self._warned) < _WARNINGS:
                self._warned.add(what)
                log.warning("%s; read from %s instead", failure, path)


def _close(blob: OpenBlob) -> None:
    """Close a blob that is no longer kept open, now or when its last user releases it."""
    if not blob.retired:
        blob.retired = True
        if not blob.users:
            os.close(blob.fd)


def _raise_gravest(failures: list[ReadError]) -> None:
    """Raise the first failure other than TargetMissing, if there is one."""
    for failure in failures:
        if not isinstance(failure, TargetMissing):
            raise failure


def _in_memory(path: str, data: Buffer) -> OpenBlob:
    return OpenBlob(path, len(data), data=data)


def _split(url: str) -> tuple[str, int | None]:
    """Return (blobref, declared length or None) of a URL."""
    blobref, _, length = url.partition(":")
    if canonical(blobref) != blobref:
        raise ReadError(url, "not a blobref")
    return blobref, int(length) if length else None

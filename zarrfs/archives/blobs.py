"""BlobReader: reads blobs from their places, and serves no byte of one before its hash is right.

Source: RFC 10 (blobrefs). A place is a directory with one file per blob, named by its blobref, or one of those of
blobplaces.py, whose blobs are fetched whole, verified and held in memory (heldblobs.py), and with cache_dir= kept in
its directory of blobs (cache/diskblobs.py).

A blob in a directory, or in a tar that is a file, is verified where it lies (blobfiles.py), when it is first read and
again whenever its file changes, which is looked for after every read.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any

import trio

from zarrfs.archives import blobfiles
from zarrfs.archives.blobfiles import ANOTHER_HASH, Blob, BlobFiles, Where, wrong_length
from zarrfs.archives.blobkeeping import BlobKeeping
from zarrfs.archives.blobplaces import DumpPlace, Place, Places, in_thread
from zarrfs.archives.blobrefs import canonical
from zarrfs.archives.heldblobs import HeldBlobs
from zarrfs.cache.diskblobs import DiskBlobs
from zarrfs.config.options import Options
from zarrfs.errors import OutOfRange, ReadError, TargetChanged, TargetMissing, WrongHash
from zarrfs.store.targets import TargetReader
from zarrfs.system.blobhash import hash_of
from zarrfs.system.buffers import Buffer
from zarrfs.system.memory import memory_limit

log = logging.getLogger("zarrfs")

MAX_OPEN = 128  # descriptors kept: reading another blob closes the one that was not read for longest
_WARNINGS = 65_536  # that are remembered, so as not to be told again
_HASHING = 4  # blobs hashed at once
_ATTEMPTS = 3  # how often a blob may change under a reader before that is an error


class _Queue:
    """The readers that wait for one blob to be verified."""

    __slots__ = ("lock", "readers")

    def __init__(self) -> None:
        self.lock = trio.Lock()
        self.readers = 0


class BlobReader(TargetReader):
    """A TargetReader for blobrefs: urls are `sized()` ones, or plain blobrefs.

    Errors, none of which is ENOENT: TargetMissing (in no place), WrongHash, OutOfRange (another length),
    AccessDenied, TargetChanged (it does not stop changing), Loop (it lies in the mount that asks), ReadError
    (no regular file, or the disk's own).
    """

    has_whole = True

    def __init__(self, places: tuple[str, ...], options: Options | None = None) -> None:
        """Read from `places`, as -o blobs= names them, in that order. Opens nothing, and asks no server."""
        options = options or Options()
        self._makes = Places(options)
        self._places: list[str | Place] = [self._makes.find(place) for place in places]  # directories are paths
        far = [number for number, place in enumerate(self._places) if not _is_local(place)]
        self._disk: DiskBlobs | None = None
        if far and options.cache_dir is not None and options.cache != "none":
            self._disk = DiskBlobs(options.cache_dir, options.cache_size, options.cache_min_free)
            self._places.insert(far[0], self._disk.directory)
        self._remote = bool(far)
        self._timeout = options.read_timeout
        self._held = HeldBlobs(memory_limit(options) * 3 // 4)  # Places has the rest
        self._keeping = None if self._disk is None else BlobKeeping(self._disk, self._held)
        self._ahead = min(options.prefetch, self._held.limit // 4)  # bytes
        self._files = BlobFiles()
        self._open: OrderedDict[str, Blob] = OrderedDict()
        self._queues: dict[str, _Queue] = {}
        self._limiter = trio.CapacityLimiter(_HASHING)
        self._warned: set[str] = set()
        self._closed = False
        self._reads = 0
        self._fetched: dict[str, list[int]] = {}  # by kind of place: blobs, bytes

    # -- the TargetReader protocol

    @property
    def forbidden_device(self) -> int | None:
        """st_dev of the mount that asks, in which no blob may lie."""
        return self._files.forbidden_device

    @forbidden_device.setter
    def forbidden_device(self, device: int | None) -> None:
        self._files.forbidden_device = device
        for place in self._places:
            if isinstance(place, DumpPlace):
                place.forbidden_device = device

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
                    await blobfiles.read(blob, offset, length)
                    if blob.data is None else memoryview(blob.data)[offset : offset + length]
                )  # fmt: skip
            finally:
                self._release(blob)
            if data is not None:
                self._reads += 1
                return data
            self._retire(blobref, blob)
        raise TargetChanged(blob.shown, "keeps changing")

    async def get_ready(self, url: str) -> None:
        """As TargetReader.get_ready: local tars are gone through, so that where() tells."""
        for place in self._places:
            if isinstance(place, DumpPlace) and place.local:
                with contextlib.suppress(ReadError), self._in_time(place, url):  # who reads is told
                    await place.get_ready()

    async def prefetch(self, wanted: Sequence[tuple[str, int, int]]) -> None:
        """As TargetReader.prefetch; blobs that are local files are left to the page cache."""
        if not self._remote:
            return
        room, urls = self._ahead, {url: None for url, _, _ in wanted}
        async with trio.open_nursery() as nursery:
            for url in urls:
                with contextlib.suppress(ReadError):
                    blobref, declared = _split(url)
                    known = blobref in self._open or blobref in self._queues or self._held.has(blobref)
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

    def whole(self, url: str, only_sound: bool = False) -> memoryview | None:
        """All bytes of a small blob that lies in a directory or a local tar, verified; blocks, in any thread.

        None: there is none, so ask read(). Where directories have nothing but wrong ones, the errors of read().
        """
        blobref, declared = _split(url)
        failures: list[ReadError] = []
        elsewhere = False
        for place in self._places:
            elsewhere = elsewhere or not isinstance(place, str)  # a tar may have it where it is not looked for
            try:
                where = self._where(place, blobref)
                data = None if where is None else self._files.whole(where, blobref, declared)
            except ReadError as exc:
                failures.append(exc)
                continue
            if where is not None:
                if only_sound and any(not isinstance(failure, TargetMissing) for failure in failures):
                    return None
                self._tell(failures, blobref, where.path)
                return data
        if not elsewhere:
            _raise_gravest(failures)
        return None

    def _where(self, place: str | Place, blobref: str) -> Where | None:
        """Where a blob should lie in a local place; blocks, in any thread. ReadError of the place."""
        if isinstance(place, str):
            if self._disk is not None and place == self._disk.directory:
                self._disk.touch(blobref)
            return Where(os.path.join(place, blobref))
        return place.where(blobref) if isinstance(place, DumpPlace) else None

    def resolve(self, url: str) -> str:
        """The file that is read for `url`: the first that exists, else the first other place, or directory."""
        blobref, _ = _split(url)
        paths = self._paths(blobref)
        far = [f"{place.shown}: {blobref}" for place in self._places if not isinstance(place, str)]
        if len(paths) + len(far) > 1:
            paths = [path for path in paths if os.path.exists(path)] or far or paths
        return (paths + far)[0] if paths or far else blobref

    def _paths(self, blobref: str) -> list[str]:
        return [os.path.join(place, blobref) for place in self._places if isinstance(place, str)]

    def adjust(self, options: Options) -> None:
        """As TargetReader.adjust."""
        self._timeout = options.read_timeout
        self._held.resize(memory_limit(options) * 3 // 4)
        self._ahead = min(options.prefetch, self._held.limit // 4)
        self._makes.adjust(options)
        if self._disk is not None:
            self._disk.resize(options.cache_size, options.cache_min_free)

    def stats(self) -> dict[str, Any]:
        """Counters, for the log."""
        far: dict[str, Any] = {}
        if not all(isinstance(place, str) for place in self._places):
            far = {
                **self._makes.stats(),
                "blobs_fetched": {kind: count for kind, (count, _) in self._fetched.items()},
                "blob_bytes_fetched": {kind: count for kind, (_, count) in self._fetched.items()},
                "blobs_held": len(self._held), "blob_bytes_held": self._held.bytes,
            }
        if self._disk is not None:
            far["blob_disk"] = self._disk.stats()
        return {
            **far, "blob_reads": self._reads, "blobs_open": len(self._open),
            "blobs_verified": self._files.hashed, "blob_bytes_verified": self._files.hashed_bytes,
        }  # fmt: skip

    async def aclose(self) -> None:
        self._closed = True
        while self._open:
            self._retire(*next(iter(self._open.items())))
        self._held.clear()
        for place in self._places:
            if not isinstance(place, str):
                await place.aclose()
        await self._makes.aclose()
        if self._keeping is not None:
            await self._keeping.aclose()

    # -- descriptors; all of this runs on the loop

    async def _acquire(self, blobref: str, declared: int | None) -> Blob:
        """The verified blob with one more user, verifying it unless somebody just did."""
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

    def _take(self, blobref: str) -> Blob | None:
        if self._closed:
            raise ReadError(blobref, "the reader is closed")
        blob = self._open.get(blobref)
        if blob is not None:
            self._open.move_to_end(blobref)
            blob.users += 1
            return blob
        data = self._held.get(blobref)
        return None if data is None else _in_memory(blobref, data)

    def _keep(self, blobref: str, blob: Blob) -> None:
        blob.users += 1
        self._open[blobref] = blob
        if self._closed:
            self._retire(blobref, blob)
        elif len(self._open) > MAX_OPEN:
            self._retire(*next(iter(self._open.items())))

    def _retire(self, blobref: str, blob: Blob) -> None:
        """Take `blob` from the open ones; its last user closes it."""
        if self._open.get(blobref) is blob:
            del self._open[blobref]
        if not blob.retired:
            blob.retired = True
            if not blob.users:
                os.close(blob.fd)

    def _release(self, blob: Blob) -> None:
        if blob.data is not None:
            return
        blob.users -= 1
        if blob.retired and not blob.users:
            os.close(blob.fd)

    # -- finding

    async def _find(self, blobref: str, declared: int | None) -> Blob:
        """The blob from the first place that has the right one; else the gravest of the errors."""
        failures: list[ReadError] = []
        for place in self._places:
            try:
                blob = await self._look(place, blobref, declared)
            except ReadError as exc:
                failures.append(exc)
            else:
                self._tell(failures, blobref, blob.shown)
                return blob
        _raise_gravest(failures)
        shown = ", ".join(place if isinstance(place, str) else place.shown for place in self._places)
        raise TargetMissing(blobref, f"no such blob: in none of {shown}" if shown else "no such blob: no blobs= given")

    async def _look(self, place: str | Place, blobref: str, declared: int | None) -> Blob:
        if _is_local(place):
            if isinstance(place, DumpPlace):
                with self._in_time(place, blobref):
                    await place.get_ready()
            try:
                blob = await trio.to_thread.run_sync(self._examine, place, blobref, declared, limiter=self._limiter)
            except (WrongHash, OutOfRange):
                if not isinstance(place, str):
                    with contextlib.suppress(TargetMissing):  # the tar may have it elsewhere
                        return await self._fetch(place, blobref, declared)
                raise
            if blob is not None:
                return blob
        assert not isinstance(place, str)
        return await self._fetch(place, blobref, declared)

    @contextlib.contextmanager
    def _in_time(self, place: Place, blobref: str) -> Iterator[None]:
        """ReadError where what is inside takes longer than it may."""
        try:
            with trio.fail_after(self._timeout):
                yield
        except trio.TooSlowError:
            where, limit = f"{place.shown}: {blobref}", f"{self._timeout:g} s (-o read_timeout=)"
            raise ReadError(where, f"not read within {limit}") from None

    def _examine(self, place: str | Place, blobref: str, declared: int | None) -> Blob | None:
        """The blob from where it should lie in a local place; None where that is not known. In a worker thread."""
        where = self._where(place, blobref)
        return None if where is None else self._files.examine(where, blobref, declared)

    async def _fetch(self, place: Place, blobref: str, declared: int | None) -> Blob:
        """The blob from a place that is no directory, verified and held."""
        async with self._held.room(blobref, declared):
            with self._in_time(place, blobref):
                data = await place.fetch(blobref, declared)
            if await in_thread(self._limiter, hash_of, data, blobref) != blobref:
                raise WrongHash(f"{place.shown}: {blobref}", ANOTHER_HASH)
            count = self._fetched.setdefault(place.kind.value, [0, 0])
            count[0], count[1] = count[0] + 1, count[1] + len(data)
            self._files.count(len(data))
            if not self._closed:
                self._held.add(blobref, data)
            if self._keeping is not None:
                await self._keeping.keep(blobref, data)
        return _in_memory(f"{place.shown}: {blobref}", data)

    def _tell(self, failures: list[ReadError], blobref: str, path: str) -> None:
        """Say once of each place that has a bad blob, or that fails, that another place, `path`, has the right one."""
        for failure in failures:
            bad = isinstance(failure, WrongHash | OutOfRange | TargetChanged)
            what = failure.where if bad else failure.where.replace(blobref, "")
            known = isinstance(failure, TargetMissing) or what in self._warned
            if not known and len(self._warned) < _WARNINGS:
                self._warned.add(what)
                log.warning("%s; read from %s instead", failure, path)


def _raise_gravest(failures: list[ReadError]) -> None:
    """Raise the first failure that is not that there is no such blob, if there is one."""
    for failure in failures:
        if not isinstance(failure, TargetMissing):
            raise failure


def _in_memory(path: str, data: Buffer) -> Blob:
    return Blob(path, len(data), data=data)


def _is_local(place: str | Place) -> bool:
    """Whether blobs are read where they lie."""
    return isinstance(place, str) or (isinstance(place, DumpPlace) and place.local)


def _split(url: str) -> tuple[str, int | None]:
    """(blobref, declared length) of a url."""
    blobref, _, length = url.partition(":")
    if canonical(blobref) != blobref:
        raise ReadError(url, "not a blobref")
    return blobref, int(length) if length else None

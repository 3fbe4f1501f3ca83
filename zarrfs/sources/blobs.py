"""BlobReader: reads blobs from their places, and serves no byte of one before its hash is right.

Source: RFC 10 (blobrefs). A place is a directory with one file per blob, named by its blobref, or one of those of
blobplaces.py, whose blobs are fetched whole, verified and held in memory (heldblobs.py), and with cache_dir= kept in
its directory of blobs (transfer/diskblobs.py).

A blob in a directory is verified when it is first read, and again whenever its file changes. What tells a change are
the file's size, mtime and ctime, looked at after every read: the kernel sets them before it changes a byte.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import stat
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, NamedTuple

import trio

from zarrfs.errors import (
    AccessDenied,
    Loop,
    OutOfRange,
    ReadError,
    TargetChanged,
    TargetMissing,
    WrongHash,
)
from zarrfs.options import Options
from zarrfs.sources.blobhash import digest as _digest
from zarrfs.sources.blobhash import hash_of
from zarrfs.sources.blobkeeping import BlobKeeping
from zarrfs.sources.blobplaces import Place, Places, in_thread
from zarrfs.sources.blobrefs import canonical
from zarrfs.sources.heldblobs import HeldBlobs
from zarrfs.transfer.api import Buffer
from zarrfs.transfer.diskblobs import DiskBlobs
from zarrfs.transfer.local import read_cached
from zarrfs.transfer.memory import memory_limit

log = logging.getLogger("zarrfs")

MAX_OPEN = 128  # descriptors kept: reading another blob closes the one that was not read for longest
MAX_VERDICTS = 65_536  # verified files remembered, open or not
WHOLE_MAX = 4 << 20  # bytes of a blob that whole() gives
_HASHING = 4  # blobs hashed at once
_ATTEMPTS = 3  # how often a blob may change under a reader before that is an error
_ANOTHER_HASH = "its bytes have another hash than its name says"
_TICK_NS = 20_000_000  # longer than the clock of file times stands still (10 ms at 100 Hz)


class _Identity(NamedTuple):
    """What changes when a file does."""

    device: int
    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int


class _Blob:
    """A verified blob: its descriptor, or its `data`."""

    __slots__ = ("data", "fd", "identity", "path", "retired", "users")

    def __init__(self, path: str, fd: int, identity: _Identity, data: Buffer | None = None) -> None:
        self.path, self.fd, self.identity, self.data = path, fd, identity, data
        self.users = 0
        self.retired = False  # to be closed by its last user


class _Queue:
    """The readers that wait for one blob to be verified."""

    __slots__ = ("lock", "readers")

    def __init__(self) -> None:
        self.lock = trio.Lock()
        self.readers = 0


class BlobReader:
    """A TargetReader for blobrefs: urls are `sized()` ones, or plain blobrefs.

    Errors, none of which is ENOENT: TargetMissing (in no place), WrongHash, OutOfRange (another length),
    AccessDenied, TargetChanged (it does not stop changing), Loop (it lies in the mount that asks), ReadError
    (no regular file, or the disk's own).
    """

    def __init__(self, places: tuple[str, ...], options: Options | None = None) -> None:
        """Read from `places`, as -o blobs= names them, in that order. Opens nothing, and asks no server."""
        options = options or Options()
        self._makes = Places(options)
        self._places: list[str | Place] = [self._makes.find(place) for place in places]  # directories are paths
        far = [number for number, place in enumerate(self._places) if not isinstance(place, str)]
        self._disk: DiskBlobs | None = None
        if far and options.cache_dir is not None and options.cache != "none":
            self._disk = DiskBlobs(options.cache_dir, options.cache_size, options.cache_min_free)
            self._places.insert(far[0], self._disk.directory)
        self.remote = bool(far)
        self._timeout = options.read_timeout
        self._held = HeldBlobs(memory_limit(options) * 3 // 4)  # Places has the rest
        self._keeping = None if self._disk is None else BlobKeeping(self._disk, self._held)
        self._ahead = min(options.prefetch, self._held.limit // 4)  # bytes
        self.forbidden_device: int | None = None  # st_dev of the mount that asks
        self._open: OrderedDict[str, _Blob] = OrderedDict()
        self._queues: dict[str, _Queue] = {}
        self._verdicts: OrderedDict[tuple[str, _Identity], bool] = OrderedDict()
        self._verdicts_lock = threading.Lock()
        self._limiter = trio.CapacityLimiter(_HASHING)
        self._warned: set[str] = set()
        self._closed = False
        self._reads = self._hashed = self._hashed_bytes = 0
        self._fetched: dict[str, list[int]] = {}  # by kind of place: blobs, bytes

    # -- the TargetReader protocol

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
            if blob.data is not None:
                if offset + length > len(blob.data):
                    raise OutOfRange(blob.path, f"has {len(blob.data)} bytes, not {offset + length}")
                self._reads += 1
                return memoryview(blob.data)[offset : offset + length]
            try:
                if offset + length > blob.identity.size:
                    raise OutOfRange(blob.path, f"has {blob.identity.size} bytes, not {offset + length}")
                data, identity = await _pread(blob.fd, offset, length)
            except OSError as exc:
                raise _read_error(blob.path, exc) from exc
            finally:
                self._release(blob)
            if identity == blob.identity:
                if len(data) != length:
                    raise OutOfRange(blob.path, f"ends before byte {offset + length}")
                self._reads += 1
                return data
            self._retire(blobref, blob)
        raise TargetChanged(blob.path, "keeps changing")

    async def get_ready(self, url: str) -> None:
        """As TargetReader.get_ready: there is nothing to do."""

    async def prefetch(self, wanted: Sequence[tuple[str, int, int]]) -> None:
        """As TargetReader.prefetch; blobs that are local files are left to the page cache."""
        if not self.remote:
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
        return blob.identity.size

    def whole(self, url: str) -> memoryview | None:
        """All bytes of a blob of at most WHOLE_MAX bytes that lies in a directory, verified; blocks, in any thread.

        None: there is none, so ask read(). Where directories have nothing but wrong ones, the errors of read().
        """
        blobref, declared = _split(url)
        failures: list[ReadError] = []
        for path in self._paths(blobref):
            if self._disk is not None and os.path.dirname(path) == self._disk.directory:
                self._disk.touch(blobref)
            try:
                data = self._slurp(path, blobref, declared)
            except OSError as exc:
                failures.append(_read_error(path, exc))
            except ReadError as exc:
                failures.append(exc)
            else:
                self._tell(failures, blobref, path)
                return data
        if not self.remote:
            _raise_gravest(failures)
        return None

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
        if self.remote:
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
            "blobs_verified": self._hashed, "blob_bytes_verified": self._hashed_bytes,
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

    async def _acquire(self, blobref: str, declared: int | None) -> _Blob:
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
        if declared is not None and blob.identity.size != declared:
            self._release(blob)
            raise _wrong_length(blob.path, blob.identity.size, declared)
        return blob

    def _take(self, blobref: str) -> _Blob | None:
        if self._closed:
            raise ReadError(blobref, "the reader is closed")
        blob = self._open.get(blobref)
        if blob is not None:
            self._open.move_to_end(blobref)
            blob.users += 1
            return blob
        data = self._held.get(blobref)
        return None if data is None else _in_memory(blobref, data)

    def _keep(self, blobref: str, blob: _Blob) -> None:
        blob.users += 1
        self._open[blobref] = blob
        if self._closed:
            self._retire(blobref, blob)
        elif len(self._open) > MAX_OPEN:
            self._retire(*next(iter(self._open.items())))

    def _retire(self, blobref: str, blob: _Blob) -> None:
        """Take `blob` from the open ones; its last user closes it."""
        if self._open.get(blobref) is blob:
            del self._open[blobref]
        if not blob.retired:
            blob.retired = True
            if not blob.users:
                os.close(blob.fd)

    def _release(self, blob: _Blob) -> None:
        if blob.data is not None:
            return
        blob.users -= 1
        if blob.retired and not blob.users:
            os.close(blob.fd)

    # -- finding

    async def _find(self, blobref: str, declared: int | None) -> _Blob:
        """The blob from the first place that has the right one; else the gravest of the errors."""
        failures: list[ReadError] = []
        for place in self._places:
            try:
                blob = await self._look(place, blobref, declared)
            except ReadError as exc:
                failures.append(exc)
            else:
                self._tell(failures, blobref, blob.path)
                return blob
        _raise_gravest(failures)
        shown = ", ".join(place if isinstance(place, str) else place.shown for place in self._places)
        raise TargetMissing(blobref, f"no such blob: in none of {shown}" if shown else "no such blob: no blobs= given")

    async def _look(self, place: str | Place, blobref: str, declared: int | None) -> _Blob:
        if not isinstance(place, str):
            return await self._fetch(place, blobref, declared)
        path = os.path.join(place, blobref)
        if self._disk is not None and place == self._disk.directory:
            await trio.to_thread.run_sync(self._disk.touch, blobref, limiter=self._limiter)
        try:
            return await trio.to_thread.run_sync(self._examine, path, blobref, declared, limiter=self._limiter)
        except OSError as exc:
            raise _read_error(path, exc) from exc

    async def _fetch(self, place: Place, blobref: str, declared: int | None) -> _Blob:
        """The blob from a place that is no directory, verified and held."""
        async with self._held.room(blobref, declared):
            try:
                with trio.fail_after(self._timeout):
                    data = await place.fetch(blobref, declared)
            except trio.TooSlowError:
                where, limit = f"{place.shown}: {blobref}", f"{self._timeout:g} s (-o read_timeout=)"
                raise ReadError(where, f"not read within {limit}") from None
            if await in_thread(self._limiter, hash_of, data, blobref) != blobref:
                raise WrongHash(f"{place.shown}: {blobref}", _ANOTHER_HASH)
            count = self._fetched.setdefault(place.kind.value, [0, 0])
            count[0], count[1] = count[0] + 1, count[1] + len(data)
            self._hashed, self._hashed_bytes = self._hashed + 1, self._hashed_bytes + len(data)
            if not self._closed:
                self._held.add(blobref, data)
            if self._keeping is not None:
                await self._keeping.keep(blobref, data)
        return _in_memory(f"{place.shown}: {blobref}", data)

    # -- verifying; all of this runs in a worker thread

    def _examine(self, path: str, blobref: str, declared: int | None) -> _Blob:
        """The blob at `path`, open, if it is the one."""
        fd = _opened(path)
        try:
            return _Blob(path, fd, self._check(fd, path, blobref, declared))
        except BaseException:
            os.close(fd)
            raise

    def _check(self, fd: int, path: str, blobref: str, declared: int | None) -> _Identity:
        """What identifies the blob, once everything about it is right."""
        identity = _identity(self._status(fd, path, declared))
        if not self._right(fd, path, blobref, identity):
            raise WrongHash(path, _ANOTHER_HASH)
        return identity

    def _status(self, fd: int, path: str, declared: int | None) -> os.stat_result:
        """What fstat says, if the file can be the blob."""
        status = os.fstat(fd)
        if status.st_dev == self.forbidden_device:
            raise Loop(path, "lies in the mount that refers to it")
        if not stat.S_ISREG(status.st_mode):
            raise ReadError(path, "not a regular file")
        if declared is not None and status.st_size != declared:
            raise _wrong_length(path, status.st_size, declared)
        return status

    def _slurp(self, path: str, blobref: str, declared: int | None) -> memoryview | None:
        """The bytes of the blob at `path`, verified; None if they are more than WHOLE_MAX."""
        fd = _opened(path)
        try:
            size = self._status(fd, path, declared).st_size
            if size > WHOLE_MAX:
                return None
            data: Buffer = os.pread(fd, size, 0)
            if len(data) != size:
                data, _ = _fill(fd, bytearray(data), 0, size)
        finally:
            os.close(fd)
        if hash_of(data, blobref) != blobref:
            raise WrongHash(path, _ANOTHER_HASH)
        with self._verdicts_lock:
            self._hashed += 1
            self._hashed_bytes += size
        return memoryview(data)

    def _right(self, fd: int, path: str, blobref: str, identity: _Identity) -> bool:
        """Whether the file's bytes have the hash that `blobref` names: remembered, or found out now."""
        known = (blobref, identity)
        with self._verdicts_lock:
            if known in self._verdicts:
                self._verdicts.move_to_end(known)
                return self._verdicts[known]
        # a write in the same tick as the last one would not show: let the tick pass before the first byte
        age = time.time_ns() - identity.ctime_ns
        if age < _TICK_NS:
            time.sleep(min(_TICK_NS, _TICK_NS - age) / 1e9)
        right = _digest(fd, blobref, identity.size) == blobref
        if _identity(os.fstat(fd)) != identity:
            raise TargetChanged(path, "changed while it was verified")
        with self._verdicts_lock:
            self._hashed += 1
            self._hashed_bytes += identity.size
            self._verdicts[known] = right
            if len(self._verdicts) > MAX_VERDICTS:
                self._verdicts.popitem(last=False)
        return right

    def _tell(self, failures: list[ReadError], blobref: str, path: str) -> None:
        """Say once of each place that has a bad blob, or that fails, that another place, `path`, has the right one."""
        for failure in failures:
            bad = isinstance(failure, WrongHash | OutOfRange | TargetChanged)
            what = failure.where if bad else failure.where.replace(blobref, "")
            known = isinstance(failure, TargetMissing) or what in self._warned
            if not known and len(self._warned) < MAX_VERDICTS:
                self._warned.add(what)
                log.warning("%s; read from %s instead", failure, path)


def _raise_gravest(failures: list[ReadError]) -> None:
    """Raise the first failure that is not that there is no such blob, if there is one."""
    for failure in failures:
        if not isinstance(failure, TargetMissing):
            raise failure


def _in_memory(path: str, data: Buffer) -> _Blob:
    return _Blob(path, -1, _Identity(0, 0, len(data), 0, 0), data)


def _split(url: str) -> tuple[str, int | None]:
    """(blobref, declared length) of a url."""
    blobref, _, length = url.partition(":")
    if canonical(blobref) != blobref:
        raise ReadError(url, "not a blobref")
    return blobref, int(length) if length else None


def _identity(status: os.stat_result) -> _Identity:
    return _Identity(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


def _opened(path: str) -> int:
    # a fifo must not hold us up, and a place may hold symlinks: the hash decides
    return os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)


def _wrong_length(path: str, size: int, declared: int) -> OutOfRange:
    return OutOfRange(path, f"a blob of {size} bytes, where the archive says {declared}")


def _read_error(path: str, exc: OSError) -> ReadError:
    if exc.errno in (errno.ENOENT, errno.ENOTDIR):
        return TargetMissing(path, "no such blob")
    reason = (exc.strerror or str(exc)).lower()
    if exc.errno in (errno.EACCES, errno.EPERM):
        return AccessDenied(path, reason)
    return ReadError(path, reason)


async def _pread(fd: int, offset: int, length: int) -> tuple[Buffer, _Identity]:
    """Up to `length` bytes, and the identity of the file after they were read."""
    data = read_cached(fd, offset, length)
    if len(data) == length:
        return data, _identity(os.fstat(fd))
    return await trio.to_thread.run_sync(_fill, fd, data, offset, length)


def _fill(fd: int, data: bytearray, offset: int, length: int) -> tuple[Buffer, _Identity]:
    """`data` with what the file has after it, up to `length` bytes; blocks."""
    while len(data) < length and (more := os.pread(fd, length - len(data), offset + len(data))):
        data += more
    return data, _identity(os.fstat(fd))

"""DiskCache: blocks of targets in a directory that any number of processes and nodes share.

What is kept where: diskfiles.py. How much: diskspace.py. Who fetches it: leases.py. For whom: docs/disk-cache.md.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import threading
import time
from collections import OrderedDict

from zarrfs.cache.diskfiles import RECORD, Block, Damaged, Layout, checksum, hash_of, header
from zarrfs.cache.diskspace import FOLDER_COST, Space, cost
from zarrfs.cache.leases import Claims
from zarrfs.config.redaction import without_secrets
from zarrfs.net.versions import Version
from zarrfs.system.buffers import Buffer

log = logging.getLogger("zarrfs.transfer")

_NOW = 1 << 20  # bytes that are read on the loop at most
UNIT = 1 << 20  # bytes: where runs of tiny values are cut
PIECES = 32  # of a unit that do not touch each other
UNITS_HELD = 4  # in memory, as reading a tiny value from the disk means reading and verifying its whole unit
BACK_OFF, BACK_OFF_MAX = 30.0, 600.0  # seconds without writing after a failure; doubled while it goes on failing
CROWDED = 1.0  # seconds after a block that found no room: others are not told to wait for what may not be kept
TELL_AGAIN = 3600.0  # seconds after which the same warning is worth another line
SKEW = 300.0  # seconds that the clocks of nodes may differ

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
# What is wrong with one file, not with the disk.
_ONE_FILE = (errno.EISDIR, errno.ENOTEMPTY, errno.EEXIST, errno.ENAMETOOLONG)


class DiskCache:
    """Blocks in a directory. Thread-safe; every method but the constructor blocks; none raises for what the disk does.

    A file is believed where its checksum says so. That finds accidents: who may write in the directory can also
    forge blocks, so it must be shared only with those who are trusted. A failing or full disk is told once in the
    log; then nothing is written for a while, and reading goes on.
    """

    def __init__(self, directory: str, size: int, min_free: int) -> None:
        """Keep at most `size` bytes, and let `min_free` bytes of the disk be free. Touches nothing on the disk."""
        self._layout = Layout(directory)
        self._space = Space(self._layout, size, min_free)
        self._lock = threading.Lock()
        self._counts = dict.fromkeys(
            ("hits", "misses", "bytes_read", "writes", "bytes_written", "dropped", "errors"), 0
        )
        self._units: OrderedDict[str, list[Block]] = OrderedDict()  # pieces of the last ones read, by first name
        self._growing = [threading.Lock() for _ in range(16)]  # of units, by the first digit of their names
        self._pause = 0.0  # seconds, of the back-off that goes on or the last one
        self._until = 0.0  # monotonic; nothing is written before
        self._told: dict[str, float] = {}
        self._crowded = 0.0  # monotonic, as _until
        self._closed = False
        self.claims = Claims(self._layout, self._keeps)

    def version(self, target: str, newer_than: float) -> Version | None:
        """Return the version of `target` that its server last gave, if after `newer_than` (seconds since 1970)."""
        name = _record_name(target)
        try:
            return self._recorded(name, newer_than)
        except FileNotFoundError:
            pass
        except Damaged:
            self._damaged(name)
        except OSError as exc:
            self._unreadable(exc)
        return None

    def remember(self, target: str, version: Version) -> None:
        """Note that the server of `target` has just said that this is its version."""
        name = _record_name(target)
        body = json.dumps(
            {"tag": version.tag, "size": version.size, "target": without_secrets(target), "name": name}
        ).encode()
        text = checksum(body) + b"\n" + body
        if not self._writes():
            return
        try:
            try:
                if self._layout.load_record(name)[0] == text:
                    self._layout.touch(name)
                    return
            except (Damaged, FileNotFoundError, PermissionError):
                pass
            self._put(name, [text])
        except OSError as exc:
            self._failed(exc)

    def read(self, target: str, version: Version, start: int, stop: int, again: bool = False) -> Buffer | None:
        """Exactly the bytes [start, stop) of `target`, verified; None where they are not kept.

        `again`: that they were not a moment ago has been counted.
        """
        data: Buffer | None = None
        if not self._closed and start < stop:
            if stop - start < UNIT:
                data = self._held(target, version, start, stop)
            if data is None:
                block = self._load(_block_name(target, version, start, stop), stop - start)
                data = block.data if block is not None else None
            if data is None:  # large ones, too: they may have been cut out of what came for many tiny ones
                data = self._from_units(target, version, start, stop)
        with self._lock:
            if data is not None or not again:
                self._counts["misses" if data is None else "hits"] += 1
            self._counts["bytes_read"] += len(data or b"")
        return data

    def read_now(
        self, target: str, version: Version | None, newer_than: float, start: int, stop: int
    ) -> tuple[Version, Buffer, str] | None:
        """Return what version() and read() would, if that needs no waiting; None: call these, in a thread.

        `version` is None where it is not known yet. It takes the time of a copy, of at most _NOW bytes. The third is
        the name of the block if touch() is due, else "".
        """
        if self._closed or stop - start > _NOW:
            return None
        try:
            if version is None:
                version = self._recorded(_record_name(target), newer_than, now=True)
                if version is None:
                    return None
            stop = min(stop, version.size)
            name = _block_name(target, version, start, stop)
            block = self._layout.load(name, stop - start, now=True)
        except (OSError, Damaged):
            return None
        with self._lock:
            self._counts["hits"] += 1
            self._counts["bytes_read"] += len(block.data)
        return version, block.data, name if block.due else ""

    def touch(self, name: str) -> None:
        """Mark a block as used."""
        with contextlib.suppress(OSError):  # read-only, of somebody else, or gone
            self._layout.touch(name)

    def write(self, target: str, version: Version, start: int, data: Buffer, run: bool = False) -> None:
        """Keep `data`, the bytes of `target` from `start` on, if there is room.

        One block is found again under its exact (start, stop). A `run`, many tiny values that came in one request,
        is cut into units, and any range within what is kept of one or two neighbouring units is found again.
        """
        view = memoryview(data).cast("B")
        if not view or not self._writes():
            return
        try:
            if not run:
                name = _block_name(target, version, start, start + len(view))
                self._keep(name, target, start, view)
            else:
                stop = start + len(view)
                for unit in range(start // UNIT, -(-stop // UNIT)):
                    low, high = max(start, unit * UNIT), min(stop, (unit + 1) * UNIT)
                    names = [_unit_name(target, version, unit, number) for number in range(PIECES)]
                    with self._growing[int(names[0][0], 16)]:
                        self._grow(names, target, low, view[low - start : high - start])
        except OSError as exc:
            self._failed(exc)

    def stats(self) -> dict[str, int]:
        """Counts since the start; "dropped" are blocks that were not kept for want of room, "evicted" are files."""
        with self._lock:
            counts = {**self._counts, "evicted": self._space.evicted}
        return {**counts, **self.claims.stats()}

    def resize(self, size: int, min_free: int) -> None:
        """Other bounds from now on."""
        self._space.resize(size, min_free)

    def close(self) -> None:
        """Give back what was reserved; from now on nothing is found and nothing kept."""
        self._closed = True
        try:
            self.claims.close()
            self._space.close()
        finally:
            self._layout.forget()

    def look_again(self) -> None:
        """Open directories anew: a network file system (NFS) then asks its server what is in them."""
        self._layout.forget()

    # -- reading

    def _recorded(self, name: str, newer_than: float, now: bool = False) -> Version | None:
        """Return the record `name` if it was written or touched after `newer_than`. OSError, Damaged."""
        text, seen = self._layout.load_record(name, now)
        return parse_record(text, name)[0] if newer_than < seen < time.time() + SKEW else None

    def _load(self, name: str, length_max: int) -> Block | None:
        try:
            return self._layout.load(name, length_max)
        except FileNotFoundError:
            return None
        except Damaged:
            self._damaged(name)
        except OSError as exc:
            self._unreadable(exc)
        return None

    def _held(self, target: str, version: Version, start: int, stop: int) -> bytes | None:
        """A range of one of the units in memory."""
        if not self._units:
            return None
        with self._lock:
            pieces = self._units.get(_unit_name(target, version, start // UNIT, 0), ())
        return next((part for piece in pieces if (part := _part(piece, start, stop)) is not None), None)

    def _from_units(self, target: str, version: Version, start: int, stop: int) -> bytes | None:
        parts = []
        for unit in range(start // UNIT, (stop - 1) // UNIT + 1):
            low, high = max(start, unit * UNIT), min(stop, (unit + 1) * UNIT)
            pieces, part = [], None
            for number in range(PIECES):
                piece = self._load(_unit_name(target, version, unit, number), UNIT)
                if piece is None:
                    break
                pieces.append(piece)
                part = _part(piece, low, high)
                if part is not None:
                    break
            if part is None:
                return None
            with self._lock:
                name = _unit_name(target, version, unit, 0)
                self._units[name] = pieces
                self._units.move_to_end(name)
                if len(self._units) > UNITS_HELD:
                    self._units.popitem(last=False)
            parts.append(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _damaged(self, name: str) -> None:
        self._layout.remove(name)
        self._count("errors")

    def _unreadable(self, exc: OSError) -> None:
        if exc.errno not in (errno.ESTALE, errno.ENOTDIR):  # removed by another node, or there is nothing yet
            self._count("errors")
            self._tell(exc, "cannot be read")

    # -- writing

    def _writes(self) -> bool:
        if self._closed:
            return False
        if time.monotonic() < self._until:
            self._count("dropped")
            return False
        return True

    def _keeps(self) -> bool:
        return not self._closed and time.monotonic() >= max(self._until, self._crowded)

    def _keep(self, name: str, target: str, start: int, data: Buffer) -> None:
        """Write a block unless it is there, from another process."""
        head = header(name, hash_of(target), start, data)
        if self._layout.size(name) != len(head) + len(data):
            self._put(name, [head, data])

    def _grow(self, names: list[str], target: str, start: int, data: memoryview) -> None:
        """Put a piece of a unit to a kept one that it touches, or beside them, or in place of a shorter one."""
        whole: Buffer = data
        stop, name = start + len(data), names[-1]
        for one in names:
            old = self._load(one, UNIT)
            if old is None:
                name = one
                break
            old_stop = old.start + len(old.data)
            if old.start <= start and stop <= old_stop:
                return
            if start <= old_stop and old.start <= stop:
                before, after = old.data[: max(0, start - old.start)], old.data[max(0, stop - old.start) :]
                whole, start, name = b"".join((before, data, after)), min(start, old.start), one
                break
            if one == names[-1] and len(old.data) >= len(data):
                return
        self._put(name, [header(name, hash_of(target), start, whole), whole])

    def _put(self, name: str, parts: list[Buffer]) -> None:
        size = sum(map(len, parts))
        for again in (False, True):
            try:
                kept = self._put_once(name, parts, size)
            except FileNotFoundError:  # somebody has removed the directory, or has never made it
                if again:
                    raise
                self._layout.forget()
                self._space.forget()
            except OSError as exc:
                if again or exc.errno not in _NO_ROOM:
                    raise  # else others, who write too, were faster: the next attempt makes room, if that helps
            else:
                break
        with self._lock:
            self._counts["writes" if kept else "dropped"] += 1
            self._counts["bytes_written"] += size if kept else 0
            self._crowded = self._crowded if kept else time.monotonic() + CROWDED
            self._pause = 0.0 if kept else self._pause

    def _put_once(self, name: str, parts: list[Buffer], size: int) -> bool:
        count, taken = cost(size), 0
        try:
            self._layout.folder(name[:2])
        except FileNotFoundError:
            count += FOLDER_COST
        if not self._space.take(count):
            return False
        try:
            taken = self._layout.put(name, parts)
        except OSError as exc:
            if exc.errno not in _ONE_FILE:
                raise
            self._layout.remove(name)  # a directory, perhaps
            self._count("errors")
            return False
        finally:
            self._space.done(count, taken)
        return True

    def _failed(self, exc: OSError) -> None:
        with self._lock:
            self._counts["errors"] += 1
            self._counts["dropped"] += 1
            self._pause = min(max(BACK_OFF, 2 * self._pause), BACK_OFF_MAX)
            self._until = time.monotonic() + self._pause
        if exc.errno in _NO_ROOM:
            self._space.full()
        self._tell(exc, "nothing is kept there for now")

    def _tell(self, exc: OSError, outcome: str) -> None:
        reason = (exc.strerror or str(exc)).lower()
        now = time.monotonic()
        with self._lock:
            news = now - self._told.get(reason, -TELL_AGAIN) >= TELL_AGAIN
            if news:
                self._told[reason] = now
        if news:
            log.warning("cache_dir=%s: %s; %s", self._layout.directory, reason, outcome)

    def _count(self, what: str) -> None:
        with self._lock:
            self._counts[what] += 1


def _part(block: Block | None, start: int, stop: int) -> bytes | None:
    if block is None or start < block.start or stop > block.start + len(block.data):
        return None
    return bytes(block.data[start - block.start : stop - block.start])  # a slice would keep the whole unit in memory


def _block_name(target: str, version: Version, start: int, stop: int) -> str:
    return hash_of(target, version.tag, version.size, start, stop).hex()


def _unit_name(target: str, version: Version, unit: int, piece: int) -> str:
    return hash_of(target, version.tag, version.size, "u", unit, piece).hex()


def _record_name(target: str) -> str:
    return hash_of(target).hex() + RECORD


def parse_record(text: bytes, name: str) -> tuple[Version, str]:
    """(version, target without secrets) of a version record called `name`. Damaged if it is none."""
    check, _, body = text.partition(b"\n")
    if checksum(body) != check:
        raise Damaged("wrong checksum")
    try:
        about = json.loads(body)
        version, shown = Version(about["tag"], about["size"]), about["target"]
    except (ValueError, KeyError, TypeError):
        raise Damaged("no version record") from None
    if about["name"] != name:
        raise Damaged("another file")
    return version, shown

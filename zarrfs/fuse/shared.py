"""Memory that the processes of one mount share: inode numbers, open handles, versions of cached pages, process states.

All of it is mapped before the fork. A process writes only its own cells, or cells of at most eight bytes in which any
value is safe. So there are no locks, which a killed process could hold forever.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
from collections.abc import Hashable, Iterator
from typing import Any, NamedTuple

import pyfuse3
import xxhash

from zarrfs.errors import NotFound, ReadError
from zarrfs.fuse.inodes import InodeTable
from zarrfs.store.api import Kind, Store
from zarrfs.system.sharedtable import SharedTable

_NORESERVE = 0x4000  # MAP_NORESERVE of mmap(2): untouched pages need no memory
_HINTS = 1 << 17  # cells with the process whose table has the record of an inode
_PAGES = 1 << 16  # cells with versions of cached pages
_LATEST = 1 << 16  # cells with the versions of documents and chunks that were seen last
_SIZED = 1 << 22  # cells that say whether a size was sent for an inode; several inodes share a cell
_HANDLES = 1 << 16  # open handles of one process
_NAME = 256
_LISTING_STATE = struct.Struct(f"<QH{_NAME}s")  # state of a listing: position, length of the name before it, that name
_DIRECTORIES = 1 << 13  # open directories of one process
# a slot: sequence number and, in the upper half, generation (both 0: free); inode, version, pid, descriptor, st_dev,
# st_ino
_SLOT = struct.Struct("=QQQIiQQ")
_SEQUENCE = (1 << 32) - 1
_WORDS, _SLOT_SIZE, _PLACE_SIZE = 8, 64, 512  # words and bytes of a slot, bytes of a place
_SLOTS = (1 << 40) - 1  # the bits of a handle with its slot; those above have the sequence number
_IDENTITY = 9  # bytes: st_ino has 64 bits, and other identities may be negative
# the record of an inode: kind, whether it has an identity, generation, identity, length of the key; then follow the
# key and the bytes of Store.export_entry()
_RECORD = struct.Struct(f"<BBI{_IDENTITY}sH")
_KNOWN = 32_768  # names kept in the memory of a process
_M64 = (1 << 64) - 1
_INODES = (1 << 62) - 1
_NO_IDENTITY = 0x5851F42D4C957F2D

# Cells of a process: numbers of handles opened and released, and of requests; whether it is parked; how often it would
# have woken another process but none was parked; how many slots for directories and for files it has used; whether it
# runs; how often it was woken; the last generation in which it found a changed target; and the newest handle, as long
# as its number may not have been sent to the kernel yet.
OPENED, RELEASED, USES, PARKED, WANTED, DIRECTORIES, FILES, RUNS, WOKEN, CHANGED, NEW = range(11)
_CELLS = 11


def _shared(size: int) -> mmap.mmap:
    return mmap.mmap(-1, size, flags=mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | _NORESERVE)


def digest(version: Hashable) -> int:
    """Return a 64-bit number that is the same in all processes of a mount for equal versions of a value."""
    return xxhash.xxh3_64_intdigest(repr(version).encode("utf-8", "surrogateescape"))


class Shared:
    """The shared memory of a mount with up to `processes` processes. Create it before the fork."""

    def __init__(self, processes: int) -> None:
        self.processes = processes
        self.cells = memoryview(_shared(processes * _CELLS * 8)).cast("Q")
        self.visible = memoryview(_shared(8)).cast("Q")  # the generation of the version that answers requests
        self.visible[0] = 1
        self.hints = memoryview(_shared(_HINTS * 2)).cast("H")
        self.pages = memoryview(_shared(_PAGES * 8)).cast("Q")
        self.latest = memoryview(_shared(_LATEST * 8)).cast("Q")
        self.sized = memoryview(_shared(_SIZED))
        self.slots = _shared(processes * _HANDLES * _SLOT_SIZE)
        self.words = memoryview(self.slots).cast("Q")  # the same memory, _WORDS for each slot
        self.places = _shared(processes * _DIRECTORIES * _PLACE_SIZE)
        self.tables = [SharedTable() for _ in range(processes)]
        self.secret = int.from_bytes(os.urandom(8), "little")  # so that no document can have keys chosen to collide
        self.bells = [os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC) for _ in range(processes)]

    def descriptors(self) -> set[int]:
        """Return the descriptors that every process must keep open."""
        return {*self.bells, *(table.descriptor for table in self.tables)}

    def at(self, process: int, cell: int) -> int:
        """Return the index of a cell in `cells`."""
        return process * _CELLS + cell

    def total(self, cell: int) -> int:
        """Return the sum of a cell over all processes."""
        return sum(self.cells[cell::_CELLS])

    def add(self, process: int, cell: int, number: int = 1) -> None:
        """Add to a cell."""
        self.cells[process * _CELLS + cell] += number

    def cell(self, process: int, cell: int) -> int:
        """Return the value of a cell of a process."""
        return self.cells[process * _CELLS + cell]

    def put(self, process: int, cell: int, value: int) -> None:
        """Set a cell of a process."""
        self.cells[process * _CELLS + cell] = value

    def ring(self, process: int) -> None:
        """Wake a parked process."""
        self.put(process, PARKED, 0)
        with contextlib.suppress(OSError):
            os.eventfd_write(self.bells[process], 1)

    def wake_one(self, own: int) -> None:
        """Wake a parked process because requests queue up. If none is parked, count that in the cell WANTED."""
        cells = self.cells
        for process in range(self.processes):
            if cells[process * _CELLS + PARKED]:
                self.add(process, WOKEN)
                self.ring(process)
                return
        self.add(own, WANTED)

    def active(self) -> int:
        """Return how many processes take requests: the first one, and all others that run and are not parked."""
        cells = self.cells
        places = range(_CELLS, self.processes * _CELLS, _CELLS)
        return 1 + sum(1 for place in places if cells[place + RUNS] and not cells[place + PARKED])

    def sent_size(self, inode: int) -> None:
        """Note that the kernel is sent a size for an inode. Call this before the reply."""
        self.sized[inode & _SIZED - 1] = 1

    def release_new(self, process: int) -> None:
        """Release the handle that a process was opening when it died. The reply with it was most likely not sent."""
        handle = self.cell(process, NEW)
        at = (handle & _SLOTS) * _WORDS
        if handle and self.words[at] & _SEQUENCE == handle >> 40:
            self.words[at] = 0
            self.add(process, RELEASED)
        self.put(process, NEW, 0)

    def others_run(self, own: int) -> bool:
        """Return whether another process runs. It may take a request at any moment, even if it is parked."""
        cells = self.cells
        return any(cells[process * _CELLS + RUNS] for process in range(self.processes) if process != own)


class _Name(NamedTuple):
    key: str
    kind: Kind
    identity: int | None
    generation: int


_ROOT = _Name("", Kind.DIRECTORY, None, 0)


class SharedInodes(InodeTable):
    """Inode numbers that all processes of a mount agree on: hashes of key, kind, identity and, for files, generation.

    A process enters each number that it sends to the kernel in its own table, unless it finds it in that of another.
    All processes find the key there. There are no lookup counts, because a number never changes its meaning: a lookup
    after a forget returns it again.
    """

    def __init__(self, shared: Shared, process: int, store: Store) -> None:
        super().__init__()
        self._shared, self._process = shared, process
        self.store = store  # of the present generation
        self._table = shared.tables[process]
        self._names: dict[int, _Name] = {}
        self.generation = 1

    def __len__(self) -> int:
        return len(self._table)

    def number(self, key: str, kind: Kind, identity: int | None, generation: int) -> int:
        """Return the inode number of an entry."""
        seed = self._shared.secret + kind + (_NO_IDENTITY if identity is None else identity * 0x9E3779B97F4A7C15)
        if kind is not Kind.DIRECTORY:
            seed += generation * 0xC2B2AE3D27D4EB4F
        return xxhash.xxh3_64_intdigest(key.encode("utf-8", "surrogateescape"), seed & _M64) & _INODES | 1 << 61

    def find(self, inode: int) -> _Name:
        """Return key, kind, identity and generation of an inode; NotFound if no process has sent it to the kernel."""
        known = self._names.get(inode)
        if known is None:
            if inode == pyfuse3.ROOT_INODE:
                return _ROOT
            found = self._record(inode)
            if found is None:
                raise NotFound(f"inode {inode}")
            known = self._keep(inode, _decoded(found))
            exported = found[_RECORD.size + _RECORD.unpack_from(found)[4] :]
            if exported and known.generation == self.generation:
                self.store.import_entry(known.key, exported)
        return known

    def key(self, inode: int) -> str:
        known = self._names.get(inode)
        return self.find(inode).key if known is None else known.key

    def is_other(self, inode: int, identity: int | None) -> bool:
        return identity is not None and self.find(inode).identity not in (None, identity)

    def learn(self, inode: int, identity: int | None) -> None:
        # only for this process: the shared record does not change
        known = self._names.get(inode)
        if identity is not None and known is not None and known.identity is None:
            self._names[inode] = known._replace(identity=identity)

    def kind(self, inode: int) -> Kind:
        return self.find(inode).kind

    def directories(self) -> list[int]:
        records = (record for table in self._shared.tables for record in table.items())
        found = {inode for inode, value in records if value[0] == Kind.DIRECTORY}  # the first field of _RECORD
        return list(found | {int(pyfuse3.ROOT_INODE)})

    def known(self) -> dict[str, int]:
        found = {_decoded(value).key: inode for table in self._shared.tables for inode, value in table.items()}
        return {"": int(pyfuse3.ROOT_INODE), **found}

    def renew(self) -> None:
        self.generation += 1

    def is_old(self, inode: int) -> bool:
        known = self.find(inode)
        return known.kind is not Kind.DIRECTORY and known.generation < self.generation

    def survives(self, inode: int) -> bool:
        known = self.find(inode)
        return known.kind is Kind.DIRECTORY and known.generation < self.generation

    def orphan(self, key: str, kind: Kind) -> int:
        return self._enter(key, kind, None, self.generation - 1)

    def lookup(self, key: str, kind: Kind, identity: int | None = None) -> int:
        return self._enter(key, kind, identity, self.generation)

    def may_be_sized(self, inode: int) -> bool:
        return bool(self._shared.sized[inode & _SIZED - 1])  # another process may have sent one

    def peek(self, key: str) -> int | None:
        return self.number(key, Kind.DIRECTORY, None, 0) if key else int(pyfuse3.ROOT_INODE)

    def forget(self, inode: int, lookups: int) -> bool:
        """Do nothing: a number always belongs to the same entry."""
        return False

    def _enter(self, key: str, kind: Kind, identity: int | None, generation: int) -> int:
        if not key:
            return int(pyfuse3.ROOT_INODE)
        inode = self.number(key, kind, identity, generation)
        known = self._names.get(inode)
        if known is None:
            name = _Name(key, kind, identity, generation)
            found = self._hinted(inode)
            if found is None:
                encoded = key.encode("utf-8", "surrogateescape")
                number = (identity or 0).to_bytes(_IDENTITY, "little", signed=True)
                head = _RECORD.pack(kind, identity is not None, generation, number, len(encoded))
                exported = self.store.export_entry(key) if kind is Kind.FILE and generation == self.generation else b""
                self._table.put(inode, head + encoded + exported)
                self._shared.hints[inode & _HINTS - 1] = self._process + 1
            else:
                name = _decoded(found)
            known = self._keep(inode, name)
        if known.key != key:
            raise ReadError(key, f"has the inode number of {known.key}: refresh the mount, or use workers=1")
        return inode

    def _keep(self, inode: int, name: _Name) -> _Name:
        if len(self._names) >= _KNOWN:
            self._names = {}
        self._names[inode] = name
        return name

    def _hinted(self, inode: int) -> bytes | None:
        """Return the record of an inode from the process that the hint cell names, or from this process, if any."""
        hint = self._shared.hints[inode & _HINTS - 1]
        if hint and hint != self._process + 1:
            found = self._shared.tables[hint - 1].get(inode)
            if found is not None:
                return found
        return self._table.get(inode)

    def _record(self, inode: int) -> bytes | None:
        found = self._hinted(inode)
        if found is None:
            for table in self._shared.tables:
                found = table.get(inode)
                if found is not None:
                    break
        return found


def _decoded(record: bytes) -> _Name:
    kind, has_identity, generation, identity, length = _RECORD.unpack_from(record)
    key = record[_RECORD.size : _RECORD.size + length].decode("utf-8", "surrogateescape")
    number = int.from_bytes(identity, "little", signed=True)
    return _Name(key, Kind(kind), number if has_identity else None, generation)


class PageVersions(dict[int, Hashable]):
    """The versions of values whose pages the kernel may have, by inode, in a fixed number of shared cells.

    get() returns the default only if it is the version in the inode's cell. If another inode has overwritten the cell,
    no version is equal to it.
    """

    def __init__(self, pages: memoryview) -> None:
        super().__init__()
        self._pages = pages

    def get(self, inode: int, default: Any = None) -> Any:
        """Return `default` if it is the version of the cached pages; otherwise another object, equal to no version."""
        return default if self._pages[inode & _PAGES - 1] == _cell(inode, default) else self

    def __setitem__(self, inode: int, version: Hashable) -> None:
        self._pages[inode & _PAGES - 1] = _cell(inode, version)

    def pop(self, inode: int, default: Any = None) -> Any:
        """Do nothing: get() never returns a version without comparing it."""
        return default


def _cell(inode: int, version: Hashable) -> int:
    return digest(version) ^ inode


class SharedVersions:
    """The versions of documents and chunks that any process has seen last (store.api.LatestVersions), in shared cells.

    If two documents or chunks share a cell, it holds the version of the one noted later. The other must be looked at
    again.
    """

    def __init__(self, cells: memoryview) -> None:
        self._cells = cells

    def begin(self, what: str) -> int:
        """Return a number to pass to ended(). Call it before looking at the document or chunk."""
        return int(self._cells[_hash(what) % _LATEST])

    def ended(self, what: str, version: Hashable, begun: int) -> None:
        """Note the version that was seen, unless the cell has changed since begin()."""
        number = _hash(what)
        if self._cells[number % _LATEST] == begun:
            self._cells[number % _LATEST] = digest(version) ^ number

    def holds(self, what: str, version: Hashable) -> bool:
        """Return whether a version is the one that was seen last; False if that is not known."""
        number = _hash(what)
        return bool(self._cells[number % _LATEST] == digest(version) ^ number)


def _hash(text: str) -> int:
    return xxhash.xxh3_64_intdigest(text.encode("utf-8", "surrogateescape"))


class Slot(NamedTuple):
    """The shared record of an open handle."""

    generation: int
    inode: int
    version: int  # the digest of Value.pinned; 0: the store never changes
    pid: int  # of the process that opened it
    descriptor: int  # of the local file in that process; -1: none
    device: int  # st_dev and, in `number`, st_ino of that file
    number: int


class _Range:
    """The slots of one process for files, or for directories. The first `high` were used; those in `free` are free."""

    def __init__(self, first: int, most: int, high: int) -> None:
        self.first, self.most, self.high = first, most, high
        self.free: list[int] = []

    def take(self) -> int | None:
        if self.free:
            return self.free.pop()
        if self.high == self.most:
            return None
        self.high += 1
        return self.first + self.high - 1


class Handles:
    """The open handles of one process, in a part of the shared memory. Any process may read and release them.

    The number of a handle consists of its slot and a sequence number, so that it differs from the number of a later
    handle in the same slot.
    """

    def __init__(self, shared: Shared, process: int) -> None:
        self._shared, self._words, self._places, self._process = shared, shared.words, shared.places, process
        self._slots = shared.slots
        first = process * _HANDLES
        self._directories = _Range(first, _DIRECTORIES, shared.cell(process, DIRECTORIES))
        self._files = _Range(first + _DIRECTORIES, _HANDLES - _DIRECTORIES, shared.cell(process, FILES))
        self._next = int.from_bytes(os.urandom(2), "little")
        self._new = shared.at(process, NEW)
        self._taken = set[int]()  # handles of this process whose slots are not free yet
        self._inherited = [  # handles of a killed predecessor
            (self._words[_WORDS * slot] & _SEQUENCE) << 40 | slot for slots in _used(shared, process) for slot in slots
        ]
        self.reclaim()

    def take(self, inode: int, generation: int, version: int, descriptor: int | None, directory: bool) -> int | None:
        """Return the number of a new handle; None if there are too many."""
        slot = (self._directories if directory else self._files).take()
        if slot is None:
            return None
        self._next = self._next % 0x3FFFFF + 1
        handle = self._next << 40 | slot
        self._shared.cells[self._new] = handle  # cleared when SharedWaiting knows that the reply was sent
        device = number = 0
        if descriptor is not None:
            status = os.fstat(descriptor)
            device, number = status.st_dev, status.st_ino
        _SLOT.pack_into(
            self._slots, slot * _SLOT_SIZE, generation << 32 | self._next, inode, version, os.getpid(),
            -1 if descriptor is None else descriptor, device, number,
        )  # fmt: skip
        self._taken.add(handle)
        if directory:
            _LISTING_STATE.pack_into(self._places, _place(handle), 0, 0, b"")
            self._shared.put(self._process, DIRECTORIES, self._directories.high)
        else:
            self._shared.put(self._process, FILES, self._files.high)
        return handle

    def get(self, handle: int) -> Slot | None:
        """Return the record of a handle of any process; None if it was released."""
        word, *others = _SLOT.unpack_from(self._slots, (handle & _SLOTS) * _SLOT_SIZE)
        return Slot(word >> 32, *others) if word & _SEQUENCE == handle >> 40 else None

    def is_open(self, handle: int) -> bool:
        """Return whether a handle of any process is still open."""
        return self._words[(handle & _SLOTS) * _WORDS] & _SEQUENCE == handle >> 40

    def release(self, handle: int) -> None:
        """Release a handle of any process. The process that opened it frees its slot later."""
        if self.is_open(handle):
            self._words[(handle & _SLOTS) * _WORDS] = 0

    def free(self, handle: int) -> None:
        """Free the slot of a released handle if this process opened it. reclaim() frees those of a predecessor."""
        if handle in self._taken:
            self._taken.remove(handle)
            self._put_back(handle)

    def reclaim(self) -> None:
        """Free the slots of a killed predecessor's handles that were released."""
        inherited, self._inherited = self._inherited, []
        for handle in inherited:
            if handle >> 40 and self.is_open(handle):
                self._inherited.append(handle)
            else:
                self._put_back(handle)

    def _put_back(self, handle: int) -> None:
        directory = (handle & _SLOTS) % _HANDLES < _DIRECTORIES
        (self._directories if directory else self._files).free.append(handle & _SLOTS)

    def place(self, handle: int) -> tuple[int, str]:
        """Return the position that the listing of a directory has reached, and the name before it."""
        position, length, name = _LISTING_STATE.unpack_from(self._places, _place(handle))
        return position, name[:length].decode("utf-8", "surrogateescape")

    def put_place(self, handle: int, position: int, name: str) -> None:
        """Note the position that a listing has reached, and the name before it."""
        encoded = name.encode("utf-8", "surrogateescape")
        _LISTING_STATE.pack_into(self._places, _place(handle), position, len(encoded), encoded)

    def of_inode(self, inode: int) -> Iterator[tuple[int, Slot]]:
        """Yield (handle, slot) for the open handles of an inode in all processes."""
        for slots in self._used_slots():
            numbers = self._words[_WORDS * slots.start + 1 : _WORDS * slots.stop : _WORDS].tolist()
            for at in [at for at, number in enumerate(numbers, slots.start) if number == inode]:
                handle = (self._words[_WORDS * at] & _SEQUENCE) << 40 | at
                if handle >> 40 and (slot := self.get(handle)) is not None:
                    yield handle, slot

    def holds(self, generation: int) -> bool:
        """Return whether any process has an open handle of a generation or of an earlier one."""
        for slots in self._used_slots():
            words = self._words[_WORDS * slots.start : _WORDS * slots.stop : _WORDS].tolist()
            if any(word and word >> 32 <= generation for word in words):
                return True
        return False

    def _used_slots(self) -> Iterator[range]:
        for process in range(self._shared.processes):
            yield from _used(self._shared, process)


def _place(handle: int) -> int:
    process, at = divmod(handle & _SLOTS, _HANDLES)
    return (process * _DIRECTORIES + at) * _PLACE_SIZE


def _used(shared: Shared, process: int) -> tuple[range, range]:
    """Return the slots that a process has used so far, for directories and for files."""
    first, files = process * _HANDLES, process * _HANDLES + _DIRECTORIES
    return (
        range(first, first + shared.cell(process, DIRECTORIES)), range(files, files + shared.cell(process, FILES))
    )  # fmt: skip

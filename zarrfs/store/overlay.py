"""Overlay: a read-only lower store under an upper directory that holds the changes.

Reads of unchanged entries go to the lower store. A lower entry is copied up before it is changed; deleting it writes a
whiteout (store/upper.py). The lower store is never modified.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import stat
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from typing import Any, Literal, NamedTuple, TypeVar

import trio

from zarrfs.concurrency.single_flight import SingleFlight
from zarrfs.errors import IsDirectory, NotDirectory, NotFound, ReadError, Refused
from zarrfs.store.api import (
    Info,
    Kind,
    Store,
    Usage,
    Value,
    WrappingStore,
    WritableStore,
    check_key,
    join_key,
    ordinary_mode,
    split_key,
)
from zarrfs.store.directory import answers, info_of, not_opened, writing
from zarrfs.store.traversal import extents
from zarrfs.store.upper import OPAQUE, RECORD, UNFINISHED, Upper, UpperListing, remove_unfinished, reserved
from zarrfs.store.uri import file_uri
from zarrfs.store.values import FileValue, open_sized
from zarrfs.store.writing import RESERVED, NewFile
from zarrfs.system.buffers import Buffer
from zarrfs.system.sparse import data_extents, keep_times, write_sparse

log = logging.getLogger(__name__)

T = TypeVar("T")

_ABSENT = 10_000  # negative entries in memory
_PIECE = 4 << 20  # bytes that are copied up at a time
_GAP = 64 << 10  # bytes: smaller holes are read with the data around them; write_sparse() would not keep them
_MODES = {Kind.FILE: 0o644, Kind.DIRECTORY: 0o755, Kind.SYMLINK: 0o777}  # permission bits, if the lower store has none


class OverlayEntry(NamedTuple):
    """The entry at a key: the lstat of an upper one, the Info of a lower one. A merged directory has both."""

    status: os.stat_result | None
    info: Info | None

    @property
    def is_directory(self) -> bool:
        """Return whether the entry is a directory."""
        if self.status is not None:
            return stat.S_ISDIR(self.status.st_mode)
        return self.info is not None and self.info.kind is Kind.DIRECTORY


class Change(NamedTuple):
    """One difference between the merged tree and the lower store; `status` is that of the upper entry."""

    kind: Literal["added", "changed", "deleted"]
    key: str
    status: os.stat_result | None


class _Unknown(Exception):
    def __init__(self, key: str, children: bool) -> None:
        self.key, self.children = key, children


class Now:
    """The merged tree for a change that does not await, in what change() calls.

    Each method may ask for what the lower store has: change() then looks that up, and calls its function again.
    """

    def __init__(self, overlay: Overlay) -> None:
        self._overlay, self._upper = overlay, overlay.upper
        self.infos: dict[str, Info | None] = {}
        self.children: dict[str, list[Info]] = {}  # in directories of the lower store
        self.absent: set[str] = set()  # keys without an upper entry
        self.covered: dict[str, bool] = {}  # whether the upper directory hides an entry

    def find(self, key: str) -> OverlayEntry:
        """Return the entry at a valid key, as Overlay.find() does."""
        if self._overlay.hides(key):
            raise NotFound(key)
        status = None if key in self.absent else self._upper.status(key)
        if status is None:
            self.absent.add(key)
        below = self.below(key) if status is None or stat.S_ISDIR(status.st_mode) else None
        if status is None and below is None:
            raise NotFound(key)
        merged = status is None or (below is not None and below.kind is Kind.DIRECTORY)
        return OverlayEntry(status, below if merged else None)

    def entries(self, key: str) -> dict[str, OverlayEntry]:
        """Return the merged entries of a directory, as Overlay.entries() does."""
        found = self.find(key)
        if not found.is_directory:
            raise NotDirectory(key)
        lower: list[Info] = []
        if found.info is not None and self._upper.status(join_key(key, OPAQUE)) is None:
            if key not in self.children:
                raise _Unknown(key, True)
            lower = self.children[key]
        return merged(self._upper.listing(key), lower)

    def hides_lower(self, key: str) -> bool:
        """Return whether removing the upper entry at `key` would uncover a lower one, unless a whiteout is written."""
        hidden = self._overlay.lacks(key) or self._upper.covers(key, itself=False)
        return not hidden and self._info(key) is not None

    def hide_lower(self, key: str) -> None:
        """Write a whiteout at `key` if hides_lower(). Call this before removing the upper entry."""
        if self.hides_lower(key):
            self.make_parents(key)
            self._upper.write_whiteout(key)

    def make_parents(self, key: str) -> None:
        """Copy up the parent directories of `key`."""
        parent = split_key(key)[0]
        if not parent or self._upper.status(parent) is not None:
            return
        info = self.below(parent)
        if info is None:
            raise NotFound(parent)
        if info.kind is not Kind.DIRECTORY:
            raise NotDirectory(parent)
        self.make_parents(parent)
        self._overlay.make(parent, info)

    def below(self, key: str) -> Info | None:
        """Return the lower entry at `key`, as Overlay.below() does."""
        if self._overlay.lacks(key):
            return None
        if key not in self.covered:
            self.covered[key] = self._upper.covers(key)
        return None if self.covered[key] else self._info(key)  # the lower store is not asked for a hidden entry

    def _info(self, key: str) -> Info | None:
        if key not in self.infos:
            raise _Unknown(key, False)
        return self.infos[key]


class Overlay(WrappingStore, WritableStore):
    """A store of `lower` with the changes in `upper`; if that is `plain`, it holds everything, and `lower` is itself.

    `owner`: (uid, gid) of entries that are copied up; None: those of this process. Names in `upper` change in code
    that does not await, in change().
    """

    def __init__(self, lower: Store, upper: Upper, owner: tuple[int, int] | None = None) -> None:
        super().__init__(lower)
        self.upper, self.owner = upper, owner
        # a store on a server has no links, and resolving them would take a request for every parent of a key
        self.has_links = lower.has_links or not lower.remote
        self._copies: SingleFlight[str] = SingleFlight()
        self._steps = 0  # number of calls of a step(), each of which may change the upper directory
        self._told: set[str] = set()
        self._absent: set[str] = set()  # negative entries of an immutable lower store

    # -- lookup

    def check_name(self, name: str) -> None:
        """Raise OSError (EINVAL) for a reserved name."""
        if self._reserved(name):
            if name not in self._told and len(self._told) < 100:
                self._told.add(name)
                log.warning("%s: a reserved name, as all that begin with .wh., %s or %s", name, RECORD, RESERVED)
            raise OSError(errno.EINVAL, "a reserved name", name)

    async def find(self, key: str) -> OverlayEntry:
        """Return the entry at `key`. Raise NotFound, also for reserved names and below a file; InvalidKey."""
        check_key(key, root=True)
        return await self.change(lambda now: now.find(key))

    async def change(self, step: Callable[[Now], T], *keys: str) -> T:
        """Return step(): a look at the merged tree, or a change of it, that no other change interrupts.

        `step` does not await. What it asks for is looked up in the lower store, and it is called again, so it asks for
        everything before it changes anything. `keys` are looked up first.
        """
        now = Now(self)
        for key in keys:
            if not self.lacks(key) and not self.upper.covers(key, itself=False):
                now.infos[key] = await self._info_below(key)
        steps = self._steps
        while True:
            if self._steps != steps:
                now.absent.clear()  # others may have changed the upper directory while this one awaited
                now.covered.clear()
            self._steps = steps = self._steps + 1
            try:
                return step(now)
            except _Unknown as exc:
                if exc.children:
                    now.children[exc.key] = [info async for info in self._lower_entries(exc.key)]
                else:
                    now.infos[exc.key] = await self._info_below(exc.key)

    async def below(self, key: str) -> Info | None:
        """Return the lower entry at `key`; None if there is none, or the upper directory hides it."""
        return await self.change(lambda now: now.below(key))

    async def _info_below(self, key: str) -> Info | None:
        try:
            return _with_mode(await self.lower.info(key, sized=False))
        except (NotFound, NotDirectory):
            if self.immutable:
                if len(self._absent) >= _ABSENT:
                    self._absent.clear()
                self._absent.add(key)
            return None

    def lacks(self, key: str) -> bool:
        """Return whether the lower store is known to have no entry at `key`, now and later."""
        if self.upper.plain:
            return True
        while key and self._absent:
            if key in self._absent:
                return True
            key = split_key(key)[0]
        return False

    async def entries(self, key: str) -> dict[str, OverlayEntry]:
        """Return the merged entries of a directory, sorted by name. Raise NotFound or NotDirectory."""
        check_key(key, root=True)
        return await self.change(lambda now: now.entries(key))

    def hides(self, key: str) -> bool:
        """Return whether `key` has a reserved name: the merged tree lacks it, even if the upper directory has it."""
        return (".wh." in key or ".zarrfs-" in key) and any(map(self._reserved, key.split("/")))

    def _reserved(self, name: str) -> bool:
        return reserved(name) and not (self.upper.plain and name.startswith(".wh."))

    # -- copying up

    async def copy_up(self, key: str, size: int | None = None) -> os.stat_result:
        """Copy up `key`, only the first `size` bytes of a file; return the lstat of the upper entry.

        A file appears complete, by an atomic rename. Raise NotFound; Refused (ESTALE) if another lower file has taken
        the name; ReadError if lower bytes cannot be read; OSError if the upper directory cannot be written.
        """

        async def copy() -> os.stat_result:
            info = await self.below(key)
            if info is None:
                raise NotFound(key)
            if info.kind is not Kind.FILE:
                await self.change(lambda now: self._copy_name(key, info, now))
            else:
                await self._copy_file(key, info, size)
            status = self.upper.status(key)
            if status is None:  # removed meanwhile
                raise NotFound(key)
            return status

        status = self.upper.status(key)
        return await self._copies.run(key, copy, lambda: self.upper.status(key)) if status is None else status

    def _copy_name(self, key: str, info: Info, now: Now) -> None:
        # to copy up the directory itself, make the parents of a name in it
        now.make_parents(join_key(key, "x") if info.kind is Kind.DIRECTORY else key)
        if info.kind is Kind.SYMLINK and self.upper.status(key) is None and not self.upper.covers(key):
            self.make(key, info)

    async def _copy_file(self, key: str, info: Info, most: int | None) -> None:
        whole = info.size if most != 0 else 0  # to truncate to 0 bytes, an unknown size is not requested
        if whole is None:
            whole = (await self.lower.info(key)).size or 0
        size = whole if most is None else min(whole, most)
        new = await trio.to_thread.run_sync(self.upper.create, 0o600)
        try:
            if size or (most != 0 and not self.lower.remote):  # an empty file may be one that is being written
                with contextlib.closing(await open_sized(self.lower, key, whole)) as value:
                    if value.fileno() is not None:  # a local file, which may have changed since the lookup
                        if None not in (info.identity, value.info.identity) and info.identity != value.info.identity:
                            raise Refused(key, errno.ESTALE)  # the kernel repeats the lookup
                        info = _with_mode(value.info)
                        size = value.size if most is None else min(value.size, most)
                    await self._copy_data(new.descriptor, value, key, info._replace(size=size))
            await trio.to_thread.run_sync(self._finish, new, info, size)
            await self.change(lambda now: self._place(new, key, now))
        finally:
            new.close()

    def _place(self, new: NewFile, key: str, now: Now) -> None:
        if self.upper.status(key) is not None or self.upper.covers(key):  # taken or removed meanwhile
            raise NotFound(key)
        now.make_parents(key)
        with self.upper.at(key) as (directory, name), keep_times(directory):
            new.place(directory, name)

    async def _copy_data(self, descriptor: int, value: Value, key: str, info: Info) -> None:
        """Copy the first `info.size` bytes without their holes, which may be larger than any disk."""
        assert info.size is not None
        source = value.fileno()
        if source is not None:
            with answers(key):
                parts = await trio.to_thread.run_sync(data_extents, source, info.size)
        else:
            parts = [(start, start + length) async for start, length in extents(self.lower, key, info)]
        for start, stop in _joined(parts):
            for at in range(start, stop, _PIECE):
                length = min(_PIECE, stop - at)
                data = await value.read(at, length)
                if len(data) != length:
                    raise ReadError(key, "ended early while it was copied")
                await trio.to_thread.run_sync(write_sparse, descriptor, data, at)

    def _finish(self, new: NewFile, info: Info, size: int) -> None:
        descriptor = new.descriptor
        os.ftruncate(descriptor, size)
        if self.owner is not None:
            os.fchown(descriptor, *self.owner)
        os.fchmod(descriptor, ordinary_mode(info))
        if info.mtime_ns is not None:
            os.utime(descriptor, ns=(info.mtime_ns, info.mtime_ns))
        os.fsync(descriptor)  # otherwise, after a power failure, an empty file might hide the lower one

    def make(self, key: str, info: Info) -> None:
        """Copy up a directory, without its entries, or a link. It gets its name when it is complete.

        It is renamed within its directory: to another one, only root can move a directory that is read-only.
        """
        with self.upper.at(key) as (directory, name), keep_times(directory):
            remove_unfinished(directory)  # left by a killed process
            try:
                if info.kind is Kind.DIRECTORY:
                    os.mkdir(UNFINISHED, 0o700, dir_fd=directory)
                else:
                    os.symlink(os.fsencode(info.target or ""), UNFINISHED, dir_fd=directory)
                if self.owner is not None:
                    os.chown(UNFINISHED, *self.owner, dir_fd=directory, follow_symlinks=False)
                if info.kind is Kind.DIRECTORY:
                    os.chmod(UNFINISHED, ordinary_mode(info), dir_fd=directory)
                if info.mtime_ns is not None:
                    times = info.mtime_ns, info.mtime_ns
                    os.utime(UNFINISHED, ns=times, dir_fd=directory, follow_symlinks=False)
                os.rename(UNFINISHED, name, src_dir_fd=directory, dst_dir_fd=directory)
            except OSError:
                remove_unfinished(directory)
                raise

    # -- the Store protocol

    async def info(self, key: str, sized: bool = True) -> Info:
        with answers(key):
            found = await self.find(key)
            if found.status is not None:
                return self.info_of(key, found.status)
        if sized and found.info is not None and found.info.size is None:
            return _with_mode(await self.lower.info(key))
        assert found.info is not None
        return found.info

    async def list_dir(self, prefix: str, after: str = "") -> AsyncIterator[Info]:
        with answers(prefix):
            found = await self.entries(prefix)
        for name, (status, info) in found.items():
            if name > after:
                yield self.info_of(join_key(prefix, name), status) if status is not None else info  # type: ignore[misc]

    async def open(self, key: str) -> Value:
        found = await self.find(key)
        if found.status is None:
            return await self.lower.open(key)
        if stat.S_ISDIR(found.status.st_mode):
            raise IsDirectory(key)
        if stat.S_ISLNK(found.status.st_mode):
            raise ReadError(key, "is a symbolic link, which is not followed here")
        if not stat.S_ISREG(found.status.st_mode):
            raise ReadError(key, not_opened(found.status))
        with answers(key):
            descriptor = self.upper.open(key, os.O_RDONLY | os.O_NONBLOCK)
        return FileValue(descriptor, lambda status: self.info_of(key, status))

    async def locate(self, key: str, shown: bool = True) -> dict[str, Any]:
        found = await self.find(key)
        if found.status is None:
            return await self.lower.locate(key, shown)
        path = os.path.join(self.upper.path, key)
        return {"url": file_uri(path) if shown else path}

    async def usage(self) -> Usage:
        """Return the usage of the lower store, with the free space of the upper directory's disk."""
        status = os.statvfs(self.upper.path)
        free = status.f_bavail * status.f_frsize
        return (await self.lower.usage())._replace(bytes_free=free, files_free=status.f_favail)

    async def aclose(self) -> None:
        self.upper.close()
        await self.lower.aclose()

    async def set(self, key: str, value: Buffer) -> None:
        with writing(key):
            self._prepare_writing(key)
            mode = await self.change(lambda now: self._make_room(key, now), key)
        await self.upper.files.set(key, value, mode)

    def _make_room(self, key: str, now: Now) -> int | None:
        """Check that a value may be set, copy up directories above it; return the mode of a lower file there."""
        mode = None
        with contextlib.suppress(NotFound):
            found = now.find(key)
            if found.is_directory:
                raise IsDirectory(key)
            if found.info is not None and found.info.kind is Kind.FILE:
                mode = ordinary_mode(found.info)
        parent = split_key(key)[0]
        while parent:
            with contextlib.suppress(NotFound):
                if not now.find(parent).is_directory:
                    raise NotDirectory(parent)
                now.make_parents(join_key(parent, "x"))
                break
            parent = split_key(parent)[0]  # set() makes the missing ones
        return mode

    async def delete(self, key: str) -> None:
        def hide(now: Now) -> bool:
            found = now.find(key)
            now.hide_lower(key)
            return found.status is not None

        with writing(key):
            self._prepare_writing(key)
            in_upper = await self.change(hide, key)
        if in_upper:
            await self.upper.files.delete(key)

    def _prepare_writing(self, key: str) -> None:
        for name in check_key(key).split("/"):
            self.check_name(name)
        if not self.upper.locked:
            self.upper.lock(exclusive=True)

    def info_of(self, key: str, status: os.stat_result) -> Info:
        """Return the entry of an upper file, directory or link."""
        target = os.fsencode(self.upper.readlink(key)) if stat.S_ISLNK(status.st_mode) else None
        return info_of(split_key(key)[1], status, target)

    async def prefetch(self, keys: Sequence[str]) -> None:
        await self.lower.prefetch([key for key in keys if self.upper.status(key) is None])

    async def left_out(self, key: str) -> dict[str, str]:
        return await self.lower.left_out(key)

    # -- the difference

    async def changes(self) -> AsyncIterator[Change]:
        """Yield the differences from the lower store, by key.

        If a directory was replaced, or has replaced another entry, the key is first deleted, then added.
        """
        async for change in self._changes("", True):
            yield change

    async def _changes(self, prefix: str, over: bool) -> AsyncIterator[Change]:
        """Yield the changes in an upper directory; `over`: whether it is merged with a lower one."""
        statuses, hidden, opaque = self.upper.listing(prefix) or UpperListing({}, set(), False)
        lower = {info.name: info async for info in self._lower_entries(prefix)} if over else {}
        gone = set(lower) if opaque else hidden & set(lower)
        for name in sorted({*statuses, *gone}):
            key = join_key(prefix, name)
            status = statuses.get(name)
            below = lower.get(name)
            if status is None:
                yield Change("deleted", key, None)
                continue
            tree = stat.S_ISDIR(status.st_mode)
            both = tree and name not in gone and below is not None and below.kind is Kind.DIRECTORY
            if not tree and below is not None and below.kind is not Kind.DIRECTORY:
                yield Change("changed", key, status)
            elif not both:
                if below is not None:
                    yield Change("deleted", key, None)
                yield Change("added", key, status)
            elif below is not None and below.mode is not None and stat.S_IMODE(status.st_mode) != below.mode:
                yield Change("changed", key, status)
            if tree:
                async for change in self._changes(key, both):
                    yield change

    async def _lower_entries(self, key: str) -> AsyncIterator[Info]:
        async for info in self.lower.list_dir(key):
            yield _with_mode(info)


def merged(above: UpperListing | None, lower: Iterable[Info]) -> dict[str, OverlayEntry]:
    """Return the entries of a directory of an overlay, sorted by name."""
    statuses, hidden, _ = above or UpperListing({}, set(), False)
    found = {name: OverlayEntry(status, None) for name, status in statuses.items()}
    for info in lower:
        name, status = info.name, statuses.get(info.name)
        shown = status is None or (info.kind is Kind.DIRECTORY and stat.S_ISDIR(status.st_mode))
        if shown and name not in hidden and not reserved(name):
            found[name] = OverlayEntry(status, info)
    return {name: found[name] for name in sorted(found)}


def _joined(parts: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return sorted parts (start, stop), joining those with less than _GAP bytes between them."""
    found: list[tuple[int, int]] = []
    for start, stop in parts:
        if found and start - found[-1][1] < _GAP:
            found[-1] = found[-1][0], stop
        else:
            found.append((start, stop))
    return found


def _with_mode(info: Info) -> Info:
    """Return a lower entry with permission bits: those of _MODES if the lower store has none."""
    return info if info.mode is not None else info._replace(mode=_MODES[info.kind])

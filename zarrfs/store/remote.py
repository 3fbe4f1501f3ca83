"""FsspecStore: any fsspec URL as a read-only store: http(s), s3, gs, memory, file, zip files, ..."""

from __future__ import annotations

import contextlib
import logging
from collections import OrderedDict
from collections.abc import AsyncIterator, Sequence
from typing import Any, NamedTuple

import trio

from zarrfs.errors import (
    InvalidKey,
    IsDirectory,
    NotDirectory,
    NotFound,
    OutOfRange,
    ReadError,
    StoreError,
    TargetChanged,
    TargetMissing,
)
from zarrfs.options import Options
from zarrfs.redaction import without_secrets
from zarrfs.store.api import Buffer, Info, Kind, Usage, Validator, check_key, join_key, name_rule, split_key
from zarrfs.transfer import urls
from zarrfs.transfer.answers import Entry
from zarrfs.transfer.remote import RemoteFiles
from zarrfs.transfer.systems import System
from zarrfs.transfer.tasks import at_once
from zarrfs.transfer.versions import note_unversioned

log = logging.getLogger("zarrfs.store")

_FRESH = 1.0  # seconds for which an entry is believed; in a zip file it is for good
_KNOWN = 65_536  # entries remembered


class _Known(NamedTuple):
    """What the server has told of a key."""

    until: float  # it is believed
    entry: Entry
    identity: int | None  # as Info.identity: stays, as long as no later entry contradicts


class FsspecStore:
    """Keys are the values below `url`; opening it touches no network.

    "No such key" is said only where the server says so; a server that fails is a ReadError. A value that
    changes while it is read is read anew, so no get() mixes two versions. Where a name is a value and a
    directory at once, it is the value (in a zip file: the directory).
    """

    def __init__(self, url: str, options: Options) -> None:
        self.immutable = urls.protocols(url)[:1] == ["zip"]
        self.files = RemoteFiles(options)
        self._url, self._missing, self._reread = url, options.missing_status, options.stale == "reread"
        self._found: tuple[System, str] | None = None
        self._entries: OrderedDict[str, _Known] = OrderedDict()

    @property
    def uri(self) -> str:
        """The URL, without credentials."""
        return without_secrets(self._url)

    # -- the Store protocol

    async def info(self, key: str, sized: bool = True) -> Info:
        check_key(key, root=True)
        if not key:
            return Info("", Kind.DIRECTORY)
        entry = await self._entry(key)
        if entry.size is None and not entry.directory:
            raise ReadError(key, "the server does not tell its size")
        return self._info(key, entry)

    async def list_dir(self, prefix: str, after: str = "") -> AsyncIterator[Info]:
        for info in await self._listing(prefix):
            if info.name > after:
                yield info

    async def list_prefix(self, prefix: str) -> AsyncIterator[str]:
        stack = [(prefix, iter(await self._listing(prefix)))]
        while stack:
            directory, infos = stack[-1]
            for info in infos:
                key = join_key(directory, info.name)
                if info.kind is not Kind.DIRECTORY:
                    yield key
                    continue
                try:
                    below = await self._listing(key)
                except NotFound:  # removed since its parent was listed
                    continue
                stack.append((key, iter(below)))
                break
            else:
                stack.pop()

    async def get(self, key: str, start: int = 0, length: int | None = None) -> Buffer:
        check_key(key, root=True)
        if not key:
            raise IsDirectory(key)
        entry = await self._entry(key)
        try:
            return await self._get(key, entry, start, length)
        except (TargetChanged, TargetMissing, OutOfRange):
            if self.immutable:
                raise
        # Another version than the one that was asked about: once more, from the beginning.
        self._doubt(key, entry)
        return await self._get(key, await self._entry(key), start, length)

    async def validator(self, key: str) -> Validator:
        """As ValidatedStore.validator; what was told in the last second is believed."""
        entry = await self._entry(key)
        if entry.directory:
            raise IsDirectory(key)
        certain = entry.tag is not None or entry.mtime_ns is not None
        return Validator(entry, self._info(key, entry), certain)

    async def get_same(self, key: str, validator: Validator, start: int = 0, length: int | None = None) -> Buffer:
        """As ValidatedStore.get_same; with -o stale=reread as get().

        Bytes may come without a word of their version: what the server tells of the value is asked for once a second.
        """
        entry = validator.value
        assert isinstance(entry, Entry)
        if self._reread:
            return await self.get(key, start, length)
        same = _same(entry, await self._entry(key))
        identity, now = validator.info.identity, self._entries[key].identity
        # a value that had no version when it was opened may have got one since, and then another
        if not same or (identity != now and None not in (identity, now)):
            raise TargetChanged(key, "has changed since it was opened")
        try:
            return await self._get(key, entry, start, length)
        except (TargetChanged, TargetMissing, OutOfRange):
            self._doubt(key, entry)
            raise

    remote = True

    async def get_ready(self) -> None:
        """As PrefetchStore.get_ready."""
        with contextlib.suppress(ReadError):
            await self.files.get_ready(self._url)

    async def prefetch(self, keys: Sequence[str]) -> None:
        """As PrefetchStore.prefetch."""
        wanted = []

        async def look(key: str) -> None:
            with contextlib.suppress(StoreError, ReadError):
                entry = await self._entry(key)
                if not entry.directory and entry.size:
                    system, path = await self._place(key)
                    wanted.append(self.files.first_block(system, path, 0, entry.size, entry))

        await at_once(look, keys)
        await self.files.blocks.prefetch(wanted)

    async def locate(self, key: str) -> dict[str, Any]:
        info = await self.info(key)
        if info.kind is Kind.DIRECTORY:
            return {}
        system, path = await self._place(key)
        return {"url": system.shown(path)}

    async def usage(self) -> Usage:
        return Usage()

    def adjust(self, options: Options) -> None:
        """As AdjustableStore.adjust."""
        self.files.adjust(options)

    def stats(self) -> dict[str, Any]:
        """Counters: those of the remote files, which have names of their own."""
        return {"remote": self.files.stats()}

    async def aclose(self) -> None:
        await self.files.aclose()

    # -- for stores on top of this one

    async def listed(self, prefix: str) -> list[Info] | None:
        """The sorted entries of a directory; None where the server shows no listing."""
        system, path = await self._place(prefix)
        try:
            entries = await self.files.listing_at(system, path)
        except NotADirectoryError:
            raise NotDirectory(prefix) from None
        except TargetMissing:
            if not prefix:
                raise
            if not (await self._entry(prefix)).directory:
                raise NotDirectory(prefix) from None
            raise NotFound(prefix) from None
        return None if entries is None else self._sorted(prefix, entries)

    # -- parts

    async def _place(self, key: str) -> tuple[System, str]:
        """(system, path in it) of a key."""
        check_key(key, root=True)
        if self._found is None:
            self._found = await self.files.find(self._url)
        system, path = self._found
        try:
            for name in key.split("/") if key else ():
                path = system.child(path, name)
        except UnicodeEncodeError:
            raise InvalidKey(key, "not a key: a lone surrogate") from None
        return system, path

    async def _entry(self, key: str) -> Entry:
        known = self._entries.get(key)
        if known is not None and (self.immutable or known.until > trio.current_time()):
            return known.entry
        system, path = await self._place(key)
        try:
            entry = await self.files.stat_at(system, path)
        except NotADirectoryError:
            raise NotDirectory(key) from None
        except ReadError as exc:
            if isinstance(exc, TargetMissing) if exc.status is None else exc.status in self._missing:
                raise NotFound(key) from None
            raise
        if entry.html and not key.lower().endswith((".html", ".htm")):
            # some servers show a directory's listing without redirecting to its name with "/"
            with_slash = await self.files.listing_at(system, path)
            entry = entry if with_slash is None else Entry(entry.name, True)
        if entry.tag is None and entry.mtime_ns is None and not (entry.directory or self.immutable):
            note_unversioned(system.host(path), system.shown(path))
        return self._remember(key, entry)

    def _remember(self, key: str, entry: Entry) -> Entry:
        """Believe an entry for a while; returns it, with the tag of the one before where it is of the same value."""
        known, identity = self._entries.get(key), None
        if not (entry.directory or entry.size is None or self.immutable or self._reread):
            if known is not None and known.identity is not None and _same(known.entry, entry):
                identity = known.identity
                if entry.tag is None:
                    entry = entry._replace(tag=known.entry.tag, strong=known.entry.strong)
            else:
                identity = hash((entry.size, entry.tag, _second(entry)))
        self._entries[key] = _Known(trio.current_time() + _FRESH, entry, identity)
        self._entries.move_to_end(key)
        if len(self._entries) > _KNOWN:
            self._entries.popitem(last=False)
        return entry

    def _doubt(self, key: str, entry: Entry) -> None:
        """Ask anew what is at `key`, where `entry` is what is believed."""
        known = self._entries.get(key)
        if known is not None and known.entry is entry:
            self._entries[key] = known._replace(until=0.0)

    async def _listing(self, prefix: str) -> list[Info]:
        found = await self.listed(prefix)
        if found is None:
            raise ReadError(prefix or "/", "the server shows no listing")
        return found

    def _sorted(self, prefix: str, entries: list[Entry]) -> list[Info]:
        found: dict[str, Entry] = {}
        for entry in entries:
            rule = name_rule(entry.name)
            if rule:
                log.debug("%s: %s: not listed", join_key(prefix, entry.name), rule)
            elif entry.name not in found or not entry.directory:
                found[entry.name] = entry
        for name, entry in found.items():
            if entry.directory or entry.size is not None:
                found[name] = self._remember(join_key(prefix, name), entry)
        return [self._info(join_key(prefix, name), found[name]) for name in sorted(found)]

    async def _get(self, key: str, entry: Entry, start: int, length: int | None) -> Buffer:
        if entry.directory:
            raise IsDirectory(key)
        system, path = await self._place(key)
        if entry.size is None:
            data = await self.files.read_all_at(system, path)
            return memoryview(data)[start : len(data) if length is None else start + length]
        stop = entry.size if length is None else min(entry.size, start + length)
        if start >= stop:
            return b""
        return await self.files.read_at(system, path, start, stop - start, 0, entry.size, entry)

    def _info(self, key: str, entry: Entry) -> Info:
        name, known = split_key(key)[1], self._entries.get(key)
        if entry.directory:
            return Info(name, Kind.DIRECTORY, 0, None, entry.mtime_ns)
        identity = known.identity if known is not None and known.entry is entry else None
        return Info(name, Kind.FILE, entry.size, None, entry.mtime_ns, identity=identity)


def _second(entry: Entry) -> int | None:
    """The time of an entry: in listings some are more exact than elsewhere."""
    return None if entry.mtime_ns is None else entry.mtime_ns // 1_000_000_000


def _same(one: Entry, other: Entry) -> bool:
    """Whether two entries are of one value, as far as both tell: by their tags, or else by their times."""
    if one.directory or other.directory or (None not in (one.size, other.size) and one.size != other.size):
        return one is other
    if one.tag is not None and other.tag is not None:
        return one.tag == other.tag
    return None in (one.mtime_ns, other.mtime_ns) or _second(one) == _second(other)

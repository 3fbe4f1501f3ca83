"""FsspecStore: any fsspec URL as a read-only store: http(s), s3, gs, memory, file, zip files, ..."""

from __future__ import annotations

import bisect
import contextlib
import logging
import math
import os
from collections.abc import AsyncIterator, Hashable, Iterator, Sequence
from typing import Any

import trio

from zarrfs.concurrency.single_flight import SingleFlight
from zarrfs.concurrency.tasks import for_each, in_background
from zarrfs.config import urls
from zarrfs.config.options import Options
from zarrfs.config.redaction import split_chain, without_secrets, without_user
from zarrfs.config.values import FOREVER
from zarrfs.errors import (
    AccessDenied,
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
from zarrfs.net.responses import Entry, System
from zarrfs.net.versions import note_unversioned
from zarrfs.store.api import Info, Kind, Store, Value, check_key, join_key, name_rule, split_key
from zarrfs.store.names import FlatListing, Known, Listing, Names
from zarrfs.store.remotefiles import RemoteFiles
from zarrfs.system.buffers import Buffer

log = logging.getLogger(__name__)

_FRESH = 1.0  # seconds for which a value is assumed unchanged, if its bytes come without a version

_WALK = 2  # directories listed in order until a walk is assumed
_AHEAD = 64  # directories that are listed ahead of a walk
_LEAD = 8  # pages that one of them is ahead of a walk
_WIDE = 50  # names of a directory in a page of a flat listing: with fewer, most of the page is below subdirectories
_PAGES = 100  # such pages in a walk, until a directory is listed without what is below it; else one


class FsspecStore(Store):
    """A store of the values below `url`. Creating it sends nothing over a network.

    A key is NotFound only if the server reports that it is absent (missing_status= says by which statuses); if the
    server fails, ReadError is raised. A name that is both a value and a directory is shown as the value (in a zip
    file: as the directory). Names and attributes that the server reports are valid for metadata_ttl= (names.py).
    """

    def __init__(self, url: str, options: Options, files: RemoteFiles | None = None) -> None:
        """`files`, if given, is closed by the caller."""
        self.immutable = urls.protocols(url)[:1] == ["zip"]
        self.files = RemoteFiles(options) if files is None else files
        self._owns_files = files is None
        self._url, self._missing = url, options.missing_status
        self._found: tuple[System, str] | None = None
        self._web = urls.protocols(url)[:1] in (["http"], ["https"])
        self._marks = not self._web  # whether listings are known to tell directories from values
        self.names = Names(FOREVER if self.immutable else options.metadata_ttl, self._web)
        self._asking: SingleFlight[str] = SingleFlight()
        self._listing: SingleFlight[str] = SingleFlight()
        self._beginning: SingleFlight[str] = SingleFlight()
        self._refused = -math.inf  # when a lookup's listing was last refused
        self._flat: FlatListing | None = None  # the last one that went on
        self._ahead: set[str] = set()  # directories listed ahead that no reader has reached
        self._walked = 0  # directories listed one after the other, each within one that was listed

    # -- the Store protocol

    async def info(self, key: str, sized: bool = True) -> Info:
        check_key(key, root=True)
        if not key:
            return Info("", Kind.DIRECTORY)
        return self._info(key, await self._known(key, sized=sized))

    async def list_dir(self, prefix: str, after: str = "") -> AsyncIterator[Info]:
        listing = await self._list(prefix)
        if listing is None:
            raise ReadError(prefix or "/", "the server shows no listing")
        for name, known in self.names.children(prefix, listing, after):
            yield self._info(name, known)

    async def open(self, key: str) -> Value:
        check_key(key, root=True)
        # a valid row of the table is enough, unless the server sends bytes without their version
        known = await self._exact_known(key)
        entry = known.entry
        assert entry is not None
        if entry.directory:
            raise IsDirectory(key)
        info = self._info(key, known)
        version: Hashable | None = None
        if not entry.rough and (entry.tag is not None or entry.mtime_ns is not None):
            version = entry if info.identity is None else info.identity
        return _RemoteValue(info, self, key, entry, version)

    async def read_version(self, key: str, opened: Info, entry: Entry, start: int, length: int) -> Buffer:
        """Return bytes of the version of a value that was opened.

        If the server sends bytes without their version, the version is requested at most once a second. Raise
        TargetChanged if the value has another version.
        """
        if self._info(key, await self._exact_known(key)).identity != opened.identity:
            raise TargetChanged(key, "has changed since it was opened")
        try:
            return await self._get(key, entry, start, length)
        except (TargetChanged, TargetMissing, OutOfRange):
            self.names.forget(key)
            raise

    @property
    def remote(self) -> bool:
        return True

    async def prefetch(self, keys: Sequence[str]) -> None:
        wanted = []

        async def look(key: str) -> None:
            with contextlib.suppress(StoreError, ReadError):
                entry = (await self._exact_known(key, look=True)).entry
                if entry is not None and not entry.directory and entry.size:
                    system, path = await self._path_of_key(key)
                    wanted.append(self.files.first_block(system, path, 0, entry.size, entry))

        await for_each(look, keys)
        await self.files.blocks.prefetch(wanted)

    async def locate(self, key: str, shown: bool = True) -> dict[str, Any]:
        info = await self.info(key)
        if info.kind is Kind.DIRECTORY:
            return {}
        system, path = await self._path_of_key(key)
        return {"url": system.shown(path) if shown else await self._url_of_key(key, system, path)}

    async def aclose(self) -> None:
        with trio.CancelScope(shield=True):
            if self._owns_files:
                await self.files.aclose()

    # -- for stores on top of this one

    async def look(self, key: str, page: bool = False) -> Info:
        """Return info() of a key that is likely a value and read next: the request also fetches its beginning.

        `page`: first fetch the page from the beginning of its directory, if that was not requested yet.
        """
        if page and self.names.get(key) is None:
            await self._try_first_page(split_key(key)[0])
        return self._info(key, await self._known(key, look=True))

    async def listed(self, prefix: str) -> list[Info] | None:
        """Return the sorted entries of a directory; None if the server shows no listing.

        Raise NotFound or NotDirectory.
        """
        listing = await self._list(prefix)
        if listing is None:
            return None
        return [self._info(name, known) for name, known in self.names.children(prefix, listing)]

    async def first_page(self, directory: str) -> Listing:
        """Return the listing of a directory of a server that has flat listings, complete or begun with a page.

        One page answers the lookups of all names up to its last key: readers look for several metadata documents.
        """

        async def ask() -> Listing:
            flat = FlatListing(self.names, directory)
            await self._next_page(flat)
            return flat.listing

        if (known := self.names.begun(directory)) is not None:
            return known
        return await self._beginning.run(directory, ask, lambda: self.names.begun(directory))

    async def _try_first_page(self, directory: str) -> None:
        """Do what first_page() does, unless listings are refused: a server may allow reads without allowing them."""
        if not self.names.is_valid(self._refused) and await self.is_flat():
            try:
                await self.first_page(directory)
            except (AccessDenied, TargetMissing) as exc:
                log.debug("%s", exc)
                self._refused = trio.current_time()

    async def _list(self, prefix: str) -> Listing | None:
        """Return the listing of a directory; None if the server shows no listing. Raise NotFound or NotDirectory."""
        check_key(prefix, root=True)
        known = self.names.get(prefix) if prefix else None
        is_directory = known is None or (known.entry is not None and known.entry.directory)
        if not is_directory and not (await self._entry(prefix)).directory:  # not all listings mark directories
            raise NotDirectory(prefix)
        if prefix in self._ahead:
            self._ahead.discard(prefix)
        elif prefix and self.names.was_listed(split_key(prefix)[0]):
            self._walked += 1
        else:
            self._walked = 0
            self._ahead.clear()
        walks = self._walked >= _WALK and not self.immutable
        if walks and not await self.is_flat():
            self._list_ahead(prefix)
        found = await self._complete(prefix)
        if found is not None and not found.entries and await self.is_flat():  # it has no keys: does it exist?
            if not prefix:
                await self.files.stat_at(*await self._path_of_key(""))
            elif not (await self._entry(prefix)).directory:
                raise NotDirectory(prefix)
        flat = self._flat
        if walks and flat is not None and flat.more and 0 < flat.pages_after(prefix) < _LEAD:
            in_background(self._page_ahead, flat)
        return found

    async def _complete(self, prefix: str) -> Listing | None:
        """Return the listing of a directory, requested unless it is known; None if the server shows no listing."""
        found = self.names.listing(prefix)
        if found is not None:
            return found

        async def ask() -> Listing | None:
            return await (self._list_flat(prefix) if await self.is_flat() else self._list_alone(prefix))

        return await self._listing.run(prefix, ask, lambda: self.names.listing(prefix))

    async def _list_alone(self, prefix: str) -> Listing | None:
        """List a directory without what is below it."""
        asked = trio.current_time()
        system, path = await self._path_of_key(prefix)
        try:
            entries = await self.files.listing_at(system, path)
        except NotADirectoryError:
            raise NotDirectory(prefix) from None
        except TargetMissing:
            if not prefix:
                raise
            entry = (await self._ask(prefix, look=False)).entry  # NotFound, unless only its listing is missing
            if entry is not None and not entry.directory:
                raise NotDirectory(prefix) from None
            return None
        return None if entries is None else await self._put_listing(prefix, entries, asked)

    async def _put_listing(self, prefix: str, entries: list[Entry], asked: float) -> Listing:
        """Store the entries of a directory that have valid names."""
        found: dict[str, Entry] = {}
        for entry in entries:
            rule = name_rule(entry.name) or ("a name with a slash" if "/" in entry.name else "")
            if rule:
                log.debug("%s: %s: not listed", join_key(prefix, entry.name), rule)
            elif entry.name not in found or not entry.directory:
                found[entry.name] = entry
        self._marks = self._marks or any(entry.directory for entry in found.values())
        if not self._marks:
            await self._tell_directories(prefix, found)
            asked = trio.current_time()  # so that a name that is listed stays so, even if its value was not found
        for name, entry in found.items():
            was = self.names.last(join_key(prefix, name))
            exact = was is not None and was.entry is not None and not was.entry.rough and was.entry.size == entry.size
            if entry.rough and exact:  # keep the earlier attributes
                entry = entry._replace(size=None)
            found[name] = self._identified(was, entry)
        return self.names.put_listing(prefix, Listing(asked, found))

    async def _tell_directories(self, prefix: str, found: dict[str, Entry]) -> None:
        """Request the entries without a size, which may be directories: not all web servers mark these in listings."""

        async def ask(name: str) -> None:
            key = join_key(prefix, name)
            with contextlib.suppress(NotFound, AccessDenied):  # a reader of that value will get the error
                entry = await self._entry(key)
                if entry.directory:
                    found[name] = Entry(name, True)

        await for_each(ask, [name for name, entry in found.items() if entry.size is None])

    async def _list_flat(self, prefix: str) -> Listing | None:
        """List a directory with everything below it, unless that takes too many pages.

        A reader that walks a tree continues one flat listing.
        """
        listing, count, left = self.names.begun(prefix), 0, _PAGES if self._walked >= _WALK else 1
        if listing is None:
            listing = await self.first_page(prefix)
            left -= len(listing.entries) <= _WIDE
        while (flat := listing.flat) is not None:
            with _broken_off():
                if not left:
                    return await self._list_alone(prefix)
                count = len(listing.entries)
                await self._next_page(flat)
            left -= len(listing.entries) - count <= _WIDE
        return listing

    async def _next_page(self, flat: FlatListing) -> None:
        """Request the next page of a flat listing, unless another task does."""
        after = flat.after
        async with flat.lock:
            if flat.after == after and flat.more:
                self._flat, asked = flat, trio.current_time()
                system, path = await self._path_of_key("")
                flat.add(await self.files.page_at(system, path, flat.after), asked)

    # -- parts

    async def _path_of_key(self, key: str) -> tuple[System, str]:
        """Return (system, path in it) of a key. Send no request, but open an archive, or log in.

        Raise ReadError if the URL of the store cannot be used.
        """
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

    async def _url_of_key(self, key: str, system: System, path: str) -> str:
        """Return a URL that leads to the value at `path`, without credentials. Raise ReadError if none does."""
        if self._web:  # names are percent-encoded, so that a query belongs to the store's URL
            return without_secrets(path)
        head, *archive = split_chain(self._url)
        url = "::".join([os.path.join(head, key), *archive])
        found, there = await self.files.find(url)
        if found.identity(there) != system.identity(path):  # for some protocols a "?" ends the path
            raise ReadError(key, "a name that means something else in a URL")
        *before, last = split_chain(url)
        protocol = urls.protocols(url)[-1]
        if archive and protocol in ("http", "https"):  # a query belongs to the store's URL
            last = without_secrets(last)
        elif archive and protocol in ("file", "local"):
            last = urls.file_path(last)
        else:
            last = without_user(last)
        return "::".join([*before, last])

    async def _entry(self, key: str) -> Entry:
        entry = (await self._known(key)).entry
        assert entry is not None
        return entry

    async def _exact_known(self, key: str, look: bool = False) -> Known:
        """Return _known() of a key that is about to be read, requested anew if its entry is not exact enough for that.

        That is so if it has no tag and comes from an HTML listing, or if it is older than _FRESH seconds and has no
        tag or a server that sends bytes without their version. `look`: the key is likely a value.
        """
        named = self.names.get(key) if key else None
        look = look or (named is not None and named.entry is not None and not named.entry.directory)
        known = await self._known(key, look)
        entry = known.entry
        assert entry is not None
        if entry.directory or self.immutable:
            return known
        tagged = entry.tag is not None and self._found is not None and self._found[0].sends_versions
        if (entry.rough and entry.tag is None) or not (tagged or known.seen + _FRESH > trio.current_time()):
            known = await self._request_entry(key, look=True)
            if known.entry is None:  # the request of another task found that it is absent
                raise NotFound(key)
        return known

    async def _known(self, key: str, look: bool = False, sized: bool = True) -> Known:
        """Return what is known of a key, or request it; unless `sized`, the size may be unknown. Raise NotFound."""
        if not key:
            return Known(Entry("", True))
        known = self.names.get(key)
        if known is None or (sized and _lacks_size(known)):
            known = await self._request_entry(key, look)
        if known.entry is None:
            raise NotFound(key)
        return known

    async def _request_entry(self, key: str, look: bool) -> Known:
        """Request the entry of a key. Concurrent callers share one request."""

        async def ask() -> Known:
            if not look:
                await self._try_first_page(split_key(key)[0])
                if (found := known()) is not None:
                    return found
            return await self._ask(key, look)

        def known() -> Known | None:
            found = self.names.get(key)
            return None if found is None or _lacks_size(found) else found

        return await self._asking.run(key, ask, known)

    async def _ask(self, key: str, look: bool) -> Known:
        asked = trio.current_time()
        system, path = await self._path_of_key(key)
        try:
            entry = await self.files.look_at(system, path) if look and self._may_look(key, system, path) else None
            if entry is None or _is_page(key, entry):  # an HTML page may be the listing of a directory
                entry = await self.files.stat_at(system, path)
        except NotADirectoryError:
            raise NotDirectory(key) from None
        except ReadError as exc:
            # missing_status= says which statuses mean absence; without a status, TargetMissing means it
            if isinstance(exc, TargetMissing) if exc.status is None else exc.status in self._missing:
                self.names.put(key, None, asked)
                raise NotFound(key) from None
            raise
        if _is_page(key, entry):
            # some servers show a directory's listing without redirecting to its name with "/"
            if await self.files.listing_at(system, path) is None:
                raise ReadError(key, "the server answers with an HTML page, as for names that it does not have")
            entry = Entry(entry.name, True)
        if entry.size is None and not entry.directory:
            raise ReadError(key, "the server does not state its size")
        if entry.tag is None and entry.mtime_ns is None and not (entry.directory or self.immutable):
            note_unversioned(system.host(path), system.shown(path))
        return self.names.put(key, self._identified(self.names.last(key), entry), asked)

    def _may_look(self, key: str, system: System, path: str) -> bool:
        """Return whether to stat a value by fetching its beginning: that comes with a version, and is not cached."""
        known = self.names.last(key)
        entry = None if known is None else known.entry
        if entry is None or entry.size is None or entry.directory or entry.rough:
            return system.sends_versions
        block = self.files.first_block(system, path, 0, entry.size, entry)
        return system.sends_versions and not self.files.blocks.cache.has(block.key)

    def _identified(self, known: Known | None, entry: Entry) -> Entry:
        """Return the entry; if `known` may be of the same version, with its tag, time and identity."""
        was = None if known is None else known.entry
        if was is None or self.immutable or entry.size is None or not _same(was, entry):
            return entry
        tagged = entry if entry.tag is not None else entry._replace(tag=was.tag, strong=was.strong)
        if was.rough:  # keep the time that stat(2) has reported
            tagged = tagged._replace(mtime_ns=was.mtime_ns, rough=tagged.tag is None)
        return tagged if _identity(tagged) == _identity(was) else tagged._replace(identity=_identity(was))

    # -- listings ahead of a reader that walks a tree

    def _list_ahead(self, prefix: str) -> None:
        """Prefetch the listings of the next directories: those in this one, and those after it."""
        places = [(prefix, "")]
        if prefix:
            places.append(split_key(prefix))
        for directory, after in places:
            listing = self.names.listing(directory)
            if listing is None:
                continue
            at = bisect.bisect_right(listing.order, after)
            for name in listing.order[at : at + 2 * _AHEAD]:
                if len(self._ahead) >= _AHEAD:
                    return
                key = join_key(directory, name)
                if listing.entries[name].directory and key not in self._ahead and self.names.listing(key) is None:
                    self._ahead.add(key)
                    in_background(self._one_ahead, key)

    async def _one_ahead(self, key: str) -> None:
        try:
            await self._complete(key)  # a reader may have listed it before this task began
        except (StoreError, ReadError) as exc:  # a reader of that directory will get the error
            log.debug("%s", exc)
            self._walked = 0

    async def _page_ahead(self, flat: FlatListing) -> None:
        if not flat.lock.locked():
            with contextlib.suppress(StoreError, ReadError):  # a reader of these directories will get the error
                await self._next_page(flat)

    async def is_flat(self) -> bool:
        """Return whether the server lists all keys below a directory, regardless of subdirectories."""
        system, _ = await self._path_of_key("")
        return system.flat

    async def _get(self, key: str, entry: Entry, start: int, length: int) -> Buffer:
        system, path = await self._path_of_key(key)
        assert entry.size is not None
        stop = min(entry.size, start + length)
        if start >= stop:
            return b""
        data = await self.files.read_at(system, path, start, stop - start, 0, entry.size, entry)
        if not (self.immutable or system.sends_versions):
            # the parts of a large value do not show whether they are of one version: request the entry again, unless
            # it is at most a second old
            now = (await self._exact_known(key)).entry
            if now is not None and not _same(entry, now):
                raise TargetChanged(key, "has changed while it was read")
        return data

    def _info(self, key: str, known: Known) -> Info:
        name, entry = key.rpartition("/")[2], known.entry
        assert entry is not None
        if entry.directory:
            return Info(name, Kind.DIRECTORY, 0, None, entry.mtime_ns)
        identity = None if self.immutable or entry.size is None else _identity(entry)
        return Info(name, Kind.FILE, entry.size, None, entry.mtime_ns, identity=identity)


@contextlib.contextmanager
def _broken_off() -> Iterator[None]:
    """Turn AccessDenied into another ReadError: the listing has begun, so the rest is unknown, not forbidden."""
    try:
        yield
    except AccessDenied as exc:
        raise ReadError(exc.where, f"its listing broke off: {exc.reason}", exc.status) from exc


def _is_page(key: str, entry: Entry) -> bool:
    """Return whether the server answered with an HTML page although the key does not end in .html or .htm."""
    return entry.html and not key.lower().endswith((".html", ".htm"))


def _lacks_size(known: Known) -> bool:
    return known.entry is not None and known.entry.size is None and not known.entry.directory


def _identity(entry: Entry) -> int:
    """Return a number that identifies a version of a value in this process."""
    return (
        entry.identity
        if entry.identity is not None
        else hash((entry.size, entry.tag, None if entry.rough else _second(entry)))
    )


def _second(entry: Entry) -> int | None:
    """Return the time of an entry in seconds, because some listings are more exact than other responses."""
    return None if entry.mtime_ns is None else entry.mtime_ns // 1_000_000_000


def _same(one: Entry, other: Entry) -> bool:
    """Return whether two entries may be of one version: their sizes, and their tags or else times, do not differ."""
    if one.directory or other.directory or (None not in (one.size, other.size) and one.size != other.size):
        return one is other
    if one.tag is not None and other.tag is not None:
        return one.tag == other.tag
    rough = one.rough or other.rough
    return rough or None in (one.mtime_ns, other.mtime_ns) or _second(one) == _second(other)


class _RemoteValue(Value):
    __slots__ = ("_entry", "_key", "_store")

    def __init__(self, info: Info, store: FsspecStore, key: str, entry: Entry, version: Hashable | None) -> None:
        super().__init__(info, version)
        self._store, self._key, self._entry = store, key, entry

    async def read(self, start: int, length: int) -> Buffer:
        return await self._store.read_version(self._key, self.info, self._entry, start, length)

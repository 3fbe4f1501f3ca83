"""FsspecStore: any fsspec URL as a read-only store: http(s), s3, gs, memory, file, zip files, ..."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import logging
import os
import time
from collections.abc import AsyncIterator, Hashable, Iterator, Sequence
from typing import Any
from urllib.parse import urlsplit

import trio

from zarrfs.concurrency.lru import LRU
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
from zarrfs.net.responses import Entry, Page, System
from zarrfs.net.versions import note_unversioned
from zarrfs.net.weboptions import from_netrc
from zarrfs.store.api import Info, Kind, Store, Value, check_key, join_key, name_rule, split_key
from zarrfs.store.name_table import Emptied, Known, NameTable, encoded, span_of
from zarrfs.store.pages import Pages
from zarrfs.store.remotefiles import RemoteFiles
from zarrfs.system.buffers import Buffer

log = logging.getLogger(__name__)

_FRESH = 1.0  # seconds for which a value is assumed unchanged, if its bytes come without a version

_WALK = 2  # directories listed in order until a walk is assumed
_AHEAD, _BESIDE = 256, 64  # directories that are listed ahead of a walk: in all; in one directory
_TICK = 0.001  # seconds by which `now` is set back, so that later responses are valid even with metadata_ttl=0s
_NAMES = 1  # version of the contents of a kept table of names
_WIDE = 50  # entries: a directory with more in its first page is listed with everything below it


class FsspecStore(Store):
    """A store of the values below `url`. Creating it sends nothing over a network.

    A key is NotFound only if the server reports that it is absent (missing_status= says by which statuses); if the
    server fails, ReadError is raised. If a value changes while get() reads it, it is read again, so get() never mixes
    two versions. A name that is both a value and a directory is shown as the value (in a zip file: as the directory).
    Names and attributes that the server reports are valid for metadata_ttl= (name_table.py).
    """

    def __init__(
        self, url: str, options: Options, names: str | None = None, files: RemoteFiles | None = None
    ) -> None:
        """`names`: a directory that keeps the table of names. `files`, if given, is closed by the caller."""
        self.immutable = urls.protocols(url)[:1] == ["zip"]
        self.files = RemoteFiles(options) if files is None else files
        self._owns_files, self._directory = files is None, names
        self._url, self._missing, self._reread = url, options.missing_status, options.stale == "reread"
        self._storage = options.storage
        self._found: tuple[System, str] | None = None
        since = max(options.asked_since, options.names_since)
        self.names = NameTable(*self._ttls(options), since, options.cache == "none")
        self._web = self.names.may_omit_names = urls.protocols(url)[:1] in (["http"], ["https"])
        self._asking: SingleFlight[str] = SingleFlight()
        self._ahead: set[str] = set()  # directories listed ahead that no reader has reached
        self._listings: dict[str, trio.Event] = {}  # listings ahead that are under way
        # by directory: the last name in it up to which directories were listed ahead, and when
        self._reached: LRU[str, tuple[str, float]] = LRU(2 * _AHEAD)
        self._walked = 0  # directories listed one after the other, each within one that was listed
        self._pages: Pages | None = Pages(self.names, self._page)  # None: the server refuses listings

    # -- the Store protocol

    async def info(self, key: str, sized: bool = True) -> Info:
        check_key(key, root=True)
        if not key:
            return Info("", Kind.DIRECTORY)
        return self._info(key, await self._known(key, sized=sized))

    async def lists_same_sizes(self) -> bool:
        return await self.is_flat()  # buckets list keys with sizes; web servers send some sizes on request only

    async def list_dir(self, prefix: str, after: str = "") -> AsyncIterator[Info]:
        if await self.is_flat():
            async for info in self._flat_dir(prefix, after):
                yield info
            return
        for info in await self._listing(prefix):
            if info.name > after:
                yield info

    async def open(self, key: str) -> Value:
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

    async def get(self, key: str, start: int = 0, length: int | None = None) -> Buffer:
        check_key(key, root=True)
        if not key:
            raise IsDirectory(key)
        entry = await self._exact(key)
        try:
            return await self._get(key, entry, start, length)
        except (TargetChanged, TargetMissing, OutOfRange):
            if self.immutable:
                raise
        # The value no longer has the version that was looked up: repeat the lookup and the read, once.
        self.names.forget(key)
        return await self._get(key, await self._exact(key), start, length)

    async def read_version(self, key: str, opened: Info, entry: Entry, start: int, length: int) -> Buffer:
        """Return bytes of the version of a value that was opened; with -o stale=reread, of the current version.

        If the server sends bytes without their version, the version is requested at most once a second. Raise
        TargetChanged if the value has another version.
        """
        if self._reread:
            return await self.get(key, start, length)
        known = await self._exact_known(key)
        same = known.entry is not None and _same(entry, known.entry)
        identity, now = opened.identity, known.identity
        # _same() compares only sizes if `entry` has no version; identities differ if one became known since, and then
        # changed
        if not same or (identity != now and None not in (identity, now)):
            raise TargetChanged(key, "has changed since it was opened")
        try:
            return await self._get(key, entry, start, length)
        except (TargetChanged, TargetMissing, OutOfRange):
            self.names.forget(key)
            raise

    @property
    def remote(self) -> bool:
        return True

    async def get_ready(self) -> None:
        with contextlib.suppress(ReadError):
            await self.files.get_ready(self._url)

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

    def adjust(self, options: Options) -> None:
        self.files.adjust(options)
        self.names.ttl, self.names.absent = self._ttls(options)

    def stats(self) -> dict[str, Any]:
        """Return the counters of the remote files."""
        return {"remote": self.files.stats()}

    async def aclose(self) -> None:
        with trio.CancelScope(shield=True):
            if self._owns_files:
                await self.files.aclose()
            await trio.to_thread.run_sync(self.names.keep)
        self.names.close()

    # -- for stores on top of this one

    async def look(self, key: str, page: bool = False) -> Info:
        """Return info() of a key that is likely a value and read next: the request also fetches its beginning.

        `page`: first fetch the page from the beginning of its directory, if that was not requested yet.
        """
        await self.find()
        if page and self.names.get(key) is None:
            await self._in_page(key)
        return self._info(key, await self._known(key, look=True))

    async def listed(self, prefix: str) -> list[Info] | None:
        """Return the sorted entries of a directory; None if the server shows no listing.

        Raise NotFound or NotDirectory.
        """
        check_key(prefix, root=True)
        if self._found is None:
            await self.find()
        if prefix and (known := self.names.get(prefix)) is not None:
            if known.entry is None:
                raise NotFound(prefix)
            if not known.entry.directory:
                raise NotDirectory(prefix)
        if prefix in self._ahead:
            self._ahead.discard(prefix)
        elif prefix not in self._listings:
            self._walked = self._walked + 1 if prefix and self.names.listed(split_key(prefix)[0]) else 0
        if self._walked >= _WALK and not self.immutable and not await self.is_flat():  # flat: Pages prefetches
            self._list_ahead(prefix)
        if (asking := self._listings.get(prefix)) is not None:
            await asking.wait()
        return await self._listed(prefix)

    async def _listed(self, prefix: str) -> list[Info] | None:
        """Return listed(), without looking up `prefix` first and without listing ahead."""
        now = time.time()
        if self.names.listed(prefix, now):
            with contextlib.suppress(Emptied):
                return [self._info(name, known) for name, known in self.names.children(prefix, "", None, now)]
        system, path = await self._path_of_key(prefix)
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
        return None if entries is None else self._sorted(prefix, entries, now)

    # -- parts

    async def find(self) -> None:
        """Find the system of the URL, and the file that keeps its table of names. Raise ReadError.

        Send no request to a server of values; an archive behind a URL is opened, and some clients log in.
        """
        if self._found is None:
            found = await self.files.find(self._url)
            if self._directory is not None and not self.immutable:
                about = repr((_NAMES, found[0].identity(found[1]), self._missing, *self._credentials()))
                digest = hashlib.sha256(about.encode("utf-8", "surrogateescape")).hexdigest()
                self.names.path = os.path.join(self._directory, f"{digest}.names")
            self._found = found

    def _credentials(self) -> tuple[object, ...]:
        """Return what identifies the client to the server: the URL, storage options, environment variables, netrc.

        They are part of the name of a kept table, because many servers answer 404 for values a client may not see.
        """
        family = urls.names(next(reversed(urls.protocols(self._url)), ""))[0]
        prefix = {"s3": "AWS_", "gcs": "GOOGLE_", "abfs": "AZURE_"}.get(family)
        variables = sorted(item for item in os.environ.items() if prefix and item[0].startswith(prefix))
        personal = from_netrc(urlsplit(self._url).hostname or "") if family == "http" else ""
        return self._url, sorted(self._storage.items()), variables, personal

    async def _path_of_key(self, key: str) -> tuple[System, str]:
        """Return (system, path in it) of a key."""
        check_key(key, root=True)
        if self._found is None:
            await self.find()
            assert self._found is not None
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
        if "::" in key:
            raise ReadError(key, 'a name with "::", which means something else in a URL')
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

    def _ttls(self, options: Options) -> tuple[float, float]:
        """Return the seconds for which names are valid, and those for which absent names are.

        The latter is the time for which the kernel caches absent names, if an option sets it.
        """
        if self.immutable:
            return FOREVER, FOREVER
        timeouts = (options.negative_timeout, options.entry_timeout, options.attr_timeout, options.metadata_ttl)
        return options.metadata_ttl, next(timeout for timeout in timeouts if timeout is not None)

    async def _entry(self, key: str) -> Entry:
        entry = (await self._known(key)).entry
        assert entry is not None
        return entry

    async def _exact(self, key: str) -> Entry:
        entry = (await self._exact_known(key)).entry
        assert entry is not None
        return entry

    async def _exact_known(self, key: str, look: bool = False) -> Known:
        """Return _known() of a key that is about to be read, requested anew if its entry is not exact enough for that.

        That is so if it has no tag and comes from an HTML listing, or if it is older than _FRESH seconds and has no
        tag or a server that sends bytes without their version. `look`: the key is likely a value.
        """
        if self._found is None:
            await self.find()
        named = self.names.get(key) if key else None
        look = look or (named is not None and named.entry is not None and not named.entry.directory)
        known = await self._known(key, look)
        entry = known.entry
        assert entry is not None
        if entry.directory or self.immutable:
            return known
        tagged = entry.tag is not None and self._found is not None and self._found[0].sends_versions
        if (entry.rough and entry.tag is None) or not (tagged or known.seen + _FRESH > time.time()):
            known = await self._request_entry(key, look=True)
            if known.entry is None:  # the request of another task found that it is absent
                raise NotFound(key)
        return known

    async def _known(self, key: str, look: bool = False, sized: bool = True) -> Known:
        """Look up a key in the table, or request it; unless `sized`, the size may be unknown. Raise NotFound."""
        if not key:
            return Known(Entry("", True))
        if self._found is None:
            await self.find()
        known = self.names.get(key)
        if known is None or (sized and _lacks_size(known)):
            known = await self._request_entry(key, look)
        if known.entry is None:
            raise NotFound(key)
        return known

    async def _request_entry(self, key: str, look: bool) -> Known:
        """Request the entry of a key. Concurrent callers share one request."""

        async def ask() -> Known:
            found = None if look else await self._in_page(key)
            return await self._ask(key, look) if found is None else found

        def known() -> Known | None:
            found = self.names.get(key)
            return None if found is None or _lacks_size(found) else found

        return await self._asking.run(key, ask, known)

    async def _ask(self, key: str, look: bool) -> Known:
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
                self.names.put(key, None)
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
        return self.names.put(key, *self._identified(self.names.last(key), entry))

    def _may_look(self, key: str, system: System, path: str) -> bool:
        """Return whether to stat a value by fetching its beginning: that comes with a version, and is not cached."""
        known = self.names.last(key)
        entry = None if known is None else known.entry
        if entry is None or entry.size is None or entry.directory or entry.rough:
            return system.sends_versions
        block = self.files.first_block(system, path, 0, entry.size, entry)
        return system.sends_versions and not self.files.blocks.cache.has(block.key)

    def _identified(self, known: Known | None, entry: Entry) -> tuple[Entry, int | None]:
        """Return (entry, identity).

        If `known` may be of the same version, its tag and time complete the entry, and its identity is kept.
        """
        if entry.directory or entry.size is None or self.immutable or self._reread:
            return entry, None
        was = None if known is None else known.entry
        if known is None or was is None or not _same(was, entry):
            return entry, _identity(entry)
        identity = _identity(was) if known.identity is None else known.identity
        if entry.tag is None:
            entry = entry._replace(tag=was.tag, strong=was.strong)
        if was.rough:  # keep the time that stat(2) has reported
            entry = entry._replace(mtime_ns=was.mtime_ns, rough=entry.tag is None)
        return entry, identity

    # -- listings ahead of a reader that walks a tree

    def _list_ahead(self, prefix: str) -> None:
        """Prefetch the listings of the next directories: those in this one, and a few after it."""
        self._list_below(prefix, "", _BESIDE)
        if prefix:
            above, name = split_key(prefix)
            beside = sum(split_key(key)[0] == above for key in self._ahead)
            self._list_below(above, name, _BESIDE - beside)

    def _list_below(self, directory: str, after: str, most: int) -> None:
        """Prefetch the listings of up to `most` subdirectories, after the name `after` and those already requested."""
        now = time.time()
        if most <= 0 or len(self._ahead) >= _AHEAD or not self.names.listed(directory, now):
            return
        was = self._reached.pop(directory, ("", 0.0))
        after = max(after, was[0]) if was[1] + self.names.ttl > now else after
        with contextlib.suppress(Emptied):
            for child, known in self.names.children(directory, after, None, now):
                if most <= 0 or len(self._ahead) >= _AHEAD:
                    break
                after, key = child, join_key(directory, child)
                listed = known.entry is None or not known.entry.directory or key in self._listings
                if not listed and not self.names.listed(key, now):
                    most -= 1
                    self._ahead.add(key)
                    self._listings[key] = trio.Event()
                    in_background(self._one_ahead, key)
        self._reached.put(directory, (after, now))

    async def _one_ahead(self, key: str) -> None:
        try:
            await self._listed(key)
            self._list_below(key, "", _BESIDE)  # a walk enters `key` before the next directory
        except (StoreError, ReadError) as exc:  # a reader of that directory will get the error
            log.debug("%s", exc)
            self._walked = 0
        finally:
            self._listings.pop(key).set()

    # -- flat listings

    async def is_flat(self) -> bool:
        """Return whether the server lists all keys below a directory, regardless of subdirectories."""
        system, _ = await self._path_of_key("")
        return system.flat and self._pages is not None

    async def _page(self, after: str) -> Page:
        return await self.files.page_at(*await self._path_of_key(""), after)

    async def _flat_dir(self, prefix: str, after: str) -> AsyncIterator[Info]:
        """Yield the entries of a directory as its pages arrive."""
        check_key(prefix, root=True)
        if prefix and not (await self._entry(prefix)).directory:
            raise NotDirectory(prefix)
        now = time.time() - _TICK
        found = begun = False
        while True:
            emptied, before = self.names.emptied, after
            try:
                async for info in self._flat_names(prefix, after, now, begun):
                    found, after = True, info.name
                    yield info
                if self.names.emptied == emptied:
                    break
            except Emptied:
                log.debug("%s: listed anew from %r on: the table of names has lost some", prefix, after)
            if self.names.emptied == emptied:  # only forget() was called
                continue
            # no progress, because the table has no room for all keys below the next name: list the names alone
            if begun and after == before:
                for info in await self._listing(prefix):
                    if info.name > after:
                        found = True
                        yield info
                break
            begun = True
        # the root has no entries: stat it, to raise the error if it does not exist or is a value
        if not (found or after or prefix):
            system, path = await self._path_of_key("")
            if not (await self.files.stat_at(system, path)).directory:
                raise NotDirectory(prefix)

    async def _flat_names(self, prefix: str, after: str, now: float, begun: bool) -> AsyncIterator[Info]:
        """Yield the entries of a directory after a name, as its pages arrive.

        If the table loses names meanwhile, Emptied is raised, or `names.emptied` has increased and entries may be
        missing. `begun`: use pages even if most keys are below few subdirectories.
        """
        pages = self._pages  # another task may set it to None while this one waits
        if pages is None:
            if after:
                raise ReadError(prefix or "/", "its listing broke off: the server refuses listings")
            raise AccessDenied(prefix or "/", "the server refuses listings")
        start, stop = span_of(prefix)
        lost = self.names.lost
        at = encoded(join_key(prefix, after)) + b"\0" if after else start
        while at < stop and not self.names.listed(prefix, now):
            with _broken_off(at > start):
                at = await pages.ensure_listed(at, stop, now)
            if self.names.lost != lost:
                raise Emptied
            # narrow: the first page had at most _WIDE names of this directory, so most keys are below few names
            narrow = not begun and not any(itertools.islice(self._so_far(prefix, "", None, now), _WIDE, None))
            if at < stop and narrow and not pages.walking:
                with _broken_off(True):
                    await self.listed(prefix)  # many keys below few names: list this directory alone
                break
            begun = True
            for info in self._so_far(prefix, after, _known_before(prefix, at), now):
                after = info.name
                yield info
        for info in self._so_far(prefix, after, None, now):
            yield info

    def _so_far(self, prefix: str, after: str, upto: bytes | None, now: float) -> Iterator[Info]:
        """Yield the known entries of a directory after the name `after` and before `upto`."""
        return (self._info(name, known) for name, known in self.names.children(prefix, after, upto, now))

    async def _in_page(self, key: str) -> Known | None:
        """Look up a key by fetching the page from the beginning of its directory; None: request the key alone."""
        start, stop = span_of(split_key(key)[0])
        now = time.time() - _TICK
        if not await self.is_flat() or self.names.covered(start, stop, now) > start:
            return None
        assert self._pages is not None
        try:
            await self._pages.ensure_listed(start, stop, now)
        except (AccessDenied, TargetMissing) as exc:  # a server may allow reads without allowing listings
            log.debug("%s", exc)
            self._pages = None
            return None
        return self.names.get(key, now)

    async def _listing(self, prefix: str) -> list[Info]:
        found = await self.listed(prefix)
        if found is None:
            raise ReadError(prefix or "/", "the server shows no listing")
        return found

    def _sorted(self, prefix: str, entries: list[Entry], since: float) -> list[Info]:
        """Store a listing in the table; return its entries with valid names, sorted."""
        found: dict[str, Entry] = {}
        for entry in entries:
            rule = name_rule(entry.name) or ("a name with a slash" if "/" in entry.name else "")
            if rule:
                log.debug("%s: %s: not listed", join_key(prefix, entry.name), rule)
            elif entry.name not in found or not entry.directory:
                found[entry.name] = entry
        before, names = self.names.rows(prefix), []
        for name in sorted(found):
            was, entry = before.get(name), found[name]
            if entry.rough and was is not None and was.entry is not None and was.entry.size == entry.size:
                entry = entry._replace(size=None)  # the earlier size is more exact
            names.append((name, *self._identified(was, entry)))
        if self.names.put_listing(prefix, names, since):
            with contextlib.suppress(Emptied):
                now = since - _TICK
                return [self._info(name, known) for name, known in self.names.children(prefix, "", None, now)]
        return [self._info(name, Known(entry, identity, since)) for name, entry, identity in names]

    async def _get(self, key: str, entry: Entry, start: int, length: int | None) -> Buffer:
        if entry.directory:
            raise IsDirectory(key)
        system, path = await self._path_of_key(key)
        if entry.size is None:
            whole = await self.files.read_all_at(system, path)
            return memoryview(whole)[start : len(whole) if length is None else start + length]
        stop = entry.size if length is None else min(entry.size, start + length)
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
        name, entry = split_key(key)[1], known.entry
        assert entry is not None
        if entry.directory:
            return Info(name, Kind.DIRECTORY, 0, None, entry.mtime_ns)
        identity = None if self.immutable or self._reread else known.identity
        if identity is None and not (self.immutable or self._reread) and entry.size is not None:
            identity = _identity(entry)
        return Info(name, Kind.FILE, entry.size, None, entry.mtime_ns, identity=identity)


@contextlib.contextmanager
def _broken_off(begun: bool) -> Iterator[None]:
    """Turn AccessDenied into another ReadError if the listing has `begun`: the rest is unknown, not forbidden."""
    try:
        yield
    except AccessDenied as exc:
        if not begun:
            raise
        raise ReadError(exc.where, f"its listing broke off: {exc.reason}", exc.status) from exc


def _known_before(prefix: str, at: bytes) -> bytes:
    """Return the name in a directory before which all names are known, if all keys before `at` are.

    Names and keys sort differently: in a listing the directory "a" comes before the value "a-b", but its keys, which
    reveal it, come after that.
    """
    name = at[len(span_of(prefix)[0]) :].split(b"/")[0]
    for index, letter in enumerate(name):
        if index and letter < ord("/"):
            return name[:index]
    return name


def _is_page(key: str, entry: Entry) -> bool:
    """Return whether the server answered with an HTML page although the key does not end in .html or .htm."""
    return entry.html and not key.lower().endswith((".html", ".htm"))


def _lacks_size(known: Known) -> bool:
    return known.entry is not None and known.entry.size is None and not known.entry.directory


def _identity(entry: Entry) -> int:
    """Return a number that identifies a version of a value, and is the same in every process."""
    about = repr((entry.size, entry.tag, None if entry.rough else _second(entry))).encode()
    return int.from_bytes(hashlib.blake2b(about, digest_size=8).digest(), "big", signed=True)


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

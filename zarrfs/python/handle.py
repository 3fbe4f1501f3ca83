"""StoreHandle: an open source for blocking callers, in any thread, in forked processes, and after unpickling."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import secrets
import threading
import weakref
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TypeVar

from zarrfs.archives.source_kinds import absolute
from zarrfs.config.effective import settings
from zarrfs.config.keywords import as_items
from zarrfs.config.options import TABLE, Options
from zarrfs.config.redaction import without_secrets
from zarrfs.config.values import is_url
from zarrfs.documents.plan import Plan
from zarrfs.errors import SourceError, StoreError, UsageError
from zarrfs.python import background
from zarrfs.sources import absolute_source, discard, fingerprint, open_plan, plan_source
from zarrfs.store.api import Info, Kind, Store, check_key, join_key
from zarrfs.store.traversal import get_followed

if TYPE_CHECKING:
    import numpy as np

    from zarrfs.views.reading import Selection

log = logging.getLogger(__name__)

T = TypeVar("T")

_SHARED_MOST = 32  # open sources kept for unpickled handles of this process
_CLOSING = 10.0  # seconds that closing may take
_PAGE = 10_000  # entries of a directory that one call on the loop lists


class StoreHandle:
    """A source, open for reading: a reference set, an archive or a Zarr store, in any view.

    Created by open_store(). Keys are names joined by "/", without a slash at their ends; the root is "". Methods
    block, and may be called from any number of threads at the same time.

    Methods raise NotFound, IsDirectory, NotDirectory or InvalidKey (all of them StoreError) if the source has no such
    value. They raise ReadError if a value exists and its bytes cannot be read; such a value is never reported as
    missing. All these errors are ZarrfsErrors, whose text is the line that a command would print.

    An unpickled handle opens the source again at its first use, with the options that were given here: the pickle
    contains storage_options, and so credentials. Opening raises SourceError if a document has changed since
    (directories, zip files, stores behind URLs and Parquet sets have no version to compare). A handle in a forked
    process opens the source again in the same way.
    """

    _fingerprint: str | None  # of the version that this handle shows; None: any version
    _opened: _Opened | None  # None: not opened yet, or closed
    _opening: str = ""  # of a source without versions: the id by which pickled copies share a store

    def __init__(self, source: str | os.PathLike[str], options: dict[str, Any]) -> None:
        self._set(os.fspath(source), [*map(_absolute_item, as_items(options))], None, False)
        self._opened = opened = self._open()
        self.source, self._fingerprint = opened.source, opened.fingerprint
        self._opening = "" if opened.fingerprint else secrets.token_hex(8)
        self._end_with(opened)

    def _set(self, source: str, items: Sequence[str], fingerprint: str | None, shared: bool) -> None:
        self.source, self._items = source, tuple(items)
        self._fingerprint, self._opened = fingerprint, None
        self._shared = shared  # whether it shares its store with other unpickled handles of this process
        self._closed = False

    # -- reading

    def get(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        """Return the bytes [start, start + length) of a value, cut at its end; without a length, all from `start`.

        A negative `start` counts from the end. Symbolic links within the source are followed.
        """
        return self.call(get_followed, check_key(key), start, length)

    def info(self, key: str = "") -> Info:
        """Return the entry of `key`: its kind, size, time and, of a symbolic link, its target."""
        return self.call(_info, check_key(key, root=True))

    def list_dir(self, prefix: str = "") -> list[Info]:
        """Return the entries of a directory, in the order of the source."""
        return self.call(_list_dir, check_key(prefix, root=True))

    def list(self, prefix: str = "") -> Iterator[str]:
        """Yield the key of every file and symbolic link below a directory, without holding all keys in memory."""
        levels = [(check_key(prefix, root=True), self._pages(prefix))]
        while levels:
            above, entries = levels[-1]
            entry = next(entries, None)
            if entry is None:
                levels.pop()
                continue
            key = join_key(above, entry.name)
            if entry.kind is Kind.DIRECTORY:
                levels.append((key, self._pages(key)))
            else:
                yield key

    def _pages(self, prefix: str) -> Iterator[Info]:
        after = ""
        while page := self.call(_page, prefix, after):
            yield from page
            after = page[-1].name

    def locate(self, key: str) -> dict[str, Any]:
        """Return where the bytes of a value are: {"inline": size}, {"url", "offset", "length"}, ..."""
        return self.call(_locate, check_key(key))

    def read_array(self, name: str = "", selection: Selection = ()) -> np.ndarray[Any, Any]:
        """Read an array, or the part `selection` (whole numbers, slices, an ellipsis); see zarrfs.read_array()."""
        from zarrfs.views import reading

        return self.call(reading.read_array, name.strip("/"), selection)

    def about(self) -> dict[str, Any]:
        """Return facts about the source, as `zarrfs info` prints them."""
        return self.call(_about)

    @property
    def warnings(self) -> tuple[str, ...]:
        """Return the warnings that a command would print, such as which entries were left out, and why."""
        return self.opened().warnings

    # -- as a mapping of keys to bytes

    def __getitem__(self, key: str) -> bytes:
        try:
            return self.get(key)
        except StoreError as exc:
            raise KeyError(key) from exc

    def __contains__(self, key: object) -> bool:
        """Return whether `key` is a file or a symbolic link."""
        try:
            return isinstance(key, str) and self.info(key).kind is not Kind.DIRECTORY
        except StoreError:
            return False

    def __iter__(self) -> Iterator[str]:
        return self.list()

    def keys(self) -> Iterator[str]:
        """Yield all keys. With this method, dict(handle) reads a whole source into memory."""
        return self.list()

    # -- closing, pickling and comparing

    def close(self) -> None:
        """Close the source. A second call does nothing.

        Reads in progress in other threads fail, unless this handle was unpickled: its store may be shared, and stays
        open.
        """
        self._closed = True
        opened, self._opened = self._opened, None
        if opened is not None and not self._shared:
            opened.close()

    @property
    def closed(self) -> bool:
        """Return whether close() was called."""
        return self._closed

    def __enter__(self) -> StoreHandle:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<zarrfs.StoreHandle {without_secrets(self.source)}{' (closed)' if self._closed else ''}>"

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickled, (self.source, self._items, self._fingerprint, self._opening)

    def __eq__(self, other: object) -> bool:
        """Return whether both handles show the same version of the same source with the same options."""
        return isinstance(other, StoreHandle) and self._identity == other._identity

    def __hash__(self) -> int:
        return hash(self._identity)

    @property
    def _identity(self) -> tuple[object, ...]:
        return self.source, self._items, self._fingerprint

    # -- for the stores of other libraries

    def call(self, function: Callable[..., Awaitable[T]], *arguments: Any) -> T:
        """Run `function(store, *arguments)` on trio in the background, and wait for its result."""
        opened = self.opened()
        return opened.loop.call(function, opened.store, *arguments)

    def submit(self, function: Callable[..., Awaitable[T]], *arguments: Any) -> Future[T]:
        """Start `function(store, *arguments)` on trio in the background. Blocks if the source must be opened first."""
        opened = self.opened()
        return opened.loop.submit(function, opened.store, *arguments)

    async def call_async(self, function: Callable[..., Awaitable[T]], *arguments: Any) -> T:
        """Run `function(store, *arguments)` on trio, and await it on asyncio. Cancelling the task cancels the call."""
        import asyncio

        if not self.ready:
            await asyncio.to_thread(self.opened)
        return await asyncio.wrap_future(self.submit(function, *arguments))

    @property
    def ready(self) -> bool:
        """Return whether opened() returns without opening the source."""
        return self._opened is not None and self._opened.usable

    def opened(self) -> _Opened:
        """Return the open source; open it if this process has not. Raise UsageError after close()."""
        if self._closed:
            raise UsageError(f"{without_secrets(self.source)}: this handle is closed")
        opened = self._opened
        if opened is not None and opened.usable:
            return opened
        with _opening:
            opened = self._opened
            if opened is None or not opened.usable:
                if opened is not None:
                    _parents.append(opened)
                opened = _share((*self._identity, self._opening), self._open) if self._shared else self._open()
                if not self._shared:
                    self._end_with(opened)
                self._opened = opened
        return opened

    def _open(self) -> _Opened:
        return _Opened(self.source, self._items, self._fingerprint)

    def _end_with(self, opened: _Opened) -> None:
        """Close `opened` when this handle is garbage-collected."""
        weakref.finalize(self, opened.close, wait=False).atexit = False


def _absolute_item(item: str) -> str:
    """Return an item of -o with an absolute path, because an unpickled handle may have another working directory."""
    name, equals, value = item.partition("=")
    metavar = TABLE[name].metadata["metavar"] if name in TABLE and value else ""
    if metavar in ("DIR", "FILE") and not is_url(value):
        value = os.path.join(os.getcwd(), value)  # not abspath(): ".." may follow a link, and the parser resolves it
    elif metavar == "PLACE":
        value = absolute(value)
    elif metavar == "URL" and "://" not in value:
        value = absolute_source(value)
    return f"{name}{equals}{value}"


class _Opened:
    """A source that is open on the background loop of one process."""

    def __init__(self, source: str, items: Sequence[str], wanted: str | None) -> None:
        """Raise SourceError or UsageError. `wanted` is a fingerprint or None; another version is a SourceError."""
        found = settings(items, [source])
        options = found.parsed.options
        [place] = found.sources
        named = place != source  # a name of zarrfs.toml; its URL may contain secrets
        self.source = source if named else absolute_source(source)
        self.options = options
        plan = plan_source(place, options)
        try:
            self.fingerprint = fingerprint(plan)
            if wanted is not None and self.fingerprint != wanted:
                raise SourceError(plan.source, "has changed since this handle was opened; open it anew")
            self.warnings = plan.warnings
            for warning in plan.warnings if wanted is None else ():
                log.warning("%s: %s", plan.source, warning)
            self.generation = background.generation()
            self.loop = background.acquire()
            try:
                self.store = self.loop.call(_open_plan, plan, options)
            except BaseException:
                background.release()
                raise
        finally:
            discard(plan)
        self._closed = False
        _alive.add(self)

    @property
    def usable(self) -> bool:
        """Return whether this process has opened the source; False in a process forked since."""
        return self.generation == background.generation()

    def close(self, wait: bool = True) -> None:
        """Close the store and release the loop; do nothing if a parent process has opened it.

        Without `wait`, return before the store is closed.
        """
        with _closing:
            closed, self._closed = self._closed, True
        if closed or not self.usable:
            return
        if not wait:
            _end(self.loop, self.store)
            return
        try:
            self.loop.submit(self.store.aclose).result(_CLOSING)
        except TimeoutError:
            log.warning("%s: not closed within %g s", without_secrets(self.source), _CLOSING)
        finally:
            background.release()


def _end(loop: background.LoopThread, store: Store) -> None:
    """Close a store without waiting for it."""
    loop.submit(store.aclose).add_done_callback(lambda _future: background.release())


def _unpickled(source: str, items: Sequence[str], fingerprint: str | None, opening: str = "") -> StoreHandle:
    handle = StoreHandle.__new__(StoreHandle)
    handle._set(source, items, fingerprint, True)
    handle._opening = opening
    return handle


def _share(identity: tuple[object, ...], open_it: Callable[[], _Opened]) -> _Opened:
    """Return the open source that unpickled handles of one identity share; open it if there is none.

    So a worker process that receives a handle with every task opens the source once.
    """
    found = _shared.pop(identity, None)
    if found is None or not found.usable:
        found = open_it()
    _shared[identity] = found  # the most recently used is last
    if len(_shared) > _SHARED_MOST:
        oldest = _shared.pop(next(iter(_shared)))  # closed when no handle uses it any more
        weakref.finalize(oldest, _end, oldest.loop, oldest.store).atexit = False
    return found


_opening = threading.RLock()
_closing = threading.RLock()
_shared: dict[tuple[object, ...], _Opened] = {}
_alive: weakref.WeakSet[_Opened] = weakref.WeakSet()
_parents: list[_Opened] = []  # never freed: their finalisers could use threads and connections of the parent


def _forget() -> None:
    """Reset the state in a forked child: locks may be held by threads that exist only in the parent."""
    global _opening, _closing
    _opening, _closing = threading.RLock(), threading.RLock()
    _parents.extend(_alive)
    _shared.clear()


os.register_at_fork(after_in_child=_forget)


@atexit.register
def _close_all() -> None:
    for opened in list(_alive):
        with contextlib.suppress(Exception):  # at this point Python no longer starts threads
            opened.close()


async def _open_plan(plan: Plan, options: Options) -> Store:
    return open_plan(plan, options)


async def _info(store: Store, key: str) -> Info:
    return await store.info(key)


async def _list_dir(store: Store, prefix: str) -> list[Info]:
    return [info async for info in store.list_dir(prefix)]


async def _page(store: Store, prefix: str, after: str) -> list[Info]:
    found: list[Info] = []
    async for info in store.list_dir(prefix, after):
        found.append(info)
        if len(found) == _PAGE:
            break
    return found


async def _locate(store: Store, key: str) -> dict[str, Any]:
    return await store.locate(key)


async def _about(store: Store) -> dict[str, Any]:
    return await store.about()

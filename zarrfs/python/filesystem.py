"""The protocol `zarrfs` of fsspec: the files of a source, read-only, without a mount.

    xarray.open_zarr("zarrfs://::combined.json")
    fsspec.filesystem("zarrfs", source="combined.json", retries=8)
    fsspec.open("zarrfs://t2m/0.0.0::combined.json")

Options are those of `-o`.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import logging
import os
import pickle
import weakref
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, NoReturn, TypeVar

from fsspec.asyn import AsyncFileSystem
from fsspec.spec import AbstractBufferedFile

from zarrfs.archives.source_kinds import absolute
from zarrfs.config.effective import settings
from zarrfs.config.keywords import as_items
from zarrfs.config.options import TABLE, Options
from zarrfs.config.redaction import without_secrets
from zarrfs.config.values import is_url
from zarrfs.documents.plan import Plan
from zarrfs.errors import (
    InvalidKey,
    IsDirectory,
    NotDirectory,
    NotFound,
    ReadError,
    SourceError,
    StoreError,
    UsageError,
)
from zarrfs.python import background
from zarrfs.sources import absolute_source, discard, fingerprint, open_plan, plan_source
from zarrfs.store.api import Info, Kind, Store, Value, check_key, join_key, split_key
from zarrfs.store.traversal import followed, get_followed, open_followed, resolve
from zarrfs.zarr import DOCUMENTS

log = logging.getLogger(__name__)

T = TypeVar("T")

_FSSPEC = ("use_listings_cache", "listings_expiry_time", "max_paths", "batch_size")  # options of AsyncFileSystem
_PIECE = 4 << 20  # bytes per read of a download


class ZarrfsFileSystem(AsyncFileSystem):  # type: ignore[misc]
    """The files of a source. Names begin with "/"; the root is "".

    A missing file raises FileNotFoundError. A file that exists but cannot be read raises ReadError; it is never
    reported as missing. An unpickled instance opens the source again, and raises SourceError if its document has
    changed since (directories, zip files, stores behind URLs and Parquet sets have no version to compare). A pickle
    contains the options, and so credentials among them. In a forked process, open the source anew.
    """

    protocol = "zarrfs"
    root_marker = ""
    cachable = False  # an instance shows the source as of its opening, so a new one must open it again
    blocksize = 256 << 10  # bytes that an open file reads ahead; the store reads ahead on its own

    def __init__(
        self, source: str | os.PathLike[str] | None = None, fo: str | None = None,
        target_protocol: str | None = None, target_options: Mapping[str, Any] | None = None,
        asynchronous: bool = False, loop: Any = None, version: str = "", items: Sequence[str] = (), **options: Any,
    ) -> None:  # fmt: skip
        """Open `source`, or the rest of a URL chain after `zarrfs://::`.

        `version` and `items`, options as text, are those of a pickled instance. Raise SourceError or UsageError.
        """
        super().__init__(
            asynchronous=asynchronous, loop=loop,
            **{name: options.pop(name) for name in _FSSPEC if name in options},
        )  # fmt: skip
        if source is None and not fo and not (target_options or {}).get("fo"):
            raise UsageError("zarrfs: no source: give source=, or a URL such as zarrfs://::/data/set.json")
        if source is None:
            source, storage = _chained(fo or "", target_protocol, target_options)
            given = options.get("storage_options") or {}
            if isinstance(given, Mapping) and (given or storage):
                options["storage_options"] = {**storage, **given}
        self._items = (*items, *map(_absolute_item, as_items(options)))
        found = settings(self._items, [os.fspath(source)])
        plan = plan_source(found.sources[0], found.parsed.options)
        try:
            self.version = fingerprint(plan)
            if version and self.version != version:
                raise SourceError(plan.source, "has changed since this file system was opened; open it anew")
            for warning in () if version else plan.warnings:
                log.warning("%s: %s", plan.source, warning)
            self._store: Store | None = background.call(_open, plan, found.parsed.options)
        finally:
            discard(plan)
        named = found.sources[0] != os.fspath(source)  # a name of zarrfs.toml; its URL may contain secrets
        self.source, self._pid = os.fspath(source) if named else absolute_source(os.fspath(source)), os.getpid()
        self._close = weakref.finalize(self, _end, self._store, self._pid)
        self._close.atexit = False

    def close(self) -> None:
        """Close the source."""
        self._store = None
        _shared.cache_clear()
        self._close()

    def __reduce__(self) -> tuple[Any, ...]:
        about = {"source": self.source, "version": self.version, "items": self._items}
        return _unpickled, (pickle.dumps((type(self), about | {"asynchronous": self.asynchronous})),)

    def submit(self, function: Callable[..., Awaitable[T]], *arguments: Any) -> Future[T]:
        """Start `function(store, *arguments)` on trio in the background."""
        if self._store is None:
            raise UsageError(f"{without_secrets(self.source)}: this file system is closed")
        if self._pid != os.getpid():
            raise UsageError(f"{without_secrets(self.source)}: was opened before a fork; open it anew")
        return background.submit(function, self._store, *arguments)

    async def _call(self, function: Callable[..., Awaitable[T]], *arguments: Any) -> T:
        return await asyncio.wrap_future(self.submit(function, *arguments))

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        if isinstance(path, list):
            return [cls._strip_protocol(one) for one in path]
        key = os.fspath(path).removeprefix("zarrfs://").strip("/")
        return f"/{key}" if key else ""

    # -- the methods that all other methods of fsspec call

    async def _info(self, path: str, **_more: Any) -> dict[str, Any]:
        key = _key(path)
        try:
            return await self._call(_described, key)
        except StoreError as exc:
            _raise(exc, path)

    async def _ls(self, path: str, detail: bool = True, **_more: Any) -> list[Any]:
        try:
            found = await self._call(_listed, _key(path))
        except StoreError as exc:
            _raise(exc, path)
        return found if detail else [entry["name"] for entry in found]

    async def _exists(self, path: str, **_more: Any) -> bool:
        try:
            await self._info(path)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True

    async def _cat_file(self, path: str, start: int | None = None, end: int | None = None, **_more: Any) -> bytes:
        key = _key(path)
        try:
            if (end or 0) < 0 or ((start or 0) < 0 and end is not None):
                size: int = (await self._call(_described, key))["size"]
                start, end, _step = slice(start, end).indices(size)
            length = None if end is None else max(0, end - (start or 0))
            return await self._call(get_followed, key, start or 0, length)
        # zarr takes IsADirectoryError and NotADirectoryError for a missing chunk, and returns fill values
        except IsDirectory as exc:
            raise ReadError(path, "is a directory") from exc
        except NotDirectory as exc:
            if key.rpartition("/")[2] in DOCUMENTS:  # zarr looks for these below every name, even below files
                _raise(exc, path)
            raise ReadError(exc.key, "is not a directory") from exc
        except StoreError as exc:
            _raise(exc, path)

    async def _get_file(self, rpath: str, lpath: str, callback: Any = None, **_more: Any) -> None:
        if await self._isdir(rpath):
            os.makedirs(lpath, exist_ok=True)
            return
        try:  # open once, to read one version even if the value is replaced meanwhile
            value = await self._call(open_followed, _key(rpath))
        except StoreError as exc:
            _raise(exc, rpath)
        at, size = 0, value.size
        if callback is not None:
            callback.set_size(size)
        with contextlib.closing(value), open(lpath, "wb") as file:  # noqa: ASYNC230  (as in all of fsspec)
            while at < size:
                data = await self._call(_read, value, at, _PIECE)
                if not data:
                    raise ReadError(rpath, f"ends at {at}, not at {size}")
                file.write(data)
                at += len(data)
                if callback is not None:
                    callback.relative_update(len(data))

    def _open(
        self, path: str, mode: str = "rb", block_size: int | None = None, autocommit: bool = True,
        cache_options: dict[str, Any] | None = None, **more: Any,
    ) -> ZarrfsFile:  # fmt: skip
        if mode != "rb":
            _refuse(path)
        return ZarrfsFile(self, path, block_size or self.blocksize, cache_options, **more)

    def to_dict(self, *, include_password: bool = True) -> dict[str, Any]:
        """Return the arguments for another instance; a relative path of the source is made absolute."""
        found: dict[str, Any] = super().to_dict(include_password=include_password)
        given = self.storage_args[0] if self.storage_args else self.storage_options.get("source")
        if isinstance(given, str | os.PathLike):
            found |= {"args": [], "source": self.source}
        elif "fo" in found and found.get("target_protocol") in (None, "file", "local"):
            found["fo"] = self.source
        return found

    def modified(self, path: str) -> Any:
        """Return the modification time; None if the source has none."""
        from datetime import UTC, datetime

        seconds = self.info(path)["mtime"]
        return None if seconds is None else datetime.fromtimestamp(seconds, UTC)

    async def _refuse(self, path: str, *_more: Any, **_options: Any) -> None:
        _refuse(path)

    _pipe_file = _put_file = _cp_file = _rm_file = _mkdir = _makedirs = _refuse

    def rmdir(self, path: str) -> None:
        """Raise OSError (EROFS)."""
        _refuse(path)


class ZarrfsFile(AbstractBufferedFile):  # type: ignore[misc]
    """An open file. All reads are of one version of the value, even if it is replaced meanwhile."""

    def __init__(
        self, fs: ZarrfsFileSystem, path: str, block_size: int, cache_options: dict[str, Any] | None, **more: Any
    ) -> None:
        try:
            self._value = fs.submit(open_followed, _key(path)).result()
        except StoreError as exc:
            _raise(exc, path)
        more.pop("size", None)
        super().__init__(fs, path, "rb", block_size, cache_options=cache_options, size=self._value.size, **more)

    def _fetch_range(self, start: int, end: int) -> bytes:
        return self.fs.submit(_read, self._value, start, end - start).result()  # type: ignore[no-any-return]

    def close(self) -> None:
        """Close the file."""
        if not self.closed:
            self._value.close()
        super().close()


def _unpickled(about: bytes) -> ZarrfsFileSystem:
    return _shared(os.getpid(), about)


@functools.lru_cache(32)
def _shared(_pid: int, about: bytes) -> ZarrfsFileSystem:
    """Open a source once for all instances that a worker process gets, such as one with every task of dask."""
    kind, options = pickle.loads(about)
    found: ZarrfsFileSystem = kind(**options)
    return found


def _end(store: Store, pid: int) -> None:
    if pid == os.getpid():
        background.submit(store.aclose)


async def _open(plan: Plan, options: Options) -> Store:
    return open_plan(plan, options)


def _absolute_item(item: str) -> str:
    """Return an item of -o with an absolute path, because an unpickled instance may have another working directory."""
    name, equals, value = item.partition("=")
    metavar = TABLE[name].metavar if name in TABLE and value else ""
    if metavar in ("DIR", "FILE") and not is_url(value):
        value = os.path.join(os.getcwd(), value)  # not abspath(): ".." may follow a link, and the parser resolves it
    elif metavar == "PLACE":
        value = absolute(value)
    elif metavar == "URL" and "://" not in value:
        value = absolute_source(value)
    return f"{name}{equals}{value}"


def _chained(
    path: str, protocol: str | None, options: Mapping[str, Any] | None
) -> tuple[str, dict[str, dict[str, Any]]]:
    """Join a URL chain that fsspec has split, as zip://a::s3://bucket/b.zip; return it and its options by protocol."""
    own = {name: value for name, value in (options or {}).items() if name not in ("protocol", "asynchronous", "loop")}
    below, storage = "", dict[str, dict[str, Any]]()
    if "fo" in own:
        below, storage = _chained(own.pop("fo"), own.pop("target_protocol", None), own.pop("target_options", None))
    if own and protocol is not None:
        storage[protocol] = own
    local = protocol in (None, "file", "local")
    url = path if local or "://" in path else f"{protocol}://{path.lstrip('/') if below else path}"
    return f"{url}::{below}" if below else url, storage


def _key(path: str) -> str:
    try:
        return check_key(ZarrfsFileSystem._strip_protocol(path).removeprefix("/"), root=True)
    except InvalidKey as exc:
        raise FileNotFoundError(errno.ENOENT, str(exc), path) from None


async def _read(_store: Store, value: Value, start: int, length: int) -> bytes:
    return bytes(await value.read(start, length))


async def _described(store: Store, key: str) -> dict[str, Any]:
    parent, name = split_key(key)
    at = join_key(await followed(store, parent), name)
    return await _entry(store, key, at, await store.info(at))


async def _listed(store: Store, key: str) -> list[dict[str, Any]]:
    at = await followed(store, key)
    if (await store.info(at, sized=False)).kind is not Kind.FILE and not await _leads_back(store, key, at):
        with contextlib.suppress(NotDirectory):  # a link out of the source to a file, followed by the store itself
            return [
                await _entry(store, join_key(key, child.name), join_key(at, child.name), child)
                async for child in store.list_dir(at)
            ]
    return [await _described(store, key)]


async def _leads_back(store: Store, key: str, at: str) -> bool:
    """Return whether a directory above `key` is, or leads to, `at`: a recursive walk into `key` would never end."""
    while key and key != at:
        key = split_key(key)[0]
        if await followed(store, key) == at:
            return True
    return False


async def _entry(store: Store, key: str, at: str, info: Info) -> dict[str, Any]:
    """Describe the entry `at` under the name `key`, as fsspec's local file system does: follow symbolic links."""
    more: dict[str, Any] = {}
    if info.kind is Kind.SYMLINK:
        more = {"islink": True, "destination": info.target}
        try:
            info = (await resolve(store, at))[1]
        except ReadError:  # a dangling link
            more["type"] = "other"
    mtime = None if info.mtime_ns is None else info.mtime_ns / 1e9
    kind = "directory" if info.kind is Kind.DIRECTORY else "file"
    return {"name": f"/{key}" if key else "", "size": info.size, "type": kind, "mtime": mtime, **more}


def _raise(exc: StoreError, path: str) -> NoReturn:
    """Raise the built-in OSError that callers of fsspec expect for `exc`; raise `exc` itself if there is none."""
    for ours, kind, code in (
        (NotFound, FileNotFoundError, errno.ENOENT), (IsDirectory, IsADirectoryError, errno.EISDIR),
        (NotDirectory, NotADirectoryError, errno.ENOTDIR),
    ):  # fmt: skip
        if isinstance(exc, ours):
            raise kind(code, os.strerror(code), path) from exc
    raise exc


def _refuse(path: str) -> NoReturn:
    raise OSError(errno.EROFS, "a source of zarrfs is read-only", path)

"""The protocol `zarrfs` of fsspec: the files of a source without a mount; with `upperdir=`, whole files are written.

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
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from fsspec.asyn import AsyncFileSystem
from fsspec.callbacks import NoOpCallback
from fsspec.spec import AbstractBufferedFile, AbstractFileSystem

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
    OutOfRange,
    ReadError,
    SourceError,
    TargetChanged,
    TargetMissing,
    UsageError,
)
from zarrfs.python import background
from zarrfs.sources import absolute_source, discard, open_plan, plan_source
from zarrfs.store.api import Info, Kind, Store, Value, WritableStore, check_key, join_key, split_key
from zarrfs.store.followed import with_links_followed
from zarrfs.store.traversal import followed
from zarrfs.zarr import DOCUMENTS

log = logging.getLogger(__name__)

T = TypeVar("T")

_FSSPEC = ("use_listings_cache", "listings_expiry_time", "max_paths", "batch_size")  # options of AsyncFileSystem
_PIECE = 4 << 20  # bytes per read of a download
_READ_ONLY = "a source is read-only: give upperdir=, a directory for changes"


class ZarrfsFileSystem(AsyncFileSystem):  # type: ignore[misc]
    """The files of a source. Names begin with "/"; the root is "".

    A missing file raises FileNotFoundError. A file that exists but cannot be read raises ReadError; it is never
    reported as missing. An unpickled instance opens the source again, and raises SourceError if its document has
    changed since (directories, zip files, stores behind URLs and Parquet sets have no version to compare). A pickle
    contains the options, and so credentials among them. In a forked process, open the source anew.

    With `upperdir=`, values are written to that directory, each whole or not at all; else a write raises OSError
    (EROFS). The first write locks the directory against other writers until close().
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
            self.version = plan.digest
            if version and self.version != version:
                raise SourceError(plan.source, "has changed since this file system was opened; open it anew")
            for warning in () if version else plan.warnings:
                log.warning("%s: %s", plan.source, warning)
            self._tree = background.call(_open, plan, found.parsed.options)
            self._store: Store | None = with_links_followed(self._tree)
        finally:
            discard(plan)
        self._writes = found.parsed.options.upperdir is not None and not found.parsed.options.ro
        named = found.sources[0] != os.fspath(source)  # a name of zarrfs.toml; its URL may contain secrets
        self.source, self._pid = os.fspath(source) if named else absolute_source(os.fspath(source)), os.getpid()
        self._close = weakref.finalize(self, _end, self._store, self._pid)
        self._close.atexit = False

    def close(self) -> None:
        """Close the source; afterwards, another process may write to its upper directory."""
        self._store = None
        _shared.cache_clear()
        ended = self._close()
        if ended is not None:
            ended.result()

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
        with _errors_of(path):
            return await self._call(_described, _key(path))

    async def _ls(self, path: str, detail: bool = True, **_more: Any) -> list[Any]:
        with _errors_of(path):
            found = await self._call(_listed, _key(path))
        return found if detail else [entry["name"] for entry in found]

    async def _cat_file(self, path: str, start: int | None = None, end: int | None = None, **_more: Any) -> bytes:
        with _errors_of(path):
            try:
                return await self._call(_cut, _key(path), start, end)
            # zarr takes IsADirectoryError and FileNotFoundError for a missing chunk, and returns fill values
            except IsDirectory as exc:
                raise ReadError(path, "is a directory") from exc
            except NotDirectory as exc:
                if path.rpartition("/")[2] in DOCUMENTS:  # zarr looks for these below every name, even below files
                    raise
                raise ReadError(exc.key, "is not a directory") from exc

    async def _get_file(self, rpath: str, lpath: str, callback: Any = NoOpCallback(), **_more: Any) -> None:  # noqa: B008
        await asyncio.to_thread(self._download, rpath, lpath, callback=callback, block_size=_PIECE)

    _download = AbstractFileSystem.get_file  # through one open file, which is of one version

    def _open(
        self, path: str, mode: str = "rb", block_size: int | None = None, autocommit: bool = True,
        cache_options: dict[str, Any] | None = None, **more: Any,
    ) -> ZarrfsFile:  # fmt: skip
        if mode != "rb":
            _refuse(path, "only whole values are written: pipe_file() does" if self._writes else _READ_ONLY)
        return ZarrfsFile(self, path, block_size or self.blocksize, cache_options, **more)

    # -- writing

    async def _pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **_more: Any) -> None:
        if mode == "create" and await self._exists(path):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
        await self._change(path, _set, value)

    async def _put_file(
        self, lpath: str, rpath: str, mode: str = "overwrite", callback: Any = None, **_more: Any
    ) -> None:
        if not os.path.isdir(lpath):  # directories exist by the files in them
            await self._pipe_file(rpath, await asyncio.to_thread(Path(lpath).read_bytes), mode)

    async def _cp_file(self, path1: str, path2: str, **_more: Any) -> None:
        if (await self._info(path1))["type"] != "directory":
            await self._pipe_file(path2, await self._cat_file(path1))

    async def _rm_file(self, path: str, **_more: Any) -> None:
        await self._change(path, _deleted, False)

    async def _rm(self, path: Any, recursive: bool = False, **_more: Any) -> None:
        for one in path if isinstance(path, list) else [path]:  # no patterns: zarr removes a chunk of an array "x[0]"
            await self._change(one, _deleted, recursive)

    async def _mkdir(self, path: str, *_more: Any, **_options: Any) -> None:
        self._writable(path)  # a directory exists once it has a file

    _makedirs = _mkdir

    def rmdir(self, path: str) -> None:
        """Raise OSError (EROFS): rm(path, recursive=True) removes a directory."""
        _refuse(path, "use rm(path, recursive=True)" if self._writes else _READ_ONLY)

    async def _change(self, path: str, function: Callable[..., Awaitable[None]], *arguments: Any) -> None:
        tree = self._writable(path)
        with _errors_of(path):
            try:
                await self._call(function, tree, _key(path), *arguments)
            except NotDirectory as exc:  # zarr takes FileNotFoundError for a removed chunk
                raise ReadError(exc.key, "is not a directory") from exc

    def _writable(self, path: str) -> WritableStore:
        if not self._writes:
            _refuse(path, _READ_ONLY)
        assert isinstance(self._tree, WritableStore)
        return self._tree


class ZarrfsFile(AbstractBufferedFile):  # type: ignore[misc]
    """An open file. All reads are of one version of the value, even if it is replaced meanwhile."""

    def __init__(
        self, fs: ZarrfsFileSystem, path: str, block_size: int, cache_options: dict[str, Any] | None, **more: Any
    ) -> None:
        with _errors_of(path):
            self._value = fs.submit(_opened, _key(path)).result()
        more.pop("size", None)
        super().__init__(fs, path, "rb", block_size, cache_options=cache_options, size=self._value.size, **more)

    def _fetch_range(self, start: int, end: int) -> bytes:
        found: bytes = self.fs.submit(_read, self._value, start, end - start).result()
        if len(found) < min(end, self.size) - start:
            raise ReadError(self.path, f"{len(found)} bytes at {start}, not {end - start}")
        return found

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


def _end(store: Store, pid: int) -> Future[None] | None:
    return background.submit(store.aclose) if pid == os.getpid() else None


async def _open(plan: Plan, options: Options) -> Store:
    return open_plan(plan, options)


def _absolute_item(item: str) -> str:
    """Return an item of -o with an absolute path, because an unpickled instance may have another working directory."""
    name, equals, value = item.partition("=")
    metavar = TABLE[name].metavar if name in TABLE and value not in ("", "[]") else ""
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


async def _opened(store: Store, key: str) -> Value:
    return await store.open(key)


async def _set(_store: Store, tree: WritableStore, key: str, value: bytes) -> None:
    await tree.set(await _below_links(tree, key), value)


async def _deleted(store: Store, tree: WritableStore, key: str, recursive: bool) -> None:
    """Remove a file, or a directory if `recursive`; of the root, all that is in it."""
    try:
        if (await store.info(key, sized=False)).kind is Kind.DIRECTORY and not recursive:
            raise IsDirectory(key)
    except NotDirectory as exc:
        raise NotFound(key) from exc
    for one in [await _below_links(tree, key)] if key else [info.name async for info in tree.list_dir("")]:
        await tree.delete(one)


async def _below_links(tree: WritableStore, key: str) -> str:
    """Return `key` with the links above it resolved, as in a mount; they may lead to directories that are missing."""
    above, name = split_key(key)
    if not above:
        return key
    try:
        return join_key(await followed(tree, above), name)
    except NotFound:
        return join_key(await _below_links(tree, above), name)


async def _cut(store: Store, key: str, start: int | None, end: int | None) -> bytes:
    """Read a slice of one version of a value."""
    for last in (store.immutable, True):
        try:
            with contextlib.closing(await store.open(key)) as value:
                at, stop, _step = slice(start, end).indices(value.size)
                return bytes(await value.read(at, max(0, stop - at)))
        except (TargetChanged, TargetMissing, OutOfRange):
            if last:
                raise
    raise AssertionError("unreachable")


async def _described(store: Store, key: str) -> dict[str, Any]:
    return _entry(key, await store.info(key))


async def _listed(store: Store, key: str) -> list[dict[str, Any]]:
    if (await store.info(key, sized=False)).kind is Kind.FILE:
        return [await _described(store, key)]
    return [_entry(join_key(key, child.name), child) async for child in store.list_dir(key)]


def _entry(key: str, info: Info) -> dict[str, Any]:
    mtime = None if info.mtime_ns is None else info.mtime_ns / 1e9
    kind = "directory" if info.kind is Kind.DIRECTORY else "file"
    return {"name": f"/{key}" if key else "", "size": info.size, "type": kind, "mtime": mtime}


@contextlib.contextmanager
def _errors_of(path: str) -> Iterator[None]:
    """Raise the built-in OSErrors that callers of fsspec expect, and other failures under the name of `path`."""
    try:
        yield
    except (NotFound, NotDirectory) as exc:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path) from exc
    except IsDirectory as exc:
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path) from exc
    except ReadError as exc:
        if path.strip("/") in exc.where:
            raise
        raise exc.at(f"{path.strip('/')}: {exc.where}") from exc


def _refuse(path: str, why: str) -> NoReturn:
    raise OSError(errno.EROFS, why, path)

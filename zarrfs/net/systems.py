"""Systems based on fsspec: asynchronous file systems run on fsspec's loop, all others in worker threads."""

from __future__ import annotations

import calendar
import datetime
import errno
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar, cast

import trio

from zarrfs.config import urls
from zarrfs.config.redaction import without_secrets
from zarrfs.errors import ReadError
from zarrfs.net import bridge, identity
from zarrfs.net.failures import failure, raise_from
from zarrfs.net.responses import Entry, Fetched, System, Transient, too_large

T = TypeVar("T")

_REQUESTS = 64  # requests of one system in flight; the deadline of the others starts when they are sent
_THREADS = 16  # threads of one system, each with one request; the wait for a thread has a deadline of its own
SSH = ("sftp", "ssh")  # names of one protocol


class OnLoop:
    """Calls on fsspec's loop: a bounded number at a time, each with a deadline."""

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._slots = trio.CapacityLimiter(_REQUESTS)

    async def call(self, where: str, function: Callable[..., Awaitable[T]], *args: Any) -> T:
        """Return the result of `await function(*args)`; raise its failures as a ReadError or Transient of `where`."""
        try:
            async with self._slots:
                return await bridge.call(function, *args, timeout=self._timeout)
        except Exception as exc:
            raise_from(failure(exc, where, self._timeout), exc)


class CoroutineSystem(System):
    """An asynchronous file system of fsspec: SFTP, ..."""

    def __init__(
        self, fs: Any, protocol: str, timeout: float, limit: int,
        connect: Callable[[], Awaitable[Any]] | None = None,
    ) -> None:  # fmt: skip
        """Read with `fs`. If `fs` has a connection that may be lost, `connect` returns a new file system for it."""
        self._fs, self._protocol, self._timeout, self._limit = fs, protocol, timeout, limit
        self._family = urls.names(protocol)[0]
        self._loop = OnLoop(timeout)
        self._connect, self._lost, self._connecting = connect, False, trio.Lock()

    async def fetch(self, path: str, start: int, stop: int | None) -> Fetched:
        if self._protocol in SSH and stop is not None:
            return await self._call(path, self._fetch_sftp, path, start, stop)
        return Fetched(await self._call(path, self._cat, path, start, stop))

    async def stat(self, path: str) -> Entry:
        return entry(await self._call(path, self._info, path))

    async def listing(self, path: str) -> list[Entry] | None:
        return listed(path, await self._call(path, self._ls, path))

    def child(self, path: str, name: str) -> str:
        return f"{path.rstrip('/')}/{name}"

    def shown(self, path: str) -> str:
        return without_secrets(f"{self._protocol}://{path}")

    def host(self, path: str) -> str:
        return other_host(self._protocol, self._fs.storage_options)

    def identity(self, path: str) -> str:
        return identity.of_other(self._family, path, self._fs.storage_options)

    async def _call(self, path: str, function: Callable[..., Awaitable[T]], *args: Any) -> T:
        """Return the result of `function(*args)`, a method of this object; first reconnect if the connection was lost.

        A server that cannot be reached is Transient, too, so that the request queue waits for the end of the outage.
        """
        if self._lost:
            await self._reconnect(path)
        fs = self._fs
        try:
            return await self._loop.call(self.shown(path), function, *args)
        except Exception as exc:
            if self._connect is None or not _is_lost(exc.__cause__ or exc):
                raise
            self._lost = self._lost or fs is self._fs  # else another call has already replaced it
            raise Transient("the connection is lost") from exc

    async def _reconnect(self, path: str) -> None:
        assert self._connect is not None
        async with self._connecting:
            if self._lost:
                try:
                    self._fs = await self._connect()
                except Exception as exc:
                    raise_from(failure(exc, self.shown(path), self._timeout), exc)
                self._lost = False

    async def _info(self, path: str) -> dict[str, Any]:
        try:
            found: dict[str, Any] = await self._fs._info(path)
        except FileNotFoundError:
            if self._protocol in SSH and await self._is_there(path):
                raise ReadError(self.shown(path), "is a symbolic link that leads nowhere") from None
            raise
        return found

    async def _ls(self, path: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = await self._fs._ls(path, True)
        if self._protocol in SSH and any(info["type"] == "link" for info in found):
            return await self._followed(path, found)
        return found

    async def _is_there(self, path: str) -> bool:
        """Return whether an SFTP server has a name, even if that is a dangling symbolic link."""
        async with self._fs._pool.get() as channel:
            try:
                await channel.lstat(path)
            except Exception:  # the answer to stat(), not found, holds
                return False
        return True

    async def _followed(self, path: str, infos: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Replace the symbolic links in an SFTP listing of the directory `path` by their targets.

        A link to `path` itself or to a directory above it is left out, because a walk would never end. A link that
        cannot be followed is kept as a file of unknown size; its reader gets the error.
        """
        import asyncio

        links = [info["name"] for info in infos if info["type"] == "link"]
        found = [info for info in infos if info["type"] != "link"]
        async with self._fs._pool.get() as channel:
            above = [path[:at] for at, letter in enumerate(path) if letter == "/" and at]
            here = await asyncio.gather(*map(channel.realpath, (path, *above)))
            for at in range(0, len(links), _REQUESTS):
                names = links[at : at + _REQUESTS]
                attributes = await asyncio.gather(*map(channel.stat, names), return_exceptions=True)
                for name, one in zip(names, attributes, strict=True):
                    if isinstance(one, BaseException) and (not isinstance(one, Exception) or _is_lost(one)):
                        raise one
                    unknown = isinstance(one, Exception)
                    info = {"type": "file"} if unknown else self._fs._decode_attributes(one)
                    if info["type"] == "directory":
                        there = (await channel.realpath(name)).rstrip("/") + "/"
                        if any(f"{one}/".startswith(there) for one in here):
                            continue
                    found.append({**info, "name": name})
        return found

    async def _cat(self, path: str, start: int, stop: int | None) -> bytes:
        whole = start == 0 and stop is None
        if stop is None:
            _check_size((await self._fs._info(path)).get("size"), start, self._limit, self.shown(path))
        data: bytes = await self._fs._cat_file(path, **({} if whole else {"start": start, "end": stop}))
        return data

    async def _fetch_sftp(self, path: str, start: int, stop: int) -> Fetched:
        """Fetch a range of a file; sshfs's own _cat_file would fetch all of it."""
        async with self._fs._pool.get() as channel, channel.open(path, "rb") as file:
            return Fetched(await file.read(stop - start, start))


_NO_CONNECTION = ("DisconnectError", "ChannelOpenError", "SFTPNoConnection", "SFTPConnectionLost")  # of asyncssh


def _is_lost(exc: BaseException) -> bool:
    """Return whether a failure of sshfs means that its connection, or the channel that it keeps using, is lost."""
    kinds = {kind.__name__ for kind in type(exc).__mro__}
    if isinstance(exc, ConnectionError) or kinds.intersection(_NO_CONNECTION):
        return True
    return isinstance(exc, ValueError) and "any SFTP connections" in str(exc)


class ThreadSystem(System):
    """A synchronous file system of fsspec, whose calls run in worker threads."""

    def __init__(self, fs: Any, protocol: str, timeout: float, limit: int) -> None:
        self._fs, self._protocol, self._timeout, self._limit = fs, protocol, timeout, limit
        self._threads = trio.CapacityLimiter(_THREADS)
        self._waiting: set[trio.CancelScope] = set()

    async def fetch(self, path: str, start: int, stop: int | None) -> Fetched:
        return Fetched(await self._call(path, self._cat, path, start, stop))

    async def stat(self, path: str) -> Entry:
        return entry(await self._call(path, self._fs.info, path))

    async def listing(self, path: str) -> list[Entry] | None:
        return listed(path, await self._call(path, self._fs.ls, path, True))

    def shown(self, path: str) -> str:
        return without_secrets(f"{self._protocol}://{path}")

    def host(self, path: str) -> str:
        return other_host(self._protocol, self._fs.storage_options)

    def identity(self, path: str) -> str:
        return identity.of_other(urls.names(self._protocol)[0], path, self._fs.storage_options)

    def _cat(self, path: str, start: int, stop: int | None) -> bytes:
        whole = start == 0 and stop is None
        if stop is None:
            _check_size(self._fs.info(path).get("size"), start, self._limit, self.shown(path))
        data: bytes = self._fs.cat_file(path, **({} if whole else {"start": start, "end": stop}))
        return data

    async def _call(self, path: str, function: Callable[..., T], *args: Any) -> T:
        try:
            with trio.fail_after(self._timeout) as scope:
                slot = _Slot(self._threads, self._waiting, scope, self._timeout)
                limiter = cast(trio.CapacityLimiter, slot)  # trio takes anything with these two methods
                return await trio.to_thread.run_sync(function, *args, abandon_on_cancel=True, limiter=limiter)
        except trio.TooSlowError as exc:
            if slot.taken:
                raise_from(failure(exc, self.shown(path), self._timeout), exc)
            total = int(self._threads.total_tokens)
            calls = "1 call has" if total == 1 else f"{total} calls have"
            rule = f"{calls} no answer yet, and no more are made: none ended within {self._timeout:g} s"
            raise Transient(rule) from exc
        except Exception as exc:
            raise_from(failure(exc, self.shown(path), self._timeout), exc)


class _Slot:
    """A limiter for one call, which takes a slot of `threads` until its thread ends.

    The deadline of `scope` starts again when the call gets its slot. A thread whose caller has timed out runs on, and
    counts until it ends. Whenever a thread ends, all calls in `waiting` get the full `timeout` again, so that they
    fail only if no thread ends within that time.
    """

    def __init__(
        self, threads: trio.CapacityLimiter, waiting: set[trio.CancelScope], scope: trio.CancelScope, timeout: float
    ) -> None:
        self._threads, self._waiting, self._scope, self._timeout = threads, waiting, scope, timeout
        self.taken = False

    async def acquire_on_behalf_of(self, thread: object) -> None:
        """Take the slot, as trio.CapacityLimiter does."""
        self._waiting.add(self._scope)
        try:
            await self._threads.acquire_on_behalf_of(thread)
        finally:
            self._waiting.remove(self._scope)
        self.taken = True
        self._scope.deadline = trio.current_time() + self._timeout

    def release_on_behalf_of(self, thread: object) -> None:
        """Release the slot, as trio.CapacityLimiter does."""
        self._threads.release_on_behalf_of(thread)
        for scope in self._waiting:
            scope.deadline = trio.current_time() + self._timeout


def other_host(protocol: str, options: Mapping[str, Any]) -> str:
    """Return the name of the server of a file system with these options."""
    port = f":{options['port']}" if options.get("port") else ""
    return f"{protocol}://{options.get('host') or ''}{port}"


def _check_size(size: int | None, start: int, limit: int, where: str) -> None:
    if size is not None and size - start > limit:
        raise too_large(where, limit)


def entry(info: dict[str, Any]) -> Entry:
    """Convert an fsspec info to an Entry."""
    name = str(info["name"]).rstrip("/").rpartition("/")[2]
    if info.get("type") == "directory":
        return Entry(name, True)
    tag = info.get("ETag") or info.get("etag") or info.get("md5") or info.get("CRC")
    mtime_ns = _time_ns(info)
    link = info.get("type", "file") != "file"
    size = None if link else info.get("size")  # the size of a link is not the size of its target
    strong = tag is not None and "CRC" not in info
    return Entry(name, False, size, mtime_ns, None if tag is None else str(tag), strong=strong)


def listed(path: str, infos: list[dict[str, Any]]) -> list[Entry]:
    """Convert the result of fsspec's ls() to entries. Raise NotADirectoryError if it lists a file as itself.

    Raise ReadError if it names something that is not directly in `path`.

    Names that are neither files nor directories (symbolic links, FIFOs) are listed as files of unknown size. If they
    were left out, a chunk of that name would be absent, and a reader would use the fill value.
    """
    whole = path.strip("/")
    found = []
    for info in infos:
        at = str(info["name"]).strip("/")
        if at == whole:
            if info.get("type") != "directory" and len(infos) == 1:
                raise NotADirectoryError(errno.ENOTDIR, "is not a directory", path)
            continue  # the marker of the directory
        if at.startswith(whole + "/") and "/" in at[len(whole) + 1 :]:
            raise ReadError(path, f"its listing names something outside of it: {at[:200]!r}")
        found.append(entry(info))
    return found


def _time_ns(info: dict[str, Any]) -> int | None:
    for name in ("mtime", "LastModified", "last_modified", "updated", "created"):
        value = info.get(name)
        if isinstance(value, datetime.datetime):
            # whole seconds, because a float of this size cannot hold nanoseconds exactly
            return calendar.timegm(value.utctimetuple()) * 1_000_000_000 + value.microsecond * 1000
        if isinstance(value, int | float) and not isinstance(value, bool):
            return int(value * 1_000_000_000)
    return None

"""ThreadSystem: all protocols of fsspec, by its synchronous interface in worker threads."""

from __future__ import annotations

import calendar
import datetime
import errno
import importlib
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import trio

from zarrfs.concurrency.single_flight import SingleFlight
from zarrfs.config import urls
from zarrfs.config.options import Options
from zarrfs.config.redaction import redact_text, without_secrets
from zarrfs.errors import AccessDenied, ReadError
from zarrfs.net import identity
from zarrfs.net.failures import failure, raise_from
from zarrfs.net.responses import Entry, Fetched, System, Transient, too_large

T = TypeVar("T")

_THREADS = 64  # of one system, each with one call; a thread whose caller has timed out counts until it ends
SSH = ("sftp", "ssh")  # names of one protocol
_SERVER = re.compile(r"[^:/?#]+://[^/?#]*")


class ThreadSystem(System):
    """A file system of fsspec: one server, with the options that name it."""

    def __init__(self, options: Options, protocol: str, class_: Any, given: Mapping[str, Any]) -> None:
        """Make a file system of `class_` for the first call, and another one if its connection is lost."""
        self._protocol, self._class, self._given = protocol, class_, given
        self._timeout, self._limit = options.request_timeout, options.document_limit
        self._threads = trio.CapacityLimiter(_THREADS)
        self._fs: Any = None
        self._connecting: SingleFlight[str] = SingleFlight()

    async def fetch(self, path: str, start: int, stop: int | None) -> Fetched:
        return Fetched(await self._call(path, self._cat, start, stop))

    async def stat(self, path: str) -> Entry:
        return entry(await self._call(path, self._sync, "info"))

    async def listing(self, path: str) -> list[Entry] | None:
        return listed(path, await self._call(path, self._sync, "ls", True))  # with details

    def shown(self, path: str) -> str:
        return without_secrets(f"{self._protocol}://{path}")

    def host(self, path: str) -> str:
        port = f":{self._given['port']}" if self._given.get("port") else ""
        return f"{self._protocol}://{self._given.get('host') or ''}{port}"

    def identity(self, path: str) -> str:
        return identity.of_other(urls.names(self._protocol)[0], path, self._given)

    async def _call(self, path: str, function: Callable[..., T], *args: Any) -> T:
        """Return the result of `function(fs, path, *args)`."""
        fs = self._fs
        try:
            if fs is None:
                fs = await self._connecting.run("", self._connected, lambda: self._fs)
            return await self._run(function, fs, path, *args)
        except ConnectionError as exc:
            self._fs = None if fs is self._fs else self._fs  # else another call has already replaced it
            what = "the connection is lost" if fs else "cannot connect"
            raise Transient(f"{what}: {redact_text(str(exc))}") from exc
        except Exception as exc:
            raise_from(failure(exc, self.shown(path), self._timeout), exc)

    async def _run(self, function: Callable[..., T], *args: Any) -> T:
        with trio.fail_after(self._timeout):
            return await trio.to_thread.run_sync(function, *args, abandon_on_cancel=True, limiter=self._threads)

    async def _connected(self) -> Any:
        """Return a file system, which may have to log in."""
        self._fs = await self._run(self._made)
        return self._fs

    # -- in a thread

    def _made(self) -> Any:
        try:
            return self._class(**{"use_listings_cache": False, **self._given}, skip_instance_cache=True)
        except ReadError:
            raise
        except Exception as exc:
            # a refused login and an outage are those of any call; all else, such as a key file, is of the options
            of_server = isinstance(failure(exc, "", self._timeout), AccessDenied | Transient)
            if of_server and not getattr(exc, "filename", None):
                raise
            rule = f"cannot be used with these options: {redact_text(str(exc))}"
            raise ReadError(f"{self._protocol}://", rule) from exc

    def _sync(self, fs: Any, path: str, method: str, *args: Any) -> Any:
        """Call a method of a file system; the call of an asynchronous one is cancelled if it takes too long."""
        if not fs.async_impl:
            return getattr(fs, method)(path, *args)
        from fsspec.asyn import sync

        return sync(fs.loop, getattr(fs, f"_{method}"), path, *args, timeout=self._timeout)

    def _cat(self, fs: Any, path: str, start: int, stop: int | None) -> bytes:
        if stop is None:
            size = self._sync(fs, path, "info").get("size")
            if size is not None and size - start > self._limit:
                raise too_large(self.shown(path), self._limit)
        part = (start, stop) if start or stop is not None else ()
        data: bytes = self._sync(fs, path, "cat_file", *part)
        return data


# -- classes, URLs and answers of fsspec


def class_of(protocol: str) -> Any:
    """Return fsspec's class for a protocol; call this in a thread, because it imports packages.

    Raise ReadError if the protocol is unknown or its package is missing.
    """
    try:
        if protocol in SSH:
            return importlib.import_module("zarrfs.net.sftp").Sftp
        return importlib.import_module("fsspec").get_filesystem_class(protocol)
    except ValueError:
        raise ReadError(f"{protocol}://", f"the protocol {protocol!r} is unknown") from None
    except ImportError as exc:
        hint = "sshfs: it comes with zarrfs's extra sftp (docs/install.md)" if protocol in SSH else str(exc)
        raise ReadError(f"{protocol}://", f"{protocol} needs the package {hint}") from None


def parts_of(class_: Any, protocol: str, url: str) -> tuple[dict[str, Any], str]:
    """Return (the options that a URL contains, such as host and user; its path), as fsspec's class reads them.

    A "?", "#" or tab is part of the path: fsspec would take a query for options, and cut it off the path of a server.
    """
    server = _SERVER.match(url) if protocol in ("smb", *SSH) else None
    head, path = (url, url) if server is None else (server[0], url[server.end() :])
    return class_._get_kwargs_from_urls(head), class_._strip_protocol(path)


def entry(info: dict[str, Any]) -> Entry:
    """Convert an fsspec info to an Entry."""
    name = str(info["name"]).rstrip("/").rpartition("/")[2]
    if info.get("type") == "directory":
        return Entry(name, True)
    tag = info.get("ETag") or info.get("etag") or info.get("md5")
    mtime_ns = _time_ns(info)
    link = info.get("type", "file") != "file"
    size = None if link else info.get("size")  # the size of a link is not the size of its target
    return Entry(name, False, size, mtime_ns, str(tag) if tag else None, strong=bool(tag))


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

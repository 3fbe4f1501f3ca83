"""Openers: finds the System that serves a URL. Each system is made once, when it is first needed."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import trio

from zarrfs.concurrency.single_flight import SingleFlight
from zarrfs.config import urls
from zarrfs.config.options import Options
from zarrfs.config.redaction import redact_text, split_chain, without_secrets
from zarrfs.errors import ReadError
from zarrfs.net import bridge
from zarrfs.net.buckets import Buckets
from zarrfs.net.failures import failure
from zarrfs.net.http import HttpSystem
from zarrfs.net.reach import Trust
from zarrfs.net.responses import System, Transient
from zarrfs.net.services import SERVICES
from zarrfs.net.systems import SSH, CoroutineSystem, ThreadSystem, other_host
from zarrfs.net.weboptions import check_web_options, configuration
from zarrfs.system.memory import memory_limit

if TYPE_CHECKING:
    from zarrfs.net.zipfiles import UrlReader

_ANONYMOUSLY = "(requested anonymously: no option names its bucket; -o allow=credentials, see docs/security.md)"
_SERVER = re.compile(r"[^:/?#]+://[^/?#]*")
_CONNECTING = 4  # threads that connect to one server; a thread that a caller has abandoned counts until it ends
_ACCOUNT = re.compile(r"([^@/]+)@([^./]+)(\.[^/]+)?")  # of abfs://CONTAINER@ACCOUNT.dfs.core.windows.net/
_LINKS = 8  # URLs chained by "::": archives within archives
_KNOWN_HOSTS = ("~/.ssh/known_hosts", "/etc/ssh/ssh_known_hosts")  # as in ssh(1)
_KEEPALIVE = 15.0  # seconds; after three without an answer the connection is lost


class Openers:
    """The systems that serve the URLs of one reader."""

    def __init__(self, options: Options, files: UrlReader, trust: Trust) -> None:
        self._options, self._files, self._trust = options, files, trust
        self._classes: dict[str, Any] = {}
        self._systems: dict[object, System] = {}
        self._making: SingleFlight[object] = SingleFlight()
        self._threads: dict[object, trio.CapacityLimiter] = {}
        check_web_options(options)

    async def get_ready(self, url: str) -> None:
        """Make the system of `url`, and import and start what its first request needs. Raise the errors of find()."""
        system, _ = await self.find(url)
        if isinstance(system, HttpSystem):
            await system.get_ready(url)
        elif isinstance(system, CoroutineSystem):
            await trio.to_thread.run_sync(bridge.start)

    async def find(self, url: str) -> tuple[System, str]:
        """Return (the system that serves `url`, the path of `url` in it).

        Raise ReadError if nothing can serve `url`: an unknown protocol, a missing package, a bucket with a password,
        options or an environment that cannot be used. Raise Transient if an SSH server cannot be reached.
        """
        protocols = urls.protocols(url)
        if len(protocols) > _LINKS:
            raise ReadError(without_secrets(url), f"more than {_LINKS} URLs chained by '::'")
        if len(protocols) > 1:
            return await self._archive(url, protocols[0])
        protocol = protocols[0] if protocols else "file"
        family = urls.names(protocol)[0]
        if family == "http":
            if "web" not in self._systems:
                self._systems["web"] = HttpSystem(self._options, self._trust)
            return self._systems["web"], url
        if family in urls.BUCKETS:
            return self._bucket(protocol, family, url)
        if family == "ftp":  # fsspec's client takes errors for absent files, and replies to other requests for its own
            raise ReadError(without_secrets(url), "FTP is not supported: use HTTP or SFTP, or a mount of rclone")
        return await self._with_fsspec(url, protocol, family)

    async def _with_fsspec(self, url: str, protocol: str, family: str) -> tuple[System, str]:
        """Return the result of find() with fsspec's class for the protocol."""
        class_ = self._classes.get(protocol)
        if class_ is None:
            class_ = self._classes[protocol] = await trio.to_thread.run_sync(class_of, protocol, family)
        parts, path = parts_of(class_, family, url)  # options contain host, user, ...: each server has its system
        options, _ = self._trust.given(url)
        options = {**parts, **options}
        key = family, repr(sorted(options.items()))
        found = self._systems.get(key) or await self._make(key, protocol, options)
        return found, path

    def _bucket(self, protocol: str, family: str, url: str) -> tuple[System, str]:
        path = url.partition("://")[2]
        if ":" in path.partition("/")[0].rpartition("@")[0]:
            rule = "user:password@ is for servers: the keys of a bucket are storage options (docs/options.md)"
            raise ReadError(without_secrets(url), rule)
        given, personal = self._trust.given(url)
        options = {**(configuration(urls.names(family)) if personal else {}), **given}
        if family == "abfs" and (account := _ACCOUNT.match(path)):
            options["account_name"], path = account[2], account[1] + path[account.end() :]
            if account[3]:
                options["account_host"] = account[2] + account[3].replace(".dfs.", ".blob.", 1)
        key = family, repr(sorted(options.items())), personal
        if key not in self._systems:
            try:
                service = SERVICES[family](options)
            except (ValueError, TypeError, AttributeError) as exc:
                rule = f"cannot be used with these options: {exc}"
                raise ReadError(without_secrets(url), rule) from exc
            self._systems[key] = Buckets(self._options, protocol, service, "" if personal else _ANONYMOUSLY)
        return self._systems[key], path

    async def aclose(self) -> None:
        """Close all systems."""
        while self._systems:
            _, system = self._systems.popitem()
            await system.aclose()

    async def _make(self, key: object, protocol: str, options: dict[str, Any]) -> System:
        timeout, limit = self._options.request_timeout, self._options.document_limit
        family = urls.names(protocol)[0]
        threads = self._threads.setdefault(key, trio.CapacityLimiter(_CONNECTING))

        async def connect() -> Any:
            with trio.fail_after(timeout):  # some classes log in, or ask other machines for credentials
                return await trio.to_thread.run_sync(
                    _file_system, protocol, family, options, abandon_on_cancel=True, limiter=threads
                )

        async def make() -> System:
            try:
                fs = await connect()
            except ReadError:
                raise
            except Exception as exc:
                where = f"{protocol}://"
                found = failure(exc, where, timeout)
                hung_up = type(exc).__name__ == "ConnectionLost"  # of asyncssh: perhaps too many connections
                if hung_up:
                    found = Transient(" ".join(str(exc).split()) or "the server has ended the connection")
                unreached = hung_up or isinstance(exc, OSError | trio.TooSlowError)
                if unreached and isinstance(found, Transient) and family in SSH:
                    raise found from exc
                if isinstance(exc, trio.TooSlowError):
                    raise ReadError(where, f"not ready within {timeout:g} s (-o read_timeout=)") from exc
                raise ReadError(where, f"cannot be used with these options: {redact_text(str(exc))}") from exc
            system: System
            if fs.async_impl:
                system = CoroutineSystem(fs, protocol, timeout, limit, connect if family in SSH else None)
            else:
                system = ThreadSystem(fs, protocol, timeout, limit)
            self._systems[key] = system
            return system

        return await self._making.run(key, make, lambda: self._systems.get(key))

    async def _archive(self, url: str, protocol: str) -> tuple[System, str]:
        from zarrfs.net.zipfiles import LocalArchive, RemoteArchive, ZipSystem

        head = split_chain(url)[0]
        archive = url[len(head) + 2 :]
        if protocol != "zip":
            raise ReadError(without_secrets(url), f"{protocol} before '::' is not supported, only zip")
        path = head.partition("://")[2].strip("/")
        found = urls.protocols(archive)
        remote = bool(found) and found not in (["file"], ["local"])
        name = ""
        key = "archive", archive if remote else os.path.abspath(urls.file_path(archive))
        if remote and key not in self._systems:
            system, at = await self._files.below().find(archive)
            name = system.identity(at)
        elif key not in self._systems:
            name = secrets.token_hex(8)  # if it has no version: a name that no cached value of another process has
            with contextlib.suppress(ReadError):  # the error is raised when the archive is read
                name = await self._files.local.version(key[1])
        if key not in self._systems:
            opened: LocalArchive | RemoteArchive
            if remote:
                opened = RemoteArchive(self._files.below(), archive, name)
            else:
                opened = LocalArchive(self._files.local, key[1], name)
            self._systems[key] = ZipSystem(opened, self._options.document_limit, memory_limit(self._options))
        return self._systems[key], path


def class_of(protocol: str, family: str) -> Any:
    """Return fsspec's class for a protocol; call this in a thread, because it imports packages.

    Raise ReadError if the protocol is unknown or its package is missing.
    """
    import fsspec

    try:
        return fsspec.get_filesystem_class(protocol)
    except ValueError:
        raise ReadError(f"{protocol}://", f"the protocol {protocol!r} is unknown") from None
    except ImportError as exc:
        hint = "sshfs: pip install 'zarrfs[sftp]'" if family in SSH else str(exc)
        raise ReadError(f"{protocol}://", f"{protocol} needs the package {hint}") from None


def parts_of(class_: Any, family: str, url: str) -> tuple[dict[str, Any], str]:
    """Return (the options that a URL contains, such as host and user; its path), as fsspec's class reads them.

    A "?", "#" or tab is part of the path: fsspec would take a query for options, and cut it off the path of a server.
    """
    server = _SERVER.match(url) if family in ("smb", *SSH) else None
    head, path = (url, url) if server is None else (server[0], url[server.end() :])
    return class_._get_kwargs_from_urls(head), class_._strip_protocol(path)


def _file_system(protocol: str, family: str, options: dict[str, Any]) -> Any:
    # sshfs passes unknown options on to asyncssh, and has no cache of listings
    uncached = {} if family in SSH else {"use_listings_cache": False}
    given = {**ssh_defaults(), **options} if family in SSH else options
    try:
        fs = class_of(protocol, family)(**given, skip_instance_cache=True, **uncached)
    except Exception as exc:
        if type(exc).__name__ != "HostKeyNotVerifiable":
            raise
        raise unknown_key(protocol, options) from exc
    return fs


def ssh_defaults() -> dict[str, Any]:
    """Return defaults for asyncssh: without them sshfs accepts any host key, and does not notice a dead connection."""
    files = [file for file in map(os.path.expanduser, _KNOWN_HOSTS) if os.access(file, os.R_OK)]
    return {"known_hosts": files or b"", "keepalive_interval": _KEEPALIVE}  # b"": accept no key


def unknown_key(protocol: str, options: Mapping[str, Any]) -> ReadError:
    """Return the error for a server whose host key is unknown (HostKeyNotVerifiable of asyncssh)."""
    host, port, named = options.get("host"), options.get("port"), options.get("known_hosts")
    files = named if isinstance(named, str) and named else " or ".join(_KNOWN_HOSTS)
    scan = f"ssh-keyscan {f'-p {port} ' if port else ''}{host}"
    rule = (
        f"its host key is not in {files}: if it is the right server, add the key ({scan}), "
        f"or name a file that has it (-o {protocol}.known_hosts=FILE)"
    )
    return ReadError(other_host(protocol, options), rule)

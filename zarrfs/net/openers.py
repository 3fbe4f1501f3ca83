"""Openers: finds the System that serves a URL. Each system is made once, when it is first needed."""

from __future__ import annotations

import re
from typing import Any

import trio

from zarrfs.config import urls
from zarrfs.config.options import Options
from zarrfs.config.redaction import without_secrets
from zarrfs.errors import AccessDenied, ReadError
from zarrfs.net.http import HttpSystem
from zarrfs.net.reach import Trust
from zarrfs.net.responses import System
from zarrfs.net.tls import preload_authorities
from zarrfs.net.weboptions import check_web_options

_ANONYMOUSLY = "(requested anonymously: no option names its bucket; -o allow=credentials, see docs/security.md)"
_ACCOUNT = re.compile(r"([^@/]+)@([^./]+)(\.[^/]+)?")  # of abfs://CONTAINER@ACCOUNT.dfs.core.windows.net/
_AZURE = re.compile(  # hosts whose addresses only Azure chooses
    r"[a-z0-9.-]+\.(core\.(windows\.net|usgovcloudapi\.net|chinacloudapi\.cn)|storage\.azure\.net|fabric\.microsoft\.com)",
    re.IGNORECASE,
)
_CLIENTS = 100  # clients of buckets, each with connections and credentials: only a hostile set needs more


def preload(url: str) -> None:
    """Import the modules that the first request to `url` needs, and read the certificate authorities, in a thread."""
    protocol = urls.protocols(url)[-1]
    if urls.names(protocol)[0] in urls.BUCKETS:
        import zarrfs.net.buckets  # noqa: F401
    elif protocol != "https":
        return
    preload_authorities()


class Openers:
    """The systems that serve the URLs of one reader."""

    def __init__(self, options: Options, trust: Trust) -> None:
        self._options, self._trust = options, trust
        self._classes: dict[str, Any] = {}
        self._systems: dict[object, System] = {}
        check_web_options(options)

    async def find(self, url: str) -> tuple[System, str]:
        """Return (the system that serves `url`, which is not a chain, the path of `url` in it).

        Raise ReadError if nothing can serve `url`: an unknown protocol, a missing package, a bucket with a password,
        options or an environment that cannot be used.
        """
        protocols = urls.protocols(url)
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
        return await self._with_fsspec(url, protocol)

    async def _with_fsspec(self, url: str, protocol: str) -> tuple[System, str]:
        from zarrfs.net.threads import ThreadSystem, class_of, parts_of

        class_ = self._classes.get(protocol)
        if class_ is None:
            class_ = self._classes[protocol] = await trio.to_thread.run_sync(class_of, protocol)
        parts, path = parts_of(class_, protocol, url)  # options contain host, user, ...: each server has its system
        options = {**parts, **self._trust.given(url).options}
        key = protocol, repr(sorted(options.items()))
        if key not in self._systems:
            self._systems[key] = ThreadSystem(self._options, protocol, class_, options)
        return self._systems[key], path

    def _bucket(self, protocol: str, family: str, url: str) -> tuple[System, str]:
        from zarrfs.net.buckets import Buckets
        from zarrfs.net.services import SERVICES

        path = url.partition("://")[2]
        if ":" in path.partition("/")[0].rpartition("@")[0]:
            rule = "user:password@ is for servers: the keys of a bucket are storage options (docs/options.md)"
            raise ReadError(without_secrets(url), rule)
        given, personal = self._trust.given(url)
        options = dict(given)
        if family == "abfs" and (account := _ACCOUNT.match(path)):
            options["account_name"] = account[2]
            if account[3]:
                host = account[2] + account[3].replace(".dfs.", ".blob.", 1)
                if not _AZURE.fullmatch(host) and self._trust.must_be_public(urls.place(url)):
                    rule = "its host is not one of Azure: a set from the network reaches others with -o allow=private"
                    raise AccessDenied(without_secrets(url), rule)
                options["account_host"] = host
        key = family, repr(sorted(options.items())), personal
        if key not in self._systems:
            if sum(isinstance(system, Buckets) for system in self._systems.values()) >= _CLIENTS:
                raise ReadError(without_secrets(url), f"more than {_CLIENTS} accounts of buckets for one set")
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

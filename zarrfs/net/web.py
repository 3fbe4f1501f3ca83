"""Web: one HTTP request, redirects included: which options each host gets, which addresses are connected to.

aiohttp would follow redirects by itself, but with all headers of the user, to any host and any address. The
address is judged when the socket for it is made: neither the spelling of a host nor what a name resolves to at
another time matters then. Runs on fsspec's loop.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import socket
from collections.abc import AsyncIterator, Callable
from typing import Any

from zarrfs.config.redaction import without_secrets
from zarrfs.config.urls import web_place
from zarrfs.errors import AccessDenied, ReadError
from zarrfs.net.addresses import is_public, literal
from zarrfs.net.moved import PERMANENT, Moved
from zarrfs.net.reach import Trust

_REDIRECTS = 10  # as aiohttp
_STATUSES = (301, 302, 303, 307, 308)
_met: set[bool] = set()  # whether addresses are public that this process has made sockets for
os.register_at_fork(after_in_child=_met.clear)


def met_private_only() -> bool:
    """Return whether this process, which fetched one document, connected to private addresses only."""
    return _met == {False}


def met_public(address: str) -> bool:
    """is_public(), noted for met_private_only()."""
    public = is_public(address)
    _met.add(public)
    return public


class Web:
    """Requests of one RemoteFiles: a session of aiohttp for each set of options, made by fsspec."""

    def __init__(self, trust: Trust, make: Callable[[dict[str, Any]], Any], moved: Moved) -> None:
        self._trust, self._make = trust, make  # `make`: fsspec's file system for HTTP, from options
        self._moved = moved
        self._systems: dict[tuple[str, bool], Any] = {}
        self.answer_all: dict[str, bool] = {}  # by server: whether it has a page for every name

    @contextlib.asynccontextmanager
    async def request(
        self, method: str, url: str, headers: dict[str, str], slash: bool = False
    ) -> AsyncIterator[tuple[Any, list[Any]]]:
        """(aiohttp's response, the URLs that were asked for: first `url`, then where it was redirected to).

        `slash`: what is redirected to its own name with "/" is a directory, and is not asked for any further.
        """
        where = without_secrets(url)
        hops = [self._parsed(url, where)]
        moved, guessed = self._moved.onward(url)
        if moved != url:
            hops.append(self._parsed(moved, where))
        while True:
            response, most = await self._send(method, hops, headers, where)
            async with response:
                if guessed and response.status in (404, 410):
                    self._moved.stays(url)
                    hops, guessed = hops[:1], False
                    continue
                onward = _onward(response, hops[-1], where) if most else None
                if onward is None:
                    yield response, hops
                    return
                if slash and onward.raw_path == hops[0].raw_path + "/":
                    yield response, [*hops, onward]
                    return
            if response.status in PERMANENT:
                self._moved.learn(str(hops[-1]), str(onward))
            if len(hops) > most:
                raise ReadError(where, f"is redirected more than {most} times")
            hops.append(onward)

    async def aclose(self) -> None:
        """Close all sessions."""
        while self._systems:
            _, fs = self._systems.popitem()
            session, fs._session = fs._session, None
            if session is not None:
                await session.close()

    def _parsed(self, url: str, where: str) -> Any:
        """The URL as it is asked for."""
        import yarl

        try:
            found = yarl.URL(url)
            if self._trust.given(url).options.get("encoded"):
                found = yarl.URL(url, encoded=True)
            if found.scheme not in ("http", "https") or web_place(found) != web_place(yarl.URL(url)):
                raise ValueError("ambiguous")  # noqa: TRY301
        except (ValueError, TypeError) as exc:
            raise ReadError(where, f"not a URL: {exc}") from exc
        return found

    async def _send(self, method: str, hops: list[Any], headers: dict[str, str], where: str) -> tuple[Any, int]:
        """(the response to the last of `hops`, how many redirects may be followed)."""
        import aiohttp

        url = hops[-1]
        options = self._trust.given(str(url), web_place(url) != web_place(hops[0]))
        guarded = self._trust.must_be_public(url)
        fs = self._system(options.options, options.personal, guarded, url)
        given = dict(fs.kwargs)
        given["headers"] = {**(given.get("headers") or {}), "Accept-Encoding": "identity", **headers}
        given.setdefault("timeout", aiohttp.ClientTimeout(total=None))  # the caller's deadline holds
        most = int(given.pop("max_redirects", _REDIRECTS)) if given.pop("allow_redirects", True) else 0
        if len(hops) > 1:
            given.pop("params", None)  # they are of the first URL
            where = f"{where}: is redirected to {without_secrets(str(url))}"
        address = literal(url.raw_host) if guarded else None
        if address is not None and not is_public(address):
            raise AccessDenied(where, not_public(address))
        session = await fs.set_session()
        try:
            return await session.request(method, url, allow_redirects=False, **given), most
        except aiohttp.ClientConnectorError as exc:
            if guarded and exc.os_error.errno == errno.EACCES:
                raise AccessDenied(where, exc.os_error.strerror or "") from exc
            raise
        except TypeError as exc:
            raise ReadError(where, f"cannot be asked with these options: {exc}") from exc

    def _system(self, options: dict[str, Any], personal: bool, guarded: bool, url: Any) -> Any:
        """fsspec's file system for these options; where `guarded`, its sockets lead to public addresses only."""
        client = options.get("client_kwargs") or {}
        if client.get("trust_env") and not options.get("proxy") and (proxy := _proxy_of_environment(url)):
            options = {**options, "proxy": proxy}
        # Which address a proxy connects to is the proxy's business: it is one that the user named.
        guarded = guarded and not (options.get("proxy") or client.get("proxy"))
        key = repr(sorted(options.items())), guarded
        if key not in self._systems:
            fs = self._systems[key] = self._make(options)
            if not personal:  # fsspec's own configuration may hold headers
                fs.kwargs = {name: value for name, value in fs.kwargs.items() if name in options}
                fs.client_kwargs = dict(client)
            if guarded or "connector" not in fs.client_kwargs:
                fs.client_kwargs = {**fs.client_kwargs, "connector": self._connector(guarded)}
        return self._systems[key]

    def _connector(self, guarded: bool) -> Any:
        import aiohttp

        return aiohttp.TCPConnector(socket_factory=functools.partial(self._socket, guarded))

    def _socket(self, guarded: bool, info: tuple[Any, ...]) -> socket.socket:
        """A socket that is to be connected to the address in `info`, which is as getaddrinfo(3) gives it."""
        family, kind, protocol, _, (address, *_) = info
        if not met_public(address) and guarded:
            raise OSError(errno.EACCES, not_public(address))
        return socket.socket(family, kind, protocol)


def not_public(address: str) -> str:
    """Why an address is not connected to."""
    return f"a set from the network reaches only public addresses, and {address} is none (-o allow=private)"


def _proxy_of_environment(url: Any) -> str | None:
    """The proxy that environment variables name for `url`."""
    import urllib.request

    if urllib.request.proxy_bypass(url.host):
        return None
    return urllib.request.getproxies().get(url.scheme)


def _onward(response: Any, url: Any, where: str) -> Any:
    """Return the target of a redirect; None for any other response."""
    import yarl

    location = response.headers.get("Location")
    if response.status not in _STATUSES or not location:
        return None
    try:
        onward = url.join(yarl.URL(location))
        web_place(onward)
    except ValueError as exc:
        raise ReadError(where, f"is redirected to what is no URL: {exc}") from exc
    if onward.scheme not in ("http", "https"):
        raise ReadError(where, f"is redirected to {onward.scheme}:, which is not HTTP")
    if web_place(onward) == web_place(url) and onward.raw_user is None:
        onward = onward.with_user(url.user).with_password(url.password)
    return onward

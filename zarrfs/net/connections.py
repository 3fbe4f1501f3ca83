"""Connections to web servers on trio: name lookup, connecting, proxies, and a pool of idle connections.

Source: RFC 9112 (9 connection management), RFC 9110 (9.3.6 CONNECT).
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import socket
import ssl
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import trio

from zarrfs.concurrency.tasks import in_background
from zarrfs.errors import AccessDenied, ReadError
from zarrfs.net.addresses import is_public, not_public
from zarrfs.net.messages import BadAnswer
from zarrfs.net.responses import Transient
from zarrfs.net.tls import context_of, tls_error
from zarrfs.net.transport import Connection
from zarrfs.net.weboptions import Proxy, WebOptions, lines

_IDLE = 15.0  # seconds for which an idle connection is kept
_KEPT = 256  # the greatest number of idle connections, of all servers together
_NEXT = 2.0  # seconds until the next address of a name is tried
_ADDRESSES = 60.0  # seconds for which the addresses of a name are cached


class Server:
    """A web server, as it is reached with the options of one place.

    `name` is a host name or an address, without brackets. `guarded`: connect to public addresses only. `personal`: it
    may get credentials of the user. `headers`: of every request.
    """

    def __init__(
        self, scheme: str, name: str, port: int, guarded: bool, personal: bool, options: WebOptions,
        proxy: Proxy | None, headers: Mapping[str, str],
    ) -> None:  # fmt: skip
        self.scheme, self.name, self.port = scheme, name, port
        self.guarded, self.personal, self.options, self.proxy = guarded, personal, options, proxy
        # whether requests are sent to the proxy itself, rather than through a tunnel to the server
        self.forwarded = proxy is not None and scheme == "http"
        self.host = f"[{name.partition('%')[0]}]" if ":" in name else name
        if port != (443 if scheme == "https" else 80):
            self.host += f":{port}"
        self.lines = lines({"Host": self.host, **headers}) + (proxy.lines if proxy and self.forwarded else "")
        self._lookup = trio.Lock()
        self._addresses: list[tuple[socket.AddressFamily, Any]] = []
        self._looked_up = -math.inf
        self._good: Any = None  # the address that has answered last

    async def connect(self, where: str, patience: float) -> Connection:
        """Make a new connection. `where` is for messages, `patience` the timeout of the request in seconds.

        Raise AccessDenied, ReadError, Transient, OSError.
        """
        try:
            connection = Connection(await self._socket(where, patience), self)
        except OSError as exc:
            if self.proxy is None:
                raise
            raise Transient(f"{self.proxy}: {exc.strerror or exc}") from exc
        try:
            if self.proxy is not None and not self.forwarded:
                await self._through(self.proxy, connection, where, patience)
            if self.scheme == "https":
                await connection.encrypt(await context_of(self.options.tls, where), self.name)
        except ssl.SSLError as exc:
            connection.close()
            raise tls_error(exc, where) from exc
        except BaseException:
            connection.close()
            raise
        return connection

    async def _through(self, proxy: Proxy, connection: Connection, where: str, patience: float) -> None:
        """Make the proxy at the other end of `connection` connect to the server, which gets all later bytes."""
        at = f"[{self.name}]:{self.port}" if ":" in self.name else f"{self.name}:{self.port}"
        patience *= 0.9  # fail before the timeout of the request, whose message would not name the proxy
        try:
            with trio.fail_after(patience):
                await connection.send(f"CONNECT {at} HTTP/1.1\r\nHost: {at}\r\n{proxy.lines}\r\n".encode("latin-1"))
                head = await connection.head()
        except trio.TooSlowError as exc:
            raise Transient(f"{proxy}: no answer within {patience:g} s") from exc
        except OSError as exc:
            raise Transient(f"{proxy}: {exc.strerror or exc}") from exc
        if head is None:
            raise Transient(f"{proxy}: the connection was closed before an answer came")
        rule = f"{proxy}: HTTP status {head.status} {head.reason}".rstrip()
        if head.status in (401, 403, 407):
            hint = " (http.proxy_auth=)" if head.status == 407 else ""
            raise AccessDenied(where, rule + hint, head.status)
        if not 200 <= head.status < 300:
            raise Transient(rule, 0.0, head.status) if head.status >= 500 else ReadError(where, rule, head.status)
        if connection.ahead:
            raise BadAnswer("the proxy sends more than its answer")

    async def _socket(self, where: str, patience: float) -> socket.socket:
        """Return a socket that is connected to the first address of the server, or of its proxy, that answers.

        The address that has answered last is tried first.
        """
        name, port = (self.proxy.host, self.proxy.port) if self.proxy else (self.name, self.port)
        async with self._lookup:
            if time.monotonic() - self._looked_up > _ADDRESSES:
                found = await trio.socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)
                self._addresses = [(family, address) for family, _, _, _, address in found]
                self._looked_up = time.monotonic()
        # With a proxy, these are the addresses of the proxy, which the user has named, so they may be private.
        guarded = self.guarded and self.proxy is None
        admitted = [one for one in self._addresses if not guarded or is_public(str(one[1][0]))]
        if not admitted:
            raise AccessDenied(where, not_public(str(self._addresses[0][1][0])))
        error: OSError | None = None
        for left, one in enumerate(sorted(admitted, key=lambda one: one != self._good), 1 - len(admitted)):
            try:
                with trio.move_on_after(min(_NEXT, patience / 4) if left else math.inf):
                    sock = await _connected(*one)
                    self._good = one
                    return sock
            except OSError as exc:
                error = error or exc  # the first: the last may be one of IPv6, which this machine does not reach
        self._looked_up = -math.inf
        raise error or OSError(errno.EHOSTUNREACH, os.strerror(errno.EHOSTUNREACH))


class Hop(NamedTuple):
    """One place that a request goes to: the first one, or where it is redirected to."""

    url: str
    place: str  # scheme://host:port
    target: str  # path and query, as they are sent
    server: Server
    credentials: str  # an Authorization header of the URL itself, with its line end

    @property
    def path(self) -> str:
        """The path, without the query."""
        return self.target.partition("?")[0]

    def is_directory_of(self, first: Hop) -> bool:
        """Return whether the path is that of `first` with "/" at its end; percent-encoding may differ."""
        path, asked = self.path, first.path
        if not path.endswith("/") or asked.endswith("/"):
            return False
        from zarrfs.net.webpages import in_one_spelling

        return in_one_spelling(path) == in_one_spelling(asked + "/")


class Pool:
    """The idle connections of one client."""

    def __init__(self) -> None:
        self._idle: list[Connection] = []  # the one that is idle for the longest time first
        self._closed = self._sweeping = False

    async def take(self, server: Server, where: str, patience: float) -> tuple[Connection, bool]:
        """Return (an idle connection or else a new one, whether it was used before)."""
        for connection in reversed(self._idle):
            if connection.server is server:
                self._idle.remove(connection)
                if connection.is_quiet():
                    return connection, True
                connection.close()
        return await server.connect(where, patience), False

    def give(self, connection: Connection) -> None:
        """Keep a connection for the next request, or close it. Its last answer must have been received to the end."""
        if self._closed or connection.ahead:
            connection.close()
            return
        connection.idle_since = trio.current_time()
        self._idle.append(connection)
        if len(self._idle) > _KEPT:
            self._idle.pop(0).close()
        if not self._sweeping:
            self._sweeping = True
            in_background(self._sweep)

    def close(self) -> None:
        """Close idle connections, and from now on all that are given back."""
        self._closed = True
        while self._idle:
            self._idle.pop().close()

    async def _sweep(self) -> None:
        """Close each connection that is idle for too long, until none is left."""
        while self._idle:
            await trio.sleep_until(self._idle[0].idle_since + _IDLE)
            while self._idle and self._idle[0].idle_since + _IDLE <= trio.current_time():
                self._idle.pop(0).close()
        self._sweeping = False


async def _connected(family: socket.AddressFamily, address: Any) -> socket.socket:
    """Return a connected, non-blocking socket.

    It is not a socket of trio, because each call of those yields to the scheduler: ten times for a request.
    """
    sock = socket.socket(family, socket.SOCK_STREAM)
    with contextlib.ExitStack() as closing:
        closing.callback(sock.close)
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        error = sock.connect_ex(address)
        if error in (errno.EINPROGRESS, errno.EINTR):
            await trio.lowlevel.wait_writable(sock)
            error = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if error:
            raise OSError(error, os.strerror(error))
        closing.pop_all()
    return sock

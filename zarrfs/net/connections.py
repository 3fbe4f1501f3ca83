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
from typing import Any, NamedTuple

import trio

from zarrfs.errors import AccessDenied, ReadError
from zarrfs.net.addresses import is_public, not_public
from zarrfs.net.messages import BadAnswer
from zarrfs.net.responses import Transient
from zarrfs.net.tls import Tls, context_of, tls_error
from zarrfs.net.transport import Connection

_IDLE = 15.0  # seconds for which an idle connection is kept
_KEPT = 256  # the greatest number of idle connections, of all servers together
_NEXT = 2.0  # seconds until the next address of a name is tried
_ADDRESSES = 60.0  # seconds for which the addresses of a name are cached


class Proxy(NamedTuple):
    """An HTTP proxy through which a server is reached, for https with CONNECT."""

    host: str
    port: int
    lines: str  # headers that only the proxy gets, each with its line end

    def __str__(self) -> str:
        """Return the name of the proxy in messages."""
        return f"proxy {self.host}:{self.port}"


class Server:
    """A server as it is reached with one set of options, and its addresses.

    `guarded`: connect to public addresses only. `name` is a host name or an address, without brackets.
    """

    def __init__(self, scheme: str, name: str, port: int, guarded: bool, tls: Tls, proxy: Proxy | None) -> None:
        self.scheme, self.name, self.port, self.guarded = scheme, name, port, guarded
        self.tls, self.proxy = tls, proxy
        # whether requests are sent to the proxy itself, rather than through a tunnel to the server
        self.forwarded = proxy is not None and scheme == "http"
        self.host = f"[{name.partition('%')[0]}]" if ":" in name else name
        if port != (443 if scheme == "https" else 80):
            self.host += f":{port}"
        self._lookup = trio.Lock()
        self._addresses: list[tuple[socket.AddressFamily, Any]] = []
        self._looked_up = -math.inf

    async def connect(self, where: str, patience: float) -> Connection:
        """Make a new connection. `where` is for messages, `patience` the timeout of the request in seconds.

        Raise AccessDenied, ReadError, Transient, OSError.
        """
        connection = Connection(await self._socket(where, patience))
        try:
            if self.proxy is not None and not self.forwarded:
                await self._through(self.proxy, connection, where, patience)
            if self.scheme == "https":
                await connection.encrypt(await context_of(self.tls, where), self.name)
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
        """Return a socket that is connected to the first address of the server, or of its proxy, that answers."""
        name, port = (self.proxy.host, self.proxy.port) if self.proxy else (self.name, self.port)
        async with self._lookup:
            if time.monotonic() - self._looked_up > _ADDRESSES:
                try:
                    found = await trio.socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)
                except OSError as exc:
                    if self.proxy is None:
                        raise
                    raise Transient(f"{self.proxy}: {exc.strerror or exc}") from exc
                good = self._addresses[:1]  # the one that has answered last stays the first
                self._addresses = [(family, address) for family, _, _, _, address in found]
                self._addresses.sort(key=lambda one: one not in good)
                self._looked_up = time.monotonic()
        error: Exception = OSError(errno.EHOSTUNREACH, "no address")
        admitted, failed = [], None
        for family, address in self._addresses:
            # With a proxy, this is the address of the proxy, which the user has named, so it may be private.
            if not self.guarded or self.proxy or is_public(str(address[0])):
                admitted.append((family, address))
            else:
                error = AccessDenied(where, not_public(str(address[0])))
        for one in admitted:
            last = one is admitted[-1]
            try:
                with trio.move_on_after(math.inf if last else min(_NEXT, patience / 4)):
                    sock = await _connection(*one)
                    self._addresses.sort(key=lambda other: other != one)  # try it first from now on
                    return sock
            except OSError as exc:
                failed = failed or exc  # the first: the last may be one of IPv6, which this machine does not reach
            self._addresses.sort(key=lambda other: other == one)  # others are tried before it from now on
        self._looked_up = -math.inf
        error = failed or error
        if self.proxy is not None and isinstance(error, OSError):
            raise Transient(f"{self.proxy}: {error.strerror or error}") from error
        raise error


class Pool:
    """The idle connections of one client."""

    def __init__(self) -> None:
        self._idle: list[tuple[Server, Connection, float]] = []  # with the time since when; the oldest first
        self._closed = False

    async def take(self, server: Server, where: str, patience: float) -> tuple[Connection, bool]:
        """Return (an idle connection or else a new one, whether it was used before)."""
        self._close_old()
        for at in reversed(range(len(self._idle))):
            if self._idle[at][0] is server:
                _, connection, _ = self._idle.pop(at)
                if connection.is_quiet():
                    return connection, True
                connection.close()
        return await server.connect(where, patience), False

    def give(self, server: Server, connection: Connection) -> None:
        """Keep a connection for the next request, or close it. Its last answer must have been received to the end."""
        if self._closed or connection.ahead:
            connection.close()
            return
        self._idle.append((server, connection, time.monotonic()))
        self._close_old()

    def close(self) -> None:
        """Close idle connections, and from now on all that are given back."""
        self._closed = True
        for _, connection, _ in self._idle:
            connection.close()
        self._idle = []

    def _close_old(self) -> None:
        while self._idle and (len(self._idle) > _KEPT or self._idle[0][2] <= time.monotonic() - _IDLE):
            self._idle.pop(0)[1].close()


# -- sockets


async def _connection(family: socket.AddressFamily, address: Any) -> socket.socket:
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

"""HTTP proxies through which servers are reached, for https with CONNECT. Source: RFC 9110 (9.3.6 CONNECT)."""

from __future__ import annotations

from typing import NamedTuple

from zarrfs.errors import AccessDenied, ReadError
from zarrfs.net.messages import BadAnswer
from zarrfs.net.responses import Transient
from zarrfs.net.transport import Connection


class Proxy(NamedTuple):
    """A proxy through which a server is reached."""

    host: str
    port: int
    lines: str  # headers that only the proxy gets, each with its line end

    def __str__(self) -> str:
        """Return the name of the proxy in messages."""
        return f"proxy {self.host}:{self.port}"


async def tunnel(connection: Connection, proxy: Proxy, name: str, port: int, where: str) -> None:
    """Make the proxy at the other end of `connection` connect to a server; all later bytes are sent to the server.

    `where` is for messages. Raise AccessDenied, ReadError, Transient, BadAnswer, OSError.
    """
    at = f"[{name}]:{port}" if ":" in name else f"{name}:{port}"
    await connection.send(f"CONNECT {at} HTTP/1.1\r\nHost: {at}\r\n{proxy.lines}\r\n".encode("latin-1"))
    head = await connection.head()
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

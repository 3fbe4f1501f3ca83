"""Proxies through which servers are reached: HTTP with CONNECT, and SOCKS5.

Sources: RFC 9110 (9.3.6 CONNECT), RFC 1928 (SOCKS5), RFC 1929 (its user and password); curl(1) for the schemes.
"""

from __future__ import annotations

import ipaddress
from typing import NamedTuple

import trio

from zarrfs.errors import AccessDenied, ReadError
from zarrfs.net.addresses import is_public, literal, not_public, note_met
from zarrfs.net.messages import BadAnswer
from zarrfs.net.responses import Transient
from zarrfs.net.transport import Connection

PORTS = {"http": 80, "https": 443, "socks5": 1080, "socks5h": 1080}  # by scheme
LOGIN_MAX = 255  # bytes of a user or password of SOCKS5
_PASSWORD = 2  # the method of RFC 1929
_NOT_ALLOWED = 2
_REPLIES = {  # RFC 1928, section 6
    1: "general failure", _NOT_ALLOWED: "not allowed by its rules", 3: "network unreachable", 4: "host unreachable",
    5: "connection refused", 6: "TTL expired", 7: "it does not connect to servers", 8: "address type not supported",
}  # fmt: skip
_LASTING = (7, 8)


class Proxy(NamedTuple):
    """A proxy through which a server is reached."""

    scheme: str  # http, https (TLS to the proxy), socks5 (names are looked up here), socks5h (by the proxy)
    host: str
    port: int
    lines: str = ""  # headers that only the proxy gets, each with its line end
    user: str = ""  # for SOCKS, which has no headers; "": none
    password: str = ""

    @property
    def is_socks(self) -> bool:
        """Return whether the proxy speaks SOCKS5, which forwards any connection and knows nothing of HTTP."""
        return self.scheme.startswith("socks")

    def __str__(self) -> str:
        """Return the name of the proxy in messages."""
        return f"proxy {self.host}:{self.port}"


async def tunnel(
    connection: Connection, proxy: Proxy, name: str, port: int, where: str, guarded: bool
) -> None:  # fmt: skip
    """Make the proxy at the other end of `connection` connect to a server; all later bytes are sent to the server.

    `guarded`: refuse a server whose address is not public, if the address is looked up here (socks5://). `where` is
    for messages. Raise AccessDenied, ReadError, Transient, BadAnswer, OSError.
    """
    if proxy.is_socks:
        await _socks(connection, proxy, name, port, where, guarded)
    else:
        await _connect(connection, proxy, name, port, where)
    if connection.ahead:
        raise BadAnswer("the proxy sends more than its answer")


async def _connect(connection: Connection, proxy: Proxy, name: str, port: int, where: str) -> None:
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


async def _socks(
    connection: Connection, proxy: Proxy, name: str, port: int, where: str, guarded: bool
) -> None:  # fmt: skip
    address = await _address(proxy, name, port, where, guarded)
    await connection.send(b"\x05\x02\x00\x02" if proxy.user else b"\x05\x01\x00")
    version, method = await _exactly(connection, 2, proxy)
    if version != 5:
        raise ReadError(where, f"{proxy}: it does not speak SOCKS5")
    if method == _PASSWORD and proxy.user:
        user, password = proxy.user.encode(), proxy.password.encode()
        await connection.send(b"\x01%c%b%c%b" % (len(user), user, len(password), password))
        if (await _exactly(connection, 2, proxy))[1]:
            raise AccessDenied(where, f"{proxy}: it refuses user and password (http.proxy_auth=)")
    elif method:
        raise AccessDenied(where, f"{proxy}: it wants user and password, or another login (http.proxy_auth=)")
    await connection.send(b"\x05\x01\x00" + address + port.to_bytes(2, "big"))
    version, reply, _, kind = await _exactly(connection, 4, proxy)
    if reply or version != 5:
        rule = f"{proxy}: {_REPLIES.get(reply, f'error {reply}')}"
        if reply == _NOT_ALLOWED:
            raise AccessDenied(where, rule)
        raise ReadError(where, rule) if reply in _LASTING or version != 5 else Transient(rule)
    # skip the address from which the proxy connects
    length = {1: 4, 4: 16}.get(kind) or (await _exactly(connection, 1, proxy))[0]
    await _exactly(connection, length + 2, proxy)


async def _address(proxy: Proxy, name: str, port: int, where: str, guarded: bool) -> bytes:
    """Return the server's address in the form of SOCKS5: its type and its bytes."""
    number = literal(name.partition("%")[0])
    if number is None and proxy.scheme == "socks5":
        try:
            found = await trio.socket.getaddrinfo(name, port, type=trio.socket.SOCK_STREAM)
        except OSError as exc:  # not a failure of the proxy
            raise Transient(f"{name}: {exc.strerror or exc}") from exc
        number = str(found[0][4][0])
        if guarded and not is_public(number):
            raise AccessDenied(where, not_public(number))
    if number is None:
        text = name.encode("ascii")
        if len(text) > 255:
            raise ReadError(where, f"{proxy}: the name of the server is too long for SOCKS5")
        return b"\x03%c%b" % (len(text), text)
    note_met(is_public(number))
    packed = ipaddress.ip_address(number).packed
    return (b"\x01" if len(packed) == 4 else b"\x04") + packed


async def _exactly(connection: Connection, size: int, proxy: Proxy) -> bytes:
    """Receive `size` bytes."""
    data = b""
    while len(data) < size:
        more = await connection.receive(size - len(data))
        if not more:
            raise Transient(f"{proxy}: the connection was closed before an answer came")
        data += more
    return data

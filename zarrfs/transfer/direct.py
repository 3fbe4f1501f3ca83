"""DirectWeb: ranges over plain HTTP on sockets of trio's own: no thread, no other loop and no copy in between.

It serves what is simple: one status, headers without surprises, a body of known length that goes straight into its
place. All else (redirects, encodings, chunked bodies, servers that ignore ranges, options and proxies) is for the
next one to ask, a client of a library that knows it all. Source: RFC 9110 (14.2 range requests), RFC 9112 (messages).
"""

from __future__ import annotations

import contextlib
import errno
import logging
import re
import socket
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

import trio

from zarrfs.errors import AccessDenied, ReadError
from zarrfs.options import Options
from zarrfs.transfer import http, identity
from zarrfs.transfer.addresses import is_public
from zarrfs.transfer.answers import Entry, Fetched, Transient
from zarrfs.transfer.storeoptions import why_not_plain
from zarrfs.transfer.systems import System, failure, web_host
from zarrfs.transfer.trust import Trust
from zarrfs.transfer.urls import without_secrets
from zarrfs.transfer.web import not_public

log = logging.getLogger("zarrfs.transfer")

_IDLE = 15.0  # seconds for which a connection is kept
_ADDRESSES = 60.0  # seconds for which the addresses of a name are believed
_HOSTS = 256  # servers that are remembered
_HEAD_MAX = 64 << 10  # bytes
_LOW = 1 << 20  # bytes that are waited for at once, of a long body
_ONCE = ("content-length", "content-range", "content-encoding", "transfer-encoding", "etag", "last-modified")
# What is written into a request as it stands, by every client.
_URL = re.compile(
    r"http://((?:[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?)(?::[0-9]{1,5})?)"
    r"(/(?:(?!\.{1,2}(?:/|\Z))[A-Za-z0-9._~!$'()*,+&=;:@-]+/)*(?!\.{1,2}\Z)[A-Za-z0-9._~!$'()*,+&=;:@-]+)"
)
_STATUS = re.compile(rb"HTTP/1\.1 ([2-5][0-9][0-9])(?: ([ -~]*))?")
_HEADER = re.compile(rb"([!#-'*+.0-9A-Z^-z|~-]+):[ \t]*([\t -~\x80-\xff]*)")


class Head(NamedTuple):
    """The head of an answer; names of headers in lower case."""

    status: int
    reason: str
    headers: _Headers


class _Headers(dict[str, str]):
    def get(self, name: str, default: str = "") -> str:  # type: ignore[override]
        """A header by its name in any case."""
        return super().get(name.lower(), default)


class _Unserved(Exception):
    """An answer that is not simple, or none."""


class _Host:
    """A server: its addresses, and connections that wait for the next request."""

    def __init__(self, at: str, guarded: bool) -> None:
        name, _, port = at.partition(":")
        self.at, self.name, self.port, self.guarded = at, name, int(port or 80), guarded
        self.idle: list[tuple[trio.socket.SocketType, float]] = []
        self.addresses: list[tuple[socket.AddressFamily, Any]] = []
        self.looked_up = -_ADDRESSES
        self.odd = False  # its answers are not simple


class DirectWeb:
    """HTTP servers; a path is a URL. `next_` has what is not simple."""

    immutable = False

    def __init__(self, options: Options, trust: Trust, next_: Callable[[], Awaitable[System]]) -> None:
        self._timeout, self._trust, self._next = options.request_timeout, trust, next_
        self._hosts: OrderedDict[str, _Host] = OrderedDict()
        self._none = why_not_plain(options)

    def serves(self, path: str) -> bool:
        """Whether it would ask for `path` itself."""
        return self._split(path)[0] is not None

    async def fetch(self, path: str, start: int, stop: int | None) -> Fetched:
        """As System.fetch."""
        host, target = self._split(path)
        if host is None or stop is None:
            return await (await self._next()).fetch(path, start, stop)
        where = self.shown(path)
        try:
            with trio.fail_after(self._timeout):
                return await self._fetch(host, target, where, start, stop)
        except _Unserved as exc:
            log.debug("%s: asked again by a library's client: %s", where, exc)
        except Exception as exc:
            raise failure(exc, where, self._timeout) from exc
        found = await (await self._next()).fetch(path, start, stop)
        host.odd = True
        return found

    async def stat(self, path: str) -> Entry:
        """As System.stat."""
        return await (await self._next()).stat(path)

    async def listing(self, path: str) -> list[Entry] | None:
        """As System.listing."""
        return await (await self._next()).listing(path)

    def child(self, path: str, name: str) -> str:
        """As System.child."""
        return http.child(path, name)

    def shown(self, path: str) -> str:
        """As System.shown."""
        return without_secrets(path)

    def host(self, path: str) -> str:
        """As System.host."""
        return web_host(path)

    def identity(self, path: str) -> str:
        """As System.identity."""
        return identity.of_web(path, self._trust.given(path).options)

    async def aclose(self) -> None:
        """Close connections; `next_` is its owner's."""
        for host in self._hosts.values():
            for sock, _ in host.idle:
                sock.close()
        self._hosts.clear()

    # -- servers

    def _split(self, path: str) -> tuple[_Host | None, str]:
        """(the server, or None where it is not for us; what to ask it for)."""
        match = None if self._none else _URL.fullmatch(path)
        if match is None:
            return None, ""
        at = match[1].lower()
        host = self._hosts.get(at)
        if host is None:
            if len(self._hosts) >= _HOSTS:
                _, gone = self._hosts.popitem(last=False)
                for sock, _ in gone.idle:
                    sock.close()
            host = self._hosts[at] = _Host(at, self._trust.must_be_public_at(f"http://{at}/"))
        return (None if host.odd else host), match[2]

    async def _connected(self, host: _Host) -> tuple[trio.socket.SocketType, bool]:
        """(a connection, whether it was used before)."""
        now = time.monotonic()
        while host.idle:
            sock, used = host.idle.pop()
            if now - used < _IDLE:
                return sock, True
            sock.close()
        if now - host.looked_up > _ADDRESSES:
            found = await trio.socket.getaddrinfo(host.name, host.port, type=socket.SOCK_STREAM)
            host.addresses = [(family, address) for family, _, _, _, address in found]
            host.looked_up = now
        error: OSError | None = None
        for family, address in list(host.addresses):
            if host.guarded and not is_public(str(address[0])):
                raise AccessDenied(f"http://{host.at}", not_public(str(address[0])))
            sock = trio.socket.socket(family, socket.SOCK_STREAM)
            try:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                await sock.connect(address)
            except OSError as exc:
                sock.close()
                error = exc
            except BaseException:
                sock.close()
                raise
            else:
                return sock, False
        host.looked_up = -_ADDRESSES
        raise error or OSError(errno.EHOSTUNREACH, "no address")

    # -- one request

    async def _fetch(self, host: _Host, target: str, where: str, start: int, stop: int) -> Fetched:
        request = (
            f"GET {target} HTTP/1.1\r\nHost: {host.at}\r\nRange: bytes={start}-{stop - 1}\r\n"
            "Accept: */*\r\nAccept-Encoding: identity\r\nUser-Agent: zarrfs\r\n\r\n"
        ).encode()
        while True:
            sock, used = await self._connected(host)
            try:
                try:
                    await _send(sock, request)
                    data = await sock.recv(_HEAD_MAX)
                except (ConnectionError, BrokenPipeError):
                    data = b""
                    if not used:
                        raise
                if not data and used:
                    continue  # it was closed while it waited
                head, body = await _head(sock, data)
                found, whole = await self._answer(sock, head, body, where, start, stop)
                if whole and head.headers.get("Connection").lower() != "close":
                    host.idle.append((sock, time.monotonic()))
                    sock = None  # type: ignore[assignment]
                return found
            finally:
                if sock is not None:
                    sock.close()

    async def _answer(
        self, sock: trio.socket.SocketType, head: Head, body: bytes, where: str, start: int, stop: int
    ) -> tuple[Fetched, bool]:
        """(what the answer is, whether the connection is at its end)."""
        length = head.headers.get("Content-Length")
        if "transfer-encoding" in head.headers or not length.isdigit() or head.headers.get("Content-Encoding"):
            raise _Unserved("a body without a length")
        if head.status == 416:
            match = re.match(r"bytes\s+\*/(\d+)", head.headers.get("Content-Range"))
            return Fetched(b"", http.tag(head), int(match[1]) if match else start), False
        if 300 <= head.status < 400:
            raise _Unserved("a redirect")
        if head.status >= 400:
            http.raise_for_status(head.status, where, head.reason, head.headers.get("Retry-After"))
        if head.status != 206:
            raise _Unserved("the range is ignored")
        match = http.RANGE.match(head.headers.get("Content-Range"))
        first, last, total = (int(match[1]), int(match[2]), match[3]) if match is not None else (-1, 0, "")
        if first != start or last >= stop or last < first:
            raise ReadError(where, "the server answers with another range than was asked for")
        size = last + 1 - first
        data = await _body(sock, body[:size], size)
        found = Fetched(data, http.tag(head), None if total == "*" else int(total))
        return found, int(length) == size and len(body) <= size


async def _send(sock: trio.socket.SocketType, data: bytes) -> None:
    while data:
        data = data[await sock.send(data) :]


async def _head(sock: trio.socket.SocketType, data: bytes) -> tuple[Head, bytes]:
    """(the head of the answer that begins with `data`, what has come of its body)."""
    while (end := data.find(b"\r\n\r\n")) < 0:
        if len(data) >= _HEAD_MAX:
            raise _Unserved("a head without end")
        more = await sock.recv(_HEAD_MAX)
        if not more:
            raise Transient("the connection was closed before an answer came")
        data += more
    status, *lines = data[:end].split(b"\r\n")
    match = _STATUS.fullmatch(status)
    if match is None:
        raise _Unserved("another version of HTTP")
    headers = _Headers()
    for line in lines:
        header = _HEADER.fullmatch(line)
        name = "" if header is None else header[1].decode().lower()
        if header is None or (name in headers and name in _ONCE):
            raise _Unserved("a header that is not simple")
        headers[name] = header[2].decode("latin-1").strip()
    return Head(int(match[1]), (match[2] or b"").decode(), headers), data[end + 4 :]


async def _body(sock: trio.socket.SocketType, begun: bytes, size: int) -> bytearray:
    """`size` bytes that begin with `begun`; Transient where fewer come."""
    data = bytearray(size)
    got = len(begun)
    data[:got] = begun
    low = 1
    with memoryview(data) as view, contextlib.ExitStack() as restore:
        while got < size:
            wanted = min(_LOW, size - got)  # fewer wake-ups, as the kernel gathers so much before it tells
            if wanted != low:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, wanted)
                if low == 1:
                    restore.callback(sock.setsockopt, socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)
                low = wanted
            with view[got:] as rest:
                count = await sock.recv_into(rest)
            if not count:
                raise Transient("the answer was cut off")
            got += count
    return data

"""DirectWeb: ranges over plain HTTP on sockets of trio's own: no thread, no other loop and no copy in between.

It serves what is simple: one status, headers without surprises, a body of known length that goes straight into its
place. All else (redirects, encodings, chunked bodies, servers that ignore ranges, options and proxies) is for the
next one to ask, a client of a library that knows it all. Source: RFC 9110 (14.2 range requests), RFC 9112 (messages).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import math
import os
import re
import socket
import struct
import termios
import time
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

import trio

from zarrfs.concurrency.lru import LRU
from zarrfs.concurrency.tasks import in_background
from zarrfs.config.options import Options
from zarrfs.errors import AccessDenied, ReadError, TargetMissing
from zarrfs.net import http
from zarrfs.net.answers import Entry, Fetched, Transient
from zarrfs.net.moved import PERMANENT, Moved
from zarrfs.net.reach import Trust
from zarrfs.net.storeoptions import why_not_plain
from zarrfs.net.systems import System, WebPaths, failure, raise_from
from zarrfs.net.web import met_public, not_public
from zarrfs.system.buffers import Buffer

log = logging.getLogger("zarrfs.transfer")

_IDLE = 15.0  # seconds for which a connection is kept, and between two looks for older ones
_KEPT = 256  # connections that are kept at most, of all servers
_NEXT = 1.0  # seconds until the next address of a name is tried
_ADDRESSES = 60.0  # seconds for which the addresses of a name are believed
_HOSTS = 256  # servers that are remembered
_HEAD_MAX = 64 << 10  # bytes
_FIRST = 16 << 10  # bytes that are taken at once until the body begins
_LOW = 1 << 20  # bytes that are waited for at once, of a long body
_ONCE = ("content-length", "content-range", "content-encoding", "transfer-encoding", "etag", "last-modified")
# What is written into a request as it stands, by every client.
_URL = re.compile(
    r"http://((?:[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?)(?::[0-9]{1,5})?)"
    r"(/(?:(?!\.{1,2}(?:/|\Z))[A-Za-z0-9._~!$'()*,+&=;:@-]+/)*(?!\.{1,2}\Z)[A-Za-z0-9._~!$'()*,+&=;:@-]+)"
)
_VERSION = b"HTTP/1.1 "
_RANGE = b"HTTP/1.1 206 "
_BARE = re.compile(rb"(?<!\r)\n")
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


class _Onward(_Unserved):
    """An answer that is a permanent redirect."""

    def __init__(self, location: str) -> None:
        super().__init__("a redirect")
        self.location = location


class _Host:
    """A server: its addresses, and connections that wait for the next request."""

    def __init__(self, at: str, guarded: bool) -> None:
        name, _, port = at.partition(":")
        self.at, self.name, self.port, self.guarded = at, name, int(port or 80), guarded
        self.idle: list[tuple[socket.socket, float]] = []  # since when, the oldest first
        self.lookup = trio.Lock()
        self.addresses: list[tuple[socket.AddressFamily, Any]] = []
        self.looked_up = -math.inf
        self.odd = False  # its answers are not simple


class DirectWeb(WebPaths):
    """HTTP servers; a path is a URL. `next_` has what is not simple."""

    immutable = False
    tells = True

    def __init__(
        self, options: Options, trust: Trust, next_: Callable[[], Awaitable[System]], moved: Moved
    ) -> None:
        self._timeout, self._trust, self._next, self._moved = options.request_timeout, trust, next_, moved
        self._hosts: LRU[str, _Host] = LRU(_HOSTS, lambda host: self._drop(host, math.inf))
        self._none = why_not_plain(options)
        self._kept = 0  # idle connections
        self._sweeping: trio.CancelScope | None = None  # of the task that closes them

    def serves(self, path: str) -> bool:
        """Return whether this client serves `path` itself."""
        return self._split(path)[0] is not None

    async def fetch(self, path: str, start: int, stop: int | None) -> Fetched:
        """As System.fetch."""
        onward, guessed = self._moved.onward(path)
        host, target = self._split(onward)
        if host is None or stop is None:
            return await (await self._next()).fetch(path, start, stop)
        where = self.shown(onward)
        try:
            # what fail_after() does, at a third of its cost
            with trio.CancelScope(deadline=trio.current_time() + self._timeout):
                return await self._fetch(host, target, where, start, stop)
            raise trio.TooSlowError  # noqa: TRY301
        except _Onward as exc:
            self._moved.learn(onward, exc.location)
            if self._moved.onward(path)[0] != onward:
                return await self.fetch(path, start, stop)
        except _Unserved as exc:
            log.debug("%s: asked again by a library's client: %s", where, exc)
        except TargetMissing:
            if not guessed:
                raise
            self._moved.stays(path)
            return await (await self._next()).fetch(path, start, stop)
        except Exception as exc:
            raise_from(failure(exc, where, self._timeout), exc)
        found = await (await self._next()).fetch(path, start, stop)
        host.odd = True
        return found

    async def stat(self, path: str) -> Entry:
        """As System.stat."""
        return await (await self._next()).stat(path)

    async def listing(self, path: str) -> list[Entry] | None:
        """As System.listing."""
        return await (await self._next()).listing(path)

    async def aclose(self) -> None:
        """Close connections; `next_` is its owner's."""
        self._close_idle(math.inf)
        self._hosts.clear()
        if self._sweeping is not None:
            self._sweeping.cancel()

    # -- servers

    def _split(self, path: str) -> tuple[_Host | None, str]:
        """(the server, or None where it is not for us; what to ask it for)."""
        match = None if self._none else _URL.fullmatch(path)
        if match is None:
            return None, ""
        at = match[1].lower()
        host = self._hosts.use(at)
        if host is None:
            host = self._hosts.put(at, _Host(at, self._trust.must_be_public_at(f"http://{at}/")))
        return (None if host.odd else host), match[2]

    async def _connected(self, host: _Host, where: str) -> tuple[socket.socket, bool]:
        """(a connection, whether it was used before)."""
        while host.idle:
            sock, since = host.idle.pop()
            self._kept -= 1
            if time.monotonic() - since < _IDLE and not _has_more(sock):  # neither at its end nor ahead of us
                return sock, True
            sock.close()
        return await self._connect(host, where), False

    async def _connect(self, host: _Host, where: str) -> socket.socket:
        async with host.lookup:
            if time.monotonic() - host.looked_up > _ADDRESSES:
                found = await trio.socket.getaddrinfo(host.name, host.port, type=socket.SOCK_STREAM)
                host.addresses = [(family, address) for family, _, _, _, address in found]
                host.looked_up = time.monotonic()
        addresses = list(host.addresses)
        error: Exception = OSError(errno.EHOSTUNREACH, "no address")
        for number, (family, address) in enumerate(addresses, 1):
            if not met_public(str(address[0])) and host.guarded:
                error = AccessDenied(where, not_public(str(address[0])))
                continue
            error = TimeoutError(errno.ETIMEDOUT, "no connection")
            patience = min(_NEXT, self._timeout / 4) if number < len(addresses) else math.inf
            try:
                with trio.move_on_after(patience):
                    return await _connection(family, address)
            except OSError as exc:
                error = exc
            if host.addresses[0] == (family, address):
                host.addresses.append(host.addresses.pop(0))  # the others first, from now on
        host.looked_up = -math.inf
        raise error

    def _keep(self, host: _Host, sock: socket.socket) -> None:
        """Keep a connection whose answer is at its end for the next request."""
        if self._kept >= _KEPT or self._hosts.get(host.at) is not host:
            sock.close()
            return
        host.idle.append((sock, time.monotonic()))
        self._kept += 1
        if self._sweeping is None:
            self._sweeping = trio.CancelScope()
            in_background(self._sweep, self._sweeping)

    async def _sweep(self, scope: trio.CancelScope) -> None:
        """Close connections that nobody takes, until there are none."""
        with scope:
            while self._kept:
                await trio.sleep(_IDLE)
                self._close_idle(time.monotonic() - _IDLE)
        self._sweeping = None

    def _close_idle(self, before: float) -> None:
        for host in self._hosts.values():
            self._drop(host, before)

    def _drop(self, host: _Host, before: float) -> None:
        """Close what has been idle since `before`."""
        while host.idle and host.idle[0][1] <= before:
            sock, _ = host.idle.pop(0)
            self._kept -= 1
            sock.close()

    # -- one request

    async def _fetch(self, host: _Host, target: str, where: str, start: int, stop: int) -> Fetched:
        request = (
            f"GET {target} HTTP/1.1\r\nHost: {host.at}\r\nRange: bytes={start}-{stop - 1}\r\n"
            "Accept: */*\r\nAccept-Encoding: identity\r\nUser-Agent: zarrfs\r\n\r\n"
        ).encode()
        while True:
            sock, used = await self._connected(host, where)
            keep = False
            try:
                data = await _asked(sock, request, used)
                if not data and used:
                    continue  # it was closed while it waited
                head, body = await _head(sock, data)
                keep = _length(head) == len(body)
                found, whole = await self._answer(sock, head, body, where, start, stop)
                keep = keep or whole
                return found
            finally:
                if keep and "close" not in head.headers.get("Connection").lower():
                    self._keep(host, sock)
                else:
                    sock.close()

    async def _answer(
        self, sock: socket.socket, head: Head, body: bytes, where: str, start: int, stop: int
    ) -> tuple[Fetched, bool]:
        """(what the answer is, whether all of its body has been read)."""
        if head.status == 416:
            match = re.match(r"bytes\s+\*/(\d+)", head.headers.get("Content-Range"))
            return Fetched(b"", http.tag(head), int(match[1]) if match else start), False
        if head.status >= 400:
            http.raise_for_status(head.status, where, head.reason, head.headers.get("Retry-After"))
        if head.status in PERMANENT and head.headers.get("Location"):
            raise _Onward(head.headers.get("Location"))
        if head.status != 206:
            raise _Unserved("a redirect" if head.status >= 300 else "the range is ignored")
        length = _length(head)
        if length is None or head.headers.get("Content-Encoding"):
            raise _Unserved("a body without a length, or encoded")
        match = http.RANGE.match(head.headers.get("Content-Range"))
        first, last, total = (int(match[1]), int(match[2]), match[3]) if match is not None else (-1, 0, "")
        if first != start or last < first:
            raise ReadError(where, "the server answers with another range than was asked for")
        size = min(last + 1, stop) - first
        if length < size:  # what follows is another answer
            raise Transient("the answer was cut off")
        data = await _body(sock, body[:size], size)
        found = http.told_with(Fetched(data, http.tag(head), None if total == "*" else int(total)), head, start)
        return found, length == size and len(body) <= size


async def _connection(family: socket.AddressFamily, address: Any) -> socket.socket:
    """A connected socket that never blocks.

    Not one of trio's own: those go round the loop at every call, and a request would be ten times round.
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


def _has_more(sock: socket.socket) -> bool:
    """Return whether there is data to read, or the connection has ended."""
    try:
        sock.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


async def _asked(sock: socket.socket, request: bytes, used: bool) -> bytes:
    """The first that comes; b"" at the end of the connection, or where one that was `used` is broken.

    Of a range the head alone, if that has come: its body is then received at once, into memory of its own.
    """
    try:
        await _send(sock, request)
        await trio.lowlevel.wait_readable(sock)
        data = await _received(sock, _FIRST, socket.MSG_PEEK)
        end = data.find(b"\r\n\r\n") + 4 if data.startswith(_RANGE) else 0
        return await _received(sock, end if end > 3 else _FIRST)
    except ConnectionError:
        if not used:
            raise
        return b""


async def _send(sock: socket.socket, data: bytes) -> None:
    while data:
        try:
            data = data[sock.send(data) :]
        except BlockingIOError:
            await trio.lowlevel.wait_writable(sock)


async def _received(sock: socket.socket, most: int, flags: int = 0) -> bytes:
    while True:
        try:
            return sock.recv(most, flags)
        except BlockingIOError:
            await trio.lowlevel.wait_readable(sock)


def _length(head: Head) -> int | None:
    """The bytes that the body has; None where the head does not tell."""
    length = head.headers.get("Content-Length")
    return int(length) if length.isdecimal() and "transfer-encoding" not in head.headers else None


async def _head(sock: socket.socket, data: bytes) -> tuple[Head, bytes]:
    """(the head of the answer that begins with `data`, what has come of its body)."""
    seen = 0
    while (end := data.find(b"\r\n\r\n", max(0, seen - 3))) < 0:
        if len(data) >= _HEAD_MAX or not _VERSION.startswith(data[: len(_VERSION)]) or _BARE.search(data, seen):
            raise _Unserved("a head without end, or in another language")
        seen = len(data)
        more = await _received(sock, _FIRST)
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


async def _body(sock: socket.socket, begun: bytes, size: int) -> Buffer:
    """`size` bytes that begin with `begun`; Transient where fewer come."""
    with contextlib.ExitStack() as restore:
        low = 1

        async def wait(wanted: int) -> None:
            """Until so many bytes are there, or _LOW: the kernel gathers them before it tells."""
            nonlocal low
            if min(_LOW, wanted) != low:
                if low == 1:
                    restore.callback(sock.setsockopt, socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)
                low = min(_LOW, wanted)
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, low)
            await trio.lowlevel.wait_readable(sock)

        if not begun and 0 < size <= _LOW:  # memory that is not filled with zeros first
            if _available(sock) < size:
                await wait(size)
            begun = await _received(sock, size)
            if len(begun) == size:
                return begun
            if not begun:
                raise Transient("the answer was cut off")
        return await _gathered(sock, begun, size, wait)


async def _gathered(
    sock: socket.socket, begun: bytes, size: int, wait: Callable[[int], Awaitable[None]]
) -> bytearray:
    """As _body(), a piece at a time."""
    data = bytearray(size)
    got = len(begun)
    data[:got] = begun
    with memoryview(data) as view:
        while got < size:
            try:
                with view[got:] as rest:
                    count = sock.recv_into(rest)
            except BlockingIOError:
                await wait(size - got)
                continue
            if not count:
                raise Transient("the answer was cut off")
            got += count
            if count >= _LOW:  # a server that is faster than we are may not keep the loop from others
                await trio.lowlevel.checkpoint()
    return data


def _available(sock: socket.socket) -> int:
    """Bytes that can be received now."""
    found: int = struct.unpack("i", fcntl.ioctl(sock, termios.FIONREAD, bytes(4)))[0]
    return found

"""Connections to web servers on trio: addresses, connecting, and the bytes of an answer.

A socket never blocks, and a TLS socket decrypts straight into the memory that the reader gets: no task, thread or copy
lies between. Source: RFC 9112 (9 connection management), RFC 8305 (happy eyeballs).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import math
import os
import socket
import ssl
import struct
import termios
import time
from typing import Any

import trio

from zarrfs.concurrency.tasks import in_background
from zarrfs.errors import AccessDenied, ReadError
from zarrfs.net import messages
from zarrfs.net.addresses import is_public, not_public
from zarrfs.net.failures import certificate_refused
from zarrfs.net.messages import CHUNKED, LINE_MAX, TO_THE_END, BadAnswer, Head
from zarrfs.net.proxies import Proxy, tunnel
from zarrfs.net.responses import Transient
from zarrfs.net.tls import WAITS, Tls, TlsInTls, context_of, encrypted, tls_error, tls_reason
from zarrfs.system.buffers import Buffer

_IDLE = 15.0  # seconds for which a connection is kept, and between two looks for older ones
_KEPT = 256  # connections that are kept at most, of all servers
_NEXT = 0.25  # seconds until the next address of a name is tried as well
_ADDRESSES = 60.0  # seconds for which the addresses of a name are believed
_FIRST = 16 << 10  # bytes that are received at once until the body begins
_LOW = 1 << 20  # bytes that are waited for at once, of a long body
_RECORD = 17 << 10  # bytes of a TLS record at most, of which OpenSSL may hold a part already
_DRAIN = 16 << 10  # bytes of a body that nobody wants which are received so that the connection can be used again
_RANGE = b"HTTP/1.1 206 "

_met: set[bool] = set()  # whether addresses are public that this process has connected to
os.register_at_fork(after_in_child=_met.clear)


def met_private_only() -> bool:
    """Return whether this process, which fetched one document, connected to private addresses only."""
    return _met == {False}


class Cut(Transient):
    """A body that ended too early; `data` has come of what was to be read."""

    def __init__(self, reason: str, data: Buffer) -> None:
        super().__init__(reason, begun=True)
        self.data = data


class Connection:
    """A connection; it serves one request after the other."""

    __slots__ = ("ahead", "sock", "tls")

    def __init__(self, sock: socket.socket | TlsInTls, tls: bool) -> None:
        self.sock, self.tls = sock, tls
        self.ahead = b""  # received behind the head

    def close(self) -> None:
        """Close the socket at once; TLS sends no close_notify, as the server would have to be waited for."""
        self.sock.close()

    async def send(self, data: bytes) -> None:
        """Send all of `data`."""
        while data:
            try:
                data = data[self.sock.send(data) :]
            except (BlockingIOError, ssl.SSLWantWriteError):
                await trio.lowlevel.wait_writable(self.sock)
            except ssl.SSLWantReadError:
                await trio.lowlevel.wait_readable(self.sock)

    async def receive(self, most: int, flags: int = 0) -> bytes:
        """Return what comes next, up to `most` bytes; b"" at the end. `flags` are for connections without TLS."""
        while True:
            try:
                return self.sock.recv(most, flags)
            except WAITS:
                await trio.lowlevel.wait_readable(self.sock)
            except ssl.SSLWantWriteError:
                await trio.lowlevel.wait_writable(self.sock)

    async def head(self) -> Head | None:
        """Receive the head of an answer; None if the connection ends before anything has come.

        Raises BadAnswer, Transient, OSError. Interim answers (RFC 9110, 15.2) are skipped.
        """
        while True:
            data = await self._head()
            if not data:
                return None
            head = messages.parse_head(data)
            if head.status >= 200:
                return head
            if head.status == 101:
                raise BadAnswer("it switches protocols")

    async def _head(self) -> bytes:
        data, self.ahead = self.ahead, b""
        if not data and not self.tls:
            await trio.lowlevel.wait_readable(self.sock)
            seen = await self.receive(_FIRST, socket.MSG_PEEK)
            # of a range the head alone, if it has come: the body is then received at once, into memory of its own
            end = seen.find(b"\r\n\r\n") + 4 if seen.startswith(_RANGE) else 0
            data = await self.receive(end if end > 3 else _FIRST)
        elif not data:
            data = await self.receive(_FIRST)
        if not data:
            return b""
        seen_bytes = 0
        while not (length := messages.end_of_head(data, seen_bytes)):
            seen_bytes = len(data)
            more = await self.receive(_FIRST)
            if not more:
                raise Transient("the connection was closed before an answer came")
            data += more
        self.ahead = data[length:]
        return data[:length]

    async def read(self, size: int) -> Buffer:
        """Receive exactly `size` bytes. Raises Cut."""
        begun, self.ahead = self.ahead[:size], self.ahead[size:]
        got: int = len(begun)
        if got == size:
            return begun
        low = 1
        try:
            if not got and not self.tls and size <= _LOW:  # memory that is not filled with zeros first
                if _available(self.sock) < size:
                    low = self._wait_for(size, low)
                    await trio.lowlevel.wait_readable(self.sock)
                begun = await self.receive(size)
                got = len(begun)
                if got == size:
                    return begun
                if not got:
                    raise Cut("the answer was cut off", b"")
            data = bytearray(size)
            data[:got] = begun
            with memoryview(data) as view:
                round_ = 0
                while got < size:
                    try:
                        with view[got:] as rest:
                            count = self.sock.recv_into(rest)
                    except WAITS:
                        low = self._wait_for(size - got, low)
                        await trio.lowlevel.wait_readable(self.sock)
                        continue
                    except OSError as exc:
                        raise Cut(f"the answer was cut off: {exc.strerror or exc}", bytes(view[:got])) from exc
                    if not count:
                        raise Cut("the answer was cut off", bytes(view[:got]))
                    got += count
                    round_ += count
                    if round_ >= _LOW:  # a server that is faster than we are may not keep the loop from others
                        round_ = 0
                        await trio.lowlevel.checkpoint()
            return data
        finally:
            if low != 1:
                self._set_low(1)

    def _wait_for(self, wanted: int, low: int) -> int:
        """Have the kernel gather `wanted` bytes, or _LOW, before the socket is readable; `low` is so by now."""
        if self.tls:  # what is encrypted is longer, but OpenSSL may hold the beginning of a record
            wanted -= _RECORD
        wanted = max(1, min(_LOW, wanted))
        if wanted != low:
            self._set_low(wanted)
        return wanted

    def _set_low(self, low: int) -> None:
        with contextlib.suppress(OSError):  # reset by the server
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, low)

    def is_quiet(self) -> bool:
        """Return whether the server has neither sent anything nor closed the connection, so that it can be used."""
        beneath = self.sock.outer if isinstance(self.sock, TlsInTls) else self.sock
        try:
            socket.socket.recv(beneath, 1, socket.MSG_PEEK)  # also beneath TLS
        except BlockingIOError:
            return True
        except OSError:
            return False
        if not self.tls:
            return False
        try:
            self.sock.recv(1)  # there may be but a ticket for the next session
        except ssl.SSLWantReadError:
            return True
        except (OSError, ValueError):
            return False
        return False


class Body:
    """The body of an answer; its bytes come in order, once.

    `left` is the number of bytes that follow, CHUNKED or TO_THE_END; 0 at its end.
    """

    __slots__ = ("_chunk", "_connection", "left")

    def __init__(self, connection: Connection, length: int) -> None:
        self._connection, self.left = connection, length
        self._chunk = 0  # bytes left of the present chunk

    async def read(self, most: int) -> Buffer:
        """Return the next `most` bytes; fewer only at the end of the body. Raises Cut."""
        if self.left >= 0:
            size = min(most, self.left)
            data = await self._connection.read(size)
            self.left -= size
            return data
        pieces = bytearray()
        try:
            while len(pieces) < most and (piece := await self.piece(most - len(pieces))):
                pieces += piece
        except Cut as exc:
            exc.data = bytes(pieces) + exc.data
            raise
        return pieces

    async def piece(self, most: int = _LOW) -> bytes:
        """Return what comes next, up to `most` bytes; b"" at the end of the body. Raises Cut, BadAnswer."""
        if self.left == CHUNKED:
            most = min(most, self._chunk or await self._next_chunk())
        elif self.left >= 0:
            most = min(most, self.left)
        if not most:
            return b""
        data = await self._some(most)
        if self.left == TO_THE_END:
            self.left = TO_THE_END if data else 0
        elif not data:
            raise Cut("the answer was cut off", b"")
        elif self.left == CHUNKED:
            self._chunk -= len(data)
            if not self._chunk and await self._line():
                raise BadAnswer("a chunk is longer than it states")
        else:
            self.left -= len(data)
        return data

    async def drain(self) -> bool:
        """Take the rest if that is short and has come already; return whether the body is at its end."""
        had = 0
        with trio.CancelScope(deadline=-math.inf):  # nothing is waited for
            while self.left and self.left <= _DRAIN and self.left != TO_THE_END and had <= _DRAIN:
                had += len(await self.piece(_DRAIN))
        return self.left == 0

    async def _next_chunk(self) -> int:
        self._chunk = messages.chunk_length(await self._line())
        if not self._chunk:
            had = 0
            while line := await self._line():  # trailers
                had += len(line)
                if had > LINE_MAX:
                    raise BadAnswer("its trailers are too long")
            self.left = 0
        return self._chunk

    async def _line(self) -> bytes:
        """Receive a line; return it without its end."""
        connection = self._connection
        while (end := connection.ahead.find(b"\r\n")) < 0:
            if len(connection.ahead) > LINE_MAX:
                raise BadAnswer("a line within its body is too long")
            more = await connection.receive(_FIRST)
            if not more:
                raise Cut("the answer was cut off", b"")
            connection.ahead += more
        line, connection.ahead = connection.ahead[:end], connection.ahead[end + 2 :]
        return line

    async def _some(self, most: int) -> bytes:
        connection = self._connection
        if connection.ahead:
            data, connection.ahead = connection.ahead[:most], connection.ahead[most:]
            return data
        try:
            return await connection.receive(most)
        except OSError as exc:
            raise Cut(f"the answer was cut off: {exc.strerror or exc}", b"") from exc


class Server:
    """A server as one kind of requests reaches it: its addresses, and connections that wait for the next request.

    `guarded`: it may have public addresses only. `name` is a host name or an address, without brackets.
    """

    def __init__(self, scheme: str, name: str, port: int, guarded: bool, tls: Tls, proxy: Proxy | None) -> None:
        self.scheme, self.name, self.port, self.guarded = scheme, name, port, guarded
        self.tls, self.proxy = tls, proxy
        # whether a proxy takes requests for it, instead of connecting to it
        self.forwarded = proxy is not None and not proxy.is_socks and scheme == "http"
        self._proxys = Tls(tls.authorities)  # verified even where the server is not: it hears a password of its own
        self.host = f"[{name.partition('%')[0]}]" if ":" in name else name
        if port != (443 if scheme == "https" else 80):
            self.host += f":{port}"
        self.idle: list[tuple[Connection, float]] = []  # since when, the oldest first
        self.forgotten = False  # by the pool
        self._lookup = trio.Lock()
        self._addresses: list[tuple[socket.AddressFamily, Any]] = []
        self._looked_up = -math.inf
        self._session: ssl.SSLSession | None = None

    async def connect(self, where: str, patience: float) -> Connection:
        """Make a new connection. Raises AccessDenied, ReadError, Transient, OSError; `where` is for messages."""
        connection = Connection(await self._socket(where, patience), False)
        try:
            if self.proxy is not None:
                connection = await self._through(self.proxy, connection, where, patience)
            if self.scheme == "https":
                try:
                    secure = await encrypted(connection.sock, self.tls, self.name, where, self._session)
                except ssl.SSLError as exc:
                    raise tls_error(exc, where) from exc
                connection = Connection(secure, True)
        except BaseException:
            connection.close()
            raise
        return connection

    async def _through(self, proxy: Proxy, connection: Connection, where: str, patience: float) -> Connection:
        """Return a connection to the server by one to its proxy, or to the proxy itself if that takes requests."""
        patience *= 0.9  # before the whole request is out of time, which would not tell of the proxy
        try:
            with trio.fail_after(patience):
                if proxy.scheme == "https":
                    connection = Connection(await encrypted(connection.sock, self._proxys, proxy.host, where), True)
                if not self.forwarded:
                    await tunnel(connection, proxy, self.name, self.port, where, self.guarded)
        except trio.TooSlowError as exc:
            raise Transient(f"{proxy}: no answer within {patience:g} s") from exc
        except ssl.SSLCertVerificationError as exc:
            raise ReadError(where, f"{proxy}: {certificate_refused(exc.verify_message)}") from exc
        except OSError as exc:
            reason = tls_reason(exc, "it") if isinstance(exc, ssl.SSLError) else exc.strerror or exc
            raise Transient(f"{proxy}: {reason}") from exc
        return connection

    async def get_ready(self, where: str) -> None:
        """Load the certificates that the first connection needs."""
        if self.scheme == "https":
            await context_of(self.tls, where)

    def close(self, connection: Connection) -> None:
        """Close a connection that has brought an answer; the next one resumes its TLS session."""
        if self.scheme == "https":
            assert isinstance(connection.sock, ssl.SSLSocket | TlsInTls)
            self._session = connection.sock.session
        connection.close()

    async def _socket(self, where: str, patience: float) -> socket.socket:
        """Connect to the first address that answers; later ones are tried beside it."""
        name, port = (self.proxy.host, self.proxy.port) if self.proxy else (self.name, self.port)
        async with self._lookup:
            if time.monotonic() - self._looked_up > _ADDRESSES:
                found = await trio.socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)
                self._addresses = [(family, address) for family, _, _, _, address in found]
                self._looked_up = time.monotonic()
        error: Exception = OSError(errno.EHOSTUNREACH, "no address")
        admitted = []
        for family, address in self._addresses:
            public = is_public(str(address[0]))
            _met.add(public)
            # Which address a proxy connects to is the proxy's business: it is one that the user named.
            if public or not self.guarded or self.proxy:
                admitted.append((family, address))
            else:
                error = AccessDenied(where, not_public(str(address[0])))
        sock, failed = await _first_connection(admitted, min(_NEXT, patience / 4))
        if sock is not None:
            at = sock.getpeername()
            for number, (_, address) in enumerate(self._addresses):
                if address[0] == at[0]:  # it goes first from now on
                    self._addresses.insert(0, self._addresses.pop(number))
                    break
            return sock
        self._looked_up = -math.inf
        error = failed or error
        if self.proxy is not None and isinstance(error, OSError):
            raise Transient(f"{self.proxy}: {error.strerror or error}") from error
        raise error


class Pool:
    """The connections of one client that wait for their next request."""

    def __init__(self) -> None:
        self._servers: set[Server] = set()  # those that have idle connections
        self._kept = 0  # idle connections
        self._sweeping: trio.CancelScope | None = None  # of the task that closes them

    async def take(self, server: Server, where: str, patience: float) -> tuple[Connection, bool]:
        """Return (a connection, whether it was used before)."""
        while server.idle:
            connection, since = server.idle.pop()
            self._kept -= 1
            if time.monotonic() - since < _IDLE and connection.is_quiet():
                return connection, True
            server.close(connection)
        return await server.connect(where, patience), False

    def give(self, server: Server, connection: Connection) -> None:
        """Keep a connection whose answer has been received to its end for the next request."""
        if self._kept >= _KEPT or connection.ahead or server.forgotten:
            server.close(connection)
            return
        server.idle.append((connection, time.monotonic()))
        self._servers.add(server)
        self._kept += 1
        if self._sweeping is None:
            self._sweeping = trio.CancelScope()
            in_background(self._sweep, self._sweeping)

    def forget(self, server: Server) -> None:
        """Close the idle connections of a server, and keep none from now on."""
        server.forgotten = True
        self._drop(server, math.inf)

    def close(self) -> None:
        """Close idle connections."""
        self.close_idle(math.inf)
        if self._sweeping is not None:
            self._sweeping.cancel()

    def close_idle(self, before: float) -> None:
        """Close the connections that have been idle since `before`, on the monotonic clock."""
        for server in list(self._servers):
            self._drop(server, before)

    async def _sweep(self, scope: trio.CancelScope) -> None:
        """Close connections that nobody takes, until there are none."""
        with scope:
            while self._kept:
                await trio.sleep(_IDLE)
                self.close_idle(time.monotonic() - _IDLE)
        self._sweeping = None

    def _drop(self, server: Server, before: float) -> None:
        while server.idle and server.idle[0][1] <= before:
            connection, _ = server.idle.pop(0)
            self._kept -= 1
            server.close(connection)
        if not server.idle:
            self._servers.discard(server)


# -- sockets


async def _first_connection(
    addresses: list[tuple[socket.AddressFamily, Any]], delay: float
) -> tuple[socket.socket | None, Exception | None]:
    """Return (the first socket that is connected, or None; why one is not); one is begun every `delay` seconds."""
    found: list[socket.socket] = []
    failures: list[Exception] = []

    async def one(family: socket.AddressFamily, address: Any, failed: trio.Event) -> None:
        try:
            sock = await _connection(family, address)
        except OSError as exc:
            failures.append(exc)
            failed.set()
            return
        if found:
            sock.close()
        else:
            found.append(sock)
        nursery.cancel_scope.cancel()

    if len(addresses) == 1:
        try:
            return await _connection(*addresses[0]), None
        except OSError as exc:
            return None, exc
    try:
        async with trio.open_nursery() as nursery:
            for family, address in addresses:
                failed = trio.Event()
                nursery.start_soon(one, family, address, failed)
                with trio.move_on_after(delay):
                    await failed.wait()
    except BaseException:
        for sock in found:
            sock.close()
        raise
    return (found[0] if found else None), (failures[0] if failures else None)


async def _connection(family: socket.AddressFamily, address: Any) -> socket.socket:
    """Return a connected socket that never blocks.

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


def _available(sock: socket.socket | TlsInTls) -> int:
    """Return how many bytes can be received now."""
    found: int = struct.unpack("i", fcntl.ioctl(sock, termios.FIONREAD, bytes(4)))[0]
    return found

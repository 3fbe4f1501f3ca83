"""A connection to a web server, on trio: sends requests, and receives the heads and bodies of answers.

Sockets are non-blocking, and a TLS socket decrypts directly into the memory that the reader gets, without another
task, thread or copy.
"""

from __future__ import annotations

import contextlib
import math
import socket
import ssl
from collections.abc import Callable
from typing import TYPE_CHECKING

import trio

from zarrfs.errors import ReadError
from zarrfs.net import messages
from zarrfs.net.messages import CHUNKED, LINE_MAX, TO_THE_END, BadAnswer, Head
from zarrfs.net.responses import Transient
from zarrfs.system.buffers import Buffer, unfilled

if TYPE_CHECKING:
    from zarrfs.net.connections import Server
    from zarrfs.net.web import Hop

_WAITS = (BlockingIOError, ssl.SSLWantReadError)  # raised if there is nothing to receive yet
_FIRST = 16 << 10  # bytes that are received in one call until the body begins
_LOW = 1 << 20  # bytes of a long body that the kernel gathers before it wakes the reader
_RECORD = 17 << 10  # bytes of the longest TLS record, of which OpenSSL may hold a part already
_DRAIN = 16 << 10  # bytes: a shorter rest of an unwanted body is received, so that the connection can be used again
_STEPS = 64  # calls of recv(2) before a connection yields to other tasks


class Cut(Transient):
    """A body that ended too early."""

    def __init__(self, reason: str = "") -> None:
        super().__init__(f"the answer was cut off: {reason}" if reason else "the answer was cut off", begun=True)


class Connection:
    """A connection, for one request after the other."""

    __slots__ = ("_low", "_steps", "ahead", "idle_since", "server", "sock", "tls")

    def __init__(self, sock: socket.socket, server: Server) -> None:
        self.sock, self.server, self.tls = sock, server, False
        self.idle_since = 0.0  # while it is in a Pool
        self.ahead = b""  # bytes that were received, but not returned yet
        self._low = 1  # bytes that the kernel gathers before the socket is readable: SO_RCVLOWAT
        self._steps = 0  # since the connection last waited

    def close(self) -> None:
        """Close the socket immediately. TLS sends no close_notify, because that may have to wait for the server."""
        self.sock.close()

    async def encrypt(self, context: ssl.SSLContext, name: str) -> None:
        """Speak TLS with the server `name` from now on. Raise OSError, which includes ssl.SSLError."""
        self.sock = secure = context.wrap_socket(
            self.sock, server_hostname=name, do_handshake_on_connect=False, suppress_ragged_eofs=False
        )
        self.tls = True
        while True:
            try:
                secure.do_handshake()
            except _WAITS:
                await self._wait(1)
            except ssl.SSLWantWriteError:
                await trio.lowlevel.wait_writable(secure)
            else:
                return

    async def send(self, data: bytes) -> None:
        """Send all of `data`."""
        while data:
            try:
                data = data[self.sock.send(data) :]
            except (BlockingIOError, ssl.SSLWantWriteError):
                await trio.lowlevel.wait_writable(self.sock)

    async def receive(self, most: int) -> bytes:
        """Wait for bytes and return them, up to `most`; b"" at the end."""
        self._steps += 1
        if self._steps >= _STEPS:
            await self._let_others()
        if self.ahead:
            data, self.ahead = self.ahead[:most], self.ahead[most:]
            return data
        while True:
            try:
                return self.sock.recv(most)
            except _WAITS:
                await self._wait(1)

    async def read(self, size: int) -> bytearray:
        """Receive exactly `size` bytes. Raise Cut, OSError."""
        data, got = unfilled(size), min(size, len(self.ahead))
        data[:got], self.ahead = self.ahead[:got], self.ahead[got:]
        with memoryview(data) as view:
            while got < size:
                self._steps += 1
                if self._steps >= _STEPS:
                    await self._let_others()
                try:
                    count = self.sock.recv_into(view[got:])
                except _WAITS:
                    await self._wait(size - got)
                    continue
                if not count:
                    raise Cut
                got += count
        return data

    async def _let_others(self) -> None:
        """Yield to other tasks after many steps without a wait, so that a fast server does not hold them up."""
        self._steps = 0
        await trio.lowlevel.checkpoint()

    async def _wait(self, wanted: int) -> None:
        """Wait until the kernel has gathered `wanted` bytes, at most _LOW, or the connection has ended."""
        if self.tls:  # encrypted data is longer, but OpenSSL may hold the beginning of a record already
            wanted -= _RECORD
        low = max(1, min(_LOW, wanted))
        if low != self._low:
            self._low = low
            with contextlib.suppress(OSError):  # the server has reset the connection
                self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, low)
        self._steps = 0
        await trio.lowlevel.wait_readable(self.sock)

    async def head(self) -> Head | None:
        """Receive the head of an answer; return None if the connection ends before any byte of it.

        Raise BadAnswer, Transient, OSError. Interim answers (RFC 9110, 15.2) are skipped.
        """
        while True:
            if not self.ahead:
                await self._wait(1)
            data, seen = await self.receive(_FIRST), 0
            if not data:
                return None
            while not (length := messages.end_of_head(data, seen)):
                seen = len(data)
                more = await self.receive(_FIRST)
                if not more:
                    raise Transient("the connection was closed before an answer came")
                data += more
            self.ahead = data[length:] + self.ahead
            head = messages.parse_head(data[:length])
            if head.status >= 200:
                return head
            if head.status == 101:
                raise BadAnswer("it switches protocols")

    def is_quiet(self) -> bool:
        """Return whether the server has neither sent data nor closed the connection, so that it can be used again."""
        if isinstance(self.sock, ssl.SSLSocket) and self.sock.pending():  # decrypted, but not received
            return False
        try:
            socket.socket.recv(self.sock, 1, socket.MSG_PEEK)  # for TLS, peek at the encrypted bytes
            if self.tls:
                self.sock.recv(1)  # the bytes may be just a TLS session ticket
        except _WAITS:
            return True
        except (OSError, ValueError):
            pass
        return False


class Response:
    """An answer, whose body can be read once, in order. The caller ends it by `async with`, release() or close().

    `left`: the number of bytes of the body that follow, CHUNKED or TO_THE_END; 0 at its end. `hops`: the places that
    the request went to. `keep` gets the connection if another request can be sent on it.
    """

    __slots__ = ("_chunk", "_connection", "_keep", "headers", "hops", "left", "persistent", "reason", "status")

    def __init__(
        self, connection: Connection, method: str, head: Head, hops: list[Hop], keep: Callable[[Connection], None]
    ) -> None:
        self.status, self.reason, self.headers, self.persistent = head
        self.left, self._chunk = messages.body_length(head, method), 0  # bytes left of the present chunk
        self.hops, self._connection, self._keep = hops, connection, keep

    async def __aenter__(self) -> Response:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        if kind is None or isinstance(error, ReadError) or (isinstance(error, Transient) and not error.begun):
            await self.release()
        else:
            self.close()
        if isinstance(error, OSError):
            raise Cut(error.strerror or str(error)) from error

    async def release(self) -> None:
        """Keep the connection for the next request if the rest of the body is short; else close it."""
        kept = False
        try:
            kept = self.persistent and (self.left == 0 or await self._drain())
        except (OSError, Transient):
            pass
        finally:
            (self._keep if kept else Connection.close)(self._connection)

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    async def read(self, most: int) -> Buffer:
        """Return the next `most` bytes; fewer only at the end of the body. Raise Cut, BadAnswer, OSError."""
        if self.left >= 0:
            data = await self._connection.read(min(most, self.left))
            self.left -= len(data)
            return data
        pieces = bytearray()
        while len(pieces) < most and (piece := await self.piece(most - len(pieces))):
            pieces += piece
        return pieces

    async def piece(self, most: int = _LOW) -> bytes:
        """Wait for bytes and return them, up to `most`; b"" at the end. Raise Cut, BadAnswer, OSError."""
        if self.left == CHUNKED:
            most = min(most, self._chunk or await self._next_chunk())
        elif self.left >= 0:
            most = min(most, self.left)
        if not most:
            return b""
        data = await self._connection.receive(most)
        if self.left == TO_THE_END:
            self.left = TO_THE_END if data else 0
        elif not data:
            raise Cut
        elif self.left == CHUNKED:
            self._chunk -= len(data)
            if not self._chunk and await self._line():
                raise BadAnswer("a chunk is longer than it states")
        else:
            self.left -= len(data)
        return data

    async def _drain(self) -> bool:
        """Receive the rest if it is short and has already arrived; return whether the body is at its end."""
        had = 0
        with trio.CancelScope(deadline=-math.inf):  # do not wait for anything
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
        """Receive a line; return it without its line end."""
        data = b""
        while (end := data.find(b"\r\n")) < 0:
            if len(data) > LINE_MAX:
                raise BadAnswer("a line within its body is too long")
            more = await self._connection.receive(_FIRST)
            if not more:
                raise Cut
            data += more
        self._connection.ahead = data[end + 2 :] + self._connection.ahead
        return data[:end]

"""A connection to a web server, on trio: sends requests, and receives the heads and bodies of answers.

Sockets are non-blocking, and a TLS socket decrypts directly into the memory that the reader gets, without another
task, thread or copy.
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import socket
import ssl
import struct
import termios

import trio

from zarrfs.net import messages
from zarrfs.net.messages import CHUNKED, LINE_MAX, TO_THE_END, BadAnswer, Head
from zarrfs.net.responses import Transient
from zarrfs.net.tls import WAITS
from zarrfs.system.buffers import Buffer, unfilled

_FIRST = 16 << 10  # bytes that are received in one call until the body begins
_LOW = 1 << 20  # bytes of a long body that the kernel gathers before it wakes the reader
_RECORD = 17 << 10  # bytes of the longest TLS record, of which OpenSSL may hold a part already
_DRAIN = 16 << 10  # bytes: a shorter rest of an unwanted body is received, so that the connection can be used again
_RANGE = b"HTTP/1.1 206 "
_STEPS = 64  # steps before a connection yields to other tasks
_RECEIVE = 8  # steps that one receive() counts as


class Cut(Transient):
    """A body that ended too early; `data` has the bytes that were received before."""

    def __init__(self, reason: str, data: Buffer) -> None:
        super().__init__(reason, begun=True)
        self.data = data


class Connection:
    """A connection, for one request after the other."""

    __slots__ = ("ahead", "sock", "steps", "tls")

    def __init__(self, sock: socket.socket, tls: bool) -> None:
        self.sock, self.tls = sock, tls
        self.ahead = b""  # bytes that were received after the head
        self.steps = 0  # since the connection last waited

    def close(self) -> None:
        """Close the socket immediately. TLS sends no close_notify, because that may have to wait for the server."""
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
        """Wait for bytes and return them, up to `most`; b"" at the end. `flags` are for connections without TLS."""
        await self.step(_RECEIVE)
        while True:
            try:
                return self.sock.recv(most, flags)
            except WAITS:
                self.steps = 0
                await trio.lowlevel.wait_readable(self.sock)
            except ssl.SSLWantWriteError:
                await trio.lowlevel.wait_writable(self.sock)

    async def step(self, weight: int = 1) -> None:
        """Yield to other tasks after many steps without a wait, so that a fast server does not hold them up."""
        self.steps += weight
        if self.steps >= _STEPS:
            self.steps = 0
            await trio.lowlevel.checkpoint()

    async def receive_of_body(self, most: int) -> bytes:
        """Wait for bytes of a body and return them, as receive() does. Raise Cut if the connection fails."""
        try:
            return await self.receive(most)
        except OSError as exc:
            raise Cut(f"the answer was cut off: {exc.strerror or exc}", b"") from exc

    async def head(self) -> Head | None:
        """Receive the head of an answer; return None if the connection ends before any byte of it.

        Raise BadAnswer, Transient, OSError. Interim answers (RFC 9110, 15.2) are skipped.
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
            await self.step()

    async def _head(self) -> bytes:
        data, self.ahead = self.ahead, b""
        if not data and not self.tls:
            self.steps = 0
            await trio.lowlevel.wait_readable(self.sock)
            seen = await self.receive(_FIRST, socket.MSG_PEEK)
            # for a range, receive only the head if it is complete, and then the body into memory of its own
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
        """Receive exactly `size` bytes. Raise Cut."""
        begun, self.ahead = self.ahead[:size], self.ahead[size:]
        got: int = len(begun)
        if got == size:
            return begun
        low = 1
        try:
            if not got and not self.tls and size <= _LOW:  # recv() does not fill its memory with zeros first
                if _available(self.sock) < size:
                    low = self._wait_for(size, low)
                    await trio.lowlevel.wait_readable(self.sock)
                begun = await self.receive_of_body(size)
                got = len(begun)
                if got == size:
                    return begun
                if not got:
                    raise Cut("the answer was cut off", b"")
            data = unfilled(size)
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
                    if round_ >= _LOW:  # let other tasks run, even if the server sends faster than this receives
                        round_ = 0
                        await trio.lowlevel.checkpoint()
            return data
        finally:
            if low != 1:
                self._set_low(1)

    def _wait_for(self, wanted: int, low: int) -> int:
        """Make the kernel gather `wanted` bytes, at most _LOW, before the socket is readable; return their number.

        `low` is the present value of SO_RCVLOWAT.
        """
        if self.tls:  # encrypted data is longer, but OpenSSL may hold the beginning of a record already
            wanted -= _RECORD
        wanted = max(1, min(_LOW, wanted))
        if wanted != low:
            self._set_low(wanted)
        return wanted

    def _set_low(self, low: int) -> None:
        with contextlib.suppress(OSError):  # the server has reset the connection
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, low)

    def is_quiet(self) -> bool:
        """Return whether the server has neither sent data nor closed the connection, so that it can be used again."""
        try:
            socket.socket.recv(self.sock, 1, socket.MSG_PEEK)  # for TLS, peek at the encrypted bytes
        except BlockingIOError:
            return True
        except OSError:
            return False
        if not self.tls:
            return False
        try:
            self.sock.recv(1)  # the bytes may be just a TLS session ticket
        except ssl.SSLWantReadError:
            return True
        except (OSError, ValueError):
            return False
        return False


class Body:
    """The body of an answer, whose bytes can be read once, in order.

    `left` is the number of bytes that follow, CHUNKED or TO_THE_END; 0 at the end of the body.
    """

    __slots__ = ("_chunk", "_connection", "left")

    def __init__(self, connection: Connection, length: int) -> None:
        self._connection, self.left = connection, length
        self._chunk = 0  # bytes left of the present chunk

    async def read(self, most: int) -> Buffer:
        """Return the next `most` bytes; fewer only at the end of the body. Raise Cut."""
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
        """Wait for bytes and return them, up to `most`; b"" at the end of the body. Raise Cut, BadAnswer."""
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
        """Receive the rest if it is short and has already arrived; return whether the body is at its end."""
        had = self._connection.steps = 0
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
        connection = self._connection
        await connection.step()
        while (end := connection.ahead.find(b"\r\n")) < 0:
            if len(connection.ahead) > LINE_MAX:
                raise BadAnswer("a line within its body is too long")
            more = await connection.receive_of_body(_FIRST)
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
        return await connection.receive_of_body(most)


def _available(sock: socket.socket) -> int:
    """Return how many bytes can be received now."""
    found: int = struct.unpack("i", fcntl.ioctl(sock, termios.FIONREAD, bytes(4)))[0]
    return found

"""A connection to a web server, on trio: sends requests, and receives bytes and the heads of answers.

Sockets are non-blocking, and a TLS socket decrypts directly into the memory that the reader gets, without another
task, thread or copy.
"""

from __future__ import annotations

import contextlib
import socket
import ssl

import trio

from zarrfs.net import messages
from zarrfs.net.messages import BadAnswer, Head
from zarrfs.net.responses import Transient
from zarrfs.system.buffers import unfilled

_WAITS = (BlockingIOError, ssl.SSLWantReadError)  # raised if there is nothing to receive yet
_FIRST = 16 << 10  # bytes that are received in one call until the body begins
_LOW = 1 << 20  # bytes of a long body that the kernel gathers before it wakes the reader
_RECORD = 17 << 10  # bytes of the longest TLS record, of which OpenSSL may hold a part already
_STEPS = 64  # calls of recv(2) before a connection yields to other tasks


class Cut(Transient):
    """A body that ended too early."""

    def __init__(self, reason: str = "") -> None:
        super().__init__(f"the answer was cut off: {reason}" if reason else "the answer was cut off", begun=True)


class Connection:
    """A connection, for one request after the other."""

    __slots__ = ("_low", "_steps", "ahead", "idle_since", "server", "sock", "tls")

    def __init__(self, sock: socket.socket, server: object) -> None:
        self.sock, self.tls = sock, False
        self.server = server  # which Pool compares
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

"""The response to a request: its head, and its body, which is read in order."""

from __future__ import annotations

import math
from collections.abc import Callable

import trio

from zarrfs.errors import ReadError
from zarrfs.net import messages
from zarrfs.net.connections import Hop
from zarrfs.net.messages import CHUNKED, LINE_MAX, TO_THE_END, BadAnswer, Head
from zarrfs.net.responses import Transient
from zarrfs.net.transport import Connection, Cut
from zarrfs.system.buffers import Buffer

_PIECE = 1 << 20  # bytes that piece() returns at most, unless its caller says how many
_LINE = 16 << 10  # bytes that are received in one call for a line within a chunked body
_DRAIN = 16 << 10  # bytes: a shorter rest of an unwanted body is received, so that the connection can be used again


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

    async def piece(self, most: int = _PIECE) -> bytes:
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
            more = await self._connection.receive(_LINE)
            if not more:
                raise Cut
            data += more
        self._connection.ahead = data[end + 2 :] + self._connection.ahead
        return data[:end]

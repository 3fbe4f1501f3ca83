"""Questions and answers between two processes of a mount, over a pair of sockets."""

from __future__ import annotations

import contextlib
import pickle
import socket
import struct
from collections.abc import Awaitable, Callable
from typing import Any

import pyfuse3
import trio

from zarrfs.errors import MountError, ZarrfsError, internal_error

_LENGTH = struct.Struct("<I")
Answers = Callable[..., Awaitable[Any]]  # called with the name of a question and its arguments


def announce(sock: socket.socket, what: str, *arguments: Any) -> None:
    """Send a question over a socket that has no Channel yet, without waiting for the answer."""
    data = pickle.dumps((0, what, arguments))
    sock.sendall(_LENGTH.pack(len(data)) + data)


class Channel:
    """One end of a connection. Both ends ask and answer any number of questions at a time.

    `answers` is called for each question of the other end.
    """

    def __init__(self, sock: socket.socket, answers: Answers) -> None:
        sock.setblocking(False)
        self._stream = trio.SocketStream(trio.socket.from_stdlib_socket(sock))
        self._answers = answers
        self._sending = trio.Lock()
        self._asked: dict[int, tuple[trio.Event, list[Any]]] = {}
        self._next = 0
        self.closed = False

    async def ask(self, what: str, *arguments: Any) -> Any:
        """Return the answer of the other process to a question.

        Raise FUSEError if its answer raised that; MountError if its answer raised another exception, or if it ends.
        """
        self._next += 1
        number, arrived, answer = self._next, trio.Event(), list[Any]()
        self._asked[number] = arrived, answer
        try:
            await self._send((number, what, arguments))
            await arrived.wait()
        finally:
            self._asked.pop(number, None)
        if not answer:
            raise MountError("another process of the mount has ended")
        value, failure = answer
        if isinstance(failure, int):
            raise pyfuse3.FUSEError(failure)
        if failure is not None:
            raise MountError(failure)
        return value

    def close(self) -> None:
        """Close the socket, which ends run()."""
        self._stream.socket.close()

    async def run(self) -> None:
        """Answer questions and receive answers until the other process ends."""
        try:
            async with trio.open_nursery() as nursery:
                while (message := await self._receive()) is not None:
                    number, what, rest = message
                    if what:
                        nursery.start_soon(self._answer, number, what, rest)
                    elif number in self._asked:
                        arrived, answer = self._asked[number]
                        answer[:] = rest
                        arrived.set()
                nursery.cancel_scope.cancel()
        finally:
            self.closed = True
            for arrived, _answer in self._asked.values():
                arrived.set()
            await trio.aclose_forcefully(self._stream)

    async def _answer(self, number: int, what: str, arguments: tuple[Any, ...]) -> None:
        value: Any = None
        failure: Any = None
        try:
            value = await self._answers(what, *arguments)
        except pyfuse3.FUSEError as exc:
            failure = exc.errno
        except ZarrfsError as exc:
            failure = str(exc)
        except Exception as exc:  # a failed question must not end the mount
            failure = internal_error(exc)
        with contextlib.suppress(MountError):  # the other process has ended
            await self._send((number, "", (value, failure)))

    async def _send(self, message: tuple[Any, ...]) -> None:
        data = pickle.dumps(message)
        try:
            async with self._sending:
                await self._stream.send_all(_LENGTH.pack(len(data)) + data)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            raise MountError("another process of the mount has ended") from None

    async def _receive(self) -> tuple[int, str, Any] | None:
        head = await self._exactly(_LENGTH.size)
        data = head and await self._exactly(_LENGTH.unpack(head)[0])
        return pickle.loads(data) if data else None

    async def _exactly(self, size: int) -> bytes:
        parts = bytearray()
        while len(parts) < size:
            try:
                part = await self._stream.receive_some(size - len(parts))
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                return b""
            if not part:
                return b""
            parts += part
        return bytes(parts)

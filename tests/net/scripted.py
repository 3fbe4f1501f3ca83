"""A server whose responses a test scripts byte by byte, in the same trio loop as its client."""

from __future__ import annotations

import re
import socket
import struct
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import trio
import trio.testing

from zarrfs.config.options import parse
from zarrfs.net.http import HttpSystem
from zarrfs.net.reach import Trust
from zarrfs.store.remotefiles import RemoteFiles

VALUE = bytes(range(256)) * 40


def asked(request: str) -> tuple[int, int]:
    """Return the byte range [start, stop) that a request asks for."""
    match = re.search(r"^range: bytes=(\d+)-(\d+)\r$", request, re.IGNORECASE | re.MULTILINE)
    assert match is not None, request
    return int(match[1]), int(match[2]) + 1


def head(status: str, *headers: str) -> bytes:
    """Return a response head: the status line and these header lines."""
    return "\r\n".join([f"HTTP/1.1 {status}", *headers, "", ""]).encode("latin-1")


def part(request: str, value: bytes = VALUE) -> tuple[list[str], bytes]:
    """Return (header lines, body) of the correct response to a range request."""
    start, stop = asked(request)
    body = value[start:stop]
    return [f"Content-Range: bytes {start}-{start + len(body) - 1}/{len(value)}", f"Content-Length: {len(body)}"], body


def right(request: str, value: bytes = VALUE) -> bytes:
    """Return the correct response to a range request."""
    headers, body = part(request, value)
    return head("206 Partial Content", *headers) + body


class Peer:
    """The server's end of one connection; `number` counts the connections from 0."""

    def __init__(self, server: Scripted, stream: trio.SocketStream, number: int) -> None:
        self.server, self.stream, self.number = server, stream, number

    async def heard(self) -> str | None:
        """Return the head of the next request, or None when the client has closed the connection."""
        data = b""
        while b"\r\n\r\n" not in data:
            more = await self.stream.receive_some()
            if not more:
                return None
            data += more
        self.server.requests.append(data.decode())
        return data.decode()

    async def send(self, *pieces: bytes) -> None:
        """Send `pieces`; after each of several, wait until all other tasks are blocked."""
        for piece in pieces:
            await self.stream.send_all(piece)
            if len(pieces) > 1:
                await trio.testing.wait_all_tasks_blocked()

    async def reset(self) -> None:
        """Reset the connection with RST, as a crashed server does."""
        self.stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        await self.stream.aclose()

    async def rest(self) -> None:
        """Discard input until the client closes the connection."""
        while await self.stream.receive_some():
            pass


class Scripted:
    """A server that runs `serve` for each connection; `ended` counts the connections that have ended."""

    def __init__(self, serve: Callable[[Peer], Awaitable[None]]) -> None:
        self._serve = serve
        self.requests: list[str] = []
        self.connections = self.ended = 0
        self.port = 0

    async def handle(self, stream: trio.SocketStream) -> None:
        """Serve one connection; the handler for trio.serve_listeners()."""
        peer = Peer(self, stream, self.connections)
        self.connections += 1
        try:
            async with stream:
                await self._serve(peer)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass
        finally:
            self.ended += 1

    async def until_ended(self, count: int) -> None:
        """Wait until `count` connections have ended."""
        with trio.fail_after(20):
            while self.ended < count:  # noqa: ASYNC110
                await trio.sleep(0.005)


Check = Callable[[HttpSystem, Scripted], Awaitable[Any]]


def run(
    serve: Callable[[Peer], Awaitable[None]], check: Check, *options: str, origin: str = "", host: str = "127.0.0.1",
    clock: trio.abc.Clock | None = None,
) -> Any:  # fmt: skip
    """Run `check` on an HttpSystem and a server at `host`; return its result.

    `origin` is the URL of the reference set whose targets are read; {port} in it stands for the server's port.
    """

    async def main() -> Any:
        server = Scripted(serve)
        listeners = await trio.open_tcp_listeners(0, host=host)
        server.port = listeners[0].socket.getsockname()[1]
        given = parse(["retries=0", "read_timeout=50", *options]).options
        files = RemoteFiles(given, trust=Trust(given, origin.format(port=server.port)))
        async with trio.open_nursery() as nursery:
            await nursery.start(trio.serve_listeners, server.handle, listeners)
            try:
                web, _ = await files.find(f"http://127.0.0.1:{server.port}/v")
                assert isinstance(web, HttpSystem)
                with trio.fail_after(60):
                    return await check(web, server)
            finally:
                await files.aclose()
                nursery.cancel_scope.cancel()

    return trio.run(main, clock=clock)


async def get(web: HttpSystem, server: Scripted, start: int = 10, stop: int = 110, path: str = "/v") -> bytes:
    """Fetch one range."""
    return bytes((await web.fetch(f"http://127.0.0.1:{server.port}{path}", start, stop)).data)


async def well(peer: Peer) -> None:
    """Answer every request correctly."""
    while (request := await peer.heard()) is not None:
        await peer.send(right(request))


def cut(data: bytes, sizes: Iterable[int]) -> list[bytes]:
    """Split `data` into pieces of these sizes and a last piece with the rest; drop empty pieces."""
    pieces, at = [], 0
    for size in sizes:
        pieces.append(data[at : at + size])
        at += size
    return [piece for piece in [*pieces, data[at:]] if piece]

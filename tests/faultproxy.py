"""A proxy in front of a web server that spoils some of the responses, as networks and servers do.

It runs on an asyncio loop in its own thread. A seeded generator decides which responses are spoilt, and how: with the
same seed and faults, the n-th GET is spoilt in the same way.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import random
import re
import socket
import threading
from collections.abc import Coroutine, Iterator
from typing import Any, NamedTuple, TypeVar
from urllib.parse import urlsplit

import pytest

from tests.servers import free_port

T = TypeVar("T")

FAULTS = (
    "reset",  # the connection is reset instead of a response
    "reset late",  # the connection is reset in the middle of the body
    "stall",  # headers and half of the body, then nothing until the client disconnects
    "503",
    "429",
    "truncate",  # half of the body, then the end of the connection
    "short",  # half of the body, with the Content-Length of that half
    "long",  # seven bytes more than were requested
    "elsewhere",  # a 206 with another range, and with the Content-Range of that other range
    "drip",  # the right bytes, in small pieces with pauses
    "changed",  # the right bytes with another ETag
)
_HEAD_MAX = 64 << 10  # bytes
_PIECE = 64 << 10  # bytes
_SHIFT = 7  # bytes


class _Answer(NamedTuple):
    """A response of the server: its status line, its headers with names in lower case, its body."""

    status: str
    headers: dict[str, str]
    body: bytes


class FaultProxy:
    """A proxy at `url` for the server at `upstream`; each kind of fault spoils its share of the responses to GET.

    `faults` is {a word of FAULTS, or "late" (2 s): probability} and may be changed at any time. `counts` counts each
    fault and the requests "GET" and "HEAD"; `paths` counts GETs by path. If `absent` is set, it replaces the server's
    status 404. Between hold() and release() every GET waits.
    """

    def __init__(self, upstream: str, seed: int = 0) -> None:
        self.faults: dict[str, float] = {}
        self.absent: int | None = None
        self.counts: collections.Counter[str] = collections.Counter()
        self.paths: collections.Counter[str] = collections.Counter()
        self.held = threading.Event()  # set once a GET waits for release()
        parts = urlsplit(upstream)
        assert parts.hostname is not None
        assert parts.port is not None
        self._upstream = parts.hostname, parts.port
        self._random = random.Random(seed)
        self._free = asyncio.Event()
        self._free.set()
        self._server: asyncio.Server | None = None
        self._clients: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.start()

    # -- for tests

    def start(self) -> None:
        """Listen, always on the same port."""
        self._do(self._start())

    def stop(self) -> None:
        """Stop listening and reset all connections, both idle ones and those in the middle of a response."""
        self._do(self._stop())

    def close(self) -> None:
        """Stop for good, and end the thread."""
        self.stop()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def hold(self) -> None:
        """Make GETs from now on wait; `held` is set once a GET waits."""
        self.held.clear()
        self._loop.call_soon_threadsafe(self._free.clear)

    def release(self) -> None:
        """Answer the GETs that wait."""
        self._loop.call_soon_threadsafe(self._free.set)

    def connections(self) -> int:
        """Return the number of open client connections."""
        return len(self._clients)

    # -- the loop

    def _do(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(30)

    async def _start(self) -> None:
        self._server = await asyncio.start_server(
            self._client, "127.0.0.1", self.port, reuse_address=True, backlog=256, limit=_HEAD_MAX
        )

    async def _stop(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
        clients = list(self._clients)
        for task in clients:
            task.cancel()
        await asyncio.gather(*clients, return_exceptions=True)

    async def _client(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve a client's connection, with its own connection to the server."""
        task = asyncio.current_task()
        assert task is not None
        self._clients.add(task)
        server = _Upstream(*self._upstream)
        try:
            while await self._one(reader, writer, server):
                pass
        except (OSError, EOFError, asyncio.CancelledError):
            _reset(writer)
        finally:
            self._clients.discard(task)
            server.close()
            writer.close()

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, server: _Upstream) -> bool:
        """Answer one request; return whether the connection can be used for another."""
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        method, path, _ = head.split(" ", 2)
        self.counts[method] += 1
        fault = None
        if method == "GET":
            self.paths[path] += 1
            fault = self._draw()
            if not self._free.is_set():
                self.held.set()
                await self._free.wait()
        if fault is not None:
            self.counts[fault] += 1
        if fault == "reset":
            raise ConnectionResetError
        if fault in ("503", "429"):
            return await _send(reader, writer, _Answer(f"HTTP/1.1 {fault} Busy", {"retry-after": "0"}, b"no\n"))
        answer = await server.ask(_shifted(head) if fault == "elsewhere" else head)
        if self.absent is not None and answer.status.split()[1] == "404":
            answer = answer._replace(status=f"HTTP/1.1 {self.absent} Absent")
        if method == "HEAD":
            writer.write(_head(answer.status, answer.headers))
            await writer.drain()
            return True
        return await _send(reader, writer, answer, fault)

    def _draw(self) -> str | None:
        point = self._random.random()
        for fault, share in self.faults.items():
            point -= share
            if point < 0:
                return fault
        return None


class _Upstream:
    """A connection to the server, opened at the first request."""

    def __init__(self, host: str, port: int) -> None:
        self._address = host, port
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(self, head: str) -> _Answer:
        """Send a request without a body; return the response."""
        if self._streams is None:
            self._streams = await asyncio.open_connection(*self._address, limit=_HEAD_MAX)
        reader, writer = self._streams
        writer.write(head.encode("latin-1"))
        lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:-2])}
        body = b""
        if not head.startswith("HEAD ") and headers.get("transfer-encoding") == "chunked":
            body = await _chunks(reader)
            del headers["transfer-encoding"]
        elif not head.startswith("HEAD "):
            body = await reader.readexactly(int(headers.get("content-length", "0")))
        if headers.pop("connection", "") == "close":
            self.close()
            self._streams = None
        return _Answer(lines[0], headers, body)

    def close(self) -> None:
        if self._streams is not None:
            self._streams[1].close()


async def _chunks(reader: asyncio.StreamReader) -> bytes:
    """Read a body in chunks (RFC 9112, 7.1), as nginx sends listings."""
    body = b""
    while size := int((await reader.readuntil(b"\r\n")).split(b";")[0], 16):
        body += (await reader.readexactly(size + 2))[:-2]
    await reader.readuntil(b"\r\n")
    return body


def _reset(writer: asyncio.StreamWriter) -> None:
    """Close a connection with RST, not with FIN."""
    connection = writer.get_extra_info("socket")
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    writer.transport.abort()


def _shifted(head: str) -> str:
    """Return the request with its range shifted."""

    def further(match: re.Match[str]) -> str:
        return f"bytes={int(match[1]) + _SHIFT}-{int(match[2]) + _SHIFT}"

    return re.sub(r"bytes=(\d+)-(\d+)", further, head)


def _head(status: str, headers: dict[str, str]) -> bytes:
    return "\r\n".join([status, *(f"{name}: {value}" for name, value in headers.items()), "", ""]).encode("latin-1")


async def _send(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, answer: _Answer, fault: str | None = None
) -> bool:
    """Send a response, spoilt by `fault`; return whether the connection can be used for another request."""
    body, half = answer.body, answer.body[: len(answer.body) // 2]
    headers = {**answer.headers, "etag": '"changed"'} if fault == "changed" else answer.headers
    body = {"short": half, "long": body + bytes(_SHIFT)}.get(fault or "", body)
    if fault == "late":
        await asyncio.sleep(2)
    writer.write(_head(answer.status, {**headers, "content-length": str(len(body))}))
    if fault in ("reset late", "stall", "truncate"):
        body = half
    size = max(1, -(-len(body) // 8)) if fault == "drip" else max(1, len(body))
    for at in range(0, len(body), size):
        if fault == "drip":
            await asyncio.sleep(0.05)
        writer.write(body[at : at + size])
        await writer.drain()
    await writer.drain()
    if fault == "reset late":
        await asyncio.sleep(0.01)  # the client sees the first half
        raise ConnectionResetError
    if fault == "stall":
        await reader.read()  # until the client closes
    return fault not in ("stall", "truncate")


@contextlib.contextmanager
def proxied(upstream: str, seed: int = 0) -> Iterator[FaultProxy]:
    """Run a proxy in front of `upstream`."""
    proxy = FaultProxy(upstream, seed)
    try:
        yield proxy
    finally:
        proxy.release()
        proxy.close()


@pytest.fixture
def proxy(nginx: Any) -> Iterator[FaultProxy]:
    """Run a proxy, at first without faults, in front of nginx without listings."""
    with proxied(nginx.plain.url) as made:
        yield made

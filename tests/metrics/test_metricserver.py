"""The HTTP server of -o metrics=: requests are parsed strictly, and every one gets a response."""

from __future__ import annotations

import re

import pytest
import trio
from trio.testing import memory_stream_pair

from zarrfs.metrics.metricserver import _converse

ASK = b"GET /metrics HTTP/1.1\r\nHost: x\r\n"


def answers(*pieces: bytes) -> bytes:
    """Return the server's output to a client that sends `pieces` one by one and then shuts down its side."""

    async def converse() -> bytes:
        client, server = memory_stream_pair()
        written = b""
        async with trio.open_nursery() as nursery:

            async def serve() -> None:
                await _converse(server, lambda: b"up 1\n")
                await server.aclose()

            nursery.start_soon(serve)
            for piece in pieces:
                await client.send_all(piece)
                await trio.testing.wait_all_tasks_blocked()
            await client.send_eof()
            async for data in client:
                written += data
        return written

    return trio.run(converse)


def statuses(*pieces: bytes) -> list[int]:
    return [int(found) for found in re.findall(rb"HTTP/1\.1 (\d+) ", answers(*pieces))]


@pytest.mark.parametrize(
    ("status", "request_"),
    [
        (200, ASK), (200, b"GET /metrics HTTP/1.0\r\n"), (200, ASK + b"Content-Length: 0\r\n"),
        (200, b"HEAD" + ASK[3:]),
        (404, b"GET / HTTP/1.1\r\nHost: x\r\n"), (405, b"PUT" + ASK[3:]),
        (400, b"GET  /metrics HTTP/1.1\r\nHost: x\r\n"), (400, b"GET /metrics HTTP/2.0\r\nHost: x\r\n"),
        (400, b"GET /metrics\r\nHost: x\r\n"), (400, b"GET /metrics HTTP/1.1\r\n"), (400, ASK + b"Host: y\r\n"),
        (400, ASK + b" folded\r\n"), (400, ASK + b"Name : x\r\n"), (400, ASK + b"X: a\rb\r\n"),
        (400, ASK + b"X: a\nY: b\r\n"),
        (400, ASK + b"X: \0\r\n"), (413, ASK + b"Content-Length: 1\r\n"), (413, ASK + b"Content-Length: 0, 0\r\n"),
        (413, ASK + b"Content-Length: 0\r\nContent-Length: 5\r\n"), (413, ASK + b"Transfer-Encoding: chunked\r\n"),
        (431, ASK + b"X: " + b"x" * 9000 + b"\r\n"),
    ],
)  # fmt: skip
def test_a_request_gets_one_response(status: int, request_: bytes) -> None:
    assert statuses(request_ + b"\r\n") == [status]


def test_a_connection_serves_several_requests_however_they_are_split() -> None:
    whole = (ASK + b"\r\n") * 2 + ASK + b"Connection: close\r\n\r\n" + ASK + b"\r\n"
    assert statuses(whole) == [200] * 3
    assert statuses(*(bytes([byte]) for byte in whole[: -len(ASK) - 2])) == [200] * 3
    assert answers(b"HEAD" + ASK[3:] + b"\r\n").endswith(b"Content-Length: 5\r\n\r\n")
    assert answers(ASK + b"\r\n").endswith(b"\r\n\r\nup 1\n")


def test_an_invalid_request_ends_the_connection() -> None:
    assert statuses(b"hello\n") == [400]
    assert statuses(b"x" * 9000) == [431]
    assert statuses(ASK) == [400]
    assert statuses(ASK + b"Content-Length: 9\r\n\r\n" + ASK + b"\r\n") == [413]
    assert statuses() == []

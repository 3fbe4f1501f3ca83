"""The HTTP server of -o metrics=, which answers GET and HEAD of /metrics, with limits on connections, sizes and times.

Requests are parsed strictly: anything but a well-formed request without a body is answered with an error, and the
connection is closed. Source: RFC 9112, sections 2 to 6.
"""

from __future__ import annotations

import contextlib
import logging
import re
import socket
from collections.abc import Callable, Sequence
from typing import NamedTuple

import trio

from zarrfs.metrics.exposition import TYPE

log = logging.getLogger(__name__)

_CONNECTIONS = 16  # at the same time; further ones are closed immediately
_PATIENCE = 5.0  # seconds for one request and its response
_REQUEST = 8192  # bytes of a request's head at most
_PATH = b"/metrics"
_PLAIN = "text/plain; charset=utf-8"
_LINE = re.compile(rb"([!#-'*+.0-9A-Z^-z|~-]+) ([!-~]+) HTTP/1\.([01])")
_HEADER = re.compile(rb"([!#-'*+.0-9A-Z^-z|~-]+):[ \t]*([\t -~\x80-\xff]*)")
_REASONS = {
    200: "OK", 400: "Bad Request", 404: "Not Found", 405: "Method Not Allowed", 413: "Content Too Large",
    431: "Request Header Fields Too Large",
}  # fmt: skip


class _Request(NamedTuple):
    """The head of a request."""

    method: bytes
    target: bytes
    last: bool  # close the connection after the response


class _Refused(Exception):
    """A request that is answered with an error, after which the connection is closed."""

    def __init__(self, status: int, rule: str) -> None:
        super().__init__(rule)
        self.status = status


async def serve(sockets: Sequence[socket.socket], metrics: Callable[[], bytes]) -> None:
    """Serve the bytes that `metrics` returns until cancelled; then close `sockets`, which must be listening."""
    slots = trio.CapacityLimiter(_CONNECTIONS)

    async def connection(stream: trio.SocketStream) -> None:
        try:
            slots.acquire_on_behalf_of_nowait(stream)
        except trio.WouldBlock:
            await trio.aclose_forcefully(stream)
            return
        try:
            with contextlib.suppress(trio.BrokenResourceError, trio.ClosedResourceError):
                await _converse(stream, metrics)
        except Exception as exc:  # no request may end a mount
            log.error("metrics: %s: %s", type(exc).__name__, exc)
        finally:
            slots.release_on_behalf_of(stream)
            await trio.aclose_forcefully(stream)

    for sock in sockets:
        sock.setblocking(False)
    listeners = [trio.SocketListener(trio.socket.from_stdlib_socket(sock)) for sock in sockets]
    await trio.serve_listeners(connection, listeners)


async def _converse(stream: trio.abc.HalfCloseableStream, metrics: Callable[[], bytes]) -> None:
    """Answer the requests of one connection, in sequence."""
    received = bytearray()
    while True:
        with trio.move_on_after(_PATIENCE) as patience:
            try:
                request = await _request(stream, received)
                if request is None:
                    return
                await stream.send_all(_answer(request, metrics))
                if request.last:
                    return
            except _Refused as exc:
                await stream.send_all(_response(exc.status, f"{exc}\n".encode(), last=True))
                await stream.send_eof()
                while await stream.receive_some(_REQUEST):  # closing with unread data could discard the response
                    pass
                return
        if patience.cancelled_caught:
            return


async def _request(stream: trio.abc.HalfCloseableStream, received: bytearray) -> _Request | None:
    """Receive the next request and remove it from `received`; return None at the end of the connection.

    Raise _Refused for a request that is malformed, too large, or announces a body.
    """
    while (end := received.find(b"\r\n\r\n")) < 0:
        if len(received) > _REQUEST:
            raise _Refused(431, f"a request of more than {_REQUEST} bytes")
        if received and b"\r" not in received and b"\n" in received:
            raise _Refused(400, "lines of a request end with CR LF")
        data = await stream.receive_some(_REQUEST)
        if not data:
            if received:
                raise _Refused(400, "a request that does not end")
            return None
        received += data
    if end > _REQUEST:
        raise _Refused(431, f"a request of more than {_REQUEST} bytes")
    head = bytes(received[:end])
    del received[: end + 4]
    return _parsed(head)


def _parsed(head: bytes) -> _Request:
    """Parse a head, given without its final empty line. Raise _Refused if it is malformed or announces a body."""
    first, *lines = head.split(b"\r\n")
    begin = _LINE.fullmatch(first)
    headers = [_HEADER.fullmatch(line) for line in lines]
    if begin is None or None in headers:
        raise _Refused(400, "not a request of HTTP/1.1")
    found: dict[bytes, list[bytes]] = {}
    for header in headers:
        assert header is not None
        found.setdefault(header[1].lower(), []).append(header[2].strip(b" \t"))
    if len(found.get(b"host", ())) != 1 and begin[3] == b"1":
        raise _Refused(400, "a request has one Host")
    if b"transfer-encoding" in found or found.get(b"content-length", [b"0"]) != [b"0"]:
        raise _Refused(413, "a request with a body")
    wishes = b",".join(found.get(b"connection", ())).lower()
    return _Request(begin[1], begin[2], begin[3] == b"0" or b"close" in wishes)


def _answer(request: _Request, metrics: Callable[[], bytes]) -> bytes:
    head, last = request.method == b"HEAD", request.last
    if _path(request.target) != _PATH:
        return _response(404, b"there is only /metrics\n", head, last)
    if not head and request.method != b"GET":
        return _response(405, b"only GET and HEAD\n", head, last, more="Allow: GET, HEAD\r\n")
    return _response(200, metrics(), head, last, TYPE)


def _path(target: bytes) -> bytes:
    """Return the path of a request target, which may be a whole URL (RFC 9112, 3.2.2)."""
    absolute = re.match(rb"(?i:https?)://[^/?#]+", target)
    return target[absolute.end() if absolute else 0 :].partition(b"?")[0]


def _response(
    status: int, body: bytes, head: bool = False, last: bool = False, kind: str = _PLAIN, more: str = ""
) -> bytes:
    """Return a response, without its body if `head` is set."""
    more += "Connection: close\r\n" if last else ""
    begin = f"HTTP/1.1 {status} {_REASONS[status]}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n"
    return f"{begin}{more}\r\n".encode() + (b"" if head else body)

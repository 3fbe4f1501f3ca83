"""The HTTP server of -o metrics=: GET /metrics and nothing else, with bounds on connections, sizes and times.

It is a module of its own because h11 is imported only with that option.
"""

from __future__ import annotations

import contextlib
import logging
import re
import socket
from collections.abc import Callable, Sequence

import h11
import trio

from zarrfs.metrics.exposition import TYPE

log = logging.getLogger(__name__)

_CONNECTIONS = 16  # at once; further ones are closed
_PATIENCE = 5.0  # seconds for one request and its answer
_REQUEST = 8192  # bytes of a request's head
_PATH = b"/metrics"
_PLAIN = b"text/plain; charset=utf-8"


async def serve(sockets: Sequence[socket.socket], metrics: Callable[[], bytes]) -> None:
    """Serve the bytes that `metrics` returns until cancelled. The sockets listen already; they are closed."""
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


async def _converse(stream: trio.SocketStream, metrics: Callable[[], bytes]) -> None:
    """Answer the requests of one connection, one after the other."""
    http = h11.Connection(h11.SERVER, max_incomplete_event_size=_REQUEST)
    while http.states == {h11.CLIENT: h11.IDLE, h11.SERVER: h11.IDLE}:
        with trio.move_on_after(_PATIENCE) as patience:
            try:
                request = await _request(stream, http)
                if request is None:
                    return
                await _answer(stream, http, request, metrics)
            except h11.RemoteProtocolError as exc:
                if http.our_state in (h11.IDLE, h11.SEND_RESPONSE):
                    await _send(stream, http, exc.error_status_hint, f"{exc}\n".encode(), close=True)
                return
        if patience.cancelled_caught or http.our_state is not h11.DONE or http.their_state is not h11.DONE:
            return
        http.start_next_cycle()


async def _request(stream: trio.SocketStream, http: h11.Connection) -> h11.Request | None:
    """Receive the next request; None at the end of the connection. Raise RemoteProtocolError for one with a body."""
    found: h11.Request | None = None
    while True:
        event = http.next_event()
        if event is h11.NEED_DATA:
            http.receive_data(await stream.receive_some(_REQUEST))
        elif isinstance(event, h11.Request):
            found = event
        elif isinstance(event, h11.EndOfMessage):
            return found
        elif isinstance(event, h11.ConnectionClosed):
            return None
        else:
            raise h11.RemoteProtocolError("a request with a body", error_status_hint=413)


async def _answer(
    stream: trio.SocketStream, http: h11.Connection, request: h11.Request, metrics: Callable[[], bytes]
) -> None:
    head = request.method == b"HEAD"
    if _path(request.target) != _PATH:
        await _send(stream, http, 404, b"there is only /metrics\n", head)
    elif not head and request.method != b"GET":
        await _send(stream, http, 405, b"only GET and HEAD\n", head, more=[(b"Allow", b"GET, HEAD")])
    else:
        await _send(stream, http, 200, metrics(), head, TYPE.encode())


def _path(target: bytes) -> bytes:
    """Return the path of a request target, which may be a whole URL (RFC 9112, 3.2.2)."""
    absolute = re.match(rb"(?i:https?)://[^/?#]+", target)
    return target[absolute.end() if absolute else 0 :].partition(b"?")[0]


async def _send(
    stream: trio.SocketStream, http: h11.Connection, status: int, body: bytes, head: bool = False,
    kind: bytes = _PLAIN, more: Sequence[tuple[bytes, bytes]] = (), close: bool = False,
) -> None:  # fmt: skip
    headers = [(b"Content-Type", kind), (b"Content-Length", str(len(body)).encode()), *more]
    if close:
        headers.append((b"Connection", b"close"))
    data = http.send(h11.Response(status_code=status, headers=headers)) or b""
    if not head:
        data += http.send(h11.Data(data=body)) or b""
    await stream.send_all(data + (http.send(h11.EndOfMessage()) or b""))

"""A web server of files that spoils some of the responses, as networks and servers do.

A seeded generator decides which responses are spoilt, and how: with the same seed and faults, the n-th GET is spoilt
in the same way.
"""

from __future__ import annotations

import collections
import contextlib
import http.server
import random
import re
import socket
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

from tests.servers import QuietServer, free_port

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
_PIECE = 64 << 10  # bytes
_SHIFT = 7  # bytes
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER with which close(2) sends RST, not FIN


class FaultProxy:
    """A server at `url` of the files in `root`; each kind of fault spoils its share of the responses to GET.

    `faults` is {a word of FAULTS: probability} and may be changed at any time. `counts` counts each fault and the
    requests "GET" and "HEAD"; `paths` counts GETs by path. If `absent` is set, it replaces the status 404. Between
    hold() and release() every GET waits.
    """

    def __init__(self, root: Path, seed: int = 0) -> None:
        self.root = root
        self.faults: dict[str, float] = {}
        self.absent = 404
        self.counts: collections.Counter[str] = collections.Counter()
        self.paths: collections.Counter[str] = collections.Counter()
        self.held = threading.Event()  # set once a GET waits for release()
        self._random, self._lock, self._free = random.Random(seed), threading.Lock(), threading.Event()
        self._free.set()
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.start()

    def start(self) -> None:
        """Listen, always on the same port."""
        self._server = _Server(("127.0.0.1", self.port), type("Handler", (_Handler,), {"owner": self}))
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def stop(self) -> None:
        """Stop listening and reset all connections, both idle ones and those in the middle of a response."""
        self._server.shutdown()
        self._server.server_close()
        self._server.reset()

    def hold(self) -> None:
        """Make GETs from now on wait; `held` is set once a GET waits."""
        self.held.clear()
        self._free.clear()

    def release(self) -> None:
        """Answer the GETs that wait."""
        self._free.set()

    def begin(self, method: str, path: str) -> str | None:
        """Count a request, wait while it is held, and return its fault."""
        with self._lock:
            self.counts[method] += 1
            if method == "HEAD":
                return None
            self.paths[path] += 1
            point, chosen = self._random.random(), None
            for fault, share in self.faults.items():
                point -= share
                if point < 0:
                    chosen = fault
                    self.counts[fault] += 1
                    break
        if not self._free.is_set():
            self.held.set()
            self._free.wait()
        return chosen


class _Server(QuietServer):
    """A server that can reset its connections."""

    stopped = False

    def __init__(self, *arguments: Any) -> None:
        self._clients: set[socket.socket] = set()
        super().__init__(*arguments)

    def get_request(self) -> tuple[socket.socket, Any]:
        client, address = super().get_request()
        self._clients.add(client)
        return client, address

    def shutdown_request(self, request: Any) -> None:
        self._clients.discard(request)
        request.close()

    def reset(self) -> None:
        self.stopped = True
        for client in list(self._clients):
            with contextlib.suppress(OSError):
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                client.shutdown(socket.SHUT_RD)  # wakes its thread, which then closes it


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # else a body waits for the acknowledgement of its headers
    owner: FaultProxy
    server: _Server

    def log_message(self, *arguments: object) -> None:
        """Print nothing: the errors are intended."""

    def do_GET(self) -> None:
        fault = self.owner.begin(self.command, self.path)
        if fault == "reset":
            self._reset()
        elif fault in ("503", "429"):
            self._send(int(fault), {"Retry-After": "0"}, b"no\n")
        else:
            self._answer(self.owner.root / unquote(self.path.partition("?")[0]).lstrip("/"), fault)

    do_HEAD = do_GET

    def _answer(self, path: Path, fault: str | None) -> None:
        if path.is_dir():  # as nginx without listings
            slash = self.path.endswith("/")
            return self._send(403 if slash else 301, {} if slash else {"Location": f"{self.path}/"}, b"no\n")
        if not path.is_file():
            return self._send(self.owner.absent, {}, b"no\n")
        size, changed = path.stat().st_size, path.stat().st_mtime
        headers = {"ETag": f'"{changed:.0f}-{size}"', "Last-Modified": self.date_time_string(int(changed))}
        if fault == "changed":
            headers["ETag"] = '"changed"'
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        start, stop = (int(asked[1]), int(asked[2]) + 1 if asked[2] else size) if asked else (0, size)
        if asked and fault == "elsewhere":
            start, stop = start + _SHIFT, stop + _SHIFT
        if asked and start >= size:
            return self._send(416, {"Content-Range": f"bytes */{size}"}, b"")
        with path.open("rb") as file:
            file.seek(start)
            body = file.read(stop - start)
        if asked:
            headers["Content-Range"] = f"bytes {start}-{start + len(body) - 1}/{size}"
        body = {"short": body[: len(body) // 2], "long": body + bytes(_SHIFT)}.get(fault or "", body)
        return self._send(206 if asked else 200, headers, body, fault)

    def _send(self, status: int, headers: dict[str, str], body: bytes, fault: str | None = None) -> None:
        """Send a response, spoilt by `fault`."""
        self.send_response(status)
        for name, text in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, text)
        self.end_headers()
        if self.command == "HEAD":
            return
        if fault in ("reset late", "stall", "truncate"):
            body, self.close_connection = body[: len(body) // 2], True
        size = max(1, -(-len(body) // 8)) if fault == "drip" else _PIECE
        for at in range(0, len(body), size):
            time.sleep(0.05 * (fault == "drip"))
            if self.server.stopped:
                self._reset()
            self.wfile.write(body[at : at + size])
        if fault == "reset late":
            time.sleep(0.01)  # the client sees the first half
            self._reset()
        if fault == "stall":
            self.rfile.read()  # until the client closes

    def _reset(self) -> None:
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        raise ConnectionResetError


@contextlib.contextmanager
def proxied(root: Path, seed: int = 0) -> Iterator[FaultProxy]:
    """Run a server of the files in `root`."""
    proxy = FaultProxy(root, seed)
    try:
        yield proxy
    finally:
        proxy.release()
        proxy.stop()


@pytest.fixture
def proxy(nginx: Any) -> Iterator[FaultProxy]:
    """Run a server, at first without faults, of the files that nginx serves."""
    with proxied(nginx.plain.root) as made:
        yield made

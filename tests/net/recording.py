"""An HTTP server that redirects on request and records the headers of every request."""

from __future__ import annotations

import http.client
import http.server
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import unquote, urlsplit

VALUE = bytes(range(256)) * 8


class Recorder:
    """A server of VALUE; /to?URL redirects to URL. With `behind`, it forwards all requests to that server instead."""

    def __init__(self, host: str, behind: str = "") -> None:
        self.requests: list[tuple[str, dict[str, str]]] = []  # path, headers with names in lower case
        self.behind = behind  # the URL of a server to which all requests are forwarded
        handler = type("Handler", (_Handler,), {"owner": self})
        self._server = (_Server6 if ":" in host else _Server)((host, 0), handler)
        self.port = int(self._server.server_port)
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{self.port}"
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def to(self, url: str) -> str:
        """Return a URL of this server that redirects to `url`."""
        return f"{self.url}/to?{url}"

    def headers(self) -> dict[str, str]:
        """Return the headers of the last request."""
        return self.requests[-1][1]

    def close(self) -> None:
        """Stop the server."""
        self._server.shutdown()
        self._server.server_close()


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True


class _Server6(_Server):
    address_family = socket.AF_INET6


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # send a body without waiting for the ACK of its headers
    owner: Recorder

    def log_message(self, *arguments: object) -> None:
        """Log nothing."""

    def do_HEAD(self) -> None:
        self._answer(False)

    def do_GET(self) -> None:
        self._answer(True)

    def _answer(self, whole: bool) -> None:
        self.owner.requests.append((self.path, {name.lower(): value for name, value in self.headers.items()}))
        if self.owner.behind:
            return self._ask(self.owner.behind)
        if self.path.startswith("/to?"):
            location = unquote(self.path[4:].partition("&")[0])
            return self._send(302, {"Location": location.encode().decode("latin-1")}, b"")
        return self._send(200, {"ETag": '"1"'}, VALUE, whole)

    def _ask(self, behind: str) -> None:
        connection = http.client.HTTPConnection(urlsplit(behind).netloc, timeout=30)
        connection.request(self.command, self.path, headers=dict(self.headers))
        answer = connection.getresponse()
        body = answer.read()
        headers = {name: value for name, value in answer.getheaders() if name.lower() in ("etag", "content-range")}
        self._send(answer.status, headers, body)
        connection.close()

    def _send(self, status: int, headers: dict[str, str], body: bytes, whole: bool = True) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if whole:
            self.wfile.write(body)


@contextmanager
def recording(host: str, behind: str = "") -> Iterator[Recorder]:
    """Run a Recorder for the duration of the block."""
    server = Recorder(host, behind)
    try:
        yield server
    finally:
        server.close()

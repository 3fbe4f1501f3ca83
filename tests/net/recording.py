"""A server that records its requests, and can redirect."""

from __future__ import annotations

import http.client
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from urllib.parse import unquote, urlsplit

from tests.servers import Answer, serving_by_headers

VALUE = bytes(range(256)) * 8


class Recorder:
    """A server of VALUE at every path; /to?URL redirects to URL. With `behind`, it asks that server instead."""

    url = ""
    port = 0

    def __init__(self, behind: str) -> None:
        self.requests: list[tuple[str, dict[str, str]]] = []  # path, headers with names in lower case
        self._behind = urlsplit(behind).netloc

    def to(self, url: str) -> str:
        """Return a URL of this server that redirects to `url`."""
        return f"{self.url}/to?{url}"

    def headers(self) -> dict[str, str]:
        """Return the headers of the last request."""
        return self.requests[-1][1]

    def answer(self, method: str, path: str, headers: Mapping[str, str]) -> Answer:
        """Record a request, and answer it."""
        self.requests.append((path, {name.lower(): value for name, value in headers.items()}))
        if self._behind:
            with closing(http.client.HTTPConnection(self._behind, timeout=30)) as connection:
                connection.request(method, path, headers=dict(headers))
                answer = connection.getresponse()
                kept = {name: text for name, text in answer.getheaders() if name.lower() in ("etag", "content-range")}
                return answer.status, kept, answer.read()
        if path.startswith("/to?"):
            location = unquote(path[4:].partition("&")[0])
            return 302, {"Location": location.encode().decode("latin-1")}, b""
        return 200, {"ETag": '"1"'}, VALUE


@contextmanager
def recording(host: str, behind: str = "") -> Iterator[Recorder]:
    """Run a Recorder for the duration of the block."""
    server = Recorder(behind)
    with serving_by_headers(server.answer, host) as server.url:
        server.port = int(server.url.rpartition(":")[2])
        yield server

"""Messages of HTTP/1.1: the head of an answer, and where its body ends. No I/O.

Source: RFC 9110 (semantics), RFC 9112 (message syntax; section 6.3 says how long a body is).
"""

from __future__ import annotations

import re
from typing import NamedTuple

from zarrfs.net.responses import Transient

HEAD_MAX = 64 << 10  # bytes
LINE_MAX = 8 << 10  # bytes of a line in a chunked body, and of all its trailers
CHUNKED = -1  # in place of a body's length: each chunk states its own length
TO_THE_END = -2  # in place of a body's length: the body ends with the connection

_END = b"\r\n\r\n"
_VERSION = b"HTTP/1."
_BARE = re.compile(rb"(?<!\r)\n")
_STATUS = re.compile(rb"HTTP/1\.([01]) ([1-5][0-9][0-9])(?: ([\t -~\x80-\xff]*))?")
_HEADER = re.compile(rb"([!#-'*+.0-9A-Z^-z|~-]+):[ \t]*([\t -~\x80-\xff]*)")
_CHUNK = re.compile(rb"([0-9A-Fa-f]{1,15})[ \t]*(?:;[\t -~\x80-\xff]*)?")
# Headers that decide which bytes a body has. It is an error if one of them occurs twice with different values.
_ONCE = (
    "content-length", "content-range", "content-encoding", "transfer-encoding", "etag", "last-modified", "location",
)  # fmt: skip


class BadAnswer(Transient):
    """An answer that breaks the rules of HTTP."""

    def __init__(self, rule: str) -> None:
        super().__init__(f"the answer is not HTTP: {rule}", begun=True)


class Headers(dict[str, str]):
    """The headers of an answer; names are stored in lower case."""

    def get(self, name: str, default: str = "") -> str:  # type: ignore[override]
        """Return a header by its name in any case. Headers of one name are joined by ", ", cookies by newlines."""
        return super().get(name.lower(), default)


class Head(NamedTuple):
    """The head of an answer."""

    status: int
    reason: str
    headers: Headers
    persistent: bool  # the connection can be used again once the body has been read


def end_of_head(data: bytes, seen: int = 0) -> int:
    """Return the number of bytes of the head with which `data` begins; 0 if the head is not complete yet.

    The first `seen` bytes were examined by an earlier call. Raise BadAnswer if `data` cannot become a head.
    """
    end = data.find(_END, max(0, seen - 3))
    if end >= 0:
        return end + len(_END)
    if not _VERSION.startswith(data[: len(_VERSION)]):
        raise BadAnswer("it does not begin with HTTP/1")
    if len(data) >= HEAD_MAX or _BARE.search(data, seen):
        raise BadAnswer(f"its head has a bare line feed, or more than {HEAD_MAX} bytes")
    return 0


def parse_head(data: bytes) -> Head:
    """Parse a complete head, including its empty line. Raise BadAnswer."""
    status, *lines = data[: -len(_END)].split(b"\r\n")
    match = _STATUS.fullmatch(status)
    if match is None:
        raise BadAnswer("its status line is malformed")
    headers = Headers()
    for line in lines:
        header = _HEADER.fullmatch(line)
        if header is None:
            raise BadAnswer("a header is malformed")
        name, value = header[1].decode().lower(), header[2].decode("latin-1").strip()
        if name not in headers:
            headers[name] = value
        elif name in _ONCE:
            if headers[name] != value:
                raise BadAnswer(f"it has two different headers {name}")
        else:
            headers[name] += ("\n" if name == "set-cookie" else ", ") + value
    options = headers.get("connection").lower()
    persistent = "close" not in options and (match[1] == b"1" or "keep-alive" in options)
    return Head(int(match[2]), (match[3] or b"").decode("latin-1"), headers, persistent)


def body_length(head: Head, method: str) -> int:
    """Return the length of the body in bytes, or CHUNKED or TO_THE_END.

    Raise BadAnswer. Source: RFC 9112, section 6.3.
    """
    if method == "HEAD" or head.status in (204, 304):
        return 0
    length = head.headers.get("Content-Length")
    coding = head.headers.get("Transfer-Encoding").lower()
    if coding:
        if coding != "chunked" or length:
            raise BadAnswer("its body has a transfer coding beside a length, or another one than chunked")
        return CHUNKED
    if not length:
        return TO_THE_END
    if not (length.isascii() and length.isdecimal() and len(length) < 20):
        raise BadAnswer("its Content-Length is not a number")
    return int(length)


def chunk_length(line: bytes) -> int:
    """Return the length in bytes that the first line of a chunk states.

    Raise BadAnswer. Source: RFC 9112, section 7.1.
    """
    match = _CHUNK.fullmatch(line)
    if match is None:
        raise BadAnswer("a chunk states no length")
    return int(match[1], 16)

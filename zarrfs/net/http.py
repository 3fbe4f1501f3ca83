"""HttpSystem: ranges, sizes and listings of web servers.

Bytes of another range are never returned: a 206 must name the range that it contains, and the range is cut out of a
200, which contains the whole value. Source: RFC 9110 (14 range requests, 15 status codes).
"""

from __future__ import annotations

import functools
import logging
import re
import time
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TypeVar
from urllib.parse import quote, urlsplit

import trio

from zarrfs.config.options import Options
from zarrfs.config.redaction import without_secrets
from zarrfs.errors import AccessDenied, ReadError
from zarrfs.net import identity
from zarrfs.net.failures import check_bucket, failure, raise_for_status, raise_from
from zarrfs.net.http_response import Response
from zarrfs.net.reach import Trust
from zarrfs.net.responses import Entry, Fetched, System, Transient, http_date, too_large
from zarrfs.net.transport import Cut
from zarrfs.net.web import Web
from zarrfs.system.buffers import Buffer

log = logging.getLogger(__name__)

T = TypeVar("T")

_NOBODYS = "zarrfs-asks-whether-all-names-exist"
_LISTING_MAX = 256 << 20  # bytes of an HTML listing
_PARSED_AT_ONCE = 64 << 10  # characters: a longer listing is parsed in a thread, so that it does not block the loop
_WHOLE = 8 << 20  # bytes: for a longer part of a body, memory is allocated as the bytes arrive
_PIECE = 256 << 10  # bytes of an encoded body that are decoded in one step
_ERROR_MAX = 8 << 10  # bytes that are read of an error message
RANGE = re.compile(r"bytes\s+(\d+)-(\d+)/(\d+|\*)\s*$", re.IGNORECASE)
_SERVED = (200, 203, 204, 206)  # statuses of answers that contain the value; the body of another 2xx is a message
_OF_BUCKETS = ("x-amz-request-id", "x-ms-request-id")  # headers of object stores


class HttpSystem(System):
    """All web servers; a path is a URL."""

    sends_versions = True

    def __init__(self, options: Options, trust: Trust, of_buckets: bool = False) -> None:
        """`of_buckets`: URLs are signed for one method, values are as they are stored, and no password is sent."""
        self._trust, self._timeout, self._limit = trust, options.request_timeout, options.document_limit
        self._web, self._of_buckets = Web(options, trust, of_buckets), of_buckets
        self._answering: dict[str, bool] = {}  # by server: whether it has a page for every name

    async def fetch(self, path: str, start: int, stop: int | None) -> Fetched:
        return await self._call(self._fetch, path, start, stop)

    async def stat(self, path: str) -> Entry:
        """Return the entry; a path that the server redirects to itself with "/" at its end is a directory.

        Some servers do not support HEAD, or send no length with it: then one byte is requested. If that answer has no
        length either, but contains the whole value, its bytes are counted, up to the limit of documents.
        """
        return await self._call(self._stat, path)

    async def listing(self, path: str) -> list[Entry] | None:
        """Return the entries of the directory `path` from its HTML page (of nginx, Apache, http.server, ...).

        Sizes are unknown unless the page has them exactly, as that of nginx does. Many servers do not list names that
        begin with a dot. Return None if the page is not a listing, or for status 401 or 403.
        """
        head, mark, query = path.partition("?")
        return await self._call(self._listing, f"{head.rstrip('/')}/{mark}{query}")

    def child(self, path: str, name: str) -> str:
        return child(path, name)

    def shown(self, path: str) -> str:
        return without_secrets(path)

    def host(self, path: str) -> str:
        return web_host(path)

    def identity(self, path: str) -> str:
        return identity.of_web(path, self._trust.given(path).options)

    async def header(self, path: str, name: str) -> str:
        """Return a header of the answer to HEAD, unless the server is busy; "" if the answer has none."""

        async def ask(url: str) -> str:
            async with await self._web.request("HEAD", url) as response:
                _check_busy(response, url)
                return response.headers.get(name)

        return await self._call(ask, path)

    async def answer(self, path: str, most: int) -> bytes:
        """Return the body of an answer. Raise ReadError if it has more than `most` bytes."""

        async def ask(url: str) -> bytes:
            async with await self._web.request("GET", url) as response:
                await _check_bucket(response, url)
                _check_status(response, url)
                body, _ = await _part(response, 0, most + 1)
            if len(body) > most:
                raise too_large(without_secrets(url), most)
            return bytes(body)

        return await self._call(ask, path)

    async def aclose(self) -> None:
        self._web.close()

    async def _call(self, function: Callable[..., Awaitable[T]], path: str, *args: int | None) -> T:
        """Call a method within Options.request_timeout; translate its failures."""
        try:
            # what fail_after() does, at a third of its cost
            with trio.CancelScope(deadline=trio.current_time() + self._timeout):
                return await function(path, *args)
            raise trio.TooSlowError  # noqa: TRY301
        except Exception as exc:
            raise_from(failure(exc, self.shown(path), self._timeout), exc)

    # -- bytes

    async def _fetch(self, url: str, start: int, stop: int | None) -> Fetched:
        more = ""
        if start or stop is not None:
            more = f"Range: bytes={start}-{'' if stop is None else stop - 1}\r\n"
        async with await self._web.request("GET", url, more) as response:
            if self._of_buckets:
                _ignore_stored_coding(response)
            return await self._received(response, url, start, stop)

    async def _received(self, response: Response, url: str, start: int, stop: int | None) -> Fetched:
        """Return the requested bytes of an answer."""
        status, headers = response.status, response.headers
        if status == 206:
            match = RANGE.match(headers.get("Content-Range"))
            first, last = (int(match[1]), int(match[2])) if match else (-1, 0)
            if coding := _coding(response):
                raise ReadError(without_secrets(url), f"the server sends ranges of it as {coding}, unrequested")
            if match is None or first != start or last < first:
                raise ReadError(without_secrets(url), "the server answers with another range than requested")
            total = None if match[3] == "*" else int(match[3])
            end = last + 1
            if stop is None and end - start > self._limit:
                raise too_large(without_secrets(url), self._limit)
            size = (end if stop is None else min(stop, end)) - start
            if 0 <= response.left < size:  # do not read on into the next answer
                raise Cut
            data = await response.read(size)
            if len(data) < size:
                raise Cut
            return with_attributes(Fetched(data, tag(response), total), response, start)
        if status == 416:
            match = re.match(r"bytes\s+\*/(\d+)", headers.get("Content-Range"))
            return Fetched(b"", tag(response), int(match[1]) if match else None if start else 0)
        await _check_bucket(response, url)
        _check_status(response, url)
        return with_attributes(await self._cut_out(response, url, start, stop), response, start)

    async def _cut_out(self, response: Response, url: str, start: int, stop: int | None) -> Fetched:
        """Return [start, stop) of an answer that contains the whole value."""
        total = _length(response)
        if stop is None and total is not None and total - start > self._limit:
            raise too_large(without_secrets(url), self._limit)
        if start:
            _warn_of_no_ranges(web_host(url))
        want = self._limit + 1 if stop is None else stop - start
        data, seen = await _part(response, start, want)
        if stop is None and len(data) > self._limit:
            raise too_large(without_secrets(url), self._limit)
        return Fetched(data, tag(response), total if len(data) == want else seen, ranged=False)

    # -- names

    async def _stat(self, url: str) -> Entry:
        async with await self._web.request("HEAD", url, slash=True) as response:
            if self._of_buckets:
                _ignore_stored_coding(response)
                _check_status(response, url)
                return _entry(response, _length(response))
            if _is_directory(response):
                return Entry("", True)
            size = _length(response)
            if response.status in _SERVED and (size is not None or url.partition("?")[0].endswith("/")):
                return _entry(response, size)
            if response.status in (404, 410) and not _is_of_bucket(response):
                _check_status(response, url)
        async with await self._web.request("GET", url, "Range: bytes=0-0\r\n", slash=True) as response:
            if _is_directory(response):
                return Entry("", True)
            if response.status == 416:  # no first byte: an empty value
                return _entry(response, 0)
            await _check_bucket(response, url)
            _check_status(response, url)
            if response.status == 206:
                match = RANGE.match(response.headers.get("Content-Range"))
                return _entry(response, int(match[3]) if match and match[3] != "*" else None)
            size = _length(response)
            if size is None:  # count the bytes, without keeping them
                more, size = await _part(response, self._limit, 1)
                if more:
                    raise too_large(without_secrets(url), self._limit)
            return _entry(response, size)

    async def _listing(self, url: str) -> list[Entry] | None:
        async with await self._web.request("GET", url) as response:
            if response.status in (401, 403):
                return None
            _check_status(response, url)
            if "html" not in (response.headers.get("Content-Type") or "text/html"):
                return None
            body, _ = await _part(response, 0, _LISTING_MAX + 1)
        if len(body) > _LISTING_MAX:  # a truncated listing would lack names
            rule = f"its listing has more than {_LISTING_MAX} bytes: use a reference set, or a server that lists none"
            raise ReadError(without_secrets(url), rule)
        from zarrfs.net.webpages import listed

        page, base = bytes(body).decode("utf-8", "surrogateescape"), response.hops[-1].url
        if len(page) > _PARSED_AT_ONCE:
            found = await trio.to_thread.run_sync(listed, page, base, abandon_on_cancel=True)
        else:
            found = listed(page, base)
        if found is None:
            return None
        entries, certain = found
        return entries if certain or not await self._answers_all(url) else None

    async def _answers_all(self, url: str) -> bool:
        """Return whether a server has a page for every name; send one request, for a made-up name, to find out."""
        server = web_host(url)
        if server not in self._answering:
            async with await self._web.request("HEAD", child(url, _NOBODYS) + "/") as response:
                _check_busy(response, url)
                self._answering[server] = response.status == 200
        return self._answering[server]


@functools.lru_cache(1024)  # once for each server
def _warn_of_no_ranges(host: str) -> None:
    log.warning("%s ignores range requests: every read fetches a value from its beginning", host)


@functools.lru_cache(4096)
def web_host(url: str) -> str:
    """Return the host, and the port if given, of an HTTP URL; "" if there is no valid host."""
    try:
        return urlsplit(url).netloc.rpartition("@")[2].lower()
    except ValueError:
        return ""


# -- bodies


async def _part(response: Response, skip: int, want: int) -> tuple[Buffer, int]:
    """Return (up to `want` bytes of a decoded body after its first `skip`, the number of all bytes seen)."""
    if not skip and want <= _WHOLE and not _coding(response):
        data = await response.read(want)
        return data, len(data)
    found = bytearray()
    seen = 0
    async for piece in _pieces(response):
        found += piece[max(skip - seen, 0) :] if seen < skip else piece
        seen += len(piece)
        if len(found) >= want:
            del found[want:]
            break
    return found, seen


async def _pieces(response: Response) -> AsyncIterator[bytes]:
    """Yield the pieces of a body; decode them if the server has encoded the body without being asked to."""
    coding = _coding(response)
    if not coding:
        while piece := await response.piece():
            yield piece
        return
    if coding not in ("gzip", "x-gzip", "deflate"):
        where = without_secrets(response.hops[0].url)
        raise ReadError(where, f"its body is encoded as {coding}, which was not requested")
    try:
        async for data in _decoded(response, 15 if coding == "deflate" else 31):
            yield data
    except zlib.error as exc:
        raise Transient(f"its body cannot be decoded: {exc}", begun=True) from exc


async def _decoded(response: Response, window: int) -> AsyncIterator[bytes]:
    """Yield the decoded pieces of a zlib or gzip body, which may consist of several streams in sequence."""
    decoder, begun = zlib.decompressobj(window), False
    while piece := await response.piece(_PIECE):
        while piece:
            begun = True
            yield decoder.decompress(piece, _PIECE)
            piece = decoder.unconsumed_tail
            if decoder.eof:
                piece, decoder, begun = decoder.unused_data, zlib.decompressobj(window), False
            if piece:
                await trio.lowlevel.checkpoint()
    if begun:
        raise Cut


async def _check_bucket(response: Response, url: str) -> None:
    """Raise ReadError if the body of an answer says that the whole bucket does not exist."""
    if response.status == 404 and "xml" in response.headers.get("Content-Type"):
        answer = bytes((await _part(response, 0, _ERROR_MAX))[0])
        check_bucket(answer.decode("utf-8", "replace"), without_secrets(url))


# -- heads


def _is_of_bucket(response: Response) -> bool:
    """Return whether an object store answers: only the body, which HEAD lacks, says whether the bucket exists."""
    headers = response.headers
    return "xml" in headers.get("Content-Type") or any(name in headers for name in _OF_BUCKETS)


def _is_directory(response: Response) -> bool:
    """Return whether a name was redirected to itself with "/"."""
    first, *onward = response.hops
    return any(hop.is_directory_of(first) for hop in onward)


def with_attributes(found: Fetched, response: Response, start: int) -> Fetched:
    """Add the modification time, and whether the value is HTML, to its first bytes, from the head of the response."""
    if start:
        return found
    about = _entry(response, None)
    return found._replace(mtime_ns=about.mtime_ns, html=about.html)


def _entry(response: Response, size: int | None) -> Entry:
    when = response.headers.get("Last-Modified") if response.headers.get("ETag") else _modified(response)
    seconds = http_date(when)
    mtime_ns = None if seconds is None else int(seconds) * 1_000_000_000
    html_page = "html" in response.headers.get("Content-Type")
    strong = response.headers.get("ETag").startswith('"')
    return Entry("", False, size, mtime_ns, tag(response), html_page, strong)


def tag(response: Response) -> str | None:
    """Return a validator of the value: its ETag, else its modification time."""
    found: str | None = response.headers.get("ETag") or _modified(response)
    return found.removeprefix("W/") if found else None  # whether it is weak may depend on the request


def _modified(response: Response) -> str | None:
    """Return Last-Modified; None if it is the time of the response, which is not a version (RFC 9110, 8.8.2.2)."""
    found: str | None = response.headers.get("Last-Modified")
    if not found:
        return None
    answered = http_date(response.headers.get("Date")) or time.time()
    return found if (http_date(found) or 0.0) <= answered - 1 else None


def _length(response: Response) -> int | None:
    """Return the length of the body in bytes; None if the head has none, or the body is encoded."""
    text = response.headers.get("Content-Length")
    return int(text) if text.isdecimal() and not _coding(response) else None


def _coding(response: Response) -> str:
    """Return the content coding of the body; "" if it is not encoded.

    "aws-chunked" is ignored: it is the coding of an upload to S3, which some servers keep with the decoded value.
    """
    codings = map(str.strip, response.headers.get("Content-Encoding").lower().split(","))
    return ", ".join(coding for coding in codings if coding not in ("", "identity", "aws-chunked"))


def _ignore_stored_coding(response: Response) -> None:
    """Remove Content-Encoding, unless Google says that the value is stored otherwise and a proxy has encoded it."""
    coding = response.headers.get("Content-Encoding")
    if response.headers.get("x-goog-stored-content-encoding") in ("", coding):
        response.headers.pop("content-encoding", None)


def _check_status(response: Response, url: str) -> None:
    """Raise the error of an answer that lacks the value: a failure, a redirect not followed, or 202 (Accepted)."""
    if response.headers.get("x-ms-error-code") == "ResourceNotFound":  # sent with 404; else it is BlobNotFound
        raise AccessDenied(without_secrets(url), "Azure shows no private container to anonymous requests", 403)
    if response.status not in _SERVED:
        raise_for_status(response.status, url, response.reason, response.headers.get("Retry-After"))


def _check_busy(response: Response, url: str) -> None:
    """Raise Transient if an answer says nothing about its value, because the server is busy."""
    if response.status == 429 or (response.status >= 500 and response.status != 501):  # 501: it does not know HEAD
        _check_status(response, url)


def child(url: str, name: str) -> str:
    """Return the URL of `name` in the directory `url`."""
    head, mark, query = url.partition("?")  # a query is kept, because it may grant access
    return f"{head.rstrip('/')}/{quote(name, safe='', errors='surrogateescape')}{mark}{query}"

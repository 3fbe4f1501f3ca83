"""HTTP as zarrfs needs it, on fsspec's sessions: ranges that are verified, sizes, and listings.

fsspec's own range request does not look at the status, and takes a whole body for the range that it asked
for. The coroutines here run on fsspec's loop. Source: RFC 9110 (range requests, status codes).
"""

from __future__ import annotations

import logging
import re
import time
from typing import Any, NoReturn
from urllib.parse import quote, urlsplit

from zarrfs.config.redaction import without_secrets
from zarrfs.errors import AccessDenied, ReadError, TargetMissing
from zarrfs.net.answers import Entry, Fetched, Transient, too_large
from zarrfs.net.web import Web

log = logging.getLogger("zarrfs.transfer")

_BUSY = (408, 425, 429)
_RETRY_AFTER_MAX = 60.0  # seconds
_NOBODYS = "zarrfs-asks-whether-all-names-exist"
_LISTING_MAX = 256 << 20  # bytes of a page with links
RANGE = re.compile(r"bytes\s+(\d+)-(\d+)/(\d+|\*)\s*$", re.IGNORECASE)
_told: set[str] = set()  # servers known to ignore ranges, each named once in the log


async def fetch(web: Web, limit: int, url: str, start: int, stop: int | None) -> Fetched:
    """The bytes [start, stop) of `url`, cut at its end; stop None: to its end, if these are up to `limit` bytes.

    Raises Transient for what may go better next time, else a ReadError. Never bytes from another place: a
    206 must name the range that it carries, and of a 200, which has everything, the range is cut out. A body
    that is cut off is aiohttp's error; one that is whole but short is for the caller to see.
    """
    headers = {}
    if start or stop is not None:
        headers["Range"] = f"bytes={start}-{'' if stop is None else stop - 1}"
    async with web.request("GET", url, headers) as (response, _):
        version = tag(response)
        if response.status == 416:
            match = re.match(r"bytes\s+\*/(\d+)", response.headers.get("Content-Range", ""))
            return Fetched(b"", version, int(match[1]) if match else start)
        _check_status(response, url)
        if response.status != 206:
            return told_with(await _cut(response, limit, url, start, stop, version), response, start)
        match = RANGE.match(response.headers.get("Content-Range", ""))
        if match is None or int(match[1]) != start or response.headers.get("Content-Encoding"):
            raise ReadError(without_secrets(url), "the server answers with another range than was asked for")
        total = None if match[3] == "*" else int(match[3])
        end = int(match[2]) + 1
        if stop is None and end - start > limit:
            raise too_large(without_secrets(url), limit)
        data, _ = await _body(response, 0, (end if stop is None else min(stop, end)) - start)
        return told_with(Fetched(data, version, total), response, start)


def told_with(found: Fetched, response: Any, start: int) -> Fetched:
    """Bytes from `start` on; the first of a value with what the head of their answer tells beside the version."""
    if start:
        return found
    about = _entry(response, None)
    return found._replace(mtime_ns=about.mtime_ns, html=about.html)


async def _cut(response: Any, limit: int, url: str, start: int, stop: int | None, version: str | None) -> Fetched:
    """[start, stop) of an answer that has the whole value."""
    total = _length(response)
    if stop is None and total is not None and total - start > limit:
        raise too_large(without_secrets(url), limit)
    if start:
        host = urlsplit(url).netloc.rpartition("@")[2]
        if host not in _told:
            _told.add(host)
            log.warning("%s ignores range requests: every read fetches a value from its beginning", host)
    want = limit + 1 if stop is None else stop - start
    data, seen = await _body(response, start, want)
    if stop is None and len(data) > limit:
        raise too_large(without_secrets(url), limit)
    return Fetched(data, version, total if len(data) == want else seen, ranged=False)


async def _body(response: Any, skip: int, want: int) -> tuple[bytearray, int]:
    """(up to `want` bytes after the first `skip`, how many bytes were seen)."""
    data = bytearray()
    seen = 0
    async for chunk in response.content.iter_any():
        data += chunk[max(skip - seen, 0) :] if seen < skip else chunk
        seen += len(chunk)
        if len(data) >= want:
            del data[want:]
            break
    return data, seen


async def _counted(response: Any, limit: int, url: str) -> int:
    """The length of a body; its bytes are not kept."""
    seen = 0
    async for chunk in response.content.iter_any():
        seen += len(chunk)
        if seen > limit:
            raise too_large(without_secrets(url), limit)
    return seen


async def stat(web: Web, limit: int, url: str) -> Entry:
    """Return the entry at `url`: size if the server says it, kind, tag and time.

    A directory is what the server redirects to the same path with "/" at its end. Some servers have no HEAD,
    or no length in it: one byte is asked for then. What has no length there either is fetched to be counted, up
    to `limit` bytes.
    """
    async with web.request("HEAD", url, {}, slash=True) as (response, hops):
        if _redirected_to_directory(hops):
            return Entry("", True)
        size = _length(response)
        if response.status < 400 and (size is not None or url.partition("?")[0].endswith("/")):
            return _entry(response, size)
        if response.status in (404, 410):
            _check_status(response, url)
    async with web.request("GET", url, {"Range": "bytes=0-0"}, slash=True) as (response, hops):
        if _redirected_to_directory(hops):
            return Entry("", True)
        if response.status == 416:  # no first byte: an empty value
            return _entry(response, 0)
        _check_status(response, url)
        if response.status == 206:
            match = RANGE.match(response.headers.get("Content-Range", ""))
            return _entry(response, int(match[3]) if match and match[3] != "*" else None)
        size = _length(response)
        return _entry(response, size if size is not None else await _counted(response, limit, url))


async def listing(web: Web, url: str) -> list[Entry] | None:
    """The entries of the directory `url`, which ends in "/"; None where the server shows no listing.

    Pages with links are understood (nginx, Apache, http.server, ...): links to what is right below `url`.
    Sizes are unknown: what a page says of them is often rounded. Many servers hide names with a dot.
    """
    async with web.request("GET", url, {}) as (response, _):
        if response.status in (401, 403):
            return None
        _check_status(response, url)
        if "html" not in response.headers.get("Content-Type", "text/html"):
            return None
        body, _ = await _body(response, 0, _LISTING_MAX + 1)
        if len(body) > _LISTING_MAX:  # cut, it would be a directory that lacks names
            rule = f"its listing has more than {_LISTING_MAX} bytes: use a reference set, or a server that lists none"
            raise ReadError(without_secrets(url), rule)
        base = str(response.url)
    from zarrfs.net.webpages import is_titled, listed

    page = body.decode("utf-8", "surrogateescape")
    found = listed(page, base)
    return None if found is not None and not is_titled(page) and await _answers_all(web, url) else found


async def _answers_all(web: Web, url: str) -> bool:
    """Return whether a server has a page for every name; it is asked once for one that nobody has."""
    server = urlsplit(url).netloc
    found = web.answer_all.get(server)
    if found is None:
        async with web.request("HEAD", child(url, _NOBODYS) + "/", {}) as (response, _):
            found = web.answer_all[server] = response.status == 200
    return found


def _redirected_to_directory(hops: list[Any]) -> bool:
    asked: str = hops[0].raw_path
    return not asked.endswith("/") and any(hop.raw_path == asked + "/" for hop in hops[1:])


def _entry(response: Any, size: int | None) -> Entry:
    when = response.headers.get("Last-Modified") if response.headers.get("ETag") else _modified(response)
    seconds = _time(when)
    mtime_ns = None if seconds is None else int(seconds) * 1_000_000_000
    html_page = "html" in response.headers.get("Content-Type", "")
    strong = response.headers.get("ETag", "").startswith('"')
    return Entry("", False, size, mtime_ns, tag(response), html_page, strong)


def tag(response: Any) -> str | None:
    """Return a validator of the value: its ETag, else its time."""
    found: str | None = response.headers.get("ETag") or _modified(response)
    return found.removeprefix("W/") if found else None  # weak or strong may depend on the request


def _modified(response: Any) -> str | None:
    """Last-Modified; None where it is but the time of the answer, which tells nothing. Source: RFC 9110, 8.8.2.2."""
    found: str | None = response.headers.get("Last-Modified")
    if not found:
        return None
    answered = _time(response.headers.get("Date")) or time.time()
    return found if (_time(found) or 0.0) <= answered - 1 else None


def _time(text: str | None) -> float | None:
    """Seconds since 1970 of a date; None where there is none."""
    if not text:
        return None
    import email.utils

    try:
        return email.utils.parsedate_to_datetime(text).timestamp()
    except (ValueError, OverflowError, OSError):
        log.debug("%s: not a date", text)
        return None


def _length(response: Any) -> int | None:
    """The bytes that the body has, where the server says so; None if they are encoded."""
    text = response.headers.get("Content-Length", "")
    return int(text) if text.isdecimal() and not response.headers.get("Content-Encoding") else None


def _check_status(response: Any, url: str) -> None:
    """Raises for a status of 400 and more, and for redirects that lead nowhere."""
    if response.status >= 300:
        raise_for_status(response.status, url, response.reason or "", response.headers.get("Retry-After", ""))


def child(url: str, name: str) -> str:
    """The URL of `name` in the directory `url`."""
    head, mark, query = url.partition("?")  # a query stays: it may be what grants access
    return f"{head.rstrip('/')}/{quote(name, safe='', errors='surrogateescape')}{mark}{query}"


def raise_for_status(status: int, url: str, reason: str = "", retry_after: str = "") -> NoReturn:
    """The error that an HTTP status stands for."""
    where, what = without_secrets(url), f"HTTP status {status} {reason}".rstrip()
    if status in (404, 410):
        raise TargetMissing(where, what, status)
    if status in (401, 403, 407):
        raise AccessDenied(where, what, status)
    if status >= 500 or status in _BUSY:
        after = min(float(retry_after), _RETRY_AFTER_MAX) if retry_after.isdecimal() else 0.0
        raise Transient(what, after)
    raise ReadError(where, what, status)


def certificate_refused(why: str) -> str:
    """Return the message for a certificate that is not accepted, which only a person can change."""
    return f"its certificate is refused: {why} ($SSL_CERT_FILE names a site's own authority)"

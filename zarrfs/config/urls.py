"""Parsing and joining of URLs as fsspec writes them, chains included. No I/O."""

from __future__ import annotations

import base64
import functools
import re
from typing import TYPE_CHECKING
from urllib.parse import unquote_to_bytes

from zarrfs.config.redaction import split_chain

if TYPE_CHECKING:
    import yarl

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+)(?:://|$)")
_LATER_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+)://|([a-z]+)$")  # to fsspec "memory" is one, "a.zip" a path
_WEB = re.compile(r"(https?)://([a-z0-9](?:[a-z0-9._-]*[a-z0-9])?)(?::([0-9]{1,5}))?(?:[/?#]|\Z)", re.I | re.ASCII)
_FILE = re.compile(r"\A(?:file|local):(?://)?", re.IGNORECASE)

# Names of the same protocol; the first also names its storage options.
_FAMILIES = (("http", "https"), ("s3", "s3a"), ("gcs", "gs"), ("abfs", "abfss", "az"), ("file", "local"))
_FAMILY = {name: family for family in _FAMILIES for name in family}
BUCKETS = ("s3", "gcs", "abfs")  # protocols with a bucket or container in place of the host


def names(protocol: str) -> tuple[str, ...]:
    """Return all names of a protocol, in a fixed order."""
    return _FAMILY.get(protocol, (protocol,))


def place(url: str) -> str:
    """Return the host or bucket of a URL (not a chain), as PROTOCOL://HOST, the same for all spellings.

    For HTTP, the port is always part of it. Raise ValueError for an HTTP URL that is invalid or has no host.
    """
    protocol, _, rest = url.partition("://")
    family = names(protocol.lower())[0]
    if family == "http":
        match = _WEB.match(url)
        if match is not None:
            scheme = match[1].lower()
            return place_of(scheme, match[2].lower(), int(match[3]) if match[3] else 443 if scheme == "https" else 80)
        import yarl

        return web_place(yarl.URL(url))
    rest = rest.lstrip("/")
    if rest.startswith("arn:"):  # an S3 access point: its name follows a slash
        return f"{family}://{'/'.join(rest.split('/')[:2])}"
    host = re.split("[/?#]", rest)[0]
    return f"{family}://{host if family in BUCKETS else host.rpartition('@')[2].lower()}"


def web_place(url: yarl.URL) -> str:
    """Return the place, SCHEME://HOST:PORT, of a parsed HTTP URL. Raise ValueError if it has no host."""
    if not url.raw_host:
        raise ValueError("no host")
    return place_of(url.scheme, url.raw_host.lower(), url.port or 0)


def place_of(scheme: str, name: str, port: int) -> str:
    """Return the place of a web server, SCHEME://HOST:PORT; `name` is in lower case and has no brackets."""
    return f"{scheme}://{name}:{port}"


def protocols(url: str) -> list[str]:
    """Return the protocols of an fsspec URL, outermost first; [] for a path.

    "zip://a::s3://b/c.zip" has zip and s3; "zip://a::/b/c.zip" and "zip://a::c.zip" have zip and file.
    """
    if is_data(url):
        return ["data"]
    chain = split_chain(url)
    first = _SCHEME.match(chain[0])
    if len(chain) == 1:
        if first and "://" in url:
            return [first[1].lower()]
        return [url.partition(":")[0].lower()] if re.match(r"(?i:file|memory):", url) else []
    if first is None:
        return []
    later = [_LATER_SCHEME.match(link) for link in chain[1:]]
    return [first[1].lower(), *((match[1] or match[2]).lower() if match else "file" for match in later)]


def is_data(url: str) -> bool:
    """Return whether a URL contains its bytes (RFC 2397)."""
    return url.startswith("data:")


@functools.lru_cache(1)  # readers of a large one get it in parts, with a call for each
def data_in(url: str) -> bytes:
    """Return the bytes in a data: URL. Raise ValueError if it is malformed."""
    about, comma, data = url.removeprefix("data:").partition(",")
    if not comma:
        raise ValueError("a data: URL without a comma")
    raw = unquote_to_bytes(data.encode("utf-8", "surrogatepass"))
    return base64.b64decode(raw, validate=True) if about.endswith(";base64") else raw


def relative_end(url: str) -> tuple[str, str] | None:
    """Return (prefix, relative path) if a URL, or the last link of a chain, is a relative local path; else None.

    "a/b" and "file://a/b" give ("", "a/b"); "zip://m::a.zip" gives ("zip://m::", "a.zip").
    """
    found = protocols(url)
    if found and found[-1] not in ("file", "local"):
        return None
    end = split_chain(url)[-1] if len(found) > 1 else url
    path = file_path(end) if found else end
    return None if path.startswith("/") else (url[: len(url) - len(end)], path)


def is_here(url: str) -> bool:
    """Return whether a URL, or the last link of a chain, names a file of this machine or an object in this process."""
    found = protocols(url)
    return not found or found[-1] in ("file", "local", "memory")


def file_path(url: str) -> str:
    """Return the path of a file: or local: URL as written; other text unchanged."""
    return _FILE.sub("", url, count=1)


def _split(url: str) -> tuple[str, str]:
    """Return (URL without query and fragment, "?query" or ""). Except in HTTP, "?" and "#" are part of the path."""
    if names(url.partition("://")[0].lower())[0] != "http":
        return url, ""
    url = url.partition("#")[0]
    head, mark, query = url.partition("?")
    return head, mark + query


def without_fragment(url: str) -> str:
    """Return an HTTP URL without its fragment, which is never sent to a server; other URLs unchanged."""
    return "".join(_split(url))


def directory(url: str) -> str:
    """Return the URL of a directory with "/" at the end of its path.

    A query is kept after the path, because it may grant access to the files in the directory (see net.http.child()).
    A fragment is removed.
    """
    head, query = _split(url)
    return f"{head.rstrip('/')}/{query}"


def parent(url: str) -> str:
    """Return the URL of the directory that holds a document, without the document's query."""
    return _split(url)[0].rpartition("/")[0] + "/"


def join(base: str, relative: str) -> str | None:
    """Resolve `relative` against the directory URL `base`; return None if `base` is a chain or not a URL.

    If `relative` has no query, the result has that of `base`. Empty segments are kept, because "a//c" and "a/c" are
    different keys of a bucket.
    """
    head, slashes, _ = base.partition("://")
    if len(split_chain(base)) > 1 or not slashes:
        return None
    base, query = _split(base)
    if names(head.lower())[0] == "http":
        relative, mark, own = relative.partition("?")
        query = mark + own if mark else query
    host, _, path = base.partition("://")[2].partition("/")
    found: list[str] = []
    for segment in f"{path.removesuffix('/')}/{relative}".split("/") if path else relative.split("/"):
        if segment == "..":
            del found[-1:]
        elif segment != ".":
            found.append(segment)
    return f"{head}://{host}/{'/'.join(found)}{query}"

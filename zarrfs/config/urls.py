"""Parsing and joining of URLs as fsspec writes them, chains included. No I/O."""

from __future__ import annotations

import posixpath
import re
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from zarrfs.config.redaction import links

if TYPE_CHECKING:
    import yarl

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+)(?:://|$)")
_WEB = re.compile(r"(https?)://([a-z0-9](?:[a-z0-9._-]*[a-z0-9])?)(?::([0-9]{1,5}))?(?:[/?#]|\Z)", re.I | re.ASCII)
_FILE = re.compile(r"(?:file|local):(?://)?", re.IGNORECASE)

# Names of the same protocol; the first also names its storage options.
_FAMILIES = (("http", "https"), ("s3", "s3a"), ("gcs", "gs"), ("abfs", "abfss", "az"), ("file", "local"))
_FAMILY = {name: family for family in _FAMILIES for name in family}
BUCKETS = ("s3", "gcs", "abfs")  # protocols with a bucket or container in place of the host


def names(protocol: str) -> tuple[str, ...]:
    """Return all names of a protocol, in a fixed order."""
    return _FAMILY.get(protocol, (protocol,))


def place(url: str) -> str:
    """Return the host or bucket of a URL (no chain), equal for all its spellings. Raise ValueError without a host."""
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
    if rest.startswith("arn:"):  # of an S3 access point, whose name follows a slash
        return f"{family}://{'/'.join(rest.split('/')[:2])}"
    host = re.split("[/?#]", rest)[0]
    return f"{family}://{host if family in BUCKETS else host.rpartition('@')[2].lower()}"


def web_place(url: yarl.URL) -> str:
    """Return the place of a parsed HTTP URL; scheme and port are part of it. Raise ValueError without a host."""
    if not url.raw_host:
        raise ValueError("no host")
    return place_of(url.scheme, url.raw_host.lower(), url.port or 0)


def place_of(scheme: str, name: str, port: int) -> str:
    """Return the place of a web server; `name` has lower case, and no brackets."""
    return f"{scheme}://{name}:{port}"


def protocols(url: str) -> list[str]:
    """Return the protocols of an fsspec URL, outermost first; [] for a path.

    "zip://a::s3://b/c.zip" has zip and s3; "zip://a::/b/c.zip" has zip and file.
    """
    chain = links(url)
    first = _SCHEME.match(chain[0])
    if len(chain) == 1:
        if first and "://" in url:
            return [first[1].lower()]
        return [url.partition(":")[0].lower()] if re.match(r"(?i:file|memory):", url) else []
    if first is None:
        return []
    found = [_SCHEME.match(link) for link in chain]
    return [match[1].lower() if match else "file" for match in found]


def file_path(url: str) -> str:
    """Return the path of a file: or local: URL as written; other text unchanged."""
    return _FILE.sub("", url, count=1)


def join(base: str, relative: str) -> str | None:
    """Resolve `relative` against the directory URL `base`; return None if `base` is a chain or no URL."""
    head, slashes, rest = base.partition("://")
    if len(links(base)) > 1 or not slashes:
        return None
    host, _, directory = rest.partition("/")
    path = posixpath.normpath(f"/{directory}/{relative}")
    return f"{head}://{host}/{path.lstrip('/')}"


def same_server(one: str, other: str) -> bool:
    """Return whether two URLs have the same protocol and server (or bucket); False for chains."""
    try:
        a, b = urlsplit(one), urlsplit(other)
    except ValueError:
        return False
    return bool(a.netloc) and "::" not in one + other and (a.scheme, a.netloc) == (b.scheme, b.netloc)

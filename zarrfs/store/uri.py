"""file: URIs of local directories (file system store 1.0, "Canonical URI"; RFC 8089)."""

from __future__ import annotations

import os
import re
from urllib.parse import quote, unquote_to_bytes

from zarrfs.errors import UsageError


def file_uri(path: str) -> str:
    """Return the canonical file: URI of a local path: absolute, percent-encoded (RFC 8089)."""
    return "file://" + quote(os.fsencode(os.path.abspath(path)), safe="/")


def path_of_uri(source: str) -> str | None:
    """Return the local path that `source` names; None if it is a URL of another kind.

    A URL has a scheme of two characters or more and ":", then "//", or "::" anywhere (an fsspec chain); "file:" and
    "memory:" need no "//". Everything else is a path, so "a:b" is a file name. Raise UsageError for an empty source,
    and for a file: URI with another host, a query or a fragment, or without an absolute path.
    """
    if not source:  # such as "$UNSET" in a script; it would mean the current directory
        raise UsageError("an empty name of a source (a variable that is not set?)")
    scheme = re.match(r"([A-Za-z][A-Za-z0-9+.-]+):", source)
    if scheme is None:
        return source
    rest = source[scheme.end() :]
    name = scheme[1].lower()
    if "::" in source or (name != "file" and (name == "memory" or rest.startswith("//"))):
        return None
    if name != "file":
        return source
    if rest.startswith("//"):
        host, slash, path = rest[2:].partition("/")
        if host.lower() not in ("", "localhost"):
            raise UsageError(f"{source}: names the host {host!r}; a local path has three slashes: file:///...")
        rest = slash + path
    if not rest.startswith("/"):
        raise UsageError(f"{source}: a file: URI names an absolute path: file:///...")
    if "?" in rest or "#" in rest:
        raise UsageError(f"{source}: '?' and '#' are written %3F and %23 in a file: URI")
    raw = unquote_to_bytes(rest.encode("utf-8", "surrogateescape"))
    if b"\0" in raw:
        raise UsageError(f"{source}: a NUL character")
    return os.fsdecode(raw)

"""Keys of reference sets: their limits, and their form in messages; also inline values in base64."""

from __future__ import annotations

import binascii

from zarrfs.store.api import KEY_MAX, Kind, key_rule
from zarrfs.store.destination import is_utf8

BASE64 = b"base64:"  # the prefix of an inline value in base64
DEPTH_MAX = 100  # directories of a key: each costs an index row and a path, however short its name
ZARR_METADATA = (".zgroup", ".zarray", ".zattrs", ".zmetadata", "zarr.json")
_BLANKS = b" \t\r\n\v\f"
_PRINTED_MAX = 400  # characters of a key in a message


def printable(key: str) -> str:
    """Return `key` as one printable line of bounded length, for messages."""
    if key.isprintable() and len(key) <= _PRINTED_MAX:
        return key
    cut = key if len(key) <= _PRINTED_MAX else key[:_PRINTED_MAX] + "…"
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in cut)


def set_key_rule(key: str) -> str | None:
    """Return the rule that `key` breaks as a key of a reference set, or None."""
    try:
        if len(key if key.isascii() else key.encode()) > KEY_MAX:
            return f"a key over {KEY_MAX} bytes"
    except UnicodeEncodeError:
        return "a lone surrogate"
    if key.count("/") > DEPTH_MAX:
        return f"over {DEPTH_MAX} directories deep"
    return key_rule(key)


def entry_rule(key: str, kind: Kind) -> str | None:
    """Return why no reference set can hold an entry of a tree, or None."""
    if kind is Kind.SYMLINK:
        rule: str | None = "a symbolic link"
    elif not is_utf8(key):
        rule = "a name that is not UTF-8"
    else:
        rule = set_key_rule(key) if kind is Kind.FILE else None  # a set has no entries for directories
    return f"{rule}, which no reference set can hold" if rule else None


def decode_base64(value: bytes) -> bytes:
    """Decode an inline value that begins with BASE64, ignoring white space. Raise binascii.Error if malformed."""
    # copied only if there is white space: the value may be long
    coded = value.translate(None, _BLANKS) if any(blank in value for blank in _BLANKS) else value
    return binascii.a2b_base64(memoryview(coded)[len(BASE64) :], strict_mode=True)

"""Keys of reference sets: their bounds, and how messages show them."""

from __future__ import annotations

DEPTH_MAX = 100  # directories of a key: each costs a row and a path, however short its name
ZARR_METADATA = (".zgroup", ".zarray", ".zattrs", ".zmetadata", "zarr.json")
_PRINTED_MAX = 400  # characters of a key in a message


def printable(key: str) -> str:
    """Return `key` as one printable line of bounded length, for messages."""
    if key.isprintable() and len(key) <= _PRINTED_MAX:
        return key
    cut = key if len(key) <= _PRINTED_MAX else key[:_PRINTED_MAX] + "…"
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in cut)

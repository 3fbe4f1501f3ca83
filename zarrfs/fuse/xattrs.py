"""What the extended attributes of a mount say; operations.py answers with it."""

from __future__ import annotations

import json
from typing import Any

SOURCE_XATTR = b"user.zarrfs.source"
MOUNT_XATTR = b"user.zarrfs.mount"
LEFT_OUT_XATTR = b"user.zarrfs.left_out"
STATS_XATTR = b"user.zarrfs.stats"  # answered, but not listed: cp -a must not carry it away
REFRESH_XATTR = b"user.zarrfs.refresh:"  # not listed either: TOKEN; control.py
SET_XATTR = b"user.zarrfs.set:"  # likewise: TOKEN:NUMBER:PART, TOKEN:COUNT
_SIZE = 2048  # bytes: fits every file system that `cp -a` or `rsync -X` may carry it to


def bounded(value: dict[str, Any]) -> bytes:
    """JSON that is not too long: a long list of regions gives way to their number."""
    text = json.dumps(value, separators=(",", ":")).encode()
    if len(text) > _SIZE and "regions" in value:
        value = {"regions": value["regions"][:4], "count": len(value["regions"])}
        text = json.dumps(value, separators=(",", ":")).encode()
    return text[:_SIZE]


def first_of(reasons: dict[str, str]) -> bytes:
    """JSON that is not too long: what does not fit is counted under ""."""
    shown = dict(reasons)
    while True:
        more = len(reasons) - len(shown)
        text = json.dumps(shown | ({"": f"and {more} more"} if more else {})).encode()
        if len(text) <= _SIZE or not shown:
            return text
        for path in [*shown][-max(1, len(shown) // 8) :]:
            del shown[path]

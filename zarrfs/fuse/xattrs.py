"""The extended attributes that a mount answers, and the control channel over attributes that it never lists.

The first read of `user.zarrfs.refresh:TOKEN` starts a refresh, and every read returns its state. So no client blocks
in the kernel, and an interrupted client may ask again. Operations.getxattr() checks permissions.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any

import trio

from zarrfs.concurrency.lru import LRU

SOURCE_XATTR = b"user.zarrfs.source"
MOUNT_XATTR = b"user.zarrfs.mount"
LEFT_OUT_XATTR = b"user.zarrfs.left_out"
STATS_XATTR = b"user.zarrfs.stats"  # not listed, because cp -a must not copy it
REFRESH_XATTR = b"user.zarrfs.refresh:"  # followed by TOKEN; not listed
REFRESH = REFRESH_XATTR.decode()
RELEASE_XATTR = b"user.zarrfs.release"  # not listed
_ANSWERS = 1024  # answers to remember
_SIZE = 2048  # bytes of a value: fits file systems to which `cp -a` or `rsync -X` may copy it


def bounded(value: dict[str, Any]) -> bytes:
    """Encode as JSON of at most _SIZE bytes; a long list of regions is cut to four and their count.

    A value that is still longer, for example because of a long URL, becomes {"too_long": bytes}.
    """
    text = json.dumps(value, separators=(",", ":")).encode()
    if len(text) > _SIZE and "regions" in value:
        value = {"regions": value["regions"][:4], "count": len(value["regions"])}
        text = json.dumps(value, separators=(",", ":")).encode()
    return text if len(text) <= _SIZE else b'{"too_long":%d}' % len(text)


def first_of(reasons: dict[str, str]) -> bytes:
    """Encode reasons by path as JSON of at most _SIZE bytes; reasons that do not fit are counted under the key ""."""
    kept = dict(reasons)
    while True:
        more = len(reasons) - len(kept)
        text = json.dumps(kept | ({"": f"and {more} more"} if more else {})).encode()
        if len(text) <= _SIZE or not kept:
            return text
        for path in [*kept][-max(1, len(kept) // 8) :]:
            del kept[path]


class Control:
    """The control channel of one mount: `refresh(force)` never raises, `release()` ends the hold, if there is one."""

    def __init__(
        self, nursery: trio.Nursery, refresh: Callable[[bool], Awaitable[dict[str, Any]]],
        release: Callable[[], bool],
    ) -> None:  # fmt: skip
        self._nursery, self._refresh, self.release = nursery, refresh, release
        self._answers: LRU[str, dict[str, Any]] = LRU(_ANSWERS)  # by name

    def answer(self, name: str) -> bytes:
        """Return the value of a control attribute as JSON: {"state": "running"}, {"error"}, or the result."""
        if name not in self._answers:
            self._answers.put(name, {"state": "running"})
            self._nursery.start_soon(self._run, name)
        return json.dumps(self._answers[name]).encode()

    async def _run(self, name: str) -> None:
        self._answers.put(name, await self._refresh(name.endswith(":force")))

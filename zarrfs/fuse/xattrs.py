"""What the extended attributes of a mount say; operations.py answers with it."""

from __future__ import annotations

import json
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import trio

from zarrfs.concurrency.lru import LRU
from zarrfs.errors import internal_error

log = logging.getLogger("zarrfs")

SOURCE_XATTR = b"user.zarrfs.source"
MOUNT_XATTR = b"user.zarrfs.mount"
LEFT_OUT_XATTR = b"user.zarrfs.left_out"
STATS_XATTR = b"user.zarrfs.stats"  # answered, but not listed: cp -a must not carry it away
REFRESH_XATTR = b"user.zarrfs.refresh:"  # not listed either: TOKEN; class Control
SET_XATTR = b"user.zarrfs.set:"  # likewise: TOKEN:NUMBER:PART, TOKEN:COUNT
REFRESH, SET = REFRESH_XATTR.decode(), SET_XATTR.decode()
PART = 160  # characters of text in one name, of at most 255 bytes
_REMEMBERED = 64  # tokens
_PARTS = 256  # of one text
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


class Control:
    """Answers for one mount. `refresh` is given whether it is to be forced, `settle` items of options."""

    def __init__(
        self,
        nursery: trio.Nursery,
        refresh: Callable[[bool], Awaitable[dict[str, Any]]],
        settle: Callable[[str], Awaitable[dict[str, Any]]],
    ) -> None:
        self._nursery, self._do_refresh, self._settle = nursery, refresh, settle
        self._answers: LRU[str, dict[str, Any]] = LRU(_REMEMBERED)  # by name
        self._texts: LRU[str, dict[int, str]] = LRU(_REMEMBERED)  # parts by token

    def answer(self, name: str) -> bytes:
        """What the attribute `name` says, as JSON: {"state": "running"}, {"error"}, or what came of it."""
        if name.startswith(REFRESH):
            force = name.endswith(":force")
            return self._once(name, lambda: self._do_refresh(force))
        token, _, rest = name.removeprefix(SET).partition(":")
        number, colon, part = rest.partition(":")
        if not number.isdecimal() or not number.isascii() or int(number) > _PARTS:
            return json.dumps({"error": "no such request"}).encode()
        if colon:
            parts = self._texts.use(token)
            if parts is None:
                parts = self._texts.put(token, {})
            parts[int(number)] = part
            return b"{}"
        parts = self._texts.get(token, {})
        text = "".join(parts.get(index, "") for index in range(int(number)))
        return self._once(name, lambda: self._settle(text))

    def _once(self, name: str, work: Callable[[], Awaitable[dict[str, Any]]]) -> bytes:
        if name not in self._answers:
            self._answers.put(name, {"state": "running"})
            self._nursery.start_soon(self._run, name, work)
        return json.dumps(self._answers[name]).encode()

    async def _run(self, name: str, work: Callable[[], Awaitable[dict[str, Any]]]) -> None:
        try:
            answer = await work()
        except Exception as exc:  # of one request: the mount goes on
            log.exception("a request of control failed")
            answer = {"error": internal_error(exc)}
        if name in self._answers:
            self._answers[name] = answer

"""The pinned versions of the targets that are read.

The first bytes of a target, from its server or from the cache on disk, pin its version: tag and size. From then on,
bytes of another version are an error. If bytes come without tag and size (SFTP), the attributes of the target are
requested once a second.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from typing import TypeAlias

import trio

from zarrfs.cache.block_request import BlockRequest
from zarrfs.concurrency.lru import LRU
from zarrfs.concurrency.single_flight import SingleFlight
from zarrfs.errors import ReadError, TargetChanged
from zarrfs.net.request_queue import RequestQueue
from zarrfs.net.responses import Entry, Fetched
from zarrfs.net.versions import TargetVersion, differs, note_unversioned, tag_of, version_from, version_of

log = logging.getLogger(__name__)

_PINS = 65_536  # targets whose version is remembered
_FRESH = 1.0  # seconds for which a target is assumed unchanged, if its bytes come without a version

Target: TypeAlias = tuple[int, str]  # BlockRequest.at


@dataclasses.dataclass(slots=True)
class _Pin:
    """The version of a target, as far as it is known. It is never replaced by another one."""

    tag: str | None
    size: int | None
    recorded: bool = False  # on disk

    @property
    def version(self) -> TargetVersion | None:
        return version_from(self.tag, self.size)


class Pins:
    """The pinned versions of many targets."""

    def __init__(self, queue: RequestQueue) -> None:
        self.record: Callable[[BlockRequest, TargetVersion], None] | None = None  # set by a cache on disk
        self._queue = queue
        self._pins: LRU[Target, _Pin] = LRU(_PINS)
        self._shown: LRU[Target, int] = LRU(_PINS)  # sizes that readers were shown before any bytes came
        # when attributes were last requested (trio's clock), and the answer: None if the request failed
        self._answers: LRU[Target, tuple[float, Entry | None]] = LRU(_PINS)
        self._asking: SingleFlight[Target] = SingleFlight()

    def version(self, wanted: BlockRequest) -> TargetVersion | None:
        """Return the expected or pinned version; None if it is not known."""
        if wanted.expected is not None:
            return version_of(wanted.expected)
        pin = self._pins.use(wanted.at)
        return None if pin is None else pin.version

    def has_no_version(self, wanted: BlockRequest) -> bool:
        """Return whether bytes come, or the first ones came, without a version: they cannot be kept on disk."""
        known = wanted.expected is not None or wanted.at in self._pins
        return not wanted.system.sends_versions or (known and self.version(wanted) is None)

    def put(self, target: Target, version: TargetVersion) -> TargetVersion | None:
        """Pin the version of bytes from the disk, unless the target has a pin; return the pinned version."""
        return (self._pins.get(target) or self._pins.put(target, _Pin(*version, recorded=True))).version

    def size(self, target: Target) -> int | None:
        """Return the size of a target in bytes; None if no response has contained it."""
        pin = self._pins.get(target)
        return None if pin is None else pin.size

    def note_size(self, wanted: BlockRequest, size: int) -> None:
        """Note the size that readers are shown. Raise TargetChanged if the pinned version has another one."""
        pinned = self.size(wanted.at)
        if pinned not in (None, size):
            raise _changed(wanted, f"has {size} bytes, and had {pinned} when it was first read")
        self._shown.put(wanted.at, size)

    def is_longer(self, target: Target, size: int | None) -> bool:
        """Return whether a version of `size` bytes is longer than readers were shown: they would read only a part."""
        return size is not None and size > self._shown.get(target, size)

    def check(self, wanted: BlockRequest, found: Fetched) -> None:
        """Compare the version of received bytes with the expected or pinned one. If there is none, pin it.

        Raise TargetChanged if they are of another version.
        """
        expected = wanted.expected
        if expected is not None:
            if differs(expected.tag, expected.size, found):
                raise _changed(wanted, "has changed since it was first read")
            return
        if self.size(wanted.at) is None and self.is_longer(wanted.at, found.total):
            raise _changed(wanted, "has grown since its size was shown")
        pin = self._pins.get(wanted.at)
        if pin is None:
            pin = self._pins.put(wanted.at, _Pin(found.tag, found.total))
            # an answer without bytes may be one of status 416, which has no ETag
            if found.tag is None and found.data and not (wanted.system.immutable or _lacks_version(wanted, found)):
                note_unversioned(wanted.system.host(wanted.path), wanted.system.shown(wanted.path))
        elif differs(pin.tag, pin.size, found):
            version = version_from(found.tag, found.total)
            if self.record is not None and version is not None:
                self.record(wanted, version)  # the next process that opens the target starts with it
            raise _changed(wanted, "has changed since it was first read")
        pin.size = found.total if pin.size is None else pin.size
        pin.tag = pin.tag or found.tag  # a Last-Modified that was less than a second old then was no tag
        whole = len(found.data) == found.total  # then the block itself records its version
        if self.record is not None and not (pin.recorded or whole or found.tag is None) and pin.version is not None:
            pin.recorded = True
            self.record(wanted, pin.version)

    async def confirm_recent(self, wanted: BlockRequest, found: Fetched) -> None:
        """If bytes that check() has accepted show no version, check the target's attributes. Raise TargetChanged."""
        if wanted.expected is None and _lacks_version(wanted, found):
            await self.confirm(wanted, trio.current_time() - _FRESH)

    async def confirm(self, wanted: BlockRequest, since: float) -> bool:
        """Return whether attributes that were requested at `since` (trio's clock) or later have the pinned version.

        If there is no pin, pin it. Return False also if they have no version, or if the request fails. Raise
        TargetChanged.
        """
        entry = await self._attributes(wanted, since)
        if entry is None:
            return False
        self.check(wanted, Fetched(b"", tag_of(entry), entry.size))
        version = self.version(wanted)
        if tag_of(entry) is None and version is None and not wanted.system.immutable:
            note_unversioned(wanted.system.host(wanted.path), wanted.system.shown(wanted.path))
        return version is not None and version == version_of(entry)

    async def _attributes(self, wanted: BlockRequest, since: float) -> Entry | None:
        """Return attributes that were requested at `since` or later; None if the request failed.

        Simultaneous callers share a request.
        """
        system, path = wanted.system, wanted.path

        def answer() -> tuple[float, Entry | None] | None:
            found = self._answers.get(wanted.at)
            return None if found is None or found[0] < since else found

        async def request() -> tuple[float, Entry | None]:
            began, entry = trio.current_time(), None
            try:
                entry = await self._queue.call(system, path, lambda: system.stat(path))
            except ReadError as exc:
                log.debug("%s", exc)
            return self._answers.put(wanted.at, (began, entry))

        found = answer()
        if found is None:
            found = await self._asking.run(wanted.at, request, answer)
        return found[1]


def _changed(wanted: BlockRequest, rule: str) -> TargetChanged:
    return TargetChanged(wanted.system.shown(wanted.path), rule)


def _lacks_version(wanted: BlockRequest, found: Fetched) -> bool:
    """Return whether the version of received bytes can be found only by requesting attributes."""
    known = found.tag is not None or found.total is not None
    refused = wanted.system.sends_versions and not found.data  # beyond the end: such a response has no version
    return not (known or refused or wanted.system.immutable)

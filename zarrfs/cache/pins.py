"""The pinned versions of the targets that are read.

The first bytes received of a target determine its version, by tag and size. From then on, bytes of another version are
an error. If bytes come without tag and size (SFTP, some object stores), the attributes of the target are requested:
once a second, and before and after bytes that are cached on disk.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable
from typing import TypeAlias

import trio

from zarrfs.cache.block_request import BlockRequest
from zarrfs.concurrency.lru import LRU
from zarrfs.concurrency.single_flight import SingleFlight
from zarrfs.errors import ReadError, TargetChanged
from zarrfs.net.request_queue import RequestQueue
from zarrfs.net.responses import Entry, Fetched
from zarrfs.net.versions import Pin, TargetVersion, differs, note_unversioned, tag_of, version_from, version_of

log = logging.getLogger(__name__)

_PINS = 65_536  # targets whose version is remembered
_STATED = 1024  # targets whose attributes are remembered for tasks that wait for them
_FRESH = 1.0  # seconds for which a target is assumed unchanged, if its bytes come without a version

Target: TypeAlias = tuple[int, str]  # BlockRequest.at


class Pins:
    """The pinned versions of many targets; `forget` drops the blocks of a target that has changed from the cache."""

    def __init__(self, queue: RequestQueue, forget: Callable[[Target], None]) -> None:
        self.remember: Callable[[BlockRequest, TargetVersion], None] | None = None  # set by a cache on disk
        self._queue, self._forget = queue, forget
        self._pins: LRU[Target, Pin] = LRU(_PINS)
        self._lock = threading.Lock()  # held while a pin is added
        self._shown: LRU[Target, int] = LRU(_PINS)  # sizes that readers were shown before any bytes came
        self.changes = 0  # pinned versions that were replaced by others
        self._asking: SingleFlight[Target] = SingleFlight()
        self._stating: SingleFlight[Target] = SingleFlight()
        self._stated: LRU[Target, tuple[float, Entry]] = LRU(_STATED)  # when is_still() asked last; the answer

    def get(self, target: Target) -> Pin | None:
        """Return the pin of a target; None if it has none."""
        return self._pins.get(target)

    def put(self, target: Target, pin: Pin) -> Pin:
        """Pin a version, unless the target has a pin; return its pin. Threads that read the disk call this, too."""
        with self._lock:
            return self._pins.get(target) or self._pins.put(target, pin)

    def pop(self, target: Target) -> Pin | None:
        """Remove and return the pin of a target."""
        return self._pins.pop(target, None)

    def note_size(self, wanted: BlockRequest, size: int) -> None:
        """Note the size that readers are shown. Raise TargetChanged if the pinned version has another one."""
        pinned = self.size(wanted.at)
        if pinned not in (None, size):
            rule = f"has {size} bytes, and had {pinned} when it was first read"
            raise TargetChanged(wanted.system.shown(wanted.path), rule)
        self._shown.put(wanted.at, size)

    def is_longer(self, target: Target, size: int | None) -> bool:
        """Return whether a version of `size` bytes is longer than readers were shown: they would read only a part."""
        return size is not None and size > self._shown.get(target, size)

    def size(self, target: Target) -> int | None:
        """Return the size of a target in bytes; None if no response has contained it."""
        pin = self._pins.get(target)
        return None if pin is None else pin.size

    def check(self, wanted: BlockRequest, found: Fetched) -> None:
        """Compare the version of received bytes with the expected or pinned one. If there is none, pin it.

        Raise TargetChanged if they are of another version.
        """
        expected = wanted.expected
        if expected is not None:
            if differs(expected.tag, expected.size, found):
                raise TargetChanged(wanted.system.shown(wanted.path), "has changed since it was first read")
            return
        new = Pin(found.tag, found.total, head=None if wanted.start else found._replace(data=b""))
        if self.size(wanted.at) is None:
            self._check_growth(wanted, found)
        pin = self.put(wanted.at, new)
        if differs(pin.tag, pin.size, found):
            self._change(wanted, found, pin)
            with self._lock:
                pin = self._pins.put(wanted.at, new)
        if pin is new:
            blind = self.is_blind(wanted, found)  # then its attributes are requested next
            # an answer without bytes may be one of status 416, which has no ETag
            if found.tag is None and found.data and not (wanted.system.immutable or blind):
                note_unversioned(wanted.system.host(wanted.path), wanted.system.shown(wanted.path))
        else:
            pin.certain = True
            pin.size = found.total if pin.size is None else pin.size
            pin.tag = pin.tag or found.tag  # a Last-Modified that was less than a second old then was no tag

    def _check_growth(self, wanted: BlockRequest, found: Fetched) -> None:
        if self.is_longer(wanted.at, found.total):
            raise TargetChanged(wanted.system.shown(wanted.path), "has grown since its size was shown")

    def _change(self, wanted: BlockRequest, found: Fetched, pin: Pin) -> None:
        """Raise TargetChanged, unless the pin is that of blocks on the disk of which no reader has got bytes yet."""
        version = version_from(found.tag, found.total)
        if self.remember is not None and version is not None:  # the next process that opens the target starts with it
            self.remember(wanted, version)
        if pin.certain:
            raise TargetChanged(wanted.system.shown(wanted.path), "has changed since it was first read")
        self._check_growth(wanted, found)
        self.changes += 1
        log.info("%s: is newer than the version in cache_dir=", wanted.system.shown(wanted.path))
        self._forget(wanted.at)

    async def begin(self, wanted: BlockRequest) -> None:
        """Request the version of a target before bytes that come without one, if they are to be cached on disk.

        Raise TargetChanged.
        """
        if self.remember is None or wanted.expected is not None or wanted.system.sends_versions:
            return
        pin = self._pins.get(wanted.at)
        if pin is None or (pin.version is None and _is_due(pin)):
            await self.ask(wanted)

    async def version(
        self, wanted: BlockRequest, found: Fetched, before: TargetVersion | None
    ) -> TargetVersion | None:  # fmt: skip
        """Return the version of bytes that check() has accepted; None if it is unknown. Raise TargetChanged.

        `before`: the pinned version when they were requested. A version that is learned later may be that of other
        bytes.
        """
        if found.tag is not None or wanted.expected is not None:
            pin = self._pins.get(wanted.at)
            return None if pin is None else pin.version
        return before if await self._is_same(wanted, found) else None

    async def is_still(self, wanted: BlockRequest, found: Fetched) -> bool:
        """Return whether bytes have the expected version, as far as attributes show it that are requested afterwards.

        True if no version is expected, or if it came with the bytes, because check() has then compared it.
        """
        system, path, expected = wanted.system, wanted.path, wanted.expected
        if expected is None or found.tag is not None or system.immutable or system.sends_versions:
            return True
        if version_of(expected) is None:
            return False
        began = trio.current_time()

        async def stat() -> Entry:
            asked = trio.current_time()
            entry: Entry = await self._queue.call(system, path, lambda: system.stat(path))
            self._stated.put(wanted.at, (asked, entry))
            return entry

        def answered() -> Entry | None:
            known = self._stated.get(wanted.at)
            return None if known is None or known[0] < began else known[1]

        try:  # blocks that arrive at the same time share a request that begins after they have arrived
            entry = await self._stating.run(wanted.at, stat, answered)
        except ReadError as exc:
            log.debug("%s", exc)
            return False
        # some listings have no tags
        return version_of(expected) == version_of(entry if expected.tag else entry._replace(tag=None))

    def is_blind(self, wanted: BlockRequest, found: Fetched) -> bool:
        """Return whether the version of received bytes can be found only by requesting attributes."""
        known = found.tag is not None or found.total is not None or wanted.expected is not None
        refused = wanted.system.sends_versions and not found.data  # beyond the end: such a response has no version
        return not (known or refused or wanted.system.immutable)

    async def _is_same(self, wanted: BlockRequest, found: Fetched) -> bool:
        """Return whether the target still has the pinned version, after bytes without a tag. Raise TargetChanged."""
        pin = self._pins.get(wanted.at)
        on_disk = self.remember is not None
        if not self.is_blind(wanted, found):  # its size comes with the bytes, or it never changes
            ask = on_disk and (pin is None or pin.asked is None)
        else:
            ask = pin is None or (on_disk and pin.kept) or _is_due(pin)
        if ask:
            return await self.ask(wanted)
        return pin is not None and pin.agreed

    async def ask(self, wanted: BlockRequest) -> bool:
        """Request a target's attributes, and compare their version with the pin, or pin it.

        Return whether they have the pinned version; False also if they have none, or if the request fails. Raise
        TargetChanged. Simultaneous callers share a request that begins after their calls.
        """
        began = trio.current_time()

        def answered() -> bool | None:
            pin = self._pins.get(wanted.at)
            return None if pin is None or pin.asked is None or pin.asked < began else pin.agreed

        try:
            return await self._asking.run(wanted.at, functools.partial(self._stat, wanted), answered)
        except TargetChanged:
            raise
        except ReadError as exc:
            log.debug("%s", exc)
        pin = self._pins.get(wanted.at)
        if pin is not None:
            pin.asked, pin.agreed = trio.current_time(), False
        return False

    async def _stat(self, wanted: BlockRequest) -> bool:
        """Make the request of ask(). Raise ReadError if it fails."""
        system, path, began = wanted.system, wanted.path, trio.current_time()
        entry: Entry = await self._queue.call(system, path, lambda: system.stat(path))
        version = version_of(entry)
        self.check(wanted, Fetched(b"", tag_of(entry), entry.size, mtime_ns=entry.mtime_ns, html=entry.html))
        pin = self._pins.get(wanted.at)
        if pin is None:
            return False
        if pin.tag is None and not system.immutable:
            note_unversioned(system.host(path), system.shown(path))
        pin.asked, pin.agreed = began, version is not None and version == pin.version
        if version is not None and pin.agreed:
            self.note(wanted, pin, version)
        return pin.agreed

    def note(self, wanted: BlockRequest, pin: Pin, version: TargetVersion) -> None:
        """Record the version of a pin in the cache on disk, once."""
        if self.remember is not None and not pin.noted:
            pin.noted = True
            self.remember(wanted, version)


def _is_due(pin: Pin) -> bool:
    return pin.asked is None or trio.current_time() >= pin.asked + _FRESH

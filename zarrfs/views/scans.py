"""Detection of sequential readers of a flat array, and of the chunks they need next."""

from __future__ import annotations

import math
from collections.abc import Sequence

_SLACK = 4 << 20  # bytes of tolerance, because the kernel's read-ahead requests arrive in any order
_MOST = 8  # readers of one array to remember


class Scan:
    """One sequential reader. Chunks are numbered in C order of the grid."""

    def __init__(self, position: int) -> None:
        self.position = position  # bytes
        self.chunk = 0  # number of the chunk that holds the byte at `position`
        self.runs = 0  # reads that continued an earlier one
        self.band = -1  # of the last read
        self.next = self.goal = 0  # decode the chunks [next, goal) ahead
        self.fetched = 0  # chunks before this were requested from a remote store
        self.under_way = 0  # chunks being decoded ahead
        self.fetching = False  # a request to a remote store is under way


class Scans:
    """The sequential readers of one array, recognised by the ranges they read.

    A band is the chunks with the same index in the first dimension. A reader in C order needs all chunks of a band
    again and again until it reaches the next band. The read-ahead window covers the same share of the next band as was
    read of the current one, so that no reader waits for a whole band, and at most `room` chunks are in memory.
    """

    def __init__(
        self, shape: tuple[int, ...], chunks: tuple[int, ...], itemsize: int, room: int, ahead: int
    ) -> None:
        """`room`: decoded chunks that the cache can hold; `ahead`: chunks to decode ahead in any case."""
        self._strides = [itemsize * math.prod(shape[at + 1 :]) for at in range(len(shape))]  # bytes
        self._chunks = chunks
        self._counts = [-(-extent // step) for extent, step in zip(shape, chunks, strict=True)]
        self.width = math.prod(self._counts[1:])  # chunks of a band
        self._band_bytes = self._strides[0] * chunks[0] if shape else itemsize
        self._room, self._ahead = room, ahead
        self._scans: list[Scan] = []  # most recently used last

    @property
    def fits(self) -> bool:
        """Return whether the cache can hold a whole band."""
        return self.width <= self._room

    def read(self, start: int, stop: int) -> Scan | None:
        """Record a read of the bytes [start, stop); return the scan that it continues, or None if it begins one."""
        for scan in self._scans:
            if scan.position - _SLACK <= start <= scan.position + _SLACK and (start == scan.position or scan.runs):
                break
        else:
            self._scans.append(Scan(stop))
            del self._scans[:-_MOST]
            return None
        self._scans.remove(scan)
        self._scans.append(scan)
        scan.runs += 1
        scan.position = max(scan.position, stop)
        self._aim(scan)
        return scan

    def passed(self, scan: Scan) -> Sequence[int]:
        """Return the chunks of a band that a scan has left since the last call; none if bands do not fit the cache."""
        band, scan.band = scan.band, max(scan.band, scan.position // self._band_bytes)
        return range(band * self.width, (band + 1) * self.width) if self.fits and 0 <= band < scan.band else ()

    def _aim(self, scan: Scan) -> None:
        scan.chunk = self._number(scan.position)
        if not self.fits:
            return
        band, within = divmod(scan.position, self._band_bytes)
        first = band * self.width
        share = -(-within * self.width // self._band_bytes)
        goal = max(scan.chunk + 1 + self._ahead, first + self.width + share)
        scan.goal = min(goal, first + self._room - self._ahead, math.prod(self._counts))
        scan.next = max(scan.next, first)

    def _number(self, position: int) -> int:
        number = 0
        for stride, step, count in zip(self._strides, self._chunks, self._counts, strict=True):
            at, position = divmod(position, stride)
            number = number * count + min(at // step, count - 1)
        return number

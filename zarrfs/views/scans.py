"""Which chunks a reader that goes through a flat array from its start to its end will want next."""

from __future__ import annotations

import math
from collections.abc import Sequence

_SLACK = 4 << 20  # bytes: requests of the kernel's read-ahead come in any order
_MOST = 8  # readers of one array that are remembered


class Scan:
    """One reader. Chunks are told by their numbers in the grid, C order."""

    def __init__(self, position: int) -> None:
        self.position = position  # bytes
        self.chunk = 0  # that has the byte at `position`, were it in the first row of its band
        self.runs = 0  # reads that went on where others had ended
        self.band = -1  # that the last read was in
        self.next = self.goal = 0  # chunks [next, goal) are to be decoded ahead
        self.fetched = 0  # chunks before this were asked of a remote store
        self.under_way = 0  # chunks that are being decoded ahead
        self.fetching = False  # whether some are being asked for


class Scans:
    """The readers of one array, told by the ranges that are read.

    A band is the chunks side by side along all dimensions but the first: a reader in C order wants all of them at
    once, again and again, until it comes to the next band. What is decoded ahead is that part of the next band that it
    has read of this one, so that no band is waited for, and no more than `room` chunks are held.
    """

    def __init__(
        self, shape: tuple[int, ...], chunks: tuple[int, ...], itemsize: int, room: int, ahead: int
    ) -> None:
        """`room`: decoded chunks that may be kept; `ahead`: chunks that should be under way in any case."""
        self._strides = [itemsize * math.prod(shape[at + 1 :]) for at in range(len(shape))]  # bytes
        self._chunks = chunks
        self._counts = [-(-extent // step) for extent, step in zip(shape, chunks, strict=True)]
        self.width = math.prod(self._counts[1:])  # chunks of a band
        self._band_bytes = self._strides[0] * chunks[0] if shape else itemsize
        self._room, self._ahead = room, ahead
        self._scans: list[Scan] = []  # used last at the end

    @property
    def fits(self) -> bool:
        """Whether a band can be kept while it is read."""
        return self.width <= self._room

    def read(self, start: int, stop: int) -> Scan | None:
        """Note a read of the bytes [start, stop); the scan that it belongs to, once it is one."""
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
        """The chunks of the band that a scan has left since this was asked last; none where a band does not fit."""
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

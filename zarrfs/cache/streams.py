"""Streams: readers that read in order, and how far to fetch ahead of each.

A stream goes through one large value, or through a target whose values are read in the order of their offsets; the
names of keys need not show that order.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable

from zarrfs.cache.memory import Ahead
from zarrfs.concurrency.lru import LRU

_SUBJECTS = 256  # values or targets whose readers are remembered
_READERS = 8  # readers of one value or target
_GROWTH = 16  # the window is this many times the bytes that its reader has read in order


@dataclasses.dataclass(slots=True)
class Stream:
    """One reader of a value or a target; offsets in bytes."""

    began: int  # start of its first read
    at: int  # end of the furthest read
    reads: int = 1  # in order
    window: int = 0  # bytes to fetch ahead of it; 0: too few reads, or another stream began after it
    started: int = 0  # end of the last block that was started
    blocks: list[tuple[int, Ahead]] = dataclasses.field(default_factory=list)  # (end, block), by end

    def drop(self) -> None:
        """Drop the blocks that are fetched ahead; a fetch is cancelled unless a reader waits for it."""
        for _, block in self.blocks:
            block.drop()
        self.blocks.clear()


class Streams:
    """The readers of many values or targets.

    `slack`: bytes by which the reads of one reader may be out of order, or skip ahead. `reads`: read-ahead begins with
    this read in order. `first` and `most`: bytes of the smallest and the largest window.
    """

    def __init__(self, slack: int, reads: int) -> None:
        self._slack, self._reads = slack, reads
        self.first = self.most = 0
        self._streams: LRU[Hashable, list[Stream]] = LRU(_SUBJECTS, _drop)

    def read(self, subject: Hashable, start: int, stop: int) -> Stream:
        """Return the reader of [start, stop); its window grows as it continues, and is 0 after a seek."""
        streams = self._streams.use(subject)
        if streams is None:
            streams = self._streams.put(subject, [])
        for stream in reversed(streams):
            if -self._slack <= start - stream.at <= self._slack:
                self._go_on(stream, start, stop)
                return stream
        return self._begin(streams, start, stop)

    def _go_on(self, stream: Stream, start: int, stop: int) -> None:
        stream.at, stream.reads = max(stream.at, stop), stream.reads + 1
        if stream.reads >= self._reads:
            stream.window = min(max(self.first, stream.window, _GROWTH * (stream.at - stream.began)), self.most)
        # keep the blocks up to `stop`: a reader of their bytes may not wait for them yet
        while stream.blocks and stream.blocks[0][0] <= start - self._slack:
            stream.blocks.pop(0)[1].drop()

    def _begin(self, streams: list[Stream], start: int, stop: int) -> Stream:
        """Begin a stream, after a seek or for another reader. Cancel the read-ahead of the stream begun before it."""
        if streams:
            streams[-1].drop()
            streams[-1].window = streams[-1].started = 0
        stream = Stream(start, stop)
        streams.append(stream)
        if len(streams) > _READERS:
            streams.pop(0).drop()
        return stream


def _drop(streams: list[Stream]) -> None:
    for stream in streams:
        stream.drop()

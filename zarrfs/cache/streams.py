"""Streams: sequential readers of large values, and how far to fetch ahead of each."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable

from zarrfs.cache.memory import Ahead
from zarrfs.concurrency.lru import LRU

_VALUES = 256  # values whose readers are remembered
_READERS = 8  # readers of one value
_TRUST = 16  # the window is this many times the bytes that its reader has read in order
_SLACK = 4 << 20  # bytes by which the requests of one reader may be out of order, or skip ahead


@dataclasses.dataclass(slots=True)
class Stream:
    """One reader of a value; offsets in bytes."""

    began: int  # start of its first read
    at: int  # end of the furthest read
    window: int = 0  # bytes to fetch ahead of it; 0: it has read only once, or another stream began after it
    started: int = 0  # end of the last part that was started
    parts: list[tuple[int, Ahead]] = dataclasses.field(default_factory=list)  # (end, part), by end

    def drop(self) -> None:
        """Drop the parts that are fetched ahead; a fetch is cancelled unless a reader waits for it."""
        for _, part in self.parts:
            part.drop()
        self.parts.clear()


class Streams:
    """The readers of many values. `first` and `most`: bytes of the smallest and the largest window."""

    def __init__(self, first: int, most: int) -> None:
        self.first, self.most = first, most
        self._values: LRU[Hashable, list[Stream]] = LRU(_VALUES, _drop)

    def read(self, value: Hashable, start: int, stop: int) -> Stream:
        """Return the reader of [start, stop); its window grows as it continues, and is 0 after a seek."""
        streams = self._values.use(value)
        if streams is None:
            streams = self._values.put(value, [])
        for stream in reversed(streams):
            if -_SLACK <= start - stream.at <= _SLACK:
                self._go_on(stream, start, stop)
                return stream
        return self._begin(streams, start, stop)

    def _go_on(self, stream: Stream, start: int, stop: int) -> None:
        stream.at = max(stream.at, stop)
        stream.window = min(max(self.first, stream.window, _TRUST * (stream.at - stream.began)), self.most)
        # Drop no parts up to `stop`: a reader of their bytes, in this request or an earlier one, may not wait for them
        # yet.
        while stream.parts and stream.parts[0][0] <= start - _SLACK:
            stream.parts.pop(0)[1].drop()

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

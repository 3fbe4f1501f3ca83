"""Ranges: requests to servers: neighbours fetched as one, a bounded number in flight, repeated while that may help.

What is wanted waits in a queue for its server. When a request may be sent, the first want takes its neighbours
with it: ranges of the same target with at most coalesce_gap= between them, up to coalesce_size= in all. Readers
go before what is fetched ahead of them.
"""

from __future__ import annotations

import functools
import heapq
import logging
import random
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Any

import trio

from zarrfs.concurrency.tasks import in_background
from zarrfs.config.options import Options
from zarrfs.errors import ReadError
from zarrfs.net.answers import Fetched, Transient
from zarrfs.net.meters import Latency
from zarrfs.net.systems import System

log = logging.getLogger("zarrfs.transfer")

_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 10.0  # seconds between attempts, doubled each time
TINY = 64 << 10  # bytes: wants below are not worth a file each
_NAMED = 32  # servers that are told of, the most asked ones: an extended attribute has 64 KiB
_SMALL = 1 << 20  # bytes: while requests may be sent, wants are made one only up to this


class _Want:
    """Somebody wants a range, or a request of another kind made: `request` then makes it."""

    __slots__ = ("ahead", "done", "error", "found", "path", "request", "start", "stop", "system", "task")

    def __init__(self, system: System, path: str, start: int, stop: int, ahead: bool) -> None:
        self.system, self.path, self.start, self.stop, self.ahead = system, path, start, stop, ahead
        self.request: Callable[[], Awaitable[Any]] | None = None
        self.done = trio.Event()
        self.found: Any = None
        self.error: Exception | None = None
        self.task: _Request | None = None

    @property
    def range(self) -> tuple[int, str, int, int]:
        """The key of the range in flight."""
        return id(self.system), self.path, self.start, self.stop


class _Request:
    """A request in flight, and who waits for it."""

    __slots__ = ("scope", "wants")

    def __init__(self, wants: list[_Want]) -> None:
        self.wants = wants
        self.scope = trio.CancelScope()


class _Host:
    """The requests that wait for one server."""

    __slots__ = ("asked", "flying", "flying_bytes", "requests", "waiting", "waiting_ahead")

    def __init__(self) -> None:
        self.waiting: OrderedDict[_Want, None] = OrderedDict()
        self.waiting_ahead: OrderedDict[_Want, None] = OrderedDict()
        self.flying = self.flying_bytes = self.requests = 0
        self.asked = False  # somebody will look at the queue soon


class Ranges:
    """Fetches ranges for one RemoteFiles. `on_merged` is given the ranges that were fetched for many small wants."""

    def __init__(
        self, options: Options, on_merged: Callable[[System, str, int, Fetched], None] = lambda *found: None
    ) -> None:
        self._options, self._on_merged = options, on_merged
        self._hosts: dict[str, _Host] = {}
        self._requests = self._repeated = self._failed = self._bytes = self._merged = 0
        self._latency = Latency()
        self.sent_ahead: set[tuple[int, str, int, int]] = set()  # small ranges under way that came ahead of readers

    async def fetch(self, system: System, path: str, start: int, stop: int, ahead: bool = False) -> Fetched:
        """The bytes [start, stop) of a target, cut at its end. ReadError; cancellation takes nothing from others.

        `ahead`: nobody waits for them yet, so that more of the kind may come at once, and readers go first.
        """
        host = self._host(system, path)
        want = _Want(system, path, start, stop, ahead)
        found: Fetched
        if ahead or host.waiting or not self._may_send(host, want):
            found = await self._wait(host, want)
            return found
        host.flying += 1  # nothing to wait for, and nobody to take along: no task of its own
        host.flying_bytes += stop - start
        try:
            await self._fetch(host, [want])
        finally:
            host.flying -= 1
            host.flying_bytes -= stop - start
            self._send(host)
        found = want.found
        return found

    async def call(self, system: System, path: str, request: Callable[[], Awaitable[Any]]) -> Any:
        """Send a request of another kind, with the bounds and retries of ranges, and return its answer."""
        want = _Want(system, path, 0, 0, False)
        want.request = request
        return await self._wait(self._host(system, path), want)

    def adjust(self, options: Options) -> None:
        """Take over what may change of the options: what waits may be sent now."""
        self._options = options
        for host in self._hosts.values():
            self._send(host)

    def usual(self) -> float | None:
        """Seconds that nine of ten requests have taken at most; None before the first one."""
        return self._latency.quantiles().get("p90")

    def stats(self) -> dict[str, Any]:
        """Counters, for the log."""
        hosts = self._hosts.items()
        named = heapq.nlargest(_NAMED, hosts, key=lambda item: item[1].requests)
        return {
            "requests": self._requests, "repeated": self._repeated, "failed": self._failed, "bytes": self._bytes,
            "merged": self._merged, "in_flight": sum(host.flying for _, host in hosts),
            "in_flight_bytes": sum(host.flying_bytes for _, host in hosts),
            "waiting": sum(len(host.waiting) + len(host.waiting_ahead) for _, host in hosts),
            "latency": self._latency.quantiles(), "latency_histogram": self._latency.histogram(),
            "latency_sum": self._latency.total, "latency_count": self._latency.count,
            "hosts": {name: {"requests": host.requests, "in_flight": host.flying} for name, host in named},
        }  # fmt: skip

    # -- the queue

    def _host(self, system: System, path: str) -> _Host:
        name = system.host(path)
        host = self._hosts.get(name)
        if host is None:
            host = self._hosts[name] = _Host()
        return host

    def _may_send(self, host: _Host, want: _Want) -> bool:
        if host.flying >= self._options.host_requests:
            return False
        return not host.flying or host.flying_bytes + want.stop - want.start <= self._options.host_bytes

    async def _wait(self, host: _Host, want: _Want) -> Any:
        (host.waiting_ahead if want.ahead else host.waiting)[want] = None
        if not want.ahead:
            self._send(host)
        elif not host.asked:
            host.asked = True
            in_background(self._send_soon, host)
        try:
            await want.done.wait()
        except BaseException:
            self._leave(host, want)
            raise
        if want.error is not None:
            raise want.error.with_traceback(None)
        return want.found

    async def _send_soon(self, host: _Host) -> None:
        """Let whoever wants something at the same time say so first: neighbours make one request."""
        for _ in range(2):
            await trio.lowlevel.checkpoint()
        host.asked = False
        self._send(host)

    def _leave(self, host: _Host, want: _Want) -> None:
        host.waiting.pop(want, None)
        host.waiting_ahead.pop(want, None)
        if want.task is not None:
            want.task.wants.remove(want)
            if not want.task.wants:
                want.task.scope.cancel()

    def _send(self, host: _Host) -> None:
        """Send what may be sent."""
        while host.waiting or host.waiting_ahead:
            first = next(iter(host.waiting or host.waiting_ahead))
            if not self._may_send(host, first):
                return
            wants = self._neighbours(host, first)
            for want in wants:
                host.waiting.pop(want, None)
                host.waiting_ahead.pop(want, None)
            request = _Request(wants)
            for want in wants:
                want.task = request
                if want.ahead and want.stop - want.start <= _SMALL:
                    self.sent_ahead.add(want.range)
            size = max(want.stop for want in wants) - min(want.start for want in wants)
            host.flying += 1
            host.flying_bytes += size
            in_background(self._fly, host, request, size)

    def _neighbours(self, host: _Host, first: _Want) -> list[_Want]:
        """`first` and the wants that go with it, by their place in the target; if nobody waits, from there on."""
        if first.request is not None or len(host.waiting) + len(host.waiting_ahead) == 1:
            return [first]
        beside = [
            want for queue in (host.waiting, host.waiting_ahead) for want in queue
            if want.path == first.path and want.system is first.system and want.request is None
        ]  # fmt: skip
        beside.sort(key=lambda want: (want.start, want.stop))
        if first.ahead:
            first = beside[0]
        most = self._options.coalesce_size
        if host.flying + len(beside) <= self._options.host_requests:
            most = min(most, _SMALL)  # nobody has to wait: many requests are faster than one
        at = beside.index(first)
        low = high = at
        start, stop = first.start, first.stop
        while high + 1 < len(beside):
            near = beside[high + 1]
            if near.start - stop > self._options.coalesce_gap or max(stop, near.stop) - start > most:
                break
            high, stop = high + 1, max(stop, near.stop)
        while low > 0:
            near = beside[low - 1]
            if start - near.stop > self._options.coalesce_gap or stop - min(start, near.start) > most:
                break
            low, start, stop = low - 1, min(start, near.start), max(stop, near.stop)
        return beside[low : high + 1]

    # -- requests

    async def _fly(self, host: _Host, request: _Request, size: int) -> None:
        wants = list(request.wants)  # none: all have left before this was begun
        with request.scope:
            try:
                if wants and wants[0].request is not None:
                    wants[0].found = await self._attempts(host, wants[0], 0, 0, wants[0].request)
                elif wants:
                    await self._fetch(host, wants)
            except Exception as exc:
                for want in wants:
                    want.error = exc
        host.flying -= 1
        host.flying_bytes -= size
        for want in wants:
            want.task = None
            self.sent_ahead.discard(want.range)
            want.done.set()
        self._send(host)

    async def _fetch(self, host: _Host, wants: list[_Want]) -> None:
        """Fetch the range of all `wants`, and give each its own."""
        first = wants[0]
        system, path, start = first.system, first.path, first.start
        stop = max(want.stop for want in wants)
        request = functools.partial(self._once, system, path, start, stop)
        found: Fetched = await self._attempts(host, first, start, stop - start, request)
        if len(wants) == 1:
            first.found = found
            return
        self._merged += len(wants) - 1
        data, tiny = memoryview(found.data), False
        for want in wants:
            # a copy: a slice would keep the whole range in memory for as long as one of them is kept
            piece = bytes(data[want.start - start : want.stop - start])
            want.found = found._replace(data=piece, part=len(piece) < TINY)
            tiny = tiny or want.found.part
        if tiny:
            self._on_merged(system, path, start, found)

    async def _once(self, system: System, path: str, start: int, stop: int) -> Fetched:
        """One attempt at [start, stop); bytes that are missing are either beyond the end or were cut off."""
        found = await system.fetch(path, start, stop)
        self._bytes += len(found.data)
        if found.total is not None and len(found.data) < min(stop, found.total) - start:
            raise Transient("the answer was cut off")
        if len(found.data) > stop - start:
            raise ReadError(system.shown(path), "the server sent more than it was asked for")
        return found

    async def _attempts(
        self, host: _Host, want: _Want, start: int, length: int, request: Callable[[], Awaitable[Any]]
    ) -> Any:
        """Send `request`, which is for [start, start + length), and retry while its failures may be transient."""
        where, pause, retries = want.system.shown(want.path), _FIRST_PAUSE, self._options.retries
        for attempt in range(1, retries + 2):
            self._requests += 1
            host.requests += 1
            began = time.perf_counter()
            try:
                found = await request()
            except Transient as exc:
                failure = exc
            except ReadError as exc:
                self._failed += 1
                exc.about(where, start, length, attempt)
                raise
            else:
                self._latency.add(time.perf_counter() - began)
                return found
            if attempt <= retries:
                self._repeated += 1
                after = max(failure.after, pause * random.uniform(0.5, 1.5))
                _tell_attempt(where, start, length, attempt, failure.reason, after)
                await trio.sleep(after)
                pause = min(2 * pause, _LONGEST_PAUSE)
        self._failed += 1
        times = f" ({retries + 1} attempts)" if retries else ""
        error = ReadError(where, failure.reason + times)
        error.about(where, start, length, retries + 1)
        raise error from failure


def _tell_attempt(where: str, start: int, length: int, attempt: int, reason: str, after: float) -> None:
    if log.isEnabledFor(logging.DEBUG):
        extent = f" [{start}, +{length}]" if length else ""
        facts = {"url": where, "offset": start, "length": length, "attempt": attempt}
        log.debug("%s%s: attempt %d: %s: to be repeated in %.1f s", where, extent, attempt, reason, after, extra={
            "facts": facts})  # fmt: skip

"""The queue of requests to each server: bounds those in flight, coalesces neighbouring ranges, and retries failures.

A range waits in the queue of its server. When a request may be sent, the first range takes its neighbours
with it: ranges of the same target with at most GAP bytes between them, up to PART bytes in all. Reads have
priority over read-ahead.

A failed request is repeated up to retries= times if its server answers other requests, or itself answers this one with
an error. If the server answers nothing, that is an outage (outages.py), whose end is awaited until read_timeout=.
"""

from __future__ import annotations

import functools
import heapq
import logging
import math
import random
import socket
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, TypeVar

import trio

from zarrfs.concurrency.lru import LRU
from zarrfs.concurrency.tasks import in_background
from zarrfs.config.options import Options
from zarrfs.errors import ReadError
from zarrfs.net.latency import Latency
from zarrfs.net.outages import Outage
from zarrfs.net.responses import Fetched, System, Transient

log = logging.getLogger(__name__)

T = TypeVar("T")

_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 10.0  # seconds between attempts, doubled each time
_LAST_ATTEMPT = 1.0  # seconds for a read that the kernel repeats just after it has failed
_SAME, _LATE = 1.0, 1024  # seconds within which a read counts as such a repetition; remembered unreachable places
_HOST_BYTES = 128 << 20  # bytes that are requested from one server at a time
_NAMED = 32  # servers in stats, the busiest ones: an extended attribute has at most 64 KiB
PART = 4 << 20  # bytes of the largest request
GAP = 32 << 10  # bytes between neighbouring ranges that are fetched and dropped at most
_SMALL = 1 << 20  # bytes: as long as there are free slots, wants are coalesced only up to this size


class _Want:
    """A caller waiting for a byte range, or for a request of another kind, which `call` makes."""

    __slots__ = ("ahead", "call", "done", "error", "found", "outage", "path", "sent_in", "start", "stop", "system")

    def __init__(self, system: System, path: str, start: int, stop: int, ahead: bool) -> None:
        self.system, self.path, self.start, self.stop, self.ahead = system, path, start, stop, ahead
        self.call: Callable[[], Awaitable[Any]] | None = None
        self.done = trio.Event()
        self.found: Any = None
        self.error: Exception | None = None
        self.outage: Outage | None = None  # the last outage in which it was counted as waiting
        self.sent_in: _Request | None = None

    @property
    def range(self) -> tuple[int, str, int, int]:
        """The key of the range in flight."""
        return id(self.system), self.path, self.start, self.stop


class _Request:
    """A request in flight, and the reads that wait for it."""

    __slots__ = ("scope", "wants")

    def __init__(self, wants: list[_Want]) -> None:
        self.wants = wants
        self.scope = trio.CancelScope()


class _Host:
    """One server: the wants in its queue, its requests in flight, and its outage, if any."""

    __slots__ = (
        "answers", "asked", "flying", "flying_bytes", "name", "outage", "requests", "waiting", "waiting_ahead",
    )  # fmt: skip

    def __init__(self, name: str) -> None:
        self.name = name
        self.waiting: OrderedDict[_Want, None] = OrderedDict()
        self.waiting_ahead: OrderedDict[_Want, None] = OrderedDict()
        self.flying = self.flying_bytes = self.requests = 0
        self.asked = False  # whether a task has been started to send read-ahead
        self.answers = 0  # number of answers so far, including final errors
        self.outage: Outage | None = None

    def answered(self) -> None:
        """Note an answer, which ends an outage."""
        self.answers += 1
        if self.outage is not None:
            outage, self.outage = self.outage, None
            outage.end()

    def note_waiting(self, wants: Iterable[_Want]) -> None:
        """Count the `wants` of readers as having waited for the present outage, each want once."""
        for want in wants:
            if not want.ahead and want.outage is not self.outage and self.outage is not None:
                want.outage = self.outage
                self.outage.waited += 1


class RequestQueue:
    """Fetches ranges for one RemoteFiles.

    `on_outage` is called with the name of a server when an outage of it begins.
    """

    def __init__(
        self, options: Options, on_outage: Callable[[str], None] = lambda server: None
    ) -> None:  # fmt: skip
        self._options, self._on_outage = options, on_outage
        self._hosts: dict[str, _Host] = {}
        self._requests = self._repeated = self._failed = self._bytes = self._merged = self._outages = 0
        self._latency = Latency()
        self._late: LRU[str, float] = LRU(_LATE)  # when connect() has failed to reach a place
        self.beneath: RequestQueue | None = None  # the queue for archives whose members are read here
        self.sent_ahead: set[tuple[int, str, int, int]] = set()  # small ranges of read-ahead in flight

    async def fetch(self, system: System, path: str, start: int, stop: int, ahead: bool = False) -> Fetched:
        """Return the bytes [start, stop) of a target, cut at its end. Raise ReadError if they cannot be fetched.

        Cancelling does not affect other callers. `ahead`: the range is read-ahead, for which no reader waits yet.
        Readers have priority, and neighbouring ranges of read-ahead are collected before they are sent.
        """
        host = self._host(system, path)
        want = _Want(system, path, start, stop, ahead)
        if host.outage is not None and not ahead and (late := host.outage.late(want.range)):
            return await self._last_attempt(host, want, late)
        found: Fetched
        if ahead or host.waiting or not self._may_send(host, want):
            found = await self._wait(host, want)
            return found
        host.flying += 1  # neither a wait nor coalescing: send without another task
        host.flying_bytes += stop - start
        try:
            await self._fetch(host, [want])
        finally:
            self._leave_slot(host, stop - start)
        found = want.found
        return found

    async def _last_attempt(self, host: _Host, want: _Want, reason: str) -> Fetched:
        """Make one attempt to fetch a range whose last read has just failed for `reason`, without waiting to probe."""
        size = want.stop - want.start
        self._requests += 1
        host.requests += 1
        host.flying += 1
        host.flying_bytes += size
        try:
            with trio.CancelScope(deadline=trio.current_time() + _LAST_ATTEMPT):
                found = await self._once(want.system, want.path, want.start, want.stop)
                host.answered()
                return found
        except Transient as exc:
            log.debug("%s: %s", want.system.shown(want.path), exc)
        finally:
            self._leave_slot(host, size)
        self._failed += 1
        error = ReadError(want.system.shown(want.path), reason)
        error.about(want.system.shown(want.path), want.start, size, 1)
        raise error

    async def call(self, system: System, path: str, request: Callable[[], Awaitable[Any]]) -> Any:
        """Send a request of another kind, with the bounds and retries of ranges, and return its answer."""
        want = _Want(system, path, 0, 0, False)
        want.call = request
        return await self._wait(self._host(system, path), want)

    async def connect(self, where: str, connect: Callable[[], Awaitable[T]]) -> T:
        """Return the result of `connect`, which connects to `where`; retry failures as those of any request.

        Raise ReadError after the retries or, if outages are waited for, after read_timeout=. The kernel repeats a
        failed read immediately: the repetition after read_timeout= gets only _LAST_ATTEMPT seconds.
        """
        attempt, pause, reason = 0, _FIRST_PAUSE, ""
        began = trio.current_time()
        again = began - self._late.get(where, -math.inf) < _SAME
        with trio.CancelScope(deadline=began + (_LAST_ATTEMPT if again else self._options.read_timeout)):
            while True:
                try:
                    return await connect()
                except Transient as exc:
                    failure, reason = exc, f": {exc.reason}"
                attempt += 1
                # a new _Host, as if no server had answered: only wait_for_outages=all waits
                if attempt > self._options.retries and not self._waits_for_server(_Host(where), failure):
                    times = f" ({attempt} attempts)" if attempt > 1 else ""
                    raise ReadError(where, failure.reason + times) from failure
                log.debug("%s: attempt %d: %s", where, attempt, failure.reason)
                await trio.sleep(pause * random.uniform(0.5, 1.5))
                pause = min(2 * pause, _LONGEST_PAUSE)
        if not again:
            self._late.put(where, trio.current_time())
        raise ReadError(where, f"not reached within {self._options.read_timeout:g} s (-o read_timeout=){reason}")

    def usual(self) -> float | None:
        """Return the 90th percentile of the times of requests, in seconds; None before the first one."""
        return self._latency.quantiles().get("p90")

    def too_late(self, system: System, path: str, start: int, stop: int) -> str:
        """Return the reason, for the error message, of a read of [start, stop) that was ended by read_timeout=.

        The kernel repeats a failed read immediately. So note the read: its repetition makes one short attempt only.
        """
        host = self._host(system, path)
        reason = self._too_late(host)
        if host.outage is not None:
            host.outage.note_late((id(system), path, start, stop), reason)
        return reason

    def is_out(self, server: str) -> bool:
        """Return whether there is an outage of `server`."""
        host = self._hosts.get(server)
        return host is not None and host.outage is not None

    def outages(self) -> list[str]:
        """Describe all outages: which server is out, for how long, and why."""
        own = [host.outage.described() for host in self._hosts.values() if host.outage is not None]
        return own + (self.beneath.outages() if self.beneath is not None else [])

    def _too_late(self, host: _Host, reason: str = "") -> str:
        if host.outage is not None:
            reason = host.outage.described()
        elif self.beneath is not None:
            reason = "; ".join(self.beneath.outages()) or reason
        late = f"not read within {self._options.read_timeout:g} s (-o read_timeout=)"
        return f"{late}: {reason}" if reason else late

    def stats(self) -> dict[str, Any]:
        """Return counters for statistics and the log."""
        hosts = self._hosts.items()
        named = heapq.nlargest(_NAMED, hosts, key=lambda item: (item[1].outage is not None, item[1].requests))
        return {
            "requests": self._requests, "repeated": self._repeated, "failed": self._failed, "bytes": self._bytes,
            "outages": self._outages, "merged": self._merged,
            "in_flight": sum(host.flying for _, host in hosts),
            "in_flight_bytes": sum(host.flying_bytes for _, host in hosts),
            "waiting": sum(len(host.waiting) + len(host.waiting_ahead) for _, host in hosts),
            "latency": self._latency.quantiles(), "latency_histogram": self._latency.histogram(),
            "latency_sum": self._latency.total, "latency_count": self._latency.count,
            "hosts": {**self._out_beneath(), **{name: self._stats_of(host) for name, host in named}},
        }  # fmt: skip

    def _out_beneath(self) -> dict[str, Any]:
        hosts = {} if self.beneath is None else self.beneath.stats()["hosts"]
        return {name: found for name, found in hosts.items() if "outage" in found}

    def _stats_of(self, host: _Host) -> dict[str, Any]:
        out = {} if host.outage is None else {"outage": host.outage.stats(len(host.waiting))}
        return {"requests": host.requests, "in_flight": host.flying, **out}

    # -- the queue

    def _host(self, system: System, path: str) -> _Host:
        name = system.host(path)
        host = self._hosts.get(name)
        if host is None:
            host = self._hosts[name] = _Host(name)
        return host

    def _may_send(self, host: _Host, want: _Want) -> bool:
        if host.flying >= self._options.host_requests:
            return False
        return not host.flying or host.flying_bytes + want.stop - want.start <= _HOST_BYTES

    def _leave_slot(self, host: _Host, size: int) -> None:
        host.flying -= 1
        host.flying_bytes -= size
        self._send(host)

    async def _wait(self, host: _Host, want: _Want) -> Any:
        host.note_waiting([want])
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
        """Send after a pass of the loop, so that simultaneous reads of neighbouring ranges share one request."""
        for _ in range(2):
            await trio.lowlevel.checkpoint()
        host.asked = False
        self._send(host)

    def _leave(self, host: _Host, want: _Want) -> None:
        """Remove a want whose caller was cancelled; cancel its request if nobody else waits for it."""
        host.waiting.pop(want, None)
        host.waiting_ahead.pop(want, None)
        if want.sent_in is not None:
            want.sent_in.wants.remove(want)
            if want.ahead:
                self.sent_ahead.discard(want.range)
            if not want.sent_in.wants:
                want.sent_in.scope.cancel()
            elif not want.ahead and all(other.ahead for other in want.sent_in.wants):
                # read-ahead, which alone is left, has no deadline, and _limit() set none because there was a reader
                want.sent_in.scope.deadline = trio.current_time() + self._options.read_timeout

    def _send(self, host: _Host) -> None:
        """Send requests for waiting wants, as long as the limits of the server admit them."""
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
                want.sent_in = request
                if want.ahead and want.stop - want.start <= _SMALL:
                    self.sent_ahead.add(want.range)
            size = max(want.stop for want in wants) - min(want.start for want in wants)
            host.flying += 1
            host.flying_bytes += size
            in_background(self._carry_out, host, request, size)

    def _neighbours(self, host: _Host, first: _Want) -> list[_Want]:
        """Return `first` and the wants coalesced with it, by offset; for read-ahead, begin with the lowest offset."""
        if first.call is not None or len(host.waiting) + len(host.waiting_ahead) == 1:
            return [first]
        beside = [
            want for queue in (host.waiting, host.waiting_ahead) for want in queue
            if want.path == first.path and want.system is first.system and want.call is None
        ]  # fmt: skip
        beside.sort(key=lambda want: (want.start, want.stop))
        if first.ahead:
            first = beside[0]
        most = PART
        if host.flying + len(beside) <= self._options.host_requests:
            most = min(most, _SMALL)  # all fit: many requests are faster than one
        at = beside.index(first)
        low = high = at
        start, stop = first.start, first.stop
        while high + 1 < len(beside):
            near = beside[high + 1]
            if near.start - stop > GAP or max(stop, near.stop) - start > most:
                break
            high, stop = high + 1, max(stop, near.stop)
        while low > 0:
            near = beside[low - 1]
            if start - near.stop > GAP or stop - min(start, near.start) > most:
                break
            low, start, stop = low - 1, min(start, near.start), max(stop, near.stop)
        return beside[low : high + 1]

    # -- requests

    async def _carry_out(self, host: _Host, request: _Request, size: int) -> None:
        wants = list(request.wants)  # empty if all waiters were cancelled before this started
        with request.scope:
            try:
                if wants and wants[0].call is not None:
                    wants[0].found = await self._attempts(host, wants, 0, 0, wants[0].call)
                elif wants:
                    await self._fetch(host, wants)
            except Exception as exc:
                for want in wants:
                    want.error = exc
        if request.scope.cancelled_caught and request.wants:  # its deadline has passed
            late, extent = self._too_late(host), max(want.stop for want in wants) - wants[0].start
            error = self._final(wants[0], wants[0].start, extent, 1, late)
            for want in wants:
                want.error = error
        for want in wants:
            want.sent_in = None
            self.sent_ahead.discard(want.range)
            want.done.set()
        self._leave_slot(host, size)

    async def _fetch(self, host: _Host, wants: list[_Want]) -> None:
        """Fetch the range that contains all `wants`, and give each want its part."""
        first = wants[0]
        system, path, start = first.system, first.path, first.start
        stop = max(want.stop for want in wants)
        once = functools.partial(self._once, system, path, start, stop)
        found: Fetched = await self._attempts(host, wants, start, stop - start, once)
        if len(wants) == 1:
            first.found = found
            return
        self._merged += len(wants) - 1
        data = memoryview(found.data)
        for want in wants:
            # a copy, because a slice would keep the whole range in memory
            want.found = found._replace(data=bytes(data[want.start - start : want.stop - start]))

    async def _once(self, system: System, path: str, start: int, stop: int) -> Fetched:
        """Make one attempt to fetch [start, stop). Raise Transient if the answer was cut off."""
        found = await system.fetch(path, start, stop)
        self._bytes += len(found.data)
        if found.total is not None and len(found.data) < min(stop, found.total) - start:
            raise Transient("the answer was cut off", begun=True)
        if len(found.data) > stop - start:
            raise ReadError(system.shown(path), "the server sent more bytes than requested")
        return found

    async def _attempts(
        self, host: _Host, wants: list[_Want], start: int, length: int, request: Callable[[], Awaitable[Any]]
    ) -> Any:
        """Send `request`, which is for [start, start + length), and retry while its failures may be transient.

        A reader of a range has a deadline of its own. Read-ahead alone, and requests of call(), end at read_timeout=.
        """
        attempt, counted, pause, began, answers = 0, 0, _FIRST_PAUSE, trio.current_time(), host.answers
        while True:
            probed = None
            if host.outage is not None:
                with trio.CancelScope(deadline=self._limit(wants, began)) as waiting:
                    probed = await self._await_probe(host, wants)
                if waiting.cancelled_caught:
                    raise self._final(wants[0], start, length, attempt, self._too_late(host))
            attempt += 1
            self._requests += 1
            host.requests += 1
            sent = trio.current_time()
            try:
                found = await (request() if probed is None else self._probe(probed, request))
            except Transient as exc:
                failure = exc
            except Exception as exc:
                self._failed += 1
                host.answered()
                if isinstance(exc, ReadError):
                    exc.about(wants[0].system.shown(wants[0].path), start, length, attempt)
                raise
            else:
                self._latency.add(trio.current_time() - sent)
                host.answers += 1
                if host.outage is not None:
                    host.answered()
                return found
            after, waits = 0.0, self._waits_for_server(host, failure)
            # only this request failed, or outages are not waited for: retry after a pause; otherwise it is an outage
            if not waits or failure.of_value or host.answers != answers:
                counted += not (waits and failure.asks_for_patience)
                most = _LONGEST_PAUSE if self._options.wait_for_outages == "none" else math.inf
                after = max(min(failure.after, most), pause * random.uniform(0.5, 1.5))
                pause = min(2 * pause, _LONGEST_PAUSE)
                if waits and failure.of_value:
                    host.answered()
            else:
                self._note_outage(host, failure, wants[0].path, probed)
            answers = host.answers
            if counted > self._options.retries:
                times = f" ({attempt} attempts)" if attempt > 1 else ""
                raise self._final(wants[0], start, length, attempt, failure.reason + times) from failure
            if trio.current_time() + after > self._limit(wants, began):
                reason = self._too_late(host, failure.reason)
                raise self._final(wants[0], start, length, attempt, reason) from failure
            self._repeated += 1
            _tell_attempt(wants[0], start, length, attempt, failure.reason, after)
            if after:
                await trio.sleep(after)

    def _limit(self, wants: list[_Want], began: float) -> float:
        """Return when to abandon read-ahead or a request of call(); inf for readers, which have deadlines."""
        alone = wants[0].call is not None or all(want.ahead for want in wants)
        return began + self._options.read_timeout if alone else math.inf

    def _final(self, want: _Want, start: int, length: int, attempts: int, reason: str) -> ReadError:
        self._failed += 1
        where = want.system.shown(want.path)
        error = ReadError(where, reason)
        error.about(where, start, length, attempts)
        return error

    async def _await_probe(self, host: _Host, wants: list[_Want]) -> Outage | None:
        """Wait until the outage is over (return None), or it is the turn of `wants` to probe (return the outage).

        Return None also during the outage if the request need not wait: see Outage.turn().
        """
        host.note_waiting(wants)
        readers = sum(not want.ahead for want in wants)
        while (outage := host.outage) is not None:
            outage.waiting += readers
            try:
                if await outage.turn(wants[0].path):
                    return outage
            finally:
                outage.waiting -= readers
            if not outage.over:
                return None
        return None

    async def _probe(self, outage: Outage, request: Callable[[], Awaitable[Any]]) -> Any:
        """Send `request` to a server with an outage. Its timeout is short at first, and grows with each probe."""
        try:
            patience = min(outage.probe_timeout, self._options.request_timeout)
            with trio.CancelScope(deadline=trio.current_time() + patience):
                return await request()
            outage.probe_timeout *= 2
            raise Transient(f"no answer within {patience:g} s")
        finally:
            outage.pass_on()

    def _note_outage(self, host: _Host, failure: Transient, path: str, probed: Outage | None) -> None:
        """Record a failure as one of the server, not of the request: begin an outage, or add it to the present one."""
        if host.outage is None:
            host.outage = Outage(host.name, failure.reason, path, failure.after)
            host.note_waiting(host.waiting)
            self._on_outage(host.name)
        elif host.outage.fail(failure.reason, failure.after, path, probed is host.outage):
            self._outages += 1  # an outage is counted when it is logged, so very short ones are not

    def _waits_for_server(self, host: _Host, failure: Transient) -> bool:
        """Return whether requests wait for the end of an outage of this server, rather than retry `retries=` times."""
        if not self._options.retries or self._options.wait_for_outages == "none":
            return False
        if host.answers:
            return True
        return self._options.wait_for_outages == "all" and not _is_unknown(failure)


def _tell_attempt(want: _Want, start: int, length: int, attempt: int, reason: str, after: float) -> None:
    if log.isEnabledFor(logging.DEBUG):
        where, extent = want.system.shown(want.path), f" [{start}, +{length}]" if length else ""
        facts = {"url": where, "offset": start, "length": length, "attempt": attempt}
        log.debug("%s%s: attempt %d: %s: to be repeated in %.1f s", where, extent, attempt, reason, after, extra={
            "facts": facts})  # fmt: skip


def _is_unknown(failure: BaseException) -> bool:
    """Return whether, according to DNS, the name of the server does not exist."""
    at: BaseException | None = failure
    seen: set[int] = set()  # the chain of causes and contexts may be circular
    while at is not None and id(at) not in seen:
        seen.add(id(at))
        found = getattr(at, "os_error", at)  # of aiohttp
        if isinstance(found, socket.gaierror) and found.errno in (socket.EAI_NONAME, socket.EAI_NODATA):
            return True
        at = at.__cause__ or at.__context__
    return False

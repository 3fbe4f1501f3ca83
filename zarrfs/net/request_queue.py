"""The queue of requests to each server: bounds those in flight, coalesces neighbouring ranges, and retries failures.

A range waits in the queue of its server. When a request may be sent, the first range takes its neighbours
with it: ranges of the same value with at most GAP bytes between them, up to PART bytes in all. Reads have
priority over read-ahead.

A failed request is repeated up to retries= times if its server answers other requests, or itself answers this one with
an error. If the server has answered nothing meanwhile, that is an outage, which any answer ends: its requests wait,
and one at a time is sent as a probe, until read_timeout=. After an outage of that length each request makes one
attempt.
"""

from __future__ import annotations

import logging
import math
import random
import socket
import time
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple, TypeVar

import trio

from zarrfs.concurrency.tasks import in_background
from zarrfs.config.options import Options
from zarrfs.config.redaction import redact_text
from zarrfs.errors import ReadError, causes
from zarrfs.metrics.counters import COUNTS, LATENCIES, QUEUES
from zarrfs.metrics.latency import Latency
from zarrfs.net.responses import Fetched, System, Transient

log = logging.getLogger(__name__)

T = TypeVar("T")

_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 5.0  # seconds between attempts, and between probes; doubled each time
# Part of read_timeout= after which a read waits no more: the kernel repeats a failed read, and a bit early.
_LATE = 0.9
_AFTER_OTHERS = 0.01  # seconds by which a request that has failed lets others probe first
_LOGGED = 1.0  # seconds after which an outage is logged: a single broken connection is not an outage
_PROBE = 5.0  # seconds that a probe may always take
_REASON = 200  # characters of the reason of an outage that are kept
_SERVER_BYTES = 128 << 20  # bytes that are requested from one server at a time
PART = 4 << 20  # bytes of the largest request
GAP = 32 << 10  # bytes between neighbouring ranges that are fetched and dropped at most
_SMALL = 1 << 20  # bytes: as long as there are free slots, ranges are coalesced only up to this size


class _Want:
    """A caller that waits for the bytes [start, stop) of a value, or for the result of `call`."""

    __slots__ = ("ahead", "call", "done", "error", "found", "path", "reason", "request", "start", "stop", "system")
    done: trio.Event  # exists once the caller waits in a queue

    def __init__(
        self, system: System, path: str, start: int = 0, stop: int = 0, ahead: bool = False,
        call: Callable[[], Awaitable[Any]] | None = None,
    ) -> None:  # fmt: skip
        self.system, self.path, self.start, self.stop, self.ahead, self.call = system, path, start, stop, ahead, call
        self.found: Any = None
        self.error: Exception | None = None
        self.reason = ""  # of the last failed attempt
        self.request: _Request | None = None  # that is sent for it by another task

    @property
    def key(self) -> tuple[int, str, int, int]:
        return id(self.system), self.path, self.start, self.stop

    @property
    def shown(self) -> str:
        return self.system.shown(self.path)


class _Request(NamedTuple):
    """A request that a task of its own sends, and the callers that wait for it."""

    wants: set[_Want]
    scope: trio.CancelScope


class _Server:
    """One server: its queues, its requests in flight, and its outage, if there is one."""

    def __init__(self, name: str, nested: bool) -> None:
        self.name, self.nested = name, nested
        self.queue: dict[_Want, None] = {}  # of readers
        self.queue_ahead: dict[_Want, None] = {}  # of read-ahead
        self.sends_soon = False  # whether a task is about to send read-ahead
        self.in_flight = self.bytes_in_flight = 0
        self.readers = 0  # requests of readers, waiting or in flight
        self.answers = 0  # number of answers so far, including final errors
        self.out_since = math.inf  # on trio's clock, when the outage began; inf: there is none
        self._reason, self._logged = "", False  # of the outage
        self._pause = self._next_probe = 0.0
        self._over = trio.Event()

    @property
    def is_out(self) -> bool:
        return self.out_since < math.inf

    @property
    def seconds_out(self) -> float:
        return max(0.0, trio.current_time() - self.out_since)

    def answered(self) -> None:
        """Note an answer, which ends an outage."""
        self.answers += 1
        if self.is_out:
            if self._logged:
                log.warning("%s answers again: it was out for %.1f s", self.name, self.seconds_out)
            self.out_since = math.inf
            self._over.set()

    def failed(self, failure: Transient, sent: float) -> bool:
        """Note that nothing was answered since `sent`; return whether an outage begins with this."""
        begins, now = not self.is_out, trio.current_time()
        if begins:
            self.out_since, self._logged, self._over = sent, False, trio.Event()
            self._pause, self._next_probe = _FIRST_PAUSE, now + _FIRST_PAUSE
        self._reason = redact_text(failure.reason)[:_REASON]
        self._next_probe = max(self._next_probe, now + failure.after)
        if not self._logged and self.seconds_out >= _LOGGED:
            self._logged = True
            log.warning("%s is out: %s: its requests wait, and one at a time tries again", self.name, self._reason)
        return begins

    async def may_send(self, again: bool) -> None:
        """Wait until the caller may send a request: during an outage, until it is over or the next probe is due.

        `again`: the request of the caller has failed before. Others, which may be for another value, probe first.
        """
        while self.is_out:
            now, due = trio.current_time(), self._next_probe + _AFTER_OTHERS * again
            if now >= due:
                self._pause = min(2 * self._pause, _LONGEST_PAUSE)
                self._next_probe = now + self._pause * random.uniform(0.75, 1.25)
                return
            with trio.CancelScope(deadline=due):
                await self._over.wait()

    def described(self) -> str:
        """Return that the server is out, for how long, and why."""
        return f"{self.name} has been out for {self.seconds_out:.1f} s: {self._reason}"

    def facts(self) -> dict[str, Any]:
        """Return what `zarrfs stats` reports of an outage."""
        seconds = self.seconds_out
        return {
            "since": round(time.time() - seconds, 3), "seconds": round(seconds, 3), "reason": self._reason,
            "waiting": self.readers,
        }  # fmt: skip


class RequestQueue:
    """Fetches ranges for one RemoteFiles.

    `on_outage` is called with the name of a server when an outage of it begins.
    """

    def __init__(self, options: Options, on_outage: Callable[[str], None] = lambda server: None) -> None:
        self._options, self._on_outage = options, on_outage
        self._servers: dict[str, _Server] = {}
        self._latency = Latency()
        QUEUES.add(self)
        self.beneath: RequestQueue | None = None  # the queue for archives whose members are read here
        self.sent_ahead: set[tuple[int, str, int, int]] = set()  # small ranges of read-ahead in flight

    async def fetch(self, system: System, path: str, start: int, stop: int, ahead: bool = False) -> Fetched:
        """Return the bytes [start, stop) of a value, cut at its end. Raise ReadError if they cannot be fetched.

        Cancelling does not affect other callers. `ahead`: the range is read-ahead, for which no reader waits yet.
        Readers have priority, and neighbouring ranges of read-ahead are collected before they are sent.
        """
        found: Fetched = await self._get(self._server(system, path), _Want(system, path, start, stop, ahead))
        return found

    async def call(self, system: System, path: str, request: Callable[[], Awaitable[Any]]) -> Any:
        """Send a request of another kind, with the bounds and retries of ranges, and return its answer."""
        return await self._get(self._server(system, path), _Want(system, path, call=request))

    def usual(self) -> float | None:
        """Return the 90th percentile of the times of requests, in seconds; None before the first one."""
        return self._latency.quantile(0.9)

    def too_late(self, system: System, path: str) -> str:
        """Return the reason, for the error message, of a read that was ended by read_timeout=."""
        return self._too_late(self._server(system, path))

    def is_out(self, server: str) -> bool:
        """Return whether there is an outage of `server`."""
        found = self._servers.get(server)
        return found is not None and found.is_out

    def reasons(self) -> list[str]:
        """Describe all outages: which server is out, for how long, and why."""
        own = [server.described() for server in self._servers.values() if server.is_out]
        return own + (self.beneath.reasons() if self.beneath is not None else [])

    def _too_late(self, server: _Server, reason: str = "") -> str:
        if server.is_out:
            reason = server.described()
        elif self.beneath is not None:
            reason = "; ".join(self.beneath.reasons()) or reason
        late = f"not read within {self._options.read_timeout:g} s (-o read_timeout=)"
        return f"{late}: {reason}" if reason else late

    def gauges(self) -> dict[str, float]:
        """Return figures for `zarrfs stats`."""
        servers = [server for server in self._servers.values() if not server.nested]
        return {
            "requests_in_flight": sum(server.in_flight for server in servers),
            "requests_waiting": sum(len(server.queue) + len(server.queue_ahead) for server in servers),
        }

    def outages(self) -> dict[str, dict[str, Any]]:
        """Return the servers that do not answer now."""
        return {name: server.facts() for name, server in self._servers.items() if server.is_out}

    # -- the queue

    def _server(self, system: System, path: str) -> _Server:
        name = system.host(path)
        return self._servers.get(name) or self._servers.setdefault(name, _Server(name, system.nested))

    async def _get(self, server: _Server, want: _Want) -> Any:
        """Return what `want` is for, at read_timeout= at the latest."""
        reader = not want.ahead
        server.readers += reader
        try:
            with trio.CancelScope(deadline=trio.current_time() + self._options.read_timeout):
                if reader and not server.queue and self._may_send(server, want):
                    self._take_slot(server, want.stop - want.start)
                    await self._send(server, [want])  # neither a wait nor coalescing: no other task is needed
                else:
                    await self._wait(server, want)
                if want.error is not None:
                    raise want.error.with_traceback(None)
                return want.found
        finally:
            server.readers -= reader
        _count(want, "requests_failed_total")
        error = ReadError(want.shown, self._too_late(server, want.reason))
        error.about(want.shown, want.start, want.stop - want.start)
        raise error

    def _may_send(self, server: _Server, want: _Want) -> bool:
        if server.in_flight >= self._options.host_requests:
            return False
        return not server.in_flight or server.bytes_in_flight + want.stop - want.start <= _SERVER_BYTES

    def _take_slot(self, server: _Server, length: int) -> None:
        server.in_flight += 1
        server.bytes_in_flight += length

    async def _wait(self, server: _Server, want: _Want) -> None:
        """Wait in the queue, and for the request that another task then sends."""
        want.done = trio.Event()
        (server.queue_ahead if want.ahead else server.queue)[want] = None
        if not want.ahead:
            self._send_queued(server)
        elif not server.sends_soon:
            server.sends_soon = True
            in_background(self._send_soon, server)
        try:
            await want.done.wait()
        except BaseException:
            server.queue.pop(want, None)
            server.queue_ahead.pop(want, None)
            self.sent_ahead.discard(want.key)
            if want.request is not None:
                want.request.wants.discard(want)
                if not want.request.wants:
                    want.request.scope.cancel()
            raise

    async def _send_soon(self, server: _Server) -> None:
        """Send after a pass of the loop, so that simultaneous reads of neighbouring ranges share one request."""
        for _ in range(2):
            await trio.lowlevel.checkpoint()
        server.sends_soon = False
        self._send_queued(server)

    def _send_queued(self, server: _Server) -> None:
        """Send requests for the queues, as long as the limits of the server admit them."""
        while server.queue or server.queue_ahead:
            first = next(iter(server.queue or server.queue_ahead))
            if not self._may_send(server, first):
                return
            wants = self._neighbours(server, first)
            request = _Request(set(wants), trio.CancelScope())
            for want in wants:
                server.queue.pop(want, None)
                server.queue_ahead.pop(want, None)
                want.request = request
                if want.ahead and want.stop - want.start <= _SMALL:
                    self.sent_ahead.add(want.key)
            self._take_slot(server, max(want.stop for want in wants) - wants[0].start)
            in_background(self._carry_out, server, request.scope, wants)

    async def _carry_out(self, server: _Server, scope: trio.CancelScope, wants: list[_Want]) -> None:
        with scope:
            await self._send(server, wants)
        for want in wants:
            want.request = None
            self.sent_ahead.discard(want.key)
            want.done.set()

    def _neighbours(self, server: _Server, first: _Want) -> list[_Want]:
        """Return `first` and the ranges coalesced with it, by offset; for read-ahead, begin with the lowest offset."""
        if first.call is not None or len(server.queue) + len(server.queue_ahead) == 1:
            return [first]
        near = [
            want for queue in (server.queue, server.queue_ahead) for want in queue
            if want.path == first.path and want.system is first.system and want.call is None
        ]  # fmt: skip
        near.sort(key=lambda want: (want.start, want.stop))
        if first.ahead:
            first = near[0]
        # if all fit, many requests are faster than one
        most = _SMALL if server.in_flight + len(near) <= self._options.host_requests else PART
        run, stop = list[_Want](), 0
        for want in near:
            if run and (want.start - stop > GAP or max(stop, want.stop) - run[0].start > most):
                if first in run:
                    break
                run = []
            run.append(want)
            stop = want.stop if len(run) == 1 else max(stop, want.stop)
        return run

    # -- requests

    async def _send(self, server: _Server, wants: list[_Want]) -> None:
        """Send one request, with its retries, and give each want its part of the answer, or the error."""
        first, stop = wants[0], max(want.stop for want in wants)
        length = stop - first.start
        try:
            found = first.found = await self._answer(server, wants, stop)
            if len(wants) > 1:
                data = memoryview(found.data)
                for want in wants:
                    # a copy, because a slice would keep the whole range in memory
                    want.found = found._replace(data=bytes(data[want.start - first.start : want.stop - first.start]))
        except Exception as exc:
            _count(first, "requests_failed_total")
            if isinstance(exc, ReadError):
                exc.about(first.shown, first.start, length)
            for want in wants:
                want.error = exc
        finally:
            server.in_flight -= 1
            server.bytes_in_flight -= length
            self._send_queued(server)

    async def _answer(self, server: _Server, wants: list[_Want], stop: int) -> Any:
        """Return the answer to one request for `wants`; repeat it while a retry may succeed."""
        first, answers = wants[0], server.answers
        attempts, failures, pause = 0, 0, _FIRST_PAUSE
        late = server.seconds_out >= _LATE * self._options.read_timeout
        while True:
            if not late:
                await server.may_send(attempts > 0)
            sent, after = trio.current_time(), 0.0
            patience = max(_PROBE, server.seconds_out / 2) if server.is_out else math.inf
            try:
                with trio.CancelScope(deadline=sent + patience):
                    found = await self._once(first, stop)
                    server.answered()
                    return found
                raise Transient(f"no answer within {patience:g} s")  # noqa: TRY301
            except Transient as exc:
                failure = exc
            except Exception:
                server.answered()
                raise
            attempts += 1
            for want in wants:
                want.reason = failure.reason
            waits = self._waits_for(server, failure)
            if waits and not failure.of_value and server.answers == answers:
                if server.failed(failure, sent):
                    self._on_outage(server.name)
                if late:
                    raise ReadError(first.shown, self._too_late(server)) from failure
            else:  # the server answers, but not this request
                failures += not (waits and failure.asks_for_patience)
                after = failure.after if waits else min(failure.after, _LONGEST_PAUSE)
                after, pause = max(after, pause * random.uniform(0.5, 1.5)), min(2 * pause, _LONGEST_PAUSE)
                if failure.of_value:
                    server.answered()
            if failures > self._options.retries:
                times = f" ({attempts} attempts)" if attempts > 1 else ""
                raise ReadError(first.shown, failure.reason + times) from failure
            _count(first, "requests_repeated_total")
            log.debug("%s: attempt %d: %s: to be repeated in %.1f s", first.shown, attempts, failure.reason, after)
            # if the server answers others until this request fails again, only this request fails
            answers = server.answers
            await trio.sleep(after)

    async def _once(self, first: _Want, stop: int) -> Any:
        """Send a request once, for the bytes from `first` to `stop`. Raise Transient if the answer was cut off."""
        _count(first, "requests_total")
        sent = trio.current_time()
        found = await (first.call() if first.call else first.system.fetch(first.path, first.start, stop))
        seconds = trio.current_time() - sent
        self._latency.add(seconds)
        if not first.system.nested:
            LATENCIES.add(seconds)
        if first.call is None:
            _count(first, "network_bytes_total", len(found.data))
            if found.total is not None and len(found.data) < min(stop, found.total) - first.start:
                raise Transient("the answer was cut off", begun=True)
            if len(found.data) > stop - first.start:
                raise ReadError(first.shown, "the server sent more bytes than requested")
        return found

    def _waits_for(self, server: _Server, failure: Transient) -> bool:
        """Return whether requests wait for the end of an outage of this server, rather than retry `retries=` times."""
        if not self._options.retries or self._options.wait_for_outages == "none":
            return False
        return server.answers > 0 or (self._options.wait_for_outages == "all" and not _is_unknown(failure))


def _count(want: _Want, name: str, number: int = 1) -> None:
    """Count in the statistics of the mount, except for members of archives: the queue of the archive counts."""
    if not want.system.nested:
        COUNTS[name] += number


def _is_unknown(failure: BaseException) -> bool:
    """Return whether, according to DNS, the name of the server does not exist."""
    unknown = socket.EAI_NONAME, socket.EAI_NODATA
    return any(isinstance(one, socket.gaierror) and one.errno in unknown for one in causes(failure))

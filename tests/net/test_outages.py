"""Outages of servers: one request at a time probes, the others wait, and the log says so once. On trio's mock clock.

mounts/test_outages.py has the tests with a real server.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import re
import socket

import pytest
import trio
import trio.testing

from tests.net.clockedserver import Answer, Server, run, settled
from zarrfs.config.options import Options
from zarrfs.errors import AccessDenied, ReadError
from zarrfs.net.failures import raise_for_status
from zarrfs.net.request_queue import RequestQueue
from zarrfs.net.responses import Transient

REFUSED = "Connection refused"
OPTIONS = Options(wait_for_outages="all")


def failing(reason: str, after: float = 0.0) -> Transient:
    """Return the failure that a client raises for this reason."""
    status = re.match(r"HTTP status (\d+)", reason)
    return Transient(reason, after, int(status[1]) if status else None, begun="cut off" in reason)


def out_until(end: float, reason: str = REFUSED, begin: float = 0.0, after: float = 0.0) -> Answer:
    """Return an answer() for Server that fails from `begin` to `end`."""

    async def answer(path: str) -> None:
        if begin <= trio.current_time() < end:
            raise failing(reason, after)

    return answer


async def read(ranges: RequestQueue, server: Server, path: str = "a") -> float:
    """Read a value, check its bytes, and return the time at which the read ended."""
    found = await ranges.fetch(server, path, 0, 10 * len(path))
    assert bytes(found.data) == path.encode() * 10
    return trio.current_time()


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.INFO]


# -- an outage is a delay


def test_an_outage_is_a_delay(caplog: pytest.LogCaptureFixture) -> None:
    """Forty readers all succeed, and meanwhile send few requests: one at a time, at most some 6 s apart."""
    server, ranges = Server(out_until(20.0)), RequestQueue(OPTIONS)
    ended: list[float] = []

    async def one(path: str, after: float) -> None:
        await trio.sleep(after)
        ended.append(await read(ranges, server, path))

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            for number in range(40):
                nursery.start_soon(one, f"v{number}", number and 0.05)
            await trio.sleep(10)
            [out] = ranges.outages().values()
            assert out["waiting"] == 40
            assert out["reason"] == REFUSED
            assert out["seconds"] == pytest.approx(10, abs=0.1)

    run(main)
    assert len(ended) == 40
    assert 20 <= min(ended) <= max(ended) <= 26.3
    during = [at for at, _ in server.sent if at < 20]
    assert len(during) <= 12
    assert max(after - before for before, after in itertools.pairwise(during)) <= 6.3
    assert settled(ranges)
    begins, ends = lines(caplog)
    assert begins == f"server is out: {REFUSED}: its requests wait, and one at a time tries again"
    assert re.fullmatch(r"server answers again: it was out for 2\d\.\d s", ends)
    assert not ranges.outages()


def test_an_attempt_without_an_answer_ends_soon_during_an_outage() -> None:
    """The server refuses connections, then accepts them and is silent, and is back after 20 s."""

    async def answer(path: str) -> None:
        if trio.current_time() < 1:
            raise failing(REFUSED)
        if trio.current_time() < 20:
            await trio.sleep_forever()

    server, ranges = Server(answer), RequestQueue(OPTIONS)
    assert run(lambda: read(ranges, server)) < 32


@pytest.mark.parametrize("status", [429, 503])
def test_retry_after_is_obeyed(status: int) -> None:
    """All requests to the server wait, each time that it sends the header."""

    async def answer(path: str) -> None:
        if trio.current_time() < 50:
            raise_for_status(status, "http://server/", "Busy", "7")

    server, ranges = Server(answer), RequestQueue(dataclasses.replace(OPTIONS, retries=1))

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(read, ranges, server, "a")
            await trio.sleep(0.5)
            nursery.start_soon(read, ranges, server, "a")

    run(main)
    times = [at for at, _ in server.sent if at < 56]
    assert len(times) == 8
    assert all(after - before >= 7 for before, after in itertools.pairwise(times))


def test_a_cancelled_reader_passes_on_the_turn_to_probe() -> None:
    """One reader is cancelled, at several moments of an outage; the other one still succeeds."""
    for moment in (0.05, 0.15, 0.3, 1.0, 3.0):
        server, ranges = Server(out_until(5.0)), RequestQueue(OPTIONS)

        async def main(moment: float = moment, server: Server = server, ranges: RequestQueue = ranges) -> float:
            async with trio.open_nursery() as nursery:
                with trio.move_on_after(moment):
                    nursery.start_soon(read, ranges, server, "b")
                    await read(ranges, server, "a")
            return trio.current_time()

        assert 5 <= run(main) <= 11.3
        assert settled(ranges)


# -- failures that are not an outage


def fails(ranges: RequestQueue, server: Server, path: str = "a") -> tuple[ReadError, float]:
    """Return (the error of a read, the time at which it was raised)."""

    async def main() -> tuple[ReadError, float]:
        with pytest.raises(ReadError) as caught:
            await read(ranges, server, path)
        return caught.value, trio.current_time()

    error, at = run(main)
    return error, at


@pytest.mark.parametrize("reason", ["HTTP status 500 Internal Server Error", "the answer was cut off"])
def test_a_failure_of_one_value_is_retried_a_few_times(reason: str) -> None:
    server, ranges = Server(out_until(1e9, reason)), RequestQueue(OPTIONS)
    error, at = fails(ranges, server)
    assert error.reason == f"{reason} (5 attempts)"
    assert len(server.sent) == 5
    assert at < 10


def test_one_failing_value_is_not_taken_for_an_outage() -> None:
    """A gateway has lost the backend of one value: other values are read, and that one fails soon."""

    async def answer(path: str) -> None:
        await trio.sleep(0.01)
        if path == "bad":
            raise failing("HTTP status 503 Service Unavailable")

    server, ranges = Server(answer), RequestQueue(OPTIONS)
    ended: list[float] = []

    async def others() -> None:
        for number in range(100):
            await read(ranges, server, f"v{number}")
            ended.append(trio.current_time())
            await trio.sleep(0.1)

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(others)
            await trio.sleep(0.005)
            with pytest.raises(ReadError, match=r"503 Service Unavailable \(\d attempts\)"):
                await read(ranges, server, "bad")
            assert trio.current_time() < 10

    run(main)
    assert max(after - before for before, after in itertools.pairwise(ended)) < 0.5


def test_a_final_error_is_not_retried_and_ends_an_outage() -> None:
    async def answer(path: str) -> None:
        if trio.current_time() < 3:
            raise Transient(REFUSED)
        raise_for_status(403, "http://server/a", "Forbidden")

    server, ranges = Server(answer), RequestQueue(OPTIONS)
    error, at = fails(ranges, server)
    assert isinstance(error, AccessDenied)
    assert at < 8
    assert not ranges.outages()


# -- how long a request waits


def test_without_retries_nothing_is_repeated() -> None:
    server, ranges = Server(out_until(1e9)), RequestQueue(dataclasses.replace(OPTIONS, retries=0))
    error, at = fails(ranges, server)
    assert (error.reason, at, len(server.sent)) == (REFUSED, 0.0, 1)


@pytest.mark.parametrize("patience", ["none", "answered"])
def test_opening_a_source_does_not_wait_for_a_server_that_never_answered(patience: str) -> None:
    server, ranges = Server(out_until(1e9)), RequestQueue(Options(wait_for_outages=patience))
    error, at = fails(ranges, server)
    assert error.reason == f"{REFUSED} (5 attempts)"
    assert at < 5


@pytest.mark.parametrize(
    ("read_timeout", "reason", "most"),
    [(300.0, "HTTP status 503 Busy (5 attempts)", 40),
     (15.0, "not read within 15 s (-o read_timeout=): HTTP status 503 Busy", 15),
     (5.0, "not read within 5 s (-o read_timeout=): HTTP status 503 Busy", 5)],
)  # fmt: skip
def test_opening_a_source_is_not_delayed_by_a_long_retry_after(read_timeout: float, reason: str, most: float) -> None:
    async def answer(path: str) -> None:
        raise_for_status(503, "http://server/", "Busy", "3600")

    server, ranges = Server(answer), RequestQueue(Options(wait_for_outages="none", read_timeout=read_timeout))

    async def main() -> None:
        with pytest.raises(ReadError) as caught:
            await ranges.call(server, "a", lambda: server.stat("a"))
        assert caught.value.reason == reason
        assert trio.current_time() <= most

    run(main)
    assert settled(ranges)


@pytest.mark.parametrize(("patience", "waits"), [("none", False), ("answered", True), ("all", True)])
def test_a_server_that_has_answered_is_waited_for(patience: str, waits: bool) -> None:
    server, ranges = Server(out_until(60.0, begin=1.0)), RequestQueue(Options(wait_for_outages=patience))

    async def main() -> None:
        await read(ranges, server)
        await trio.sleep(2)
        if waits:
            assert 60 <= await read(ranges, server) < 67
            return
        with pytest.raises(ReadError, match=r"refused \(5 attempts\)"):
            await read(ranges, server)

    run(main)


@pytest.mark.parametrize("code", [socket.EAI_NONAME, socket.EAI_AGAIN])
def test_a_name_that_does_not_exist_is_an_error_soon(code: int) -> None:
    """A set may have a typing error in a host name; a DNS server that does not answer is an outage."""

    async def answer(path: str) -> None:
        if trio.current_time() < 60:
            raise Transient("a name") from socket.gaierror(code, "a name")

    server, ranges = Server(answer), RequestQueue(OPTIONS)
    if code == socket.EAI_NONAME:
        assert fails(ranges, server)[1] < 5
    else:
        assert 60 <= run(lambda: read(ranges, server)) < 67


def test_a_read_after_read_timeout_does_not_wait_again() -> None:
    """The kernel repeats a read that failed: it gets one attempt, which succeeds if the server is back."""
    server, ranges = Server(out_until(20.0)), RequestQueue(dataclasses.replace(OPTIONS, read_timeout=10.0))

    async def main() -> None:
        for began, ends in (0.0, 10.0), (10.0, 10.0), (12.0, 12.0):
            await trio.sleep_until(began)
            with pytest.raises(ReadError, match=rf"not read within 10 s .*: server has been out for {ends:.1f} s"):
                await read(ranges, server)
            assert trio.current_time() == pytest.approx(ends, abs=0.01)
        await trio.sleep_until(20.1)
        assert await read(ranges, server) == pytest.approx(20.1)
        assert settled(ranges)

    run(main)


@pytest.mark.parametrize("kind", ["stat", "ahead"])
def test_prefetch_and_stat_end_at_read_timeout(kind: str) -> None:
    """The error names the URL, the time limit, and how long the server has been out."""
    server, ranges = Server(out_until(1e9)), RequestQueue(dataclasses.replace(OPTIONS, read_timeout=30.0))

    async def ahead() -> None:
        await ranges.fetch(server, "a", 0, 10, ahead=True)

    async def main() -> None:
        with pytest.raises(ReadError) as caught:
            await (ranges.call(server, "a", lambda: server.stat("a")) if kind == "stat" else ahead())
        says = r"http://server/a: not read within 30 s \(-o read_timeout=\): server has been out for 30\.\d s: "
        assert re.fullmatch(says + REFUSED, str(caught.value))
        assert trio.current_time() == pytest.approx(30, abs=0.5)
        await trio.testing.wait_all_tasks_blocked()
        assert settled(ranges)

    run(main)


def test_the_reason_of_an_outage_contains_no_secrets(caplog: pytest.LogCaptureFixture) -> None:
    server = Server(out_until(1e9, f"Cannot get http://me:hush@server/a?sig=hush {1000 * 'x'}"))
    ranges = RequestQueue(dataclasses.replace(OPTIONS, read_timeout=10.0))

    async def main() -> None:
        with trio.move_on_after(5):
            await read(ranges, server)
        [out] = ranges.outages().values()
        assert "hush" not in str(out) + str(ranges.reasons()) + caplog.text
        assert len(out["reason"]) <= 200
        assert caplog.text

    run(main)

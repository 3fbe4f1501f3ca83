"""DirectWeb against servers that answer in every way there is: right bytes, one clear error, or a library's client."""

from __future__ import annotations

import gzip
from collections.abc import Awaitable, Callable

import hypothesis
import pytest
import trio
import trio.testing
from hypothesis import strategies as st

from tests.unit.scripted import VALUE, Peer, Scripted, asked, cut, get, head, part, right, run
from zarrfs.errors import AccessDenied, ReadError, TargetMissing
from zarrfs.net.answers import Transient
from zarrfs.net.direct import DirectWeb

PART = VALUE[10:110]
LONG = VALUE * 300  # 3 MB: more than is waited for at once


# -- connections that end


@pytest.mark.parametrize("end", ["close", "reset"])
def test_a_connection_that_ends_as_the_next_request_comes_is_replaced(end: str) -> None:
    async def serve(peer: Peer) -> None:
        while (request := await peer.heard()) is not None:
            if len(peer.server.requests) == 2:
                if end == "reset":
                    await peer.reset()
                return
            await peer.send(right(request))

    async def check(web: DirectWeb, server: Scripted) -> None:
        for _ in range(3):
            assert await get(web, server) == PART
        assert (server.connections, len(server.requests)) == (2, 4)

    run(serve, check)


def test_it_is_asked_again_once() -> None:
    async def serve(peer: Peer) -> None:
        if (request := await peer.heard()) is not None and peer.number == 0:
            await peer.send(right(request))
            await peer.heard()

    async def check(web: DirectWeb, server: Scripted) -> None:
        assert await get(web, server) == PART
        with pytest.raises(Transient, match="closed before an answer"):
            await get(web, server)
        assert (server.connections, len(server.requests)) == (2, 3)

    run(serve, check)


@pytest.mark.parametrize("junk", [b"", head("206 OK", "Content-Range: bytes 10-109/200", "Content-Length: 100")])
def test_a_connection_that_ended_or_goes_on_while_idle_is_not_used(junk: bytes) -> None:
    done = trio.Event()

    async def serve(peer: Peer) -> None:
        request = await peer.heard()
        assert request is not None
        await peer.send(right(request), b"")
        await peer.send(junk and junk + bytes(100))
        done.set()
        if junk:
            await peer.rest()

    async def check(web: DirectWeb, server: Scripted) -> None:
        assert await get(web, server) == PART
        await done.wait()
        await server.until_ended(0 if junk else 1)
        assert await get(web, server) == PART
        assert (server.connections, len(server.requests)) == (2, 2)

    run(serve, check)


@pytest.mark.parametrize("reset", [False, True])
@pytest.mark.parametrize("sent", [0, 1, 30, -101, -100, -99, -1])
def test_an_answer_that_is_cut_off(sent: int, reset: bool) -> None:
    async def serve(peer: Peer) -> None:
        request = await peer.heard()
        assert request is not None
        await peer.send(right(request)[:sent], b"")
        if reset:
            await peer.reset()

    async def check(web: DirectWeb, server: Scripted) -> None:
        with pytest.raises(Transient):
            await get(web, server)
        assert not server.library_was_asked
        await server.until_ended(1)

    run(serve, check)


@pytest.mark.parametrize("sent", [0, 1, 30, -101, -100, -1])
def test_an_answer_that_stalls(sent: int) -> None:
    async def serve(peer: Peer) -> None:
        request = await peer.heard()
        assert request is not None
        await peer.send(right(request)[:sent])
        await peer.rest()

    async def check(web: DirectWeb, server: Scripted) -> None:
        with pytest.raises(Transient, match=r"no answer within 0\.2 s"):
            await get(web, server)
        await server.until_ended(1)

    run(serve, check, "request_timeout=0.2")


# -- answers of every kind


def _206(*lines: str, body: Callable[[bytes], bytes] = bytes) -> Callable[[str], bytes]:
    """A 206 with these lines, in which {r} is the right range, and `body` of the right bytes."""

    def made(request: str) -> bytes:
        start, stop = asked(request)
        given = [line.format(r=f"Content-Range: bytes {start}-{stop - 1}/{len(VALUE)}") for line in lines]
        return head("206 Some", *given) + body(VALUE[start:stop])

    return made


def _chunked(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n0\r\n\r\n" % (len(data), data)


def _changed(old: bytes, new: bytes, count: int = 1) -> Callable[[str], bytes]:
    return lambda request: right(request).replace(old, new, count)


SIZED = "{r}", "Content-Length: 100"
# Answers that DirectWeb takes itself, and what it has of them: bytes, or an error.
TAKEN: dict[str, tuple[Callable[[str], bytes], bytes | type[Exception]]] = {
    "longer": (
        _206("Content-Range: bytes 10-119/10240", "Content-Length: 110", body=lambda _: VALUE[10:120]), PART
    ),
    "shorter": (_206("Content-Range: bytes 10-59/10240", "Content-Length: 50", body=lambda x: x[:50]), PART[:50]),
    "elsewhere": (_206("Content-Range: bytes 11-110/10240", "Content-Length: 100"), ReadError),
    "backwards": (_206("Content-Range: bytes 10-9/10240", "Content-Length: 100"), ReadError),
    "unranged": (_206("Content-Length: 100"), ReadError),
    "parts": (_206("Content-Type: multipart/byteranges", "Content-Length: 100"), ReadError),
    "more than its length": (_206(*SIZED, body=lambda x: x + b"junk"), PART),
    "a length that is too large": (_206("{r}", "Content-Length: 107", body=lambda x: x + b"junk"), PART),
    "a length that is too small": (_206("{r}", "Content-Length: 50"), Transient),
    "of no known total": (_206("Content-Range: bytes 10-109/*", "Content-Length: 100"), PART),
    "in other letters": (_206("content-range:Bytes 10-109/10240\t", "CONTENT-LENGTH:100  "), PART),
    "the last": (_206(*SIZED, "Connection: keep-alive, Close"), PART),
    "no reason": (_changed(b" Partial Content", b""), PART),
}  # fmt: skip
# Those after which there may come anything, or whose body nobody reads.
NOT_KEPT = (
    "more than its length", "a length that is too large", "a length that is too small", "the last", "longer",
    "elsewhere", "backwards", "unranged", "parts",
)  # fmt: skip
# Answers that are for a library's client.
LEFT: dict[str, Callable[[str], bytes]] = {
    "no length": _206("{r}"),
    "chunked": _206("{r}", "Transfer-Encoding: chunked", body=_chunked),
    "chunked, with a length": _206(*SIZED, "Transfer-Encoding: chunked", body=_chunked),
    "gzip": _206("{r}", "Content-Encoding: gzip", "Content-Length: 50", body=lambda x: gzip.compress(x)[:50]),
    "the same length twice": _206(*SIZED, "Content-Length: 100"),
    "two lengths": _206(*SIZED, "Content-Length: 50"),
    "two lengths in one": _206("{r}", "Content-Length: 100, 100"),
    "two ranges": _206("Content-Range: bytes 0-99/10240", *SIZED),
    "a signed length": _206("{r}", "Content-Length: +100"),
    "another kind of digits": _206("{r}", "Content-Length: 10\xb2"),
    "a folded header": _206("{r}", "X: a", " b", "Content-Length: 100"),
    "a space before the colon": _206("{r}", "Content-Length : 100"),
    "bare line feeds": lambda request: right(request)[:-100].replace(b"\r\n", b"\n") + PART,
    "one bare line feed": _changed(b"\r\nContent-L", b"\nContent-L"),
    "a head of 1 MB": _changed(b"\r\n", b"\r\nX: %b\r\n" % (b"x" * (1 << 20))),
    "1 MB of headers": _changed(b"\r\n", b"\r\n" + b"X: x\r\n" * 200_000),
    "HTTP/1.0": _changed(b"HTTP/1.1", b"HTTP/1.0"),
    "100 first": lambda request: head("100 Continue") + right(request),
    "the whole": lambda request: head("200 OK", f"Content-Length: {len(VALUE)}") + VALUE,
    "another protocol": lambda request: b"SSH-2.0-OpenSSH_9.2p1\r\n",
    "nothing": lambda request: head("204 No Content"),
}


def _answering(answer: Callable[[str], bytes], close: bool = False) -> Callable[[Peer], Awaitable[None]]:
    async def serve(peer: Peer) -> None:
        while (request := await peer.heard()) is not None:
            await peer.send(answer(request))
            if close:
                return

    return serve


@pytest.mark.parametrize("kind", TAKEN)
def test_an_answer_that_is_taken(kind: str) -> None:
    answer, expected = TAKEN[kind]

    async def check(web: DirectWeb, server: Scripted) -> None:
        for _ in range(3):  # what is left of an answer is not taken for the next one
            if isinstance(expected, bytes):
                assert await get(web, server) == expected
            else:
                with pytest.raises(expected):
                    await get(web, server)
        assert not server.library_was_asked
        assert server.connections == (3 if kind in NOT_KEPT else 1)

    run(_answering(answer), check)


@pytest.mark.parametrize("kind", LEFT)
def test_an_answer_that_is_left_to_a_library(kind: str) -> None:
    async def check(web: DirectWeb, server: Scripted) -> None:
        for _ in range(2):
            try:
                assert await get(web, server) == (b"" if kind == "nothing" else PART)
            except (ReadError, Transient):
                assert kind not in ("no length", "chunked", "HTTP/1.0", "100 first", "the whole")
        assert server.library_was_asked

    run(_answering(LEFT[kind], True), check, "request_timeout=3")


def test_a_server_that_is_not_simple_is_left_alone() -> None:
    async def check(web: DirectWeb, server: Scripted) -> None:
        for _ in range(3):
            assert await get(web, server) == PART
        assert sum("User-Agent: zarrfs\r\n" in request for request in server.requests) == 1
        assert not web.serves(f"http://127.0.0.1:{server.port}/v")

    run(_answering(LEFT["the whole"]), check)


@pytest.mark.parametrize(
    ("headers", "total"),
    [(["Content-Range: bytes */10240"], 10240), ([], 20_000), (["Content-Range: bytes */*"], 20_000)],
)
def test_beyond_the_end(headers: list[str], total: int) -> None:
    async def check(web: DirectWeb, server: Scripted) -> None:
        for _ in range(2):
            found = await web.fetch(f"http://127.0.0.1:{server.port}/v", 20_000, 20_010)
            assert (bytes(found.data), found.total) == (b"", total)
        assert server.connections == 1

    run(_answering(lambda _: head("416 No", *headers, "Content-Length: 0")), check)


@pytest.mark.parametrize(
    "lines", [["Content-Length: 2"], ["Transfer-Encoding: chunked"], [], ["Content-Encoding: gzip"]]
)
@pytest.mark.parametrize(
    ("status", "error"),
    [(400, ReadError), (401, AccessDenied), (403, AccessDenied), (404, TargetMissing), (410, TargetMissing),
     (429, Transient), (500, Transient), (503, Transient)],
)  # fmt: skip
def test_a_status(status: int, error: type[Exception], lines: list[str]) -> None:
    body = b"2\r\nno\r\n0\r\n\r\n" if "chunked" in str(lines) else b"no"

    async def check(web: DirectWeb, server: Scripted) -> None:
        for _ in range(2):
            with pytest.raises(error, match=f"HTTP status {status} Such") as caught:
                await get(web, server)
            assert caught.type is error
            assert not isinstance(caught.value, Transient) or caught.value.after == 7
        assert not server.library_was_asked
        assert server.connections == (1 if lines == ["Content-Length: 2"] else 2)

    answer = head(f"{status} Such", "Retry-After: 7", *lines) + body
    run(_answering(lambda _: answer), check)


@pytest.mark.parametrize("status", [301, 302, 307])
@pytest.mark.parametrize("to", ["", "http://localhost:{port}"])
def test_a_redirect_is_followed_by_a_library(status: int, to: str) -> None:
    async def serve(peer: Peer) -> None:
        while (request := await peer.heard()) is not None:
            there = f"Location: {to.format(port=peer.server.port)}/w"
            away = head(f"{status} Away", there, "Content-Length: 0")
            await peer.send(away if request.startswith("GET /v ") else right(request))

    async def check(web: DirectWeb, server: Scripted) -> None:
        assert await get(web, server) == PART
        assert server.library_was_asked

    run(serve, check)


# -- pieces


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_an_answer_in_small_pieces(size: int) -> None:
    async def serve(peer: Peer) -> None:
        while (request := await peer.heard()) is not None:
            data = right(request)
            await peer.send(*cut(data, [size] * (len(data) // size)))

    async def check(web: DirectWeb, server: Scripted) -> None:
        for _ in range(2):
            assert await get(web, server) == PART
        assert server.connections == 1

    run(serve, check)


@hypothesis.settings(deadline=None, max_examples=60)
@hypothesis.given(
    st.lists(st.integers(0, 300) | st.integers(0, 1_500_000), max_size=6),
    st.integers(0, len(LONG) - 1), st.integers(1, 300) | st.integers(1, len(LONG)),
)  # fmt: skip
def test_any_pieces_of_a_right_answer_are_right_bytes(sizes: list[int], start: int, length: int) -> None:
    async def serve(peer: Peer) -> None:
        while (request := await peer.heard()) is not None:
            await peer.send(*cut(right(request, LONG), sizes))

    async def check(web: DirectWeb, server: Scripted) -> None:
        for _ in range(2):
            assert await get(web, server, start, start + length) == LONG[start : start + length]
        assert server.connections == 1

    run(serve, check)


def test_a_short_answer_after_a_long_one_is_not_waited_for() -> None:
    async def serve(peer: Peer) -> None:
        while (request := await peer.heard()) is not None:
            headers, body = part(request, LONG)
            await peer.send(head("206 OK", *headers), body)

    async def check(web: DirectWeb, server: Scripted) -> None:
        assert await get(web, server, 5, len(LONG)) == LONG[5:]
        assert await get(web, server) == PART
        assert server.connections == 1  # SO_RCVLOWAT is 1 again: the head would never be told of

    run(serve, check, "request_timeout=3")

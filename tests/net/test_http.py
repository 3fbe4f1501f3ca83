"""HttpSystem against servers that respond in all kinds of ways: it returns the right bytes or raises an error."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Awaitable, Callable

import hypothesis
import pytest
import trio
import trio.testing
from hypothesis import strategies as st

from tests.net.scripted import VALUE, Peer, Scripted, asked, cut, get, head, part, right, run, well
from zarrfs.errors import AccessDenied, ReadError, TargetMissing
from zarrfs.net.http import HttpSystem
from zarrfs.net.responses import Transient

PART = VALUE[10:110]
LONG = VALUE * 300  # 3 MB: more than one receive waits for


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

    async def check(web: HttpSystem, server: Scripted) -> None:
        for _ in range(3):
            assert await get(web, server) == PART
        assert (server.connections, len(server.requests)) == (2, 4)

    run(serve, check)


def test_a_request_on_a_reused_connection_is_sent_again_once() -> None:
    async def serve(peer: Peer) -> None:
        if (request := await peer.heard()) is not None and peer.number == 0:
            await peer.send(right(request))
            await peer.heard()

    async def check(web: HttpSystem, server: Scripted) -> None:
        assert await get(web, server) == PART
        with pytest.raises(Transient):
            await get(web, server)
        assert (server.connections, len(server.requests)) == (2, 3)

    run(serve, check)


@pytest.mark.parametrize("junk", [b"", head("206 OK", "Content-Range: bytes 10-109/200", "Content-Length: 100")])
def test_a_connection_that_was_closed_or_got_data_while_idle_is_not_reused(junk: bytes) -> None:
    done = trio.Event()

    async def serve(peer: Peer) -> None:
        request = await peer.heard()
        assert request is not None
        await peer.send(right(request), b"")
        await peer.send(junk and junk + bytes(100))
        done.set()
        if junk:
            await peer.rest()

    async def check(web: HttpSystem, server: Scripted) -> None:
        assert await get(web, server) == PART
        await done.wait()
        await server.until_ended(0 if junk else 1)
        assert await get(web, server) == PART
        assert (server.connections, len(server.requests)) == (2, 2)

    run(serve, check)


@pytest.mark.parametrize("reset", [False, True])
@pytest.mark.parametrize("sent", [0, 30, -100, -1])
def test_a_truncated_response_is_a_transient_failure(sent: int, reset: bool) -> None:
    async def serve(peer: Peer) -> None:
        request = await peer.heard()
        assert request is not None
        await peer.send(right(request)[:sent], b"")
        if reset:
            await peer.reset()

    async def check(web: HttpSystem, server: Scripted) -> None:
        with pytest.raises(Transient):
            await get(web, server)
        await server.until_ended(1)

    run(serve, check)


@pytest.mark.parametrize("chunked", [False, True])
def test_a_reset_after_the_head_is_a_failure_of_the_value(chunked: bool) -> None:
    """It is no sign of an outage, because the server has begun to respond."""

    async def serve(peer: Peer) -> None:
        request = await peer.heard()
        assert request is not None
        extent, length = part(request)[0]
        await peer.send(head("206 Partial Content", extent, "Transfer-Encoding: chunked" if chunked else length))
        await trio.sleep(0.1)
        await peer.reset()

    async def check(web: HttpSystem, server: Scripted) -> None:
        with pytest.raises(Transient) as error:
            await get(web, server)
        assert error.value.begun
        assert error.value.of_value

    run(serve, check)


@pytest.mark.parametrize("sent", [0, 30, -100, -1])
def test_a_stalled_response_times_out(sent: int) -> None:
    async def serve(peer: Peer) -> None:
        request = await peer.heard()
        assert request is not None
        await peer.send(right(request)[:sent])
        await peer.rest()

    async def check(web: HttpSystem, server: Scripted) -> None:
        with pytest.raises(Transient, match=r"no answer within 0\.2 s"):
            await get(web, server)
        await server.until_ended(1)

    run(serve, check, "read_timeout=1")


# -- responses of every kind


def _206(*lines: str, body: Callable[[bytes], bytes] = bytes) -> Callable[[str], bytes]:
    """Return a maker of 206 responses with these header lines, {r} being the right range, and body(right bytes)."""

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
# Responses after which the server keeps the connection open, and the bytes or the error that HttpSystem makes of each.
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
    "in no coding": (_206(*SIZED, "Content-Encoding: identity"), PART),
    "in the coding of its upload": (_206(*SIZED, "Content-Encoding: aws-chunked"), PART),
}  # fmt: skip
# Those of them after which HttpSystem closes the connection: more bytes may follow, or "Connection: Close".
NOT_KEPT = (
    "more than its length", "a length that is too large", "a length that is too small", "the last",
)  # fmt: skip
# Unusual responses with the right bytes, after each of which the server closes the connection.
ODD: dict[str, Callable[[str], bytes]] = {
    "no length": _206("{r}"),
    "chunked": _206("{r}", "Transfer-Encoding: chunked", body=_chunked),
    "chunked, with extensions and trailers": _206(
        "{r}", "Transfer-Encoding: Chunked",
        body=lambda x: b"32;a=b\r\n%b\r\n32 \r\n%b\r\n0\r\nX: y\r\n\r\n" % (x[:50], x[50:]),
    ),
    "the same length twice": _206(*SIZED, "Content-Length: 100"),
    "HTTP/1.0": _changed(b"HTTP/1.1", b"HTTP/1.0"),
    "HTTP/1.0 that goes on": _206(*SIZED, "Connection: Keep-Alive"),
    "100 first": lambda request: head("100 Continue") + head("103 Early Hints", "Link: x") + right(request),
    "the whole": lambda request: head("200 OK", f"Content-Length: {len(VALUE)}") + VALUE,
    "the whole, chunked": lambda request: head("200 OK", "Transfer-Encoding: chunked") + _chunked(VALUE),
    "the whole, without a length": lambda request: head("200 OK") + VALUE,
    "the whole, as gzip": lambda request: head("200 OK", "Content-Encoding: gzip") + gzip.compress(VALUE),
    "the whole, as gzip that was uploaded in chunks": lambda request: (
        head("200 OK", "Content-Encoding: gzip,aws-chunked") + gzip.compress(VALUE)
    ),
    "the whole, as two of gzip": lambda request: (
        head("200 OK", "Content-Encoding: x-gzip") + gzip.compress(VALUE[:50]) + gzip.compress(VALUE[50:])
    ),
    "the whole, deflated": lambda request: head("200 OK", "Content-Encoding: deflate") + zlib.compress(VALUE),
}  # fmt: skip
# Responses that are an error, after each of which the server closes the connection.
BAD: dict[str, Callable[[str], bytes]] = {
    "chunked, with a length": _206(*SIZED, "Transfer-Encoding: chunked", body=_chunked),
    "another coding": _206("{r}", "Transfer-Encoding: gzip, chunked", body=_chunked),
    "a chunk without a length": _206("{r}", "Transfer-Encoding: chunked", body=lambda x: b"xyz\r\n" + x),
    "a chunk that is longer": _206("{r}", "Transfer-Encoding: chunked", body=lambda x: b"5\r\n" + x),
    "a chunk with a negative length": _206("{r}", "Transfer-Encoding: chunked", body=lambda x: b"-5\r\n" + x),
    "chunks that end too early": _206("{r}", "Transfer-Encoding: chunked", body=lambda x: _chunked(x[:50])),
    "gzip": _206("{r}", "Content-Encoding: gzip", "Content-Length: 50", body=lambda x: gzip.compress(x)[:50]),
    "the whole, as gzip that is cut": lambda request: (
        head("200 OK", "Content-Encoding: gzip") + gzip.compress(VALUE)[:60]
    ),
    "the whole, as gzip that is none": lambda request: head("200 OK", "Content-Encoding: gzip") + VALUE,
    "the whole, in another encoding": lambda request: head("200 OK", "Content-Encoding: br") + VALUE,
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
    "another protocol": lambda request: b"SSH-2.0-OpenSSH_9.2p1\r\n",
    "another version": _changed(b"HTTP/1.1", b"HTTP/2.0"),
    "protocols switched": lambda request: head("101 Switching Protocols", "Upgrade: x") + right(request),
    "a redirect to nowhere": lambda request: head("302 Away", "Content-Length: 0"),
    "not modified": lambda request: head("304 Not Modified"),
    "a note that the value is being staged": lambda request: head("202 Accepted", "Content-Length: 200") + bytes(200),
    "a note on many values": lambda request: head("207 Multi-Status", "Content-Length: 200") + bytes(200),
}  # fmt: skip


def _answering(answer: Callable[[str], bytes], close: bool = False) -> Callable[[Peer], Awaitable[None]]:
    async def serve(peer: Peer) -> None:
        while (request := await peer.heard()) is not None:
            await peer.send(answer(request))
            if close:
                return

    return serve


@pytest.mark.parametrize("kind", TAKEN)
def test_a_response_leaves_nothing_for_the_next_request(kind: str) -> None:
    answer, expected = TAKEN[kind]

    async def check(web: HttpSystem, server: Scripted) -> None:
        for _ in range(3):  # the rest of a response is not read as the next one
            if isinstance(expected, bytes):
                assert await get(web, server) == expected
            else:
                with pytest.raises(expected):
                    await get(web, server)
        assert server.connections == (3 if kind in NOT_KEPT else 1)

    run(_answering(answer), check)


@pytest.mark.parametrize("kind", ODD)
def test_an_unusual_response_yields_the_right_bytes(kind: str) -> None:
    async def check(web: HttpSystem, server: Scripted) -> None:
        for _ in range(2):
            assert await get(web, server) == PART
        assert server.ended <= len(server.requests) == 2

    run(_answering(ODD[kind], True), check, "read_timeout=15")


@pytest.mark.parametrize("kind", BAD)
def test_a_wrong_response_is_an_error(kind: str) -> None:
    async def check(web: HttpSystem, server: Scripted) -> None:
        for _ in range(2):
            with pytest.raises((ReadError, Transient)):
                await get(web, server)
        await server.until_ended(2)

    run(_answering(BAD[kind], True), check, "read_timeout=15")


def test_a_response_without_content_is_an_empty_value() -> None:
    async def check(web: HttpSystem, server: Scripted) -> None:
        assert await get(web, server) == b""

    run(_answering(lambda _: head("204 No Content")), check)


@pytest.mark.parametrize("status", ["202 Accepted", "301 Away", "304 Not Modified"])
def test_the_length_of_a_response_without_the_value_is_not_its_size(status: str) -> None:
    async def check(web: HttpSystem, server: Scripted) -> None:
        with pytest.raises(ReadError, match=f"HTTP status {status}"):
            await web.stat(f"http://127.0.0.1:{server.port}/v")

    note = head(status, "Location: /w", "Content-Length: 20")
    run(_answering(lambda request: note + (bytes(20) if request.startswith("GET") else b""), True), check,
        "http.allow_redirects=false")  # fmt: skip


@pytest.mark.parametrize(
    ("headers", "total"),
    [(["Content-Range: bytes */10240"], 10240), ([], None), (["Content-Range: bytes */*"], None)],
)
def test_a_range_beyond_the_end_is_empty(headers: list[str], total: int | None) -> None:
    async def check(web: HttpSystem, server: Scripted) -> None:
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
     (429, Transient), (500, Transient)],
)  # fmt: skip
def test_an_error_status_raises_the_error_of_its_kind(status: int, error: type[Exception], lines: list[str]) -> None:
    body = b"2\r\nno\r\n0\r\n\r\n" if "chunked" in str(lines) else b"no"

    async def check(web: HttpSystem, server: Scripted) -> None:
        for _ in range(2):
            with pytest.raises(error, match=f"HTTP status {status} Such") as caught:
                await get(web, server)
            assert caught.type is error
            assert not isinstance(caught.value, Transient) or caught.value.after == 7
        ends = lines == ["Content-Length: 2"] or "chunked" in str(lines)
        assert server.connections == (1 if ends else 2)

    answer = head(f"{status} Such", "Retry-After: 7", *lines) + body
    run(_answering(lambda _: answer), check)


def _redirecting(status: int, to: str, *lines: str) -> Callable[[Peer], Awaitable[None]]:
    """Return a serve() that redirects /v to `to`, {port} being the server's, and answers other requests correctly."""

    async def serve(peer: Peer) -> None:
        while (request := await peer.heard()) is not None:
            there = f"Location: {to.format(port=peer.server.port)}"
            away = head(f"{status} Away", there, *lines, "Content-Length: 0")
            await peer.send(away if request.startswith("GET /v ") else right(request))

    return serve


@pytest.mark.parametrize(
    ("status", "to"),
    [
        (301, "/w"),
        (302, "w"),
        (303, "/w"),
        (307, "http://localhost:{port}/w?a=b%2Fc+d"),
        (308, "//127.0.0.1:{port}/w"),
    ],
)
def test_a_redirect_is_followed_and_remembered(status: int, to: str) -> None:
    async def check(web: HttpSystem, server: Scripted) -> None:
        async def one() -> None:
            assert await get(web, server) == PART

        await one()
        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(one)
        asked = [request.split()[1] for request in server.requests]
        there = "/w?a=b%2Fc+d" if "?" in to else "/w"
        assert asked == ["/v", *4 * [there]]

    run(_redirecting(status, to), check)


@pytest.mark.parametrize("line", ["Cache-Control: no-store", "Cache-Control: private, no-cache", "Set-Cookie: a=b"])
def test_an_uncacheable_redirect_is_not_remembered(line: str) -> None:
    async def check(web: HttpSystem, server: Scripted) -> None:
        for _ in range(2):
            assert await get(web, server) == PART
        assert [request.split()[1] for request in server.requests] == ["/v", "/w", "/v", "/w"]

    run(_redirecting(302, "/w", line), check)


@pytest.mark.parametrize("denial", ["400 ExpiredToken", "401 No", "403 Expired", "404 Gone", "410 Gone"])
def test_a_remembered_redirect_that_has_expired_is_requested_again(denial: str) -> None:
    async def serve(peer: Peer) -> None:
        while (request := await peer.heard()) is not None:
            if request.startswith("GET /v "):
                there = f"Location: /w{len(peer.server.requests)}"
                await peer.send(head("302 Away", there, "Content-Length: 0"))
            elif len(peer.server.requests) == 3:
                await peer.send(head(denial, "Content-Length: 2") + b"no")
            else:
                await peer.send(right(request))

    async def check(web: HttpSystem, server: Scripted) -> None:
        for _ in range(2):
            assert await get(web, server) == PART
        asked = [request.split()[1] for request in server.requests]
        assert asked == ["/v", "/w1", "/w1", "/v", "/w4"]

    run(serve, check)


@pytest.mark.parametrize(
    ("asked", "to"), [("/a%3Db", "/a=b/"), ("/a=b", "/a%3Db/"), ("/a%3Db", "/a%3db/"), ("/a%20b", "/a%20b/?x=y")]
)
def test_a_redirect_to_the_same_name_with_a_slash_is_a_directory_in_any_spelling(asked: str, to: str) -> None:
    """It is not followed, because a server without listings refuses the directory itself."""

    async def serve(peer: Peer) -> None:
        while (request := await peer.heard()) is not None:
            away = head("301 Away", f"Location: {to}", "Content-Length: 0")
            await peer.send(away if request.split()[1] == asked else head("403 No", "Content-Length: 0"))

    async def check(web: HttpSystem, server: Scripted) -> None:
        assert (await web.stat(f"http://127.0.0.1:{server.port}{asked}")).directory
        assert [request.split()[1] for request in server.requests] == [asked]

    run(serve, check)


@pytest.mark.parametrize("to", ["/a=c/", "/a=b", "/a%2Fb/", "/a=b/c/"])
def test_a_redirect_to_another_name_is_no_directory(to: str) -> None:
    async def serve(peer: Peer) -> None:
        while (request := await peer.heard()) is not None:
            away = head("302 Away", f"Location: {to}", "Content-Length: 0")
            await peer.send(away if request.split()[1] == "/a%3Db" else head("403 No", "Content-Length: 0"))

    async def check(web: HttpSystem, server: Scripted) -> None:
        with pytest.raises(AccessDenied):
            await web.stat(f"http://127.0.0.1:{server.port}/a%3Db")

    run(serve, check)


@pytest.mark.parametrize("failure", ["503 Down", "end"])
def test_a_remembered_redirect_to_a_failing_server_is_requested_again(failure: str) -> None:
    async def serve(peer: Peer) -> None:
        while (request := await peer.heard()) is not None:
            if request.startswith("GET /v "):
                there = f"Location: /w{len(peer.server.requests)}"
                await peer.send(head("302 Away", there, "Content-Length: 0"))
            elif len(peer.server.requests) == 2 or not request.startswith("GET /w1 "):
                await peer.send(right(request))
            elif failure == "end":
                return
            else:
                await peer.send(head(failure, "Content-Length: 2") + b"no")

    async def check(web: HttpSystem, server: Scripted) -> None:
        assert await get(web, server) == PART
        with pytest.raises(Transient):
            await get(web, server)
        assert await get(web, server) == PART
        assert [request.split()[1] for request in server.requests][-2] == "/v"

    run(serve, check)


def test_idle_connections_are_closed_after_a_while() -> None:
    """There are no requests meanwhile; the clock jumps as soon as nothing happens."""
    together = trio.Event()

    async def serve(peer: Peer) -> None:
        while (request := await peer.heard()) is not None:
            if peer.server.connections == 4:
                together.set()
            await together.wait()
            await peer.send(right(request))

    async def check(web: HttpSystem, server: Scripted) -> None:
        for before in 0, 4:
            async with trio.open_nursery() as nursery:
                for _ in range(4):
                    nursery.start_soon(get, web, server)
            assert server.ended == before
            await trio.sleep(20)
            assert server.ended >= before + (1 if before else 4)

    run(serve, check, clock=trio.testing.MockClock(autojump_threshold=0.1))


def test_cookies_are_sent_only_to_the_server_that_set_them() -> None:
    """A login like that of Earthdata: the data server redirects to a login server, and later sets a cookie."""

    async def serve(peer: Peer) -> None:
        port = peer.server.port
        while (request := await peer.heard()) is not None:
            path = request.split()[1]
            if path == "/v" and "Cookie: session=1" not in request:
                await peer.send(head("302 Log in", f"Location: http://localhost:{port}/login", "Content-Length: 0"))
            elif path == "/login":
                back = f"Location: http://127.0.0.1:{port}/back"
                await peer.send(head("302 Back", back, "Set-Cookie: other=2", "Content-Length: 0"))
            elif path == "/back":
                cookies = "Set-Cookie: session=1; Path=/; HttpOnly", "Set-Cookie: third=3; Path=/other"
                await peer.send(head("302 Here", "Location: /v", *cookies, "Content-Length: 0"))
            else:
                await peer.send(right(request))

    async def check(web: HttpSystem, server: Scripted) -> None:
        for _ in range(3):
            assert await get(web, server) == PART
        assert [request.split()[1] for request in server.requests] == ["/v", "/login", "/back", "/v", "/v", "/v"]
        assert "other=2" not in str([request for request in server.requests if "Host: 127" in request])
        assert "third" not in str(server.requests)

    run(serve, check)


@pytest.mark.parametrize("user", ["", "u@"])
@pytest.mark.parametrize(
    ("path", "sent"),
    [("/a//b?c=%2f+", "/a//b?c=%2f+"), ("/%7ea=%3D", "/%7ea=%3D"), ("/a/../b/./c", "/b/c"), ("/ä b", "/%C3%A4%20b")],
)  # fmt: skip
def test_a_url_is_sent_as_it_is_written_if_it_is_legal(user: str, path: str, sent: str) -> None:
    async def check(web: HttpSystem, server: Scripted) -> None:
        for _ in range(2):
            await web.fetch(f"http://{user}127.0.0.1:{server.port}{path}", 10, 110)
        assert [request.split()[1] for request in server.requests] == [sent, sent]

    run(well, check)


# -- responses in pieces


@pytest.mark.parametrize("size", [1, 7])
def test_a_response_in_small_pieces_is_read(size: int) -> None:
    async def serve(peer: Peer) -> None:
        while (request := await peer.heard()) is not None:
            data = right(request)
            await peer.send(*cut(data, [size] * (len(data) // size)))

    async def check(web: HttpSystem, server: Scripted) -> None:
        for _ in range(2):
            assert await get(web, server) == PART
        assert server.connections == 1

    run(serve, check)


@hypothesis.settings(deadline=None, max_examples=60)
@hypothesis.given(
    st.lists(st.integers(0, 300) | st.integers(0, 1_500_000), max_size=6),
    st.integers(0, len(LONG) - 1), st.integers(1, 300) | st.integers(1, len(LONG)),
)  # fmt: skip
def test_any_split_of_a_response_yields_the_right_bytes(sizes: list[int], start: int, length: int) -> None:
    async def serve(peer: Peer) -> None:
        while (request := await peer.heard()) is not None:
            await peer.send(*cut(right(request, LONG), sizes))

    async def check(web: HttpSystem, server: Scripted) -> None:
        for _ in range(2):
            assert await get(web, server, start, start + length) == LONG[start : start + length]
        assert server.connections == 1

    run(serve, check)

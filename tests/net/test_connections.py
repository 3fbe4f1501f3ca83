"""Connections to web servers: none leaks, idle ones are closed, and addresses are checked and tried in turn."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Awaitable, Callable, Iterator

import pytest
import trio
import trio.testing

from tests.conftest import open_descriptors
from tests.net.scripted import VALUE, Peer, Scripted, get, head, right, run, well
from tests.servers import free_port
from zarrfs.errors import AccessDenied
from zarrfs.net import connections, web
from zarrfs.net.http import HttpSystem
from zarrfs.net.responses import Transient

PART = VALUE[10:110]

# -- cancelled, concurrent and idle connections


@pytest.mark.parametrize("sent", [0, 30, -100, -1])
def test_a_cancelled_request_closes_its_connection(sent: int) -> None:
    silent = trio.Event()

    async def serve(peer: Peer) -> None:
        request = await peer.heard()
        assert request is not None
        await peer.send(right(request)[:sent], b"")
        silent.set()
        await peer.rest()

    async def check(system: HttpSystem, server: Scripted) -> None:
        before = open_descriptors()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(get, system, server)
            await silent.wait()
            nursery.cancel_scope.cancel()
        await server.until_ended(1)
        assert open_descriptors() <= before  # a thread of an earlier test may have closed its own meanwhile

    run(serve, check)


def test_a_cancelled_connect_closes_its_socket() -> None:
    async def check(system: HttpSystem, server: Scripted) -> None:
        with _silent("127.0.0.1") as port:
            before = open_descriptors()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(system.fetch, f"http://127.0.0.1:{port}/v", 0, 5)
                await trio.testing.wait_all_tasks_blocked()
                assert len(open_descriptors() - before) == 1
                nursery.cancel_scope.cancel()
            assert open_descriptors() <= before

    run(well, check)


async def _together(system: HttpSystem, server: Scripted, count: int) -> None:
    async def one(number: int) -> None:
        assert await get(system, server, number, number + 1000) == VALUE[number : number + 1000]

    async with trio.open_nursery() as nursery:
        for number in range(count):
            nursery.start_soon(one, number)


def _crowd(count: int) -> Callable[[Peer], Awaitable[None]]:
    """Return a serve() that answers only once `count` connections have each sent a request."""

    async def serve(peer: Peer) -> None:
        while (request := await peer.heard()) is not None:
            while len(peer.server.requests) % count:  # noqa: ASYNC110
                await trio.sleep(0.001)
            await peer.send(right(request))

    return serve


def test_concurrent_requests_reuse_the_connections_of_earlier_ones() -> None:
    async def check(system: HttpSystem, server: Scripted) -> None:
        await _together(system, server, 64)
        await _together(system, server, 64)
        assert (server.connections, len(server.requests)) == (64, 128)

    run(_crowd(64), check)


def test_the_number_of_idle_connections_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "_KEPT", 3)

    async def check(system: HttpSystem, server: Scripted) -> None:
        await _together(system, server, 8)
        await server.until_ended(5)
        await trio.testing.wait_all_tasks_blocked()
        assert server.ended == 5
        await system.aclose()
        await server.until_ended(8)

    run(_crowd(8), check)


def test_idle_connections_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "_IDLE", 0.05)

    async def check(system: HttpSystem, server: Scripted) -> None:
        for times in (1, 2):
            await _together(system, server, 4)
            await server.until_ended(4 * times)

    run(_crowd(4), check)


def test_the_number_of_remembered_servers_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web, "_SITES", 2)
    monkeypatch.setattr(connections, "_KEPT", 2)

    async def check(system: HttpSystem, server: Scripted) -> None:
        for host in ("127.0.0.1", "127.0.0.2", "127.0.0.1", "127.0.0.3"):
            await system.fetch(f"http://{host}:{server.port}/v", 0, 5)
        await server.until_ended(1)
        await system.fetch(f"http://127.0.0.1:{server.port}/v", 0, 5)  # still remembered: it was used after 127.0.0.2
        assert (server.connections, server.ended) == (3, 1)

    run(well, check, host="0.0.0.0")


# -- names and addresses


class _Resolver(trio.abc.HostnameResolver):
    """A resolver that maps `names` to addresses; `asked` counts the lookups."""

    def __init__(self, **names: list[str]) -> None:
        self.names, self.asked = names, 0

    async def getaddrinfo(self, host, port, *rest, **more):  # type: ignore[no-untyped-def]
        self.asked += 1
        await trio.sleep(0.01)
        name = host.decode() if isinstance(host, bytes) else host
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (at, port)) for at in self.names[name]]

    async def getnameinfo(self, *_):  # type: ignore[no-untyped-def]
        raise NotImplementedError


def test_the_host_header_has_the_port() -> None:
    async def check(system: HttpSystem, server: Scripted) -> None:
        for host in ("127.0.0.1", "localhost"):
            await system.fetch(f"http://{host}:{server.port}/v", 0, 5)
            assert f"\r\nHost: {host}:{server.port}\r\n" in server.requests[-1]

    run(well, check)


def test_the_host_header_omits_the_default_port(monkeypatch: pytest.MonkeyPatch) -> None:
    async def check(system: HttpSystem, server: Scripted) -> None:
        connection = connections._connection
        monkeypatch.setattr(connections, "_connection", lambda family, at: connection(family, (at[0], server.port)))
        await system.fetch("http://127.0.0.1/v", 0, 5)
        assert "\r\nHost: 127.0.0.1\r\n" in server.requests[-1]

    run(well, check)


def test_an_ipv6_address_is_connected_to() -> None:
    async def check(system: HttpSystem, server: Scripted) -> None:
        assert bytes((await system.fetch(f"http://[::1]:{server.port}/v", 10, 110)).data) == PART
        assert f"\r\nHost: [::1]:{server.port}\r\n" in server.requests[0]

    run(well, check, host="::1")


@contextlib.contextmanager
def _silent(host: str, port: int = 0) -> Iterator[int]:
    """Yield a port that answers no connection attempt: its accept queue is full."""
    with socket.socket() as full, socket.socket() as first, socket.socket() as second:
        full.bind((host, port))
        full.listen(0)
        for waiting in (first, second):
            waiting.setblocking(False)
            waiting.connect_ex(full.getsockname())
        yield full.getsockname()[1]


@pytest.mark.parametrize("silent", [False, True])
def test_the_addresses_of_a_name_are_tried_in_turn(silent: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "_NEXT", 0.1)
    tried = []
    connection = connections._connection

    def noted(family: socket.AddressFamily, at: tuple[str, int]) -> Awaitable[trio.socket.SocketType]:
        tried.append(at[0])
        return connection(family, at)

    monkeypatch.setattr(connections, "_connection", noted)

    async def check(system: HttpSystem, server: Scripted) -> None:
        resolver = _Resolver(name=["127.0.0.9", "127.0.0.1"])
        trio.socket.set_custom_hostname_resolver(resolver)
        with _silent("127.0.0.9", server.port) if silent else contextlib.nullcontext():
            for _ in range(2):
                assert bytes((await system.fetch(f"http://name:{server.port}/v", 10, 110)).data) == PART
                system._web._pool.close_idle(float("inf"))
        assert tried == ["127.0.0.9", "127.0.0.1", "127.0.0.1"]
        assert resolver.asked == 1

    run(well, check)


def test_concurrent_requests_share_one_lookup_of_a_name() -> None:
    async def check(system: HttpSystem, server: Scripted) -> None:
        resolver = _Resolver(name=["127.0.0.1"])
        trio.socket.set_custom_hostname_resolver(resolver)
        async with trio.open_nursery() as nursery:
            for _ in range(20):
                nursery.start_soon(system.fetch, f"http://name:{server.port}/v", 10, 110)
        assert resolver.asked == 1

    run(well, check)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "127.1", "2130706433", "0x7f.1", "name"])
def test_a_set_from_the_network_reaches_no_private_address(host: str) -> None:
    async def check(system: HttpSystem, server: Scripted) -> None:
        url = f"http://{host}:{server.port}/v"
        if host == "name":
            trio.socket.set_custom_hostname_resolver(_Resolver(name=["127.0.0.1"]))
        with pytest.raises(AccessDenied) as caught:
            await system.fetch(url, 10, 110)
        assert str(caught.value).startswith(f"{url}: a set from the network reaches only public addresses, and ")
        assert server.connections == 0

    run(well, check, origin="http://example.org/set.json")


def test_a_set_reaches_its_own_server_and_its_redirects_are_judged() -> None:
    async def serve(peer: Peer) -> None:
        while (request := await peer.heard()) is not None:
            away = head("302 Away", f"Location: http://127.0.0.2:{peer.server.port}/v", "Content-Length: 0")
            await peer.send(away if request.startswith("GET /to ") else right(request))

    async def check(system: HttpSystem, server: Scripted) -> None:
        assert await get(system, server) == PART
        with pytest.raises(AccessDenied, match=r"reaches only public addresses, and 127\.0\.0\.2 is none"):
            await get(system, server, path="/to")

    run(serve, check, origin="http://127.0.0.1:{port}/set.json", host="0.0.0.0")


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_a_refused_connection_is_a_transient_failure(host: str) -> None:
    async def check(system: HttpSystem, server: Scripted) -> None:
        with pytest.raises(Transient, match="refused"):
            await system.fetch(f"http://{host}:{free_port()}/v", 0, 5)

    run(well, check)

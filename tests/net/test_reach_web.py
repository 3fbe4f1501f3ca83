"""Access rules for web servers in remote sets, and which servers get the user's headers; with real servers."""

from __future__ import annotations

import contextlib
import errno
import socket
import zipfile
from collections.abc import Iterator
from io import BytesIO
from typing import Any

import pytest
import trio

from tests.net.recording import VALUE, Recorder, recording
from tests.servers import Faulty
from zarrfs.config.options import Options, parse
from zarrfs.errors import AccessDenied, ReadError, to_errno
from zarrfs.store.targets import Targets

SECRET = 'http.headers={"X-Token": "secret"}'


@pytest.fixture
def own() -> Iterator[Recorder]:
    """Run the server that the set comes from."""
    with recording("127.0.0.1") as server:
        yield server


@pytest.fixture
def other() -> Iterator[Recorder]:
    """Run another server on this machine."""
    with recording("127.0.0.2") as server:
        yield server


def read(url: str, origin: str, *options: str, retries: int = 0) -> bytes:
    """Read eight bytes of a target of the set that came from `origin`."""

    async def main() -> bytes:
        targets = Targets(parse([f"retries={retries}", *options]).options, origin=origin)
        try:
            return bytes(await targets.read(url, 3, 8, 0, len(VALUE)))
        finally:
            await targets.aclose()

    return trio.run(main)


def refused(url: str, origin: str, *options: str, **more: Any) -> str:
    """Read a target that must be refused; return the error message."""
    with pytest.raises(AccessDenied) as caught:
        read(url, origin, *options, **more)
    assert to_errno(caught.value) == errno.EACCES
    assert caught.value.where
    return str(caught.value)


# -- addresses


def test_a_set_reaches_its_own_server_and_no_other_of_this_machine(own: Recorder, other: Recorder) -> None:
    origin = f"{own.url}/set.json"
    assert read(f"{own.url}/v", origin) == VALUE[3:11]
    assert read(f"{own.url.upper().replace('HTTP', 'http')}/v", origin) == VALUE[3:11]
    said = refused(f"{other.url}/v", origin)
    assert f"{other.url}/v: a set from the network reaches only public addresses, and 127.0.0.2 is none" in said
    assert "(-o allow=private)" in said
    assert not other.requests
    for allow in ("allow=private", "allow=all"):
        assert read(f"{other.url}/v", origin, allow) == VALUE[3:11]
    assert read(f"{other.url}/v", "") == VALUE[3:11]  # a local set
    assert read(f"{other.url}/v", origin, f"base={other.url}/dir/") == VALUE[3:11]


def test_another_port_is_another_server(own: Recorder) -> None:
    with recording("127.0.0.1") as second:
        assert "127.0.0.1 is none" in refused(f"{second.url}/v", f"{own.url}/set.json")
        assert not second.requests


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1", "127.1", "0x7f.1", "0x7f000001", "017700000001", "2130706433", "127.0.0.1.", "0", "localhost",
        "LOCALHOST", "[::1]", "[::ffff:127.0.0.1]", "[::ffff:7f00:1]", "①②⑦.⓪.⓪.①", "127。0。0。1",
        "user:pass@127.0.0.1", "8.8.8.8@127.0.0.1", "169.254.169.254", "[fe80::1%25lo]", "10.0.0.1", "0.0.0.0",
    ],
)  # fmt: skip
@pytest.mark.parametrize("way", ["{target}", "{own}/to?{target}", "zip://x::{target}"])
def test_no_spelling_of_an_address_that_is_not_public(host: str, way: str, own: Recorder) -> None:
    with recording("127.0.0.1") as victim:
        target = f"http://{host}:{victim.port}/v"
        refused(way.format(target=target, own=own.url), f"{own.url}/set.json")
        assert not victim.requests


def test_ipv6(own: Recorder) -> None:
    with recording("::1") as server:
        assert read(f"{server.url}/v", f"{server.url}/set.json") == VALUE[3:11]
        assert "::1 is none" in refused(f"{server.url}/v", f"{own.url}/set.json")
        assert len(server.requests) == 1


def resolving(monkeypatch: pytest.MonkeyPatch, names: dict[str, list[str]]) -> None:
    """Resolve `names` to the given addresses."""
    real = socket.getaddrinfo

    def lookup(host: Any, port: Any, *arguments: Any, **more: Any) -> Any:
        if host not in names:
            return real(host, port, *arguments, **more)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in names[host]]

    monkeypatch.setattr(socket, "getaddrinfo", lookup)


def test_names_are_judged_by_the_addresses_they_resolve_to(own: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    resolving(monkeypatch, {"inside.test": ["127.0.0.1", "127.0.0.2", "127.0.0.3"]})
    with recording("127.0.0.1") as victim:
        url = f"http://inside.test:{victim.port}/v"
        assert "is none" in refused(url, f"{own.url}/set.json")
        assert not victim.requests
        assert read(url, "") == VALUE[3:11]


def test_the_next_address_of_a_name_is_tried(own: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first refuses connections, the second never answers: its queue of connections is full."""
    resolving(monkeypatch, {"several.test": ["127.0.0.8", "127.0.0.9", "127.0.0.1"]})
    with socket.create_server(("127.0.0.9", own.port), backlog=0), contextlib.ExitStack() as closing:
        for _ in range(3):
            waiting = closing.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(("127.0.0.9", own.port))
        assert read(f"http://several.test:{own.port}/v", "") == VALUE[3:11]


def test_the_error_of_a_server_is_that_of_its_first_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last one is often an IPv6 address, which a machine without IPv6 does not reach."""
    resolving(monkeypatch, {"several.test": ["127.0.0.8", "255.255.255.255"]})
    with pytest.raises(ReadError, match="Connection refused"):
        read("http://several.test:1/v", "")


def test_the_server_of_the_set_may_have_any_address(monkeypatch: pytest.MonkeyPatch) -> None:
    resolving(monkeypatch, {"inside.test": ["127.0.0.1"]})
    with recording("127.0.0.1") as server, recording("127.0.0.1") as victim:
        origin = f"http://inside.test:{server.port}/set.json"
        assert read(f"http://inside.test:{server.port}/v", origin) == VALUE[3:11]
        assert "127.0.0.1 is none" in refused(f"http://inside.test:{victim.port}/v", origin)
        assert not victim.requests


def test_redirects(own: Recorder, other: Recorder) -> None:
    origin = f"{own.url}/set.json"
    said = refused(own.to(f"{other.url}/v"), origin)
    assert f"is redirected to {other.url}/v: " in said
    assert "127.0.0.2 is none (-o allow=private)" in said
    assert not other.requests
    assert read(own.to(f"{own.url}/v"), origin) == VALUE[3:11]
    assert read(own.to("/v"), origin) == VALUE[3:11]
    assert read(own.to(own.to(own.to("/v"))), origin) == VALUE[3:11]
    assert read(own.to(f"{other.url}/v"), "") == VALUE[3:11]
    assert read(f"{own.url}/to?{'/to?' * 9}/v", origin) == VALUE[3:11]
    with pytest.raises(ReadError, match="is redirected more than 10 times"):
        read(f"{own.url}/to?{'/to?' * 10}/v", origin)


@pytest.mark.parametrize("location", ["file:///etc/passwd", "ftp://127.0.0.1/x", "gopher://127.0.0.1/", "http://[bad"])
def test_redirects_out_of_http(location: str, own: Recorder) -> None:
    with pytest.raises(ReadError, match="is redirected to"):
        read(own.to(location), f"{own.url}/set.json")
    with pytest.raises(ReadError, match="is redirected to"):
        read(own.to(location), "")


def test_an_archive_on_another_server_is_refused(faulty: Faulty, other: Recorder) -> None:
    data = BytesIO()
    with zipfile.ZipFile(data, "w") as file:
        file.writestr("a", VALUE)
    url = "zip://a::" + faulty.put("/x.zip", data.getvalue())
    assert read(url, f"{faulty.url}/set.json") == VALUE[3:11]
    assert read(url, f"zip://set.json::{faulty.url}/x.zip") == VALUE[3:11]
    faulty.put("/x.zip", data.getvalue())
    assert "127.0.0.1 is none" in refused(url, f"{other.url}/set.json")
    assert not faulty.requests


def test_a_proxy_named_by_the_user_may_have_a_private_address(faulty: Faulty, other: Recorder, own: Recorder) -> None:
    """Addresses in the URLs of targets are judged nevertheless."""
    faulty.put("http://data.test/v", VALUE)
    for options in ([f"http.proxy={faulty.url}"], [f"http://data.test.proxy={faulty.url}"]):
        assert read("http://data.test/v", f"{own.url}/set.json", *options) == VALUE[3:11]
    assert "127.0.0.2 is none" in refused(f"{other.url}/v", f"{own.url}/set.json", f"http.proxy={faulty.url}")


def test_proxies_of_the_environment_are_used(
    faulty: Faulty, own: Recorder, other: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hosts in no_proxy are connected to directly, so private addresses are refused."""
    faulty.put("http://data.test/v", VALUE)
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        with monkeypatch.context() as patch:
            patch.setenv(name, faulty.url)
            assert read("http://data.test/v", f"{own.url}/set.json") == VALUE[3:11]
            patch.setenv("no_proxy", "inside.test")
            resolving(patch, {"inside.test": ["127.0.0.2"]})
            url = f"http://inside.test:{other.port}/v"
            assert "127.0.0.2 is none" in refused(url, f"{own.url}/set.json")
    assert not other.requests
    with pytest.raises(ReadError):
        read("http://data.test/v", f"{own.url}/set.json")


# -- options and credentials


def test_headers_go_to_the_server_of_the_set_only(own: Recorder, other: Recorder) -> None:
    origin = f"{own.url}/set.json"
    read(f"{own.url}/v", origin, SECRET)
    assert own.headers()["x-token"] == "secret"
    read(f"{other.url}/v", origin, SECRET, "allow=private")
    assert "x-token" not in other.headers()
    for option in ("allow=credentials", "allow=all", f"base={other.url}/", f"{other.url}.timeout=5"):
        read(f"{other.url}/v", origin, SECRET, "allow=private", option)
        assert other.headers()["x-token"] == "secret"
    read(f"{other.url}/v", "", SECRET)  # a local set
    assert other.headers()["x-token"] == "secret"


def test_options_of_one_host_apply_to_it_alone(own: Recorder, other: Recorder) -> None:
    options = [SECRET, f'{other.url}.headers={{"X-Token": "other"}}', "allow=private"]
    for origin in ("", f"{own.url}/set.json"):
        read(f"{own.url}/v", origin, *options)
        read(f"{other.url}/v", origin, *options)
        assert (own.headers()["x-token"], other.headers()["x-token"]) == ("secret", "other")
    assert other.url.startswith("http:")
    read(f"{own.url}/v", "", f'https://127.0.0.1:{own.port}.headers={{"X-Token": "other"}}')
    assert "x-token" not in own.headers()


@pytest.mark.parametrize("option", [SECRET, 'http.cookies={"x-token": "secret"}'])
@pytest.mark.parametrize("local", [True, False])
def test_no_credentials_follow_a_redirect_elsewhere(option: str, local: bool, own: Recorder, other: Recorder) -> None:
    origin = "" if local else f"{own.url}/set.json"
    read(own.to(f"{other.url}/v"), origin, option, "allow=private")
    assert "secret" in str(own.headers())
    assert "secret" not in str(other.requests)
    read(own.to(other.to(f"{own.url}/v")), origin, option, "allow=private")
    assert "secret" not in str(other.requests)
    assert own.requests[-1][0] == "/v"
    assert "secret" in str(own.headers())  # redirected back to its own server
    read(own.to("/v"), origin, option)
    assert "secret" in str(own.headers())


def test_parameters_follow_no_redirect_at_all(own: Recorder, other: Recorder) -> None:
    read(own.to(f"{other.url}/v"), "", 'http.params={"token": "secret"}')
    assert "token=secret" in own.requests[-1][0]
    assert "secret" not in str(other.requests)
    read(own.to("/v"), "", 'http.params={"token": "secret"}')
    assert own.requests[-1][0] == "/v"


def test_passwords_in_a_url_do_not_follow_a_redirect_to_another_server(own: Recorder, other: Recorder) -> None:
    url = own.to(f"{other.url}/v").replace("://", "://user:pass@", 1)
    read(url, "")
    assert "authorization" in own.headers()
    assert "authorization" not in other.headers()
    read(own.to(f"{own.url}/v").replace("://", "://user:pass@", 1), "")
    assert own.requests[-1][0] == "/v"
    assert "authorization" in own.headers()


def test_a_refused_target_is_not_retried(own: Recorder, other: Recorder) -> None:
    refused(f"{other.url}/v", f"{own.url}/set.json", retries=5)
    refused(own.to(f"{other.url}/v"), f"{own.url}/set.json", retries=5)
    assert len(own.requests) == 1


def test_storage_options_can_be_given_as_a_python_mapping() -> None:
    options = Options(storage={"http": {"proxy": "http://h"}, "http://b": {"headers": {}}})
    assert parse(["http.proxy=http://h", "http://b.headers={}"]).options == options

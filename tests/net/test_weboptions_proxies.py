"""A real proxy (tinyproxy), named by options or environment, for http and, with CONNECT, for https; and passwords."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import trio

from tests.net.test_tls import VALUE, Authority, Server
from tests.net.test_tls import authority as authority
from tests.net.test_tls import server as server
from tests.servers import Answer, Faulty, free_port, serving_by_headers
from zarrfs.config.options import parse
from zarrfs.errors import AccessDenied, ReadError
from zarrfs.store.remotefiles import RemoteFiles


class Proxy:
    """A running tinyproxy that requires a login; `url` has user and password, `bare` is HOST:PORT."""

    def __init__(self, directory: Path) -> None:
        program = shutil.which("tinyproxy")
        if program is None:
            pytest.fail("tinyproxy is not installed: the tests of proxies need it")
        self.port, self._log = free_port(), directory / "log"
        config = directory / "tinyproxy.conf"
        config.write_text(
            f'Port {self.port}\nListen 127.0.0.1\nTimeout 60\nBasicAuth joe a-b_c\nLogFile "{self._log}"\n'
            "LogLevel Connect\nMaxClients 50\n"
        )
        self._process = subprocess.Popen([program, "-d", "-c", config], stdout=subprocess.DEVNULL)
        self.bare, self.url = f"127.0.0.1:{self.port}", f"http://joe:a-b%5Fc@127.0.0.1:{self.port}"
        for _ in range(1200):
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port)):
                return
            time.sleep(0.05)
        pytest.fail("tinyproxy does not start")

    def requests(self) -> list[str]:
        """Return the request lines that the proxy has logged."""
        return re.findall(r"Request \(file descriptor \d+\): (.*)", self._log.read_text())

    def close(self) -> None:
        """Stop the proxy."""
        self._process.terminate()
        self._process.wait()


@pytest.fixture
def proxy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxy]:
    """Run tinyproxy."""
    made = Proxy(tmp_path_factory.mktemp("proxy"))
    yield made
    made.close()


@pytest.fixture
def plain() -> Iterator[Faulty]:
    """Run a server without TLS."""
    made = Faulty()
    yield made
    made.close()


def read(url: str, *options: str) -> bytes:
    """Read bytes 100 to 599 of a value."""

    async def main() -> bytes:
        files = RemoteFiles(parse(["retries=0", "read_timeout=100", *options]).options)
        try:
            return bytes(await files.read(url, 100, 500, 0, len(VALUE)))
        finally:
            await files.aclose()

    return trio.run(main)


def test_http_goes_through_a_proxy(proxy: Proxy, plain: Faulty, monkeypatch: pytest.MonkeyPatch) -> None:
    url = plain.put("/value", VALUE)
    assert read(url, f"http.proxy={proxy.url}") == VALUE[100:600]
    monkeypatch.setenv("http_proxy", proxy.url)
    assert read(url) == VALUE[100:600]
    assert [line.split()[:2] for line in proxy.requests()] == 2 * [["GET", url]]
    assert read(url, "http.proxy=") == read(url, "http.proxy") == VALUE[100:600]
    assert len(proxy.requests()) == 2


@pytest.mark.parametrize(
    "url",
    [
        "socks5://joe:hush@h:1", "https://joe:hush@h:1", "http://", "http://joe:hush@h:x", "http://joe:hu#sh@h:1",
        "joe:hu/sh@h:1", "socks5://joe:12?34@h:1", "http://joe:hu\u2100@h:1",
    ],
)  # fmt: skip
def test_an_unusable_proxy_is_an_error_that_shows_no_password(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It names the option or variable. No part of a password is taken for the host name of the proxy."""
    with pytest.raises(ReadError, match=r"^http: .*: http\.proxy=[^@]*: the proxy cannot be used: ") as caught:
        read("https://127.0.0.1:1/value", f"http.proxy={url}")
    assert not re.search("hu|sh|12|34", str(caught.value).partition("http.proxy=")[2])
    for name in ("https_proxy", "ALL_PROXY"):
        with monkeypatch.context() as patch:
            patch.setenv(name, url)
            with pytest.raises(ReadError, match=rf"/value: \${name}=[^@]*: the proxy cannot be used: ") as caught:
                read("https://127.0.0.1:1/value")
        assert not re.search("hu|sh|12|34", str(caught.value).partition(f"${name}=")[2])


def test_servers_with_tls_are_reached_through_a_proxy(
    proxy: Proxy, server: Server, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"{server()}/value"
    monkeypatch.setenv("SSL_CERT_FILE", str(authority.file))
    assert read(url, f"http.proxy={proxy.url}") == VALUE[100:600]
    assert read(url, f"http.proxy=http://{proxy.bare}", "http.proxy_auth=joe:a-b_c") == VALUE[100:600]
    with pytest.raises(AccessDenied, match="HTTP status 407"):
        read(url, f"http.proxy=http://{proxy.bare}")
    with pytest.raises(ReadError, match="/value: its certificate is refused: "):
        read(f"{server('elsewhere', '192.0.2.1')}/value", f"http.proxy={proxy.url}")
    monkeypatch.setenv("HTTPS_PROXY", proxy.url)
    assert read(url) == VALUE[100:600]
    assert len([line for line in proxy.requests() if line.startswith("CONNECT")]) == 5


def test_the_error_for_a_proxy_that_is_not_reached_or_silent_names_the_proxy(server: Server) -> None:
    url = f"{server()}/value"
    port = free_port()
    with pytest.raises(ReadError, match=f"proxy 127.0.0.1:{port}: Connection refused"):
        read(url, f"http.proxy=http://127.0.0.1:{port}")
    with socket.create_server(("127.0.0.1", 0)) as listener:  # accepts, and never answers
        at = f"127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(ReadError, match=rf"proxy {at}: no answer within 2\.7 s"):
            read(url, f"http.proxy=http://{at}", "read_timeout=15")


def test_reading_buckets_through_socks_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "socks5h://joe:hush@h:1080")
    for url in ("s3://bucket/v", "gs://bucket/v", "az://bucket/v"):
        with pytest.raises(ReadError, match=r"/v: \$HTTPS_PROXY=socks5h://h:1080: "):
            read(url, "s3.anon=true", "gs.token=anon", "az.account_name=account", "az.anon=true")
    port = free_port()
    for more in ("NO_PROXY=127.0.0.1", "HTTPS_PROXY="):
        with monkeypatch.context() as patch:
            patch.setenv(*more.split("="))
            with pytest.raises(ReadError, match=r"(?i)connect") as caught:
                read("s3://bucket/v", "s3.anon=true", f"s3.endpoint_url=https://127.0.0.1:{port}")
            assert "socks" not in str(caught.value)


# -- credentials for servers


@pytest.fixture
def demanding() -> Iterator[str]:
    """Run a server with VALUE at /basic for user joe with password "s:ä", and at /bearer; yield the first URL."""
    wanted = {"/basic": "Basic am9lOnM6w6Q=", "/bearer": "Bearer abc"}

    def answer(method: str, path: str, headers: Mapping[str, str]) -> Answer:
        return (200, {}, VALUE) if headers.get("Authorization") == wanted[path] else (401, {}, b"no")

    with serving_by_headers(answer) as url:
        yield f"{url}/basic"


def test_passwords_are_read_from_netrc(demanding: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("NETRC", raising=False)
    with pytest.raises(AccessDenied):
        read(demanding)
    netrc = tmp_path / ".netrc"
    netrc.write_text("machine elsewhere login joe password no\nmachine 127.0.0.1 login joe password s:ä\n")
    os.chmod(netrc, 0o600)
    assert read(demanding) == VALUE[100:600]
    with pytest.raises(AccessDenied):
        read(demanding, "http.auth=joe:wrong")  # an option takes precedence over the file
    netrc.write_text("default login joe password s:ä\n")
    with pytest.raises(AccessDenied):
        read(demanding)
    other = tmp_path / "other"
    other.write_text("machine 127.0.0.1 login joe password s:ä\n")
    monkeypatch.setenv("NETRC", str(other))
    assert read(demanding) == VALUE[100:600]
    other.write_text("machine\n")
    with pytest.raises(AccessDenied):
        read(demanding)


def test_passwords_and_tokens_are_taken_from_options(demanding: str) -> None:
    place = demanding.rpartition("/")[0]
    assert read(demanding, "http.auth=joe:s:ä") == VALUE[100:600]
    assert read(demanding.replace("://", "://joe:s%3A%C3%A4@")) == VALUE[100:600]
    assert read(f"{place}/bearer", "http.token=abc") == VALUE[100:600]
    assert read(f"{place}/bearer", f"{place}.token=abc", "http.token=other") == VALUE[100:600]
    assert read(f"{place}/bearer", 'http.headers={"authorization": "Bearer abc"}') == VALUE[100:600]


@pytest.mark.parametrize(
    ("option", "rule"),
    [
        ('http.headers={"A b": "c"}', "'A b' is not a header"),
        ('http.headers={"A: hush": ""}', "'A' is not a header"),
        ('http.headers={"A": "b\\nC: d"}', "'A' is not a header, or its value"),
        ('http.cookies={"A": "b\\r\\n"}', "'A' is not a header, or its value"),
        ("http.auth=[1]", "http.auth is not user:password"),
    ],
)
def test_invalid_web_options_are_errors(option: str, rule: str) -> None:
    with pytest.raises(ReadError) as caught:
        read("http://127.0.0.1:1/v", option)
    assert rule in str(caught.value)

"""HTTP proxies for servers with TLS, by CONNECT; proxies that are refused."""

from __future__ import annotations

import socket

import pytest

from tests.net.test_tls import VALUE, Authority, Server
from tests.net.test_tls import authority as authority
from tests.net.test_tls import server as server
from tests.net.test_weboptions_proxies import Proxy, read
from tests.net.test_weboptions_proxies import plain as plain
from tests.net.test_weboptions_proxies import proxy as proxy
from tests.servers import free_port
from tests.servers import gcs as gcs
from zarrfs.errors import AccessDenied, ReadError


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
        with pytest.raises(ReadError, match=rf"proxy {at}: no answer within 0\.9 s"):
            read(url, f"http.proxy=http://{at}", "read_timeout=5")


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

"""Proxies behind TLS (nginx in front of tinyproxy) and SOCKS5 proxies (microsocks)."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import shutil
import socket
import subprocess
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio

from tests.conftest import PROGRAM
from tests.net.recording import VALUE as TARGET
from tests.net.recording import recording
from tests.net.test_reach_web import read as read_target
from tests.net.test_reach_web import refused, resolving
from tests.net.test_tls import VALUE, Authority, Server
from tests.net.test_tls import authority as authority
from tests.net.test_tls import server as server
from tests.net.test_weboptions_proxies import Proxy, read
from tests.net.test_weboptions_proxies import plain as plain
from tests.net.test_weboptions_proxies import proxy as proxy
from tests.servers import GCS, Faulty, free_port
from tests.servers import gcs as gcs
from zarrfs.errors import AccessDenied, ReadError
from zarrfs.net import addresses

STREAM = "/usr/lib/nginx/modules/ngx_stream_module.so"  # the path on Debian


def started(command: list[object], port: int) -> subprocess.Popen[bytes]:
    """Start a server, wait until it accepts connections at `port`, and return its process."""
    process = subprocess.Popen(list(map(str, command)), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    for _ in range(1200):
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
            return process
        time.sleep(0.05)
    process.kill()
    pytest.fail(f"{command[0]} does not start")


@contextlib.contextmanager
def running(command: list[object], port: int) -> Iterator[None]:
    """Run a server as started() does, for the duration of the block."""
    process = started(command, port)
    try:
        yield
    finally:
        process.terminate()
        process.wait()


@pytest.fixture
def secure(proxy: Proxy, authority: Authority, tmp_path: Path) -> Iterator[str]:
    """Run nginx as a TLS endpoint in front of the proxy; yield its HOST:PORT."""
    program = shutil.which("nginx", path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin")
    if program is None or not os.path.exists(STREAM):
        pytest.fail("nginx has no stream module: the tests of proxies need it (libnginx-mod-stream)")
    port, pem, config = free_port(), authority.certificate("proxy", "127.0.0.1"), tmp_path / "nginx.conf"
    config.write_text(
        f"load_module {STREAM}; daemon off; master_process off; pid {tmp_path}/pid; error_log {tmp_path}/log;\n"
        "events {}\n"
        f"stream {{ server {{ listen 127.0.0.1:{port} ssl; ssl_certificate {pem}; ssl_certificate_key {pem};\n"
        f"proxy_pass {proxy.bare}; }} }}\n"
    )
    with running([program, "-c", config, "-e", tmp_path / "early"], port):
        yield f"127.0.0.1:{port}"


@contextlib.contextmanager
def socks(*options: str) -> Iterator[str]:
    """Run a SOCKS5 proxy; yield its HOST:PORT."""
    program = shutil.which("microsocks")
    if program is None:
        pytest.fail("microsocks is not installed: the tests of proxies need it")
    port = free_port()
    with running([program, "-i", "127.0.0.1", "-p", port, *options], port):
        yield f"127.0.0.1:{port}"


# -- https://


def test_requests_go_through_a_proxy_with_tls(
    secure: str, proxy: Proxy, server: Server, plain: Faulty, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For an https:// URL, TLS to the server runs within TLS to the proxy; http:// requests are forwarded."""
    url, other = f"{server()}/value", plain.put("/value", VALUE)
    monkeypatch.setenv("SSL_CERT_FILE", str(authority.file))
    for one in (url, other):
        assert read(one, f"http.proxy=https://joe:a-b_c@{secure}") == VALUE[100:600]
        assert read(one, f"http.proxy=https://{secure}", "http.proxy_auth=joe:a-b_c") == VALUE[100:600]
        with pytest.raises(AccessDenied, match="HTTP status 407"):
            read(one, f"http.proxy=https://{secure}")
    monkeypatch.setenv("HTTPS_PROXY", f"https://joe:a-b_c@{secure}")
    assert read(url) == VALUE[100:600]
    assert len([line for line in proxy.requests() if line.startswith("CONNECT")]) == 4


def test_a_connection_that_the_proxy_refuses_is_closed(
    secure: str, server: Server, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is closed explicitly, not by the garbage collector, which would issue a ResourceWarning."""
    url = f"{server()}/value"
    monkeypatch.setenv("SSL_CERT_FILE", str(authority.file))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ResourceWarning)
        with pytest.raises(AccessDenied, match="HTTP status 407"):
            read(url, f"http.proxy=https://{secure}")
        gc.collect()
    assert not [warning for warning in caught if "ssl.SSLSocket" in str(warning.message)]


def test_a_proxy_with_an_untrusted_certificate_is_an_error(secure: str, server: Server) -> None:
    """The error names the proxy; verify_ssl=false is for the server's certificate only."""
    for options in ([], ["http.verify_ssl=false"]):
        with pytest.raises(ReadError, match=f"proxy {secure}: its certificate is refused: "):
            read(f"{server()}/value", f"http.proxy=https://joe:a-b_c@{secure}", *options)


def test_an_https_proxy_that_does_not_speak_tls_is_an_error(proxy: Proxy, plain: Faulty, server: Server) -> None:
    """One such server answers without TLS, the other waits for more input."""
    bare = plain.url.removeprefix("http://")
    with pytest.raises(ReadError, match=f"proxy {bare}: it does not speak TLS"):
        read(f"{server()}/value", f"http.proxy=https://{bare}")
    with pytest.raises(ReadError, match=rf"proxy {proxy.bare}: no answer within 0\.9 s"):
        read(f"{server()}/value", f"http.proxy=https://{proxy.bare}", "read_timeout=5")


def test_the_server_s_certificate_is_verified_behind_the_proxy(
    secure: str, server: Server, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(authority.file))
    with pytest.raises(ReadError, match="/value: its certificate is refused: "):
        read(
            f"{server('elsewhere', '192.0.2.1')}/value", f"http.proxy=https://joe:a-b_c@{secure}",
        )  # fmt: skip


# -- socks5:// and socks5h://


@pytest.mark.parametrize("scheme", ["socks5", "socks5h"])
def test_requests_go_through_a_socks_proxy(
    scheme: str, server: Server, plain: Faulty, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, other = f"{server()}/value", plain.put("/value", VALUE)
    monkeypatch.setenv("SSL_CERT_FILE", str(authority.file))
    with socks() as bare, socks("-u", "joe", "-P", "a:b/c") as guarded:
        for one in (url, other):
            assert read(one, f"http.proxy={scheme}://{bare}") == VALUE[100:600]
            assert read(one, f"http.proxy={scheme}://joe:a%3Ab%2Fc@{guarded}") == VALUE[100:600]
            own = f"http.proxy={scheme}://{guarded}"
            assert read(one, own, "http.proxy_auth=joe:a:b/c") == VALUE[100:600]
        for wrong in (f"joe:no@{guarded}", guarded):
            with pytest.raises(AccessDenied, match=rf"proxy {guarded}: .*\(http.proxy_auth=\)"):
                read(url, f"http.proxy={scheme}://{wrong}")
        with pytest.raises(ReadError, match=f"proxy {bare}: connection refused"):
            read(f"https://127.0.0.1:{free_port()}/value", f"http.proxy={scheme}://{bare}")
        monkeypatch.setenv("ALL_PROXY", f"{scheme}://{bare}")
        assert read(url) == VALUE[100:600]
    with pytest.raises(ReadError, match=f"proxy {bare}: Connection refused"):
        read(url)


def test_the_socks_scheme_decides_who_resolves_names(plain: Faulty, monkeypatch: pytest.MonkeyPatch) -> None:
    """With socks5://, zarrfs resolves names; with socks5h://, the proxy does. Here the two resolve differently."""
    plain.put("/value", VALUE)
    port = plain.url.rpartition(":")[2]
    resolving(monkeypatch, {"inside.test": ["127.0.0.1"], "localhost": ["127.0.0.3"]})
    with socks() as at:
        assert read(f"http://inside.test:{port}/value", f"http.proxy=socks5://{at}") == VALUE[100:600]
        with pytest.raises(ReadError, match=f"proxy {at}: "):
            read(f"http://inside.test:{port}/value", f"http.proxy=socks5h://{at}")
        assert read(f"http://localhost:{port}/value", f"http.proxy=socks5h://{at}") == VALUE[100:600]
        with pytest.raises(ReadError, match=f"proxy {at}: connection refused"):
            read(f"http://localhost:{port}/value", f"http.proxy=socks5://{at}")
        with pytest.raises(ReadError, match=r"/value: nowhere\.invalid: "):  # the proxy got no request
            read(f"http://nowhere.invalid:{port}/value", f"http.proxy=socks5://{at}")


def test_the_error_for_an_unresolvable_proxy_names_the_proxy(plain: Faulty, monkeypatch: pytest.MonkeyPatch) -> None:
    async def nobody(host: str, *args: object, **named: object) -> object:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(trio.socket, "getaddrinfo", nobody)
    with pytest.raises(ReadError, match=r"proxy proxy\.example:3128: Name or service not known"):
        read(plain.put("/value", VALUE), "http.proxy=http://proxy.example:3128")


def test_private_addresses_are_refused_through_socks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Addresses in URLs or resolved by zarrfs must be public; names that the proxy resolves are not checked."""
    resolving(monkeypatch, {"inside.test": ["127.0.0.1"], "set.test": ["8.8.8.8"]})
    with recording("127.0.0.1") as victim, socks() as at:
        url, origin = f"http://inside.test:{victim.port}/v", "http://set.test/set.json"
        assert "127.0.0.1 is none" in refused(url, origin, f"http.proxy=socks5://{at}")
        assert "127.0.0.1 is none" in refused(f"{victim.url}/v", origin, f"http.proxy=socks5h://{at}")
        assert not victim.requests
        named = f"http://localhost:{victim.port}/v"
        assert read_target(named, origin, f"http.proxy=socks5h://{at}") == TARGET[3:11]


@pytest.mark.parametrize("scheme", ["socks5", "socks5h"])
def test_a_private_proxy_does_not_make_the_set_s_server_a_private_one(
    scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the server's name could be rebound to a private address after the document has been read."""
    monkeypatch.setattr(addresses, "_met", set())
    resolving(monkeypatch, {"set.test": ["8.8.8.8"]})
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=forward, args=(listener,)).start()
        at = f"127.0.0.1:{listener.getsockname()[1]}"
        assert read("http://set.test/value", f"http.proxy={scheme}://{at}") == VALUE[100:600]
    assert not addresses.met_private_only()


def test_a_private_server_behind_a_proxy_counts_as_private(plain: Faulty, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(addresses, "_met", set())
    url = plain.put("/value", VALUE)
    with socks() as at:
        assert read(url, f"http.proxy=socks5://{at}") == VALUE[100:600]
    assert addresses.met_private_only()


def forward(listener: socket.socket) -> None:
    """Serve the first client as a SOCKS5 proxy, and answer its request in place of the server."""
    client, _ = listener.accept()
    with client:
        client.recv(100)
        client.sendall(b"\x05\x00")
        client.recv(300)
        client.sendall(b"\x05\x00\x00\x01" + bytes(6))
        client.recv(5000)
        client.sendall(f"HTTP/1.1 200 OK\r\nContent-Length: {len(VALUE)}\r\n\r\n".encode() + VALUE)


def test_a_proxy_that_does_not_speak_socks_is_an_error(proxy: Proxy, plain: Faulty) -> None:
    """Such a server waits for more input, sends something else, or closes the connection."""
    url = plain.put("/value", VALUE)
    with pytest.raises(ReadError, match=rf"proxy {proxy.bare}: no answer within 0\.9 s"):
        read(url, f"http.proxy=socks5h://{proxy.bare}", "read_timeout=5")
    for said, rule in ((b"220 ready\r\n", "it does not speak SOCKS5"), (b"", "the connection was closed")):
        with socket.create_server(("127.0.0.1", 0)) as listener:
            threading.Thread(target=answer, args=(listener, said)).start()
            at = f"127.0.0.1:{listener.getsockname()[1]}"
            with pytest.raises(ReadError, match=f"proxy {at}: {rule}"):
                read(url, f"http.proxy=socks5h://{at}")


def answer(listener: socket.socket, said: bytes) -> None:
    """Receive from the first client, send `said`, and close the connection."""
    client, _ = listener.accept()
    client.recv(100)
    client.sendall(said)
    client.close()


@pytest.mark.usefixtures("either_client")
def test_buckets_of_google_are_read_through_the_proxy_of_the_environment(
    gcs: GCS, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    gcs.put("through-a-proxy", VALUE)
    monkeypatch.setenv("http_proxy", proxy.url)
    options = ["gs.token=anon", f"gs.endpoint_url={gcs.endpoint}"]
    assert read(f"gs://{gcs.bucket}/through-a-proxy", *options) == VALUE[100:600]
    assert proxy.requests()


@pytest.mark.usefixtures("either_client")
def test_reading_buckets_through_socks_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clients of buckets would bypass the proxy, or fail without naming the cause."""
    monkeypatch.setenv("HTTPS_PROXY", "socks5h://joe:hu#sh@h:1080")
    for url in ("s3://bucket/v", "gs://bucket/v", "az://bucket@account/v"):
        with pytest.raises(ReadError, match=r"/v: \$HTTPS_PROXY=socks5h://h:1080: buckets are read through http:"):
            read(url, "s3.anon=true", "gs.token=anon", "az.account_name=account")
    port = free_port()
    for more in ("NO_PROXY=127.0.0.1", "HTTPS_PROXY="):
        with monkeypatch.context() as patch:
            patch.setenv(*more.split("="))
            with pytest.raises(ReadError, match=r"(?i)connect") as caught:
                read("s3://bucket/v", "s3.anon=true", f"s3.endpoint_url=https://127.0.0.1:{port}")
            assert "socks" not in str(caught.value)


# -- commands


def test_a_command_reads_through_the_proxy_of_the_environment(
    secure: str, server: Server, authority: Authority, tmp_path: Path
) -> None:
    source = tmp_path / "refs.json"
    source.write_text(json.dumps({"version": 1, "refs": {"part": [f"{server()}/value", 100, 5000]}}))
    with socks() as at:
        for value in (f"https://joe:a-b_c@{secure}", f"socks5h://{at}"):
            environment = {**os.environ, "SSL_CERT_FILE": str(authority.file), "HTTPS_PROXY": value}
            command = [PROGRAM, "cat", source, "part"]
            assert subprocess.check_output(command, env=environment) == VALUE[100:5100]


def test_a_mount_with_an_unusable_proxy_fails(tmp_path: Path) -> None:
    """A variable names the proxy for a remote set, or an option names it for the targets of a local set."""
    (tmp_path / "mnt").mkdir()
    local = tmp_path / "refs.json"
    local.write_text(json.dumps({"version": 1, "refs": {"part": ["https://data.test/value", 0, 5]}}))
    url = "socks4://joe:hush@h:1080"
    for source, options, variables, named in (
        ("https://data.test/refs.json", [], {"HTTPS_PROXY": url}, "$HTTPS_PROXY"),
        (local, ["-o", f"http.proxy={url}"], {}, "http.proxy"),
    ):
        done = subprocess.run(
            [PROGRAM, "mount", source, tmp_path / "mnt", *options], check=False, text=True, capture_output=True,
            env={**os.environ, **variables},
        )  # fmt: skip
        if not done.returncode:
            subprocess.run([PROGRAM, "umount", tmp_path / "mnt"], check=True)
        assert done.returncode == 1
        assert done.stderr.endswith(
            f"{named}=socks4://h:1080: the proxy cannot be used: "
            "it must be http://, https://, socks5:// or socks5h:// with HOST:PORT\n"
        )

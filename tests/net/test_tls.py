"""Servers with TLS: a site's own authority, certificates that are refused, by both kinds of clients."""

from __future__ import annotations

import datetime
import functools
import http.server
import ipaddress
import json
import os
import ssl
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from tests.conftest import PROGRAM

VALUE = bytes(range(256)) * 64
DAY = datetime.timedelta(days=1)
NOW = datetime.datetime.now(datetime.UTC)


class Authority:
    """Signs certificates; `file` is what clients trust it by."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.file = directory, directory / "authority.pem"
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "authority of tests")])
        rule = x509.BasicConstraints(True, None)
        made = self._builder(self._name, self._key, DAY).add_extension(rule, critical=True)
        self.file.write_bytes(made.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))

    def certificate(self, name: str, address: str, left: datetime.timedelta = DAY) -> Path:
        """A file with a key and a certificate for `address`, which ends in `left` from now."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        at = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(address))])
        made = self._builder(subject, key, left).add_extension(at, critical=False)
        signed = made.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
        private = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        path = self.directory / f"{name}.pem"
        path.write_bytes(private + signed)
        return path

    def _builder(
        self, subject: x509.Name, key: ec.EllipticCurvePrivateKey, left: datetime.timedelta
    ) -> x509.CertificateBuilder:
        made = x509.CertificateBuilder().subject_name(subject).issuer_name(self._name).public_key(key.public_key())
        made = made.serial_number(x509.random_serial_number())
        return made.not_valid_before(NOW - 10 * DAY).not_valid_after(NOW + left)


class Handler(http.server.BaseHTTPRequestHandler):
    """One value, or a range of it."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        """The range that is asked for, or all."""
        asked = self.headers.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")
        start, stop = int(asked[0]), min(int(asked[2] or len(VALUE) - 1) + 1, len(VALUE))
        self.send_response(206 if "Range" in self.headers else 200)
        self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{len(VALUE)}")
        self.send_header("Content-Length", str(stop - start))
        self.send_header("ETag", '"one"')
        self.end_headers()
        self.wfile.write(VALUE[start:stop])

    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""


class Quiet(http.server.ThreadingHTTPServer):
    """Says nothing of clients that do not like its certificate."""

    def handle_error(self, request: object, client_address: object) -> None:
        """Nothing."""


Server = Callable[..., str]


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """The site's own."""
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture
def server(authority: Authority) -> Iterator[Server]:
    """Starts a server with such a certificate; gives its URL."""
    running: list[Quiet] = []

    def start(name: str = "good", address: str = "127.0.0.1", left: datetime.timedelta = DAY) -> str:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(authority.certificate(name, address, left))
        made = Quiet(("127.0.0.1", 0), Handler)
        made.socket = context.wrap_socket(made.socket, server_side=True, do_handshake_on_connect=False)
        threading.Thread(target=made.serve_forever, daemon=True).start()
        running.append(made)
        return f"https://127.0.0.1:{made.server_address[1]}"

    yield start
    for one in running:
        one.shutdown()
        one.server_close()


def cat(tmp_path: Path, url: str, client: str, trusted: Path | None) -> subprocess.CompletedProcess[bytes]:
    """`zarrfs cat` of a range of the value."""
    source = tmp_path / "refs.json"
    source.write_text(json.dumps({"version": 1, "refs": {"part": [f"{url}/value", 100, 5000]}}))
    environment = {**os.environ, **({"SSL_CERT_FILE": str(trusted)} if trusted else {})}
    run = functools.partial(subprocess.run, capture_output=True, timeout=60, check=False, env=environment)
    return run([PROGRAM, "cat", source, "part", "-o", f"client={client},retries=3"])


clients = pytest.mark.parametrize("client", ["auto", "fsspec", "obstore"])


@clients
def test_an_authority_of_the_site_is_trusted_where_it_is_named(
    tmp_path: Path, server: Server, authority: Authority, client: str
) -> None:
    done = cat(tmp_path, server(), client, authority.file)
    assert (done.returncode, done.stdout, done.stderr) == (0, VALUE[100:5100], b"")


@clients
@pytest.mark.parametrize(
    ("name", "address", "left", "trusted"),
    [("good", "127.0.0.1", DAY, False), ("old", "127.0.0.1", -DAY, True), ("elsewhere", "192.0.2.1", DAY, True)],
)
def test_a_certificate_that_is_refused_is_told_at_once(
    tmp_path: Path, server: Server, authority: Authority, client: str, name: str, address: str,
    left: datetime.timedelta, trusted: bool,
) -> None:  # fmt: skip
    done = cat(tmp_path, server(name, address, left), client, authority.file if trusted else None)
    assert (done.returncode, done.stdout) == (1, b"")
    told = done.stderr.decode()
    assert "/value: " in told
    assert "its certificate is refused: " in told
    assert told.count("\n") == 1
    assert "attempts" not in told

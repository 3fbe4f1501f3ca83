"""Servers with TLS: private certificate authorities, refused certificates, client certificates."""

from __future__ import annotations

import contextlib
import datetime
import ipaddress
import json
import os
import shutil
import ssl
import subprocess
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
import trio
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from tests.conftest import PROGRAM
from tests.servers import Answer, AnswerByHeaders, serving_by_headers
from zarrfs.config.options import Options, parse
from zarrfs.errors import AccessDenied, ReadError
from zarrfs.net.http import HttpSystem
from zarrfs.net.reach import Trust
from zarrfs.store.remotefiles import RemoteFiles

VALUE = bytes(range(256)) * 64
DAY = datetime.timedelta(days=1)
NOW = datetime.datetime.now(datetime.UTC)


class Authority:
    """A certificate authority; `file` is its own certificate, by which clients trust it."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.file = directory, directory / "authority.pem"
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "authority of tests")])
        rule = x509.BasicConstraints(True, None)
        made = self._builder(self._name, self._key, DAY).add_extension(rule, critical=True)
        self.file.write_bytes(made.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))

    def certificate(self, name: str, address: str, left: datetime.timedelta = DAY) -> Path:
        """Return a new file with a key and a certificate for `address`, which expires in `left`."""
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


def ranged(method: str, path: str, headers: Mapping[str, str]) -> Answer:
    """Answer with the requested range of VALUE."""
    first, last = headers["Range"].removeprefix("bytes=").split("-")
    start, stop = int(first), min(int(last) + 1, len(VALUE))
    return 206, {"Content-Range": f"bytes {start}-{stop - 1}/{len(VALUE)}", "ETag": '"one"'}, VALUE[start:stop]


def talking(method: str, path: str, headers: Mapping[str, str]) -> Answer:
    """Answer with 20 bytes; for /first, zeros, and another answer that nobody asked for, in the same TLS record."""
    body = bytes(20) + b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n" if path == "/first" else VALUE[:20]
    return 206, {"Content-Range": "bytes 0-19/20", "Content-Length": "20"}, body


Server = Callable[..., str]


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """Return a private certificate authority."""
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture
def server(authority: Authority) -> Iterator[Server]:
    """Yield a function that starts a server with a certificate of the authority and returns its URL."""
    running = contextlib.ExitStack()

    def start(
        name: str = "good", address: str = "127.0.0.1", left: datetime.timedelta = DAY, clients: bool = False,
        version: ssl.TLSVersion | None = None, answer: AnswerByHeaders = ranged,
    ) -> str:  # fmt: skip
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(authority.certificate(name, address, left))
        if clients:
            context.verify_mode = ssl.CERT_REQUIRED
            context.load_verify_locations(authority.file)
        if version is not None:
            context.minimum_version = context.maximum_version = version
        return running.enter_context(serving_by_headers(answer, context=context))

    with running:
        yield start


def read(url: str, trusted: Path | None, *options: str) -> bytes:
    """Read bytes 100 to 5099 of the value."""

    async def main() -> bytes:
        async with contextlib.aclosing(RemoteFiles(parse(["retries=3", *options]).options)) as files:
            return bytes(await files.read(f"{url}/value", 100, 5000, 0, len(VALUE)))

    with pytest.MonkeyPatch.context() as patch:
        if trusted:
            patch.setenv("SSL_CERT_FILE", str(trusted))
        return trio.run(main)


@pytest.mark.parametrize("variable", ["SSL_CERT_FILE", "SSL_CERT_DIR"])
def test_authorities_named_by_the_environment_are_trusted(
    tmp_path: Path, server: Server, authority: Authority, variable: str
) -> None:
    hashed = tmp_path / "hashed"
    hashed.mkdir()
    shutil.copy(authority.file, hashed / "ours.pem")
    subprocess.run(["openssl", "rehash", hashed], check=True, capture_output=True)
    source = tmp_path / "refs.json"
    source.write_text(json.dumps({"version": 1, "refs": {"part": [f"{server()}/value", 100, 5000]}}))
    environment = {**os.environ, variable: str(authority.file if variable == "SSL_CERT_FILE" else hashed)}
    done = subprocess.run([PROGRAM, "cat", source, "part"], capture_output=True, check=False, env=environment)
    assert (done.returncode, done.stdout, done.stderr) == (0, VALUE[100:5100], b"")


def test_certificates_are_not_checked_on_request(server: Server) -> None:
    assert read(server(), None, "https.verify_ssl=false") == VALUE[100:5100]


@pytest.mark.parametrize(("variable", "refused"), [("SSL_CERT_FILE", True), ("REQUESTS_CA_BUNDLE", False)])
def test_a_variable_that_names_no_certificates_is_an_error(
    monkeypatch: pytest.MonkeyPatch, server: Server, variable: str, refused: bool
) -> None:
    """The other variable is for other clients. Without TLS neither is read."""
    monkeypatch.setenv(variable, "/nope/ca.pem")
    url = server()
    with pytest.raises(ReadError) as caught:
        read(url, None)
    assert (str(caught.value) == f"{url}/value: /nope/ca.pem: cannot be used: No such file or directory") == refused
    with serving_by_headers(ranged) as plain:
        assert read(plain, None) == VALUE[100:5100]


@pytest.mark.parametrize(
    ("name", "address", "left", "trusted"),
    [("good", "127.0.0.1", DAY, False), ("old", "127.0.0.1", -DAY, True), ("elsewhere", "192.0.2.1", DAY, True)],
)
def test_a_refused_certificate_is_an_error_without_retries(
    server: Server, authority: Authority, name: str, address: str, left: datetime.timedelta, trusted: bool
) -> None:  # fmt: skip
    with pytest.raises(ReadError, match="/value: its certificate is refused: ") as caught:
        read(server(name, address, left), authority.file if trusted else None)
    assert "attempts" not in str(caught.value)


@pytest.mark.parametrize(("version", "apart"), [(ssl.TLSVersion.TLSv1_2, True), (ssl.TLSVersion.TLSv1_3, False)])
def test_a_client_certificate_is_presented_to_a_server_that_requires_one(
    tmp_path: Path, server: Server, authority: Authority, version: ssl.TLSVersion, apart: bool
) -> None:
    url, pem = server(clients=True, version=version), authority.certificate("client", "192.0.2.1").read_text()
    begin = pem.index("-----BEGIN CERTIFICATE")
    (tmp_path / "key.pem").write_text(pem[:begin])
    (tmp_path / "client.pem").write_text(pem[begin:] if apart else pem)
    options = [f"https.client_cert={tmp_path}/client.pem", f"https.client_key={tmp_path}/key.pem"]
    assert read(url, authority.file, *options[: 1 + apart]) == VALUE[100:5100]
    rule = "the server refuses the connection: .*certificate of the client \\(http.client_cert=\\)"
    with pytest.raises(AccessDenied, match=rule) as caught:
        read(url, authority.file)
    assert "attempts" not in str(caught.value)


def test_a_passphrase_is_refused_without_a_prompt(tmp_path: Path, server: Server, authority: Authority) -> None:
    secret = serialization.BestAvailableEncryption(b"secret")
    key = ec.generate_private_key(ec.SECP256R1())
    pem = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, secret)
    path = tmp_path / "client.pem"
    path.write_bytes(pem + authority.certificate("client", "192.0.2.1").read_bytes())
    with pytest.raises(ReadError, match="the key has a passphrase"):
        read(server(clients=True), authority.file, f"https.client_cert={path}")


def test_a_server_that_does_not_speak_tls_is_an_error() -> None:
    with serving_by_headers(ranged) as url, pytest.raises(ReadError, match="the server does not speak TLS"):
        read(url.replace("http:", "https:"), None, "retries=0")


def test_an_answer_that_nobody_asked_for_is_not_that_of_the_next_request(
    monkeypatch: pytest.MonkeyPatch, server: Server, authority: Authority
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(authority.file))
    url = server(answer=talking)

    async def fetch() -> list[bytes]:
        system = HttpSystem(Options(), Trust(Options()))
        try:
            return [bytes((await system.fetch(f"{url}/{name}", 0, 20)).data) for name in ("first", "second")]
        finally:
            await system.aclose()

    assert trio.run(fetch) == [bytes(20), VALUE[:20]]

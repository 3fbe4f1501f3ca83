"""The data of `scripts/bench remote`: one tree on nginx, over http and https, and references to it."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import shutil
import socket
import subprocess
import time
from pathlib import Path
from typing import NamedTuple

import peers

CHUNK = 512 << 10  # bytes of each chunk: 256 x 256 float64
ROWS, COLUMNS = 20, 30  # of the grid of chunks
LATE = 30  # ms
_MODULES = "/usr/lib/nginx/modules"  # where Debian has them

_CONFIG = """
load_module {modules}/ndk_http_module.so;
load_module {modules}/ngx_http_lua_module.so;
daemon off; worker_processes 1; {user}
pid {directory}/pid; error_log {directory}/error.log;
events {{ worker_connections 1024; }}
http {{
    access_log off; sendfile on; tcp_nopush on; keepalive_requests 1000000;
    types {{ }} default_type application/octet-stream;
    client_body_temp_path {directory}/body; proxy_temp_path {directory}/proxy;
    fastcgi_temp_path {directory}/fastcgi; uwsgi_temp_path {directory}/uwsgi; scgi_temp_path {directory}/scgi;
    ssl_certificate {directory}/certificate; ssl_certificate_key {directory}/key; ssl_session_cache shared:S:1m;
    server {{ listen 127.0.0.1:{http}; root {root}; autoindex on; }}
    server {{
        listen 127.0.0.1:{tls} ssl; root {root}; autoindex on;
        access_by_lua_block {{ ngx.sleep({delay}) }}
    }}
}}
"""


class Server(NamedTuple):
    """One of the servers: its scheme, and its delay in ms before each response."""

    scheme: str
    delay: int

    def __str__(self) -> str:
        return f"{self.scheme}, {self.delay} ms"


HTTPS, HTTP = Server("https", LATE), Server("http", 0)


def make_certificate(directory: Path) -> None:
    """Write `certificate` and `key` for 127.0.0.1, and have all programs trust them."""
    certificate = directory / "certificate"
    command = [
        "openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-keyout", directory / "key",
        "-out", certificate, "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1,DNS:localhost",
    ]  # fmt: skip
    subprocess.run(command, check=True, capture_output=True)
    os.environ["SSL_CERT_FILE"] = str(certificate)


def chunk(number: int) -> str:
    """Return the path of a chunk, by its number in the order of the grid."""
    return f"chunks/{number // COLUMNS}.{number % COLUMNS}"


class Tree:
    """The tree below `www`, the nginx that serves it (start() and stop()), and the documents that refer to it."""

    def __init__(self, directory: Path, size: int) -> None:
        self.directory, self.size = directory, size
        self.www = directory / "www"
        self.index = directory / "index"
        self.urls: dict[Server, str] = {}
        self._nginx: subprocess.Popen[bytes] | None = None
        self.index.mkdir()
        self._write()

    def _write(self) -> None:
        (self.www / "chunks").mkdir(parents=True)
        for number in range(ROWS * COLUMNS):
            (self.www / chunk(number)).write_bytes(os.urandom(CHUNK))
        with (self.www / "big").open("wb") as file:
            for _ in range(self.size >> 20):
                file.write(os.urandom(1 << 20))

    def document(self, target: str) -> Path:
        """Return references to the tree at the URL `target`: an array of chunks, a large file."""
        path = self.directory / f"{hashlib.sha256(target.encode()).hexdigest()[:8]}.json"
        if not path.exists():
            array = {
                "zarr_format": 2, "shape": [ROWS * 256, COLUMNS * 256], "chunks": [256, 256], "dtype": "<f8",
                "compressor": None, "filters": None, "fill_value": 0, "order": "C",
            }  # fmt: skip
            refs: dict[str, object] = {".zgroup": '{"zarr_format": 2}', "chunks/.zarray": json.dumps(array)}
            refs |= {chunk(n): [f"{target}/{chunk(n)}", 0, CHUNK] for n in range(ROWS * COLUMNS)}
            refs["big"] = [f"{target}/big", 0, self.size]
            path.write_text(json.dumps({"version": 1, "refs": refs}))
        return path

    @functools.cache  # noqa: B019 (there is one tree in a run)
    def digest(self, name: str, start: int, length: int) -> str:
        """Return the SHA-256 of a piece of a file, in hexadecimal."""
        with (self.www / name).open("rb") as file:
            file.seek(start)
            return hashlib.sha256(file.read(length)).hexdigest()

    def start(self) -> None:
        """Start nginx; raise peers.Unavailable if it does not start."""
        program = shutil.which("nginx", path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin")
        if program is None or not Path(f"{_MODULES}/ngx_http_lua_module.so").exists():
            raise peers.Unavailable("nginx with its Lua module is not installed")
        make_certificate(self.directory)
        ports = peers.free_ports(2)
        config = self.directory / "nginx.conf"
        config.write_text(
            _CONFIG.format(
                modules=_MODULES, directory=self.directory, root=self.www, tls=ports[0], http=ports[1],
                delay=LATE / 1000, user="user root;" if os.geteuid() == 0 else "",
            )
        )  # fmt: skip
        self._nginx = subprocess.Popen([program, "-c", config, "-e", self.directory / "early.log"])
        for port in ports:
            self._wait_for(port)
        for server, port in zip((HTTPS, HTTP), ports, strict=True):
            self.urls[server] = f"{server.scheme}://127.0.0.1:{port}"

    def _wait_for(self, port: int) -> None:
        deadline = time.monotonic() + 20
        while True:
            try:
                return socket.create_connection(("127.0.0.1", port), 1).close()
            except OSError:
                if self._nginx is None or self._nginx.poll() is not None or time.monotonic() > deadline:
                    raise peers.Unavailable(f"nginx does not start: {self.directory}/error.log") from None
                time.sleep(0.01)

    def stop(self) -> None:
        """Stop nginx."""
        if self._nginx is not None:
            self._nginx.terminate()
            self._nginx.wait()

"""zarrfs commit of a remote source: interruption, and replaced values."""

from __future__ import annotations

import hashlib
import http.server
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.conftest import PROGRAM, run
from zarrfs.store.upper import RECORD

VALUES = 68  # more than are fetched at a time


def source(place: Path, url: str) -> list[str]:
    """Write a set of values at `url` and an upper directory with a file; return the arguments that commit them."""
    refs = {f"v/{number}": [f"{url}/{number}", 0, 5000] for number in range(VALUES)}
    (place / "refs.json").write_text(json.dumps({"version": 1, "refs": refs}))
    digest = hashlib.sha256((place / "refs.json").read_bytes()).hexdigest()
    (place / "upper").mkdir()
    record = {"zarrfs_upper": 1, "source": str(place / "refs.json"), "fingerprint": digest}
    (place / "upper" / RECORD).write_text(json.dumps(record))
    (place / "upper/first").write_bytes(b"1" * 10_000)
    return ["commit", str(place / "refs.json"), "--upperdir", str(place / "upper"), "-O"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_commit_leaves_no_output(tmp_path: Path, number: signal.Signals) -> None:
    (tmp_path / "blobs").mkdir()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        arguments = source(tmp_path, f"http://127.0.0.1:{silent.getsockname()[1]}")
        archive = ["--format", "archive", "--blobs", str(tmp_path / "blobs")]
        child = subprocess.Popen([PROGRAM, *arguments, str(tmp_path / "new.json"), *archive], stderr=subprocess.PIPE)
        connection = silent.accept()[0]
        child.send_signal(number)
        _out, told = child.communicate(timeout=60)
        connection.close()
    assert (child.returncode, told) == (-number, b"")
    assert sorted(os.listdir(tmp_path)) == ["blobs", "refs.json", "upper"]


def test_a_killed_commit_leaves_no_data_file(tmp_path: Path) -> None:
    """The next command removes the temporary files of the killed one, and writes under the same names."""
    arguments = [*source(tmp_path, "http://127.0.0.1:9"), str(tmp_path / "new.json"), "--format", "references"]
    script = (
        "import os, signal, sys\n"
        "from zarrfs.cli import main\n"
        "from zarrfs.copying.commit_writers import DataFile\n"
        "DataFile.finish = lambda self: os.kill(os.getpid(), signal.SIGKILL)\n"
        "main(sys.argv[1:])"
    )
    child = subprocess.run([sys.executable, "-c", script, *arguments], check=False)
    assert child.returncode == -signal.SIGKILL
    assert not (tmp_path / "new.json.data").exists()
    done = run(*arguments)
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(os.listdir(tmp_path)) == ["new.json", "new.json.data", "refs.json", "upper"]
    assert run("cat", tmp_path / "new.json", "first").stdout == "1" * 10_000


class Replaced(http.server.BaseHTTPRequestHandler):
    """A handler of a store whose one chunk is replaced once all its bytes were sent."""

    protocol_version = "HTTP/1.1"
    size = 12 << 20
    version, left = b"A", 12 << 20

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        array = {
            "zarr_format": 2, "shape": [self.size], "chunks": [self.size], "dtype": "|u1", "compressor": None,
            "fill_value": 0, "order": "C", "filters": None,
        }  # fmt: skip
        files = {"/.zgroup": b'{"zarr_format": 2}', "/a/.zarray": json.dumps(array).encode()}
        data = self.version * self.size if self.path == "/a/0" else files.get(self.path)
        first, last = 0, len(data or b"") - 1
        if wanted := re.match(r"bytes=(\d+)-(\d+)", self.headers.get("Range", "")):
            first, last = int(wanted[1]), min(int(wanted[2]), last)
        self.send_response(404 if data is None else 206 if wanted else 200)
        self.send_header("ETag", f'"{self.version.decode()}"')
        self.send_header("Content-Range", f"bytes {first}-{last}/{len(data or b'')}")
        self.send_header("Content-Length", str(last - first + 1))
        self.end_headers()
        if data is not None and self.command == "GET":
            self.wfile.write(data[first : last + 1])
            if self.path == "/a/0":
                type(self).left -= last + 1 - first
                if self.left <= 0:
                    type(self).version = b"B"

    def log_message(self, format: str, *values: object) -> None:
        pass


def test_a_file_that_is_replaced_while_it_is_divided_into_blobs_is_an_error(tmp_path: Path) -> None:
    for name in ("upper", "blobs"):
        (tmp_path / name).mkdir()
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Replaced) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        more = ["-o", "metadata_ttl=0", "-o", "members=a", "--format", "archive", "--blobs", tmp_path / "blobs"]
        url = f"http://127.0.0.1:{server.server_address[1]}"
        done = run("commit", url, "--upperdir", tmp_path / "upper", "-O", tmp_path / "new.json", *more)
        server.shutdown()
    assert done.returncode == 1
    assert "a/0: has changed" in done.stderr
    assert not (tmp_path / "new.json").exists()

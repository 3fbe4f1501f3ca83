"""zarrfs commit of a remote source: interruption, replacing read-only directories, and concurrent reads."""

from __future__ import annotations

import contextlib
import hashlib
import http.server
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import PROGRAM, run
from zarrfs.store.upper import RECORD

VALUES = 68  # more than are fetched at a time, and a multiple of the requests that Together waits for


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


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
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
    assert child.returncode == (-number if number == signal.SIGKILL else 130), told
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


class Together(http.server.BaseHTTPRequestHandler):
    """A handler that answers once `barrier` has enough requests, and with status 503 if they do not come."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # or a body would wait until its headers are acknowledged
    barrier: threading.Barrier

    def do_GET(self) -> None:
        with contextlib.suppress(threading.BrokenBarrierError):
            self.barrier.wait(30)
        data = self.path.encode().ljust(5000, b".")
        self.send_response(206 if not self.barrier.broken else 503)
        self.send_header("Content-Range", f"bytes 0-4999/{len(data)}")
        self.send_header("Content-Length", str(len(data)))
        self.send_header("ETag", '"1"')
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *values: object) -> None:
        pass


@pytest.fixture
def together() -> Iterator[str]:
    Together.barrier = threading.Barrier(4)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Together) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def test_values_are_fetched_concurrently(tmp_path: Path, together: str) -> None:
    """The server answers only if four requests are in flight."""
    more = ["--format", "archive", "--inline-threshold", "1MiB"]
    done = run(*source(tmp_path, together), tmp_path / "new.json", *more)
    assert (done.returncode, done.stderr) == (0, "")
    for number in (0, 17, VALUES - 1):
        found = run("cat", tmp_path / "new.json", f"v/{number}").stdout
        assert found == f"/{number}".ljust(5000, ".")

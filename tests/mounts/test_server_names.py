"""Names on servers with unusual listings: what is there is never absent, and each listing ends."""

from __future__ import annotations

import contextlib
import functools
import http.server
import itertools
import os
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

from tests.conftest import run
from tests.mounts.mounting import mounted
from tests.mounts.test_big_bucket import Bucket, bucket

__all__ = ["bucket"]


class Handler(http.server.SimpleHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *arguments: object) -> None:
        """Write no log."""


@contextlib.contextmanager
def served(handler: type[Handler], root: Path) -> Iterator[str]:
    """Serve a directory; yield the URL."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(handler, directory=str(root))) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


class Express(Handler):
    """Express with serve-index: its listings do not mark directories, nor show dot files."""

    def list_directory(self, path: Any) -> Any:
        here = self.path.rstrip("/")
        names = sorted(name for name in os.listdir(path) if not name.startswith("."))
        items = "".join(
            f'<li><a href="{here}/{name}" class="icon" title="{name}"><span class="name">{name}</span></a></li>'
            for name in names
        )
        up = f'<li><a href="{here.rpartition("/")[0] or "/"}" title="..">..</a></li>' if here else ""
        page = f"<html><head><title>listing directory {here}/</title></head><ul>{up}{items}</ul></html>".encode()
        self.send_response(200)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.send_header("Content-Length", str(len(page)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(page)


class Unlisted(Handler):
    """A server that lists its root alone."""

    def list_directory(self, path: Any) -> Any:
        if self.path != "/":
            self.send_error(404)
            return None
        return super().list_directory(path)


@pytest.fixture
def express(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    root = tmp_path / "root"
    group = zarr.open_group(str(root), mode="w", zarr_format=3)
    group.create_array("air", shape=(4, 4), chunks=(2, 2), dtype="i4")[:] = np.arange(16).reshape(4, 4)
    group.create_group("deep").create_array("x", shape=(3,), chunks=(1,), dtype="i4")[:] = [1, 2, 3]
    with served(Express, root) as url:
        yield url, root


def below(root: Path) -> set[str]:
    found = subprocess.run(
        ["find", ".", "-type", "f"], cwd=root, capture_output=True, text=True, timeout=60, check=True
    )
    return set(found.stdout.split())


def test_directories_that_a_listing_does_not_mark_are_directories(express: tuple[str, Path], tmp_path: Path) -> None:
    url, root = express
    with mounted(url, tmp_path / "mnt", "retries=0") as mount:
        assert below(mount) == below(root)
        group: Any = zarr.open_group(str(mount), mode="r")
        assert (group["air"][:] == np.arange(16).reshape(4, 4)).all()
        assert list(group["deep/x"][:]) == [1, 2, 3]
    with mounted(url, tmp_path / "mnt", "retries=0") as mount:  # lookups without a listing before
        assert all((mount / key).read_bytes() == (root / key).read_bytes() for key in sorted(below(root)))
    done = run("check", url, "-o", "retries=0")
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_listing_that_takes_longer_than_metadata_ttl_ends(bucket: Bucket, tmp_path: Path) -> None:
    bucket.keys = ["x/" + "".join(letters) for letters in itertools.product("abcdefghijklmno", repeat=3)]
    bucket.delay = 0.4
    with mounted("s3://b/x", tmp_path / "mnt", f"{bucket.option},metadata_ttl=0s") as mount:
        assert len(below(mount)) == 15**3


def test_a_directory_without_a_listing_is_an_error_and_not_skipped(tmp_path: Path) -> None:
    """The server answers 404 to requests for the listing of a directory that the listing above it shows."""
    root = tmp_path / "root"
    group = zarr.open_group(str(root), mode="w", zarr_format=2)
    group.create_group("deep").create_array("x", shape=(3,), chunks=(1,), dtype="i4")[:] = [1, 2, 3]

    with served(Unlisted, root) as url:
        with mounted(url, tmp_path / "mnt", "retries=0") as mount:
            assert "deep" in os.listdir(mount)
            done = subprocess.run(["find", "."], cwd=mount, capture_output=True, timeout=60, check=False)
            assert done.returncode == 1
            assert (mount / "deep/x/0").read_bytes()
        done = run("check", url, "-o", "retries=0")
        assert done.returncode == 1, done.stdout

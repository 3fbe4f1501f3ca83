"""Mounts of stores on a server without listings: chunks are listed from the array's grid, and requested on lookup."""

from __future__ import annotations

import errno
import http.server
import io
import os
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

from tests.conftest import run
from tests.mounts.mounting import mounted
from tests.mounts.test_remote_faults import settled
from tests.mounts.test_semantics import error_of
from tests.servers import Faulty, Nginx
from tests.sources.zarrstores import put_exact


@pytest.fixture
def store(nginx: Nginx, tmp_path: Path) -> str:
    """Create a store with a sparse, a dense and a very large array; return its URL."""
    name = tmp_path.name
    group = zarr.open_group(str(nginx.plain.root / name), mode="w", zarr_format=3)
    sparse = group.create_array("sparse", shape=(40,), chunks=(10,), dtype="i4")
    sparse[:10], sparse[20:30] = 1, 2
    group.create_array("dense", shape=(20, 20), chunks=(10, 10), dtype="i4")[:] = 3
    encoding = {"name": "v2", "separator": "."}
    large = group.create_array(
        "large", shape=(300, 300), chunks=(1, 1), dtype="u1", chunk_key_encoding=encoding
    )
    large[3, 4] = 7
    zarr.consolidate_metadata(group.store)
    return f"{nginx.plain.url}/{name}"


@pytest.fixture(params=["<title>App</title><a href='/'>Home</a>", "<title>App</title><a href='about'>About</a>"])
def page_for_all(request: pytest.FixtureRequest, store: str, nginx: Nginx) -> Iterator[str]:
    """Serve the store from a server that answers every unknown name with an HTML page; yield the URL."""

    class Handler(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments, directory=str(nginx.plain.root))

        def log_message(self, *arguments: object) -> None:
            """Write no log."""

        def send_head(self) -> Any:
            if os.path.isfile(self.translate_path(self.path)):
                return super().send_head()
            page = f"<!doctype html>{request.param}".encode()
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.send_header("Content-Length", str(len(page)))
            self.end_headers()
            return io.BytesIO(page)

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/{store.rpartition('/')[2]}"
        server.shutdown()


def test_a_server_with_a_page_for_every_name(page_for_all: str, nginx: Nginx, tmp_path: Path) -> None:
    """The page is not taken for a value, a directory or a missing chunk: reading it is EIO, not the fill value."""
    done = run("ls", page_for_all)
    assert done.returncode != 0
    assert not done.stdout
    assert "no listing" in done.stderr or "HTML page" in done.stderr
    with mounted(page_for_all, tmp_path / "mnt", "retries=0") as root:
        assert error_of(os.listdir, root) == errno.EIO
        assert error_of((root / "sparse/c/1").read_bytes) == errno.EIO
    (nginx.plain.root / page_for_all.rpartition("/")[2] / ".zmetadata").write_text("{}")
    with mounted(page_for_all, tmp_path / "mnt", "retries=0") as root:
        for name in ("dense/c/7", "dense/c/1/7", "dense/c/x", "sparse/c/1", "none/zarr.json", ".zgroup"):
            assert error_of((root / name).read_bytes) in (errno.EIO, errno.ENOENT), name
        assert error_of(os.stat, root / "sparse/c/3") == errno.EIO
        assert error_of((root / "sparse/c/3").read_bytes) == errno.EIO
        assert (root / "dense/c/1/1").read_bytes()


def requests(nginx: Nginx, root: Path) -> int:
    """Wait until read-ahead has ended (nothing in flight, no request for 0.2 s); return the number of requests."""
    count = -1
    while count != (count := len(nginx.log.read_text().splitlines())) or not settled(root):
        time.sleep(0.2)
    return count


def test_chunks_that_exist_are_listed_and_a_missing_one_is_enoent(store: str, nginx: Nginx, tmp_path: Path) -> None:
    with mounted(store, tmp_path / "mnt", "metadata_ttl=60") as root:
        assert sorted(os.listdir(root)) == ["dense", "large", "sparse", "zarr.json"]
        assert os.listdir(root / "sparse/c") == ["0", "2"]
        assert os.listdir(root / "dense/c") == ["0", "1"]
        assert os.listdir(root / "dense/c/1") == ["0", "1"]
        assert (root / "sparse/c/2").stat().st_size == len((root / "sparse/c/2").read_bytes()) > 0
        for call in (os.stat, lambda path: os.close(os.open(path, os.O_RDONLY))):
            for name in ("sparse/c/1", "sparse/c/4", "sparse/c/x", "sparse/1"):
                assert error_of(call, root / name) == errno.ENOENT, name
        before = requests(nginx, root)
        for _ in range(3):
            assert error_of(os.stat, root / "sparse/c/1") == errno.ENOENT
        assert requests(nginx, root) == before


def test_zarr_python_and_tools_read_the_chunks_that_the_server_has(store: str, tmp_path: Path) -> None:
    with mounted(store, tmp_path / "mnt") as root:
        group = zarr.open_group(str(root), mode="r")
        assert sorted(group) == ["dense", "large", "sparse"]
        sparse = group["sparse"]
        assert isinstance(sparse, zarr.Array)
        assert np.array_equal(sparse[:], np.repeat([1, 0, 2, 0], 10))
        assert sparse.nchunks_initialized == 2
        assert np.asarray(group["dense"]).min() == 3
        large = group["large"]
        assert isinstance(large, zarr.Array)
        assert np.asarray(large[2:5, 3:6]).tolist() == [[0, 0, 0], [0, 7, 0], [0, 0, 0]]
        subprocess.run(["cp", "-r", root / "sparse", tmp_path / "sparse"], check=True)
        subprocess.run(["rsync", "-a", f"{root}/sparse", tmp_path / "r"], check=True)
    for copy in (tmp_path / "sparse", tmp_path / "r/sparse"):
        assert sorted(str(path.relative_to(copy)) for path in copy.rglob("*")) == ["c", "c/0", "c/2", "zarr.json"]


@pytest.mark.parametrize(
    ("redirects", "separator", "group"),
    [
        (True, ".", b'{"zarr_format": 3, "node_type": "group"}'), (True, "/", b'{"zarr_format": 2}'),
        (False, ".", b'{"zarr_format": 2}'), (False, "/", b'{"zarr_format": 3, "node_type": "group"}'),
    ],
)  # fmt: skip
def test_an_array_with_documents_of_two_generations_has_the_chunks_of_both(
    nginx: Nginx, faulty: Faulty, tmp_path: Path, redirects: bool, separator: str, group: bytes
) -> None:
    """As `zarr migrate` leaves it, if the chunks are written anew under the keys of v3."""
    two = zarr.create_array(
        str(tmp_path / "two"), shape=(2, 2), chunks=(1, 2), dtype="u1", zarr_format=2, compressors=None,
        chunk_key_encoding={"name": "v2", "separator": separator},
    )  # fmt: skip
    three = zarr.create_array(str(tmp_path / "three"), shape=(4, 2), chunks=(1, 2), dtype="u1", compressors=None)
    two[:], three[:] = 1, 2
    tree = {"zarr.json" if b"node" in group else ".zgroup": group}
    for one in (tmp_path / "two", tmp_path / "three"):
        tree |= {f"a/{path.relative_to(one)}": path.read_bytes() for path in one.rglob("*") if path.is_file()}
    url = put_exact(faulty, tmp_path.name, tree)
    if redirects:
        for key, value in tree.items():
            path = nginx.plain.root / tmp_path.name / key
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(value)
        url = f"{nginx.plain.url}/{tmp_path.name}"
    with mounted(url, tmp_path / "mnt", "retries=0") as root:
        assert {key: (root / key).read_bytes() for key in tree} == tree
        for absent in (f"a/2{separator}0", "a/c/4/0", "a/c/0/1", f"a/0{separator}2", "a/d", "a/4"):
            assert error_of(os.stat, root / absent) == errno.ENOENT, absent
    with mounted(url, tmp_path / "mnt", "retries=0") as root:
        shown = {str(path.relative_to(root / "a")) for path in (root / "a").rglob("*") if path.is_file()}
        assert {f"a/{name}" for name in shown} == {key for key in tree if key.startswith("a/")}
        names = os.listdir(root / "a")
        assert len(names) == len(set(names))

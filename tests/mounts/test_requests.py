"""The number of requests for a Zarr store at a URL, counted at its server: one per value, and few others."""

from __future__ import annotations

import json
import logging
import random
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import zarr

from tests.conftest import run
from tests.mounts.mounting import all_written, mounted, until
from tests.servers import S3, Answer, Nginx, nginx, s3, serving

__all__ = ["nginx", "s3"]

CHUNKS = 30
VALUES = CHUNKS + 2  # and two documents
OTHERS = 15  # requests besides one per value; fewer than a second request per value


class Served(NamedTuple):
    """A store on a server."""

    url: str
    options: str
    requests: Callable[[], list[str]]  # returns all requests so far: "GET /path"

    def during(self, action: Callable[[], object]) -> list[str]:
        """Run an action; return the requests that it caused."""
        before = len(self.requests())
        action()
        return self.requests()[before:]


def make(root: Path, version: int, consolidated: bool) -> None:
    """Write a group with one array of many chunks."""
    shutil.rmtree(root, ignore_errors=True)
    group = zarr.open_group(str(root), mode="w", zarr_format=version)  # type: ignore[arg-type]
    array = group.create_array("x", shape=(CHUNKS, 8, 8), chunks=(1, 8, 8), dtype="f4")
    array[:] = np.arange(CHUNKS * 64, dtype="f4").reshape(CHUNKS, 8, 8)
    if consolidated:
        zarr.consolidate_metadata(group.store)


@pytest.fixture
def bucket(s3: S3) -> Iterator[list[str]]:
    """Record the requests that the S3 server receives; yield the list."""
    seen: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if found := re.search(r'"(?:\x1b\[[0-9;]*m)*((?:GET|HEAD) [^ ]+)', record.getMessage()):
                seen.append(found[1])

    handler, logger = Handler(), logging.getLogger("werkzeug")
    level = logger.level
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    yield seen
    logger.removeHandler(handler)
    logger.setLevel(level)


@pytest.fixture(params=["s3 v3", "listing v2", "plain v3"])
def served(request: pytest.FixtureRequest, tmp_path: Path, nginx: Nginx, s3: S3, bucket: list[str]) -> Served:
    """Put a store on a server that lists all keys, directories, or nothing; the last gets consolidated metadata."""
    return put(str(request.param), tmp_path, nginx, s3, bucket)


def put(kind: str, tmp_path: Path, nginx: Nginx, s3: S3, bucket: list[str]) -> Served:
    """Put a store on a server of `kind`; see served()."""
    server, version = kind.split()
    name = f"{tmp_path.name}-{server}-{version}"
    if server == "s3":
        make(tmp_path / "made", int(version[1]), False)
        for path in (tmp_path / "made").rglob("*"):
            if path.is_file():
                key = f"{name}/{path.relative_to(tmp_path / 'made')}"
                s3.client.put_object(Bucket=s3.bucket, Key=key, Body=path.read_bytes())
        options = f"s3.endpoint_url={s3.endpoint},s3.key=a,s3.secret=b"
        return Served(f"s3://{s3.bucket}/{name}", options, lambda: list(bucket))
    make(nginx.plain.root / name, int(version[1]), server == "plain")
    web, log = (nginx.plain, nginx.log) if server == "plain" else (nginx.listing, nginx.listing_log)
    return Served(f"{web.url}/{name}", "retries=0", lambda: re.findall(r'"((?:GET|HEAD) [^ ]+)', log.read_text()))


def read_all(root: Path) -> None:
    """Read chunks by name, without listing them."""
    array: Any = zarr.open_group(str(root), mode="r")["x"]
    assert float(array[:].sum(dtype="f8")) == sum(range(CHUNKS * 64))


def test_reading_an_array_takes_one_request_per_value(served: Served, tmp_path: Path) -> None:
    """In both Zarr formats, with and without listings. The requests made by mounting are counted too."""

    def action() -> None:
        with mounted(served.url, tmp_path / "mnt", served.options) as root:
            read_all(root)

    requests = served.during(action)
    assert len(requests) <= VALUES + OTHERS, unusual(requests)


WHOLE = 200


@pytest.fixture
def references_to(nginx: Nginx, tmp_path: Path) -> Callable[[str], Path]:
    """Return a function that writes a reference set of whole values on a server."""
    directory = nginx.plain.root / tmp_path.name
    directory.mkdir()
    for number in range(WHOLE):
        (directory / f"v{number:03}").write_bytes(b"x" * (number + 1))

    def make(url: str) -> Path:
        path = tmp_path / "set.json"
        refs = {f"v{number:03}": [f"{url}/{tmp_path.name}/v{number:03}"] for number in range(WHOLE)}
        path.write_text(json.dumps({"version": 1, "refs": refs}))
        return path

    return make


def test_sizes_of_a_listing_are_requested_concurrently(references_to: Callable[[str], Path], tmp_path: Path) -> None:
    """ls stats one file after another; with a server 30 ms away, 200 requests in a row would take six seconds."""
    going, lock, seen = 0, threading.Lock(), list[int]()

    def answer(method: str, path: str) -> Answer:
        nonlocal going
        with lock:
            going += 1
            seen.append(going)
        time.sleep(0.03)
        with lock:
            going -= 1
        return 200, {"Content-Length": str(int(path[-3:]) + 1)}, b""

    with serving(answer) as url, mounted(references_to(url), tmp_path / "mnt") as root:
        shell(root, "ls", "-l", ".")
        assert len(seen) == WHOLE
        assert max(seen) >= 8
        assert (root / "v122").stat().st_size == 123


def test_whole_values_take_a_request_each(
    references_to: Callable[[str], Path], nginx: Nginx, tmp_path: Path
) -> None:
    """Also with a disk cache, from which the second mount reads the values without a request."""
    document = references_to(nginx.plain.url)
    option = f"cache_dir={tmp_path / 'cache'}"
    names = random.Random(1).sample(range(WHOLE), WHOLE // 2)
    before = len(nginx.log.read_text().splitlines())
    with mounted(document, tmp_path / "mnt", "prefetch=0B", option) as root:
        with ThreadPoolExecutor(16) as readers:
            found = list(readers.map(lambda number: len((root / f"v{number:03}").read_bytes()), names))
        assert found == [number + 1 for number in names]
        until(lambda: all_written(tmp_path / "cache"))  # on exit, a daemon drops blocks that are not on disk after 4 s
    after = len(nginx.log.read_text().splitlines())
    assert after - before <= 1.02 * len(names)
    with mounted(document, tmp_path / "mnt", "prefetch=0B", option) as root:
        assert [len((root / f"v{number:03}").read_bytes()) - 1 for number in names] == names
    assert len(nginx.log.read_text().splitlines()) == after


def test_a_long_listing_does_not_fetch_chunks(tmp_path: Path, nginx: Nginx, s3: S3, bucket: list[str]) -> None:
    """`ls -l` of a store on a server without listings requests the sizes of chunks, not their bytes."""
    served = put("plain v2", tmp_path, nginx, s3, bucket)
    with mounted(served.url, tmp_path / "mnt", served.options) as root:
        before = len(served.requests())
        shell(root, "ls", "-l", "x")

        def heads() -> int:
            return sum(bool(re.search(r"HEAD .*/x/[0-9.]+$", request)) for request in served.requests()[before:])

        until(lambda: heads() >= CHUNKS)  # nginx logs a request after it has answered it
    assert heads() == CHUNKS
    assert len([request for request in served.requests()[before:] if request.startswith("GET")]) <= 15


def unusual(requests: list[str]) -> str:
    """Return the requests other than one GET of each chunk, as text for a failure message."""
    seen: set[str] = set()
    found = []
    for request in requests:
        if request in seen or not re.search(r"GET .*x/[c0-9./]+$", request):
            found.append(request)
        seen.add(request)
    return f"{len(requests)} requests, among them:\n" + "\n".join(found[:60])


def shell(root: Path, *command: str) -> None:
    """Run a program in a mount."""
    subprocess.run(command, cwd=root, stdout=subprocess.DEVNULL, timeout=100, check=True)


def test_walks_of_an_object_store_take_few_requests(
    tmp_path: Path, nginx: Nginx, s3: S3, bucket: list[str]
) -> None:  # fmt: skip
    """One listing returns all names, sizes and times."""
    served = put("s3 v2", tmp_path, nginx, s3, bucket)
    with mounted(served.url, tmp_path / "mnt", served.options) as root:
        requests = served.during(lambda: shell(root, "ls", "-lR", "."))
    assert len(requests) <= 5, requests


@pytest.mark.parametrize("kind", ["listing v3", "listing v2"])
def test_walks_of_listing_pages_take_a_request_per_directory_and_document(
    kind: str, tmp_path: Path, nginx: Nginx, s3: S3, bucket: list[str]
) -> None:
    served = put(kind, tmp_path, nginx, s3, bucket)
    store = nginx.listing.root / served.url.rpartition("/")[2]
    directories = 1 + sum(path.is_dir() for path in store.rglob("*"))
    with mounted(served.url, tmp_path / "mnt", served.options) as root:
        requests = served.during(lambda: shell(root, "ls", "-lR", "."))
    documents = 4 if kind.endswith("v3") else 12
    assert len(requests) <= directories + documents, unusual(requests)


TOOLS = [("s3 v3", "cp"), ("s3 v3", "check"), ("listing v3", "copy")]


@pytest.mark.parametrize(("kind", "tool"), TOOLS)
def test_copies_and_checks_take_one_request_per_value(
    kind: str, tool: str, tmp_path: Path, nginx: Nginx, s3: S3, bucket: list[str]
) -> None:
    served = put(kind, tmp_path, nginx, s3, bucket)

    def action() -> None:
        if tool == "cp":
            with mounted(served.url, tmp_path / "mnt", served.options) as root:
                shell(root, "cp", "-r", ".", str(tmp_path / "copy"))
        else:
            command = ["check", served.url] if tool == "check" else ["copy", served.url, tmp_path / "copy"]
            done = run(*command, "-o", served.options)
            assert done.returncode == 0, done.stderr

    requests = served.during(action)
    listings = 2 * CHUNKS + 2 if kind.startswith("listing") else 0
    assert len(requests) <= VALUES + OTHERS + listings, unusual(requests)
    if tool != "check":
        original = {path.relative_to(tmp_path / "copy") for path in (tmp_path / "copy").rglob("c/*/0/0")}
        assert len(original) == CHUNKS

"""How many requests a Zarr store at a URL takes, counted at its server: one a value, none for a name."""

from __future__ import annotations

import logging
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import zarr

from tests.mount.mounting import mounted
from tests.servers import S3, Nginx, nginx, s3

__all__ = ["nginx", "s3"]

CHUNKS = 300
VALUES = CHUNKS + 2  # and two documents
OVERHEAD = 1.05


class Served(NamedTuple):
    """A store on a server."""

    url: str
    options: str
    requests: Callable[[], list[str]]  # all so far: "GET /path"

    def during(self, action: Callable[[], object]) -> list[str]:
        """The requests that an action took."""
        before = len(self.requests())
        action()
        return self.requests()[before:]


def make(root: Path, version: int, consolidated: bool) -> None:
    """A group with one array of many chunks."""
    shutil.rmtree(root, ignore_errors=True)
    group = zarr.open_group(str(root), mode="w", zarr_format=version)  # type: ignore[arg-type]
    array = group.create_array("x", shape=(CHUNKS, 8, 8), chunks=(1, 8, 8), dtype="f4")
    array[:] = np.arange(CHUNKS * 64, dtype="f4").reshape(CHUNKS, 8, 8)
    if consolidated:
        zarr.consolidate_metadata(group.store)


@pytest.fixture
def bucket(s3: S3) -> Iterator[list[str]]:
    """The requests that the server of S3 gets."""
    seen: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if found := re.search(r'"((?:GET|HEAD) [^ ]+)', record.getMessage()):
                seen.append(found[1])

    handler, logger = Handler(), logging.getLogger("werkzeug")
    level = logger.level
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    yield seen
    logger.removeHandler(handler)
    logger.setLevel(level)


@pytest.fixture(params=["s3 v3", "s3 v2", "listing v3", "listing v2", "plain v3", "plain v2"])
def served(request: pytest.FixtureRequest, tmp_path: Path, nginx: Nginx, s3: S3, bucket: list[str]) -> Served:
    """A store on a server that lists all keys, or directories, or nothing; there, metadata is consolidated."""
    return put(str(request.param), tmp_path, nginx, s3, bucket)


def put(kind: str, tmp_path: Path, nginx: Nginx, s3: S3, bucket: list[str]) -> Served:
    """See served()."""
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
    """As a reader does it who lists no chunks."""
    array: Any = zarr.open_group(str(root), mode="r")["x"]
    assert float(array[:].sum(dtype="f8")) == sum(range(CHUNKS * 64))


def test_a_request_a_value(served: Served, tmp_path: Path) -> None:
    """Whatever the version, and whatever the server lists; what it takes to mount is part of it."""

    def action() -> None:
        with mounted(served.url, tmp_path / "mnt", served.options) as root:
            read_all(root)

    requests = served.during(action)
    assert len(requests) <= OVERHEAD * VALUES, unusual(requests)


def unusual(requests: list[str]) -> str:
    """What there is beside one GET of each chunk, to be shown."""
    seen: set[str] = set()
    found = []
    for request in requests:
        if request in seen or not re.search(r"GET .*x/[c0-9./]+$", request):
            found.append(request)
        seen.add(request)
    return f"{len(requests)} requests, among them:\n" + "\n".join(found[:60])

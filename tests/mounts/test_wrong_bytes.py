"""Servers that move, replace or cut values: a reader gets the right bytes or an error."""

from __future__ import annotations

import errno
import json
from pathlib import Path

import pytest

from tests.mounts.mounting import mounted
from tests.mounts.test_semantics import error_of
from tests.servers import Answer, serving


def reference_set(path: Path, refs: dict[str, object]) -> Path:
    """Write a reference set."""
    path.write_text(json.dumps({"version": 1, "refs": refs}))
    return path


@pytest.mark.parametrize(("status", "to"), [(301, "/v2/a"), (308, "http://localhost:{port}/v1/a")])
def test_a_redirect_of_one_url_says_nothing_about_others(status: int, to: str, tmp_path: Path) -> None:
    values = {"/v1/b": b"old b", "/v2/a": b"new a", "/v2/b": b"new b"}

    def answer(method: str, path: str) -> Answer:
        if path == "/v1/a" and "away" not in moved:
            moved.append("away")
            return status, {"Location": to.format(port=url.rpartition(":")[2])}, b""
        return 200, {"ETag": '"1"'}, values.get(path, b"new a")

    moved: list[str] = []
    with serving(answer) as url:
        refs: dict[str, object] = {name: [f"{url}/v1/{name}"] for name in "ab"}
        with mounted(reference_set(tmp_path / "set.json", refs), tmp_path / "mnt") as root:
            assert (root / "a").read_bytes() == b"new a"
            assert (root / "b").read_bytes() == b"old b"


@pytest.mark.parametrize("shorter", [100, 250])
def test_the_size_of_a_target_is_compared_with_the_version_that_was_read(shorter: int, tmp_path: Path) -> None:
    """A replica that lags behind answers HEAD: the reader of the whole target gets an error, not a part of it."""
    value = bytes(range(200))

    def answer(method: str, path: str) -> Answer:
        return 206, {"Content-Range": "bytes 0-199/200", "ETag": '"1"'}, value

    def head_differs(method: str, path: str) -> Answer:
        if method == "HEAD":
            return 200, {"ETag": '"0"', "Content-Length": str(shorter)}, b""
        return answer(method, path)

    with serving(head_differs) as url:
        refs: dict[str, object] = {"part": [f"{url}/v", 0, 200], "whole": [f"{url}/v"]}
        source, full = reference_set(tmp_path / "set.json", refs), "retries=0,memory_limit=1MiB"
        with mounted(source, tmp_path / "mnt", full) as root:
            assert (root / "part").read_bytes() == value
            assert error_of((root / "whole").stat) == errno.EIO
            assert error_of((root / "whole").read_bytes) == errno.EIO

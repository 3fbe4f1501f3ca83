"""The command zarrfs warm."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.archives.compiled import blobref, file
from tests.conftest import run
from tests.servers import Nginx

HEADER = '{"zarrfs": "record", "version": 1, "source": "refs.json"}\n'


@pytest.fixture
def source(tmp_path: Path) -> Path:
    (tmp_path / "data").write_bytes(bytes(1000))
    refs = {f"a/{number}": ["data", number * 10, 10] for number in range(100)}
    path = tmp_path / "refs.json"
    path.write_text(json.dumps({"version": 1, "refs": {**refs, "gone": ["nowhere", 0, 5]}}))
    (tmp_path / "reads").write_text(HEADER + "".join(json.dumps([key, 0, 4 << 20]) + "\n" for key in refs))
    return path


def test_the_summary_is_printed(source: Path, tmp_path: Path) -> None:
    done = run("warm", "-o", f"cache_dir={tmp_path}/blocks", source, tmp_path / "reads")
    assert (done.returncode, done.stdout, done.stderr) == (0, "100 read, 1000 B; 0 absent, 0 failed\n", "")
    done = run("warm", "--json", "--cache-dir", tmp_path / "blocks", source, tmp_path / "reads")
    assert json.loads(done.stdout) == {"found": 100, "absent": 0, "failed": 0, "bytes": 1000, "dropped": 0}


def test_failures_set_the_exit_status(source: Path, tmp_path: Path) -> None:
    with open(tmp_path / "reads", "a") as file:
        file.write('["b/1", 0, 1]\n["gone", 0, 5]\n')
    done = run("warm", "-o", f"cache_dir={tmp_path}/blocks", source, tmp_path / "reads")
    assert (done.returncode, done.stdout) == (1, "100 read, 1000 B; 1 absent, 1 failed\n"), done.stderr


@pytest.mark.parametrize("options", [(), ("-o", "cache_dir=/tmp/blocks,cache=none")])
def test_warm_without_a_disk_cache_is_a_usage_error(options: tuple[str, ...], source: Path, tmp_path: Path) -> None:
    done = run("warm", *options, source, tmp_path / "reads")
    assert (done.returncode, done.stdout) == (2, "")
    assert "needs a cache on disk" in done.stderr


def test_a_file_that_is_no_record_is_an_error(source: Path, tmp_path: Path) -> None:
    done = run("warm", "-o", f"cache_dir={tmp_path}/blocks", source, source)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"zarrfs: {source}: line 1: not a record: expected {{\"zarrfs\": \"record\", ...}}\n"


def test_a_bad_line_of_a_record_is_named(source: Path, tmp_path: Path) -> None:
    with open(tmp_path / "reads", "a") as file:
        file.write('["b/1"]\n')
    done = run("warm", "-o", f"cache_dir={tmp_path}/blocks", source, tmp_path / "reads")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f'zarrfs: {tmp_path}/reads: line 102: expected ["key", start, stop]\n'


def test_warmed_blocks_are_read_without_the_server(nginx: Nginx, source: Path, tmp_path: Path) -> None:
    """The blocks are on disk: another command reads them after the server has lost the target."""
    target = nginx.plain.root / "warm-target"
    target.write_bytes(b"".join(b"%09d\n" % number for number in range(100)))
    refs = {f"a/{number}": [f"{nginx.plain.url}/warm-target", number * 10, 10] for number in range(100)}
    source.write_text(json.dumps({"version": 1, "refs": refs}))
    for _ in range(20):  # blocks are dropped while the disk is busy
        before = nginx.log.read_text().count("GET /warm-target")
        done = run("warm", "-o", f"cache_dir={tmp_path}/blocks", source, tmp_path / "reads")
        assert (done.returncode, done.stdout) == (0, "100 read, 1000 B; 0 absent, 0 failed\n"), done.stderr
        if nginx.log.read_text().count("GET /warm-target") == before:
            break
    target.unlink()
    done = run("cat", "-o", f"cache_dir={tmp_path}/blocks,retries=0", source, "a/0", "a/50", "a/99")
    assert done.stdout == "000000000\n000000050\n000000099\n", done.stderr


def test_blocks_that_are_not_kept_set_the_exit_status(nginx: Nginx, tmp_path: Path) -> None:
    (nginx.plain.root / "large").write_bytes(bytes(4 << 20))
    (tmp_path / "refs.json").write_text(json.dumps({"version": 1, "refs": {"a": [f"{nginx.plain.url}/large"]}}))
    (tmp_path / "reads").write_text(HEADER + json.dumps(["a", 0, 4 << 20]) + "\n")
    blocks = tmp_path / "blocks"
    done = run("warm", "-o", f"cache_dir={blocks},cache_size=1MiB", tmp_path / "refs.json", tmp_path / "reads")
    assert (done.returncode, done.stdout) == (1, "1 read, 4.0 MiB; 0 absent, 0 failed\n")
    assert done.stderr == (
        f"zarrfs: {blocks}: 1 block not kept: the cache has no room, or its disk fails "
        "(-o cache_size=, cache_min_free=)\n"
    )


def test_blobs_that_are_not_kept_set_the_exit_status(nginx: Nginx, tmp_path: Path) -> None:
    """A blob larger than half of cache_size is not kept."""
    data, blocks = bytes(1 << 20), tmp_path / "blocks"
    (nginx.plain.root / blobref(data)).write_bytes(data)
    entry = file([[0, len(data), blobref(data)]], encoding="blobvec", size=len(data))
    (tmp_path / "archive.json").write_text(json.dumps([{"path": "a", **entry}]))
    (tmp_path / "reads").write_text(HEADER + json.dumps(["a", 0, 4 << 20]) + "\n")
    options = f"blobs={nginx.plain.url},cache_dir={blocks},cache_size=1MiB,cache_min_free=0B"
    done = run("warm", "-o", options, tmp_path / "archive.json", tmp_path / "reads")
    assert (done.returncode, done.stdout) == (1, "1 read, 1.0 MiB; 0 absent, 0 failed\n"), done.stderr
    assert done.stderr.startswith(f"zarrfs: {blocks}: 1 block not kept: the cache has no room")

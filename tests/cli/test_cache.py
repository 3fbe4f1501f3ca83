"""zarrfs cache with blocks: ls, prune, verify and clear, also while a mount uses the cache."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from tests.cache.diskblocks import (
    MIB,
    ONE,
    TWO,
    flip,
    found,
    remember,
    segment_of,
    segments,
    write,
)
from tests.cache.diskblocks import (
    rows as rows_of,
)
from tests.conftest import run
from zarrfs.cache import diskadmin
from zarrfs.cache.disk import DiskCache
from zarrfs.errors import UsageError

A, B = "s3://bucket/a.nc", "https://me:word@host/b.nc"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Return a cache of ten blocks of A in two old segments, four of B, and one whose source is not recorded."""
    for numbers in (range(4), range(4, 10)):
        cache = DiskCache(str(tmp_path / "blocks"), 64 * MIB, 0)
        for number in numbers:
            write(cache, A, number * 10_000, (number + 1) * 10_000, ONE if number % 2 else TWO)
        cache.close()
        path = segments(tmp_path / "blocks")[-1]
        os.truncate(path, 600_000)  # too full for more blocks
        os.utime(path, (1e9 + numbers.start, 1e9 + numbers.start))
    cache = DiskCache(str(tmp_path / "blocks"), 64 * MIB, 0)
    for number in range(4):
        write(cache, B, number * 10_000, (number + 1) * 10_000)
    write(cache, "gone", 0, 10_000)
    remember(cache, A, ONE)
    remember(cache, B, ONE)
    cache.close()
    return tmp_path / "blocks"


@pytest.fixture
def index(tmp_path: Path) -> Path:
    """Return a directory with one index."""
    document = tmp_path / "refs.json"
    document.write_text('{"version": 1, "refs": {"a": "x"}}')
    assert run("ls", document, "--index-dir", tmp_path / "index").returncode == 0
    return tmp_path / "index"


def cache(command: str, *more: object, status: int = 0) -> str:
    done = run("cache", command, *more)
    assert done.returncode == status, done.stderr
    return done.stdout


def rows(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def test_ls_shows_indexes_and_the_blocks_of_each_source(directory: Path, index: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in segments(directory)}
    listed = rows(cache("ls", "--json", "--index-dir", index, "--cache-dir", directory))
    assert [row["kind"] for row in listed] == ["references", "blocks", "blocks", "blocks"]
    by_source = {row["source"]: row for row in listed[1:]}
    assert {source: row["blocks"] for source, row in by_source.items()} == {
        A: 10, "https://host/b.nc": 4, "unknown": 1,
    }  # fmt: skip
    assert abs(by_source[A]["used"] - time.time()) < 100, "its version lies in the last segment"
    assert abs(by_source[A]["seen"] - time.time()) < 100
    assert 100_000 < by_source[A]["size"] < 100_200
    assert by_source["unknown"]["seen"] == 0
    text = cache("ls", "--index-dir", index, "-o", f"cache_dir={directory}")
    assert "10 blocks of s3://bucket/a.nc" in text
    assert "word" not in text
    assert text.count("\n") == 4
    assert cache("ls", "--index-dir", index).count("\n") == 1
    assert {path: path.stat().st_mtime_ns for path in segments(directory)} == before


def test_prune_removes_blocks_by_age(directory: Path, index: Path) -> None:
    command = ["prune", "--index-dir", index, "--cache-dir", directory]
    assert cache(*command, "--dry-run") == " 97.7 KiB  10 blocks of s3://bucket/a.nc\n"
    assert len(rows_of(directory)) == 17
    assert [row["blocks"] for row in rows(cache(*command, "--json"))] == [10]
    assert len(rows_of(directory)) == 7
    assert cache(*command) == ""


def test_files_that_cannot_be_removed_are_an_error(
    directory: Path, index: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a read-only directory, or in one of another user."""
    monkeypatch.setattr("zarrfs.cache.diskfiles.Layout.remove", lambda layout, folder, name: False)
    for remove in (lambda: diskadmin.prune(str(directory), 0.0, None, False), lambda: diskadmin.clear(str(directory))):
        with pytest.raises(UsageError, match=r"[0-9]+ files cannot be removed: permission denied, or read-only"):
            remove()
    assert len(rows_of(directory)) == 17


def test_prune_removes_the_least_recently_used_segments_over_a_limit(directory: Path, index: Path) -> None:
    size = sum(row["size"] for row in rows(cache("ls", "--json", "--index-dir", index)))
    command = ["prune", "--older-than", "100000d", "--index-dir", index, "--cache-dir", directory]
    assert cache(*command, "--max-size", f"{size + 2 * 10**6}B") == ""
    (row,) = rows(cache(*command, "--json", "--max-size", f"{size + 10**6}B"))
    assert (row["source"], row["blocks"]) == (A, 4), "the segment that was not used for longest"
    assert sum(path.stat().st_blocks * 512 for path in segments(directory)) <= 10**6
    cache(*command, "--max-size", f"{size}B")
    assert rows_of(directory) == []
    assert cache("ls", "--index-dir", index).count("\n") == 1  # the limit counts indexes first, so no block fits


@pytest.mark.parametrize("command", ["ls", "prune", "verify", "clear"])
def test_a_missing_index_directory_is_not_created(command: str, tmp_path: Path) -> None:
    done = run("cache", command, "--index-dir", tmp_path / "index")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"zarrfs: option index_dir={tmp_path}/index: no such file or directory\n"
    usual = run("cache", command, env={**os.environ, "XDG_CACHE_HOME": str(tmp_path)})
    assert usual.returncode == 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("wrong", [("--older-than", "30x"), ("--max-size", "10")])
def test_a_bad_limit_is_named(wrong: tuple[str, str], tmp_path: Path) -> None:
    done = run("cache", "prune", *wrong, "--index-dir", tmp_path)
    assert done.returncode == 2
    assert f"Error: {' '.join(wrong)}: expected a " in done.stderr


def test_clear_while_a_mount_uses_the_cache(directory: Path, index: Path) -> None:
    using = DiskCache(str(directory), 64 * MIB, 0)
    assert found(using, B, 0, 10_000)
    out = run("cache", "clear", "--index-dir", index, "--cache-dir", directory)
    assert (out.returncode, out.stdout.count("\n")) == (0, 4)
    assert "removed 1 files and 15 blocks" in out.stderr
    assert segments(directory) == []
    assert os.listdir(index) == []
    assert not found(using, B, 0, 10_000)
    write(using, B, 0, 10_000)
    assert found(using, B, 0, 10_000)
    using.close()
    assert cache("clear", "--json", "--index-dir", index) == ""
    assert len(rows_of(directory)) == 1  # without --cache-dir, blocks are not cleared


def test_verify_removes_damaged_blocks_and_indexes(directory: Path, index: Path) -> None:
    command = ["verify", "--index-dir", index, "--cache-dir", directory]
    assert rows(cache(*command, "--json")) == [
        {"indexes": 1, "bad_indexes": 0, "blocks": 17, "bad_blocks": 0, "unreadable_blocks": 0, "block_bytes": 150_000}
    ]
    assert segments(directory)[0].stat().st_mtime == 1e9
    large = [row for row in rows_of(directory) if row.length == 10_000]
    record = next(row for row in rows_of(directory) if row.is_record)
    for row in (*large[:2], record):
        flip(segment_of(directory, row), row.offset + 10)
    (one,) = index.glob("*.index")
    one.write_bytes(one.read_bytes()[:-1])
    text = cache(*command, status=1)
    assert "bad blocks                   3\n" in text
    assert "bad indexes                  1\n" in text
    assert len(rows_of(directory)) == 14
    assert list(index.glob("*.index")) == []
    assert rows(cache(*command, "--json"))[0]["blocks"] == 14


@pytest.mark.parametrize("command", ["ls", "prune", "clear", "verify"])
def test_a_missing_cache_directory_is_an_error(command: str, index: Path, tmp_path: Path) -> None:
    done = run("cache", command, "--index-dir", index, "--cache-dir", tmp_path / "typo")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"zarrfs: option cache_dir={tmp_path / 'typo'}: no such file or directory\n"
    assert len(list(index.glob("*.index"))) == 1
    assert not (tmp_path / "typo").exists()
    (tmp_path / "typo").mkdir()
    assert run("cache", command, "--index-dir", index, "--cache-dir", tmp_path / "typo").returncode == 0
    assert os.listdir(tmp_path / "typo") == []

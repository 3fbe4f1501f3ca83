"""Reference sets whose targets are in other zarrfs mounts: chains can be read, and cycles are an error."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import run
from tests.mounts.manyworkers import running, stopped
from tests.mounts.mounting import daemon_pid, log_of, mount_lines, until

RULE = "lies in a mount that itself reads from this one"
_READ = """
import sys
try:
    print(len(open(sys.argv[1], "rb").read()))
except OSError as exc:
    print(-exc.errno)
"""


def read(path: Path) -> int:
    """Return the number of bytes read, or minus the errno; if the read hangs, abort the mounts and fail."""
    with subprocess.Popen([sys.executable, "-c", _READ, path], stdout=subprocess.PIPE, text=True) as process:
        try:
            return int(process.communicate(timeout=60)[0])
        except subprocess.TimeoutExpired:
            _abort_all()
            process.kill()
            pytest.fail(f"{path}: the read hangs")


_CONNECTIONS: set[int] = set()  # minor device numbers of the mounts made here
REFUSED = (-errno.EIO, -errno.ELOOP)  # ELOOP in the mount that detects the cycle


def _abort_all() -> None:
    """Abort the FUSE connections of all mounts made here: processes in a deadlock in the kernel cannot be killed."""
    with tempfile.TemporaryDirectory() as control:
        subprocess.run(["mount", "-t", "fusectl", "none", control], check=True)
        try:
            for number in _CONNECTIONS:
                with contextlib.suppress(OSError):
                    Path(control, str(number), "abort").write_text("1")
        finally:
            subprocess.run(["umount", control], check=True)


def document(path: Path, refs: dict[str, object]) -> Path:
    path.write_text(json.dumps({"version": 1, "refs": refs}))
    return path


@contextlib.contextmanager
def together(*mounts: tuple[Path, Path, list[str]]) -> Iterator[list[Path]]:
    """Mount each (source, mount point, options) in this order; yield the mount points, and unmount all at the end."""
    roots, numbers = [], set()
    try:
        for source, at, options in mounts:
            at.mkdir(exist_ok=True)
            chosen = ",".join([f"log_file={at.parent / at.name}.log", *options])
            done = run("mount", source, at, "-o", chosen)
            assert done.returncode == 0, done.stderr
            roots.append(at)
            numbers.add(os.minor(at.stat().st_dev))
            _CONNECTIONS.update(numbers)
        yield roots
    finally:
        for _ in roots:
            for root in filter(mount_lines, roots):
                run("umount", root)  # a mount that reads from another one has to be unmounted first
        left = [root for root in roots if mount_lines(root)]
        for root in left:
            subprocess.run(["umount", "-l", root], check=False)
        _CONNECTIONS.difference_update(numbers)  # the kernel gives the numbers to other mounts
        assert not left


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("sized", [True, False])
def test_two_sets_that_lie_in_each_other(order: tuple[int, int], first: int, sized: bool, tmp_path: Path) -> None:
    at = [tmp_path / "one", tmp_path / "two"]
    (tmp_path / "data").write_bytes(b"x" * 1000)
    for number, mine in enumerate(at):
        mine.mkdir()
        other = [str(at[1 - number] / "v"), 0, 100] if sized else [str(at[1 - number] / "v")]
        document(tmp_path / f"{mine.name}.json", {"v": other, "end": [str(tmp_path / "data"), 0, 100]})
    mounts = [(tmp_path / f"{mine.name}.json", mine, list[str]()) for mine in at]
    with together(*(mounts[number] for number in order)):
        assert read(at[first] / "v") in REFUSED
        assert RULE in log_of(at[0]) + log_of(at[1])
        assert read(at[0] / "end") == read(at[1] / "end") == 100


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)])
def test_three_sets_in_a_circle(order: tuple[int, ...], first: int, tmp_path: Path) -> None:
    at = [tmp_path / name for name in ("one", "two", "three")]
    (tmp_path / "data").write_bytes(b"x" * 1000)
    for number, mine in enumerate(at):
        mine.mkdir()
        after = at[(number + 1) % 3]
        refs: dict[str, object] = {"v": [str(after / "v"), 0, 100], "next": [str(after / "end"), 0, 100]}
        document(tmp_path / f"{mine.name}.json", {**refs, "end": [str(tmp_path / "data"), 0, 100]})
    mounts = [(tmp_path / f"{mine.name}.json", mine, list[str]()) for mine in at]
    with together(*(mounts[number] for number in order)):
        assert read(at[first] / "v") in REFUSED
        assert RULE in "".join(map(log_of, at))
        assert sorted(read(mine / "next") for mine in at) == [-errno.ELOOP, 100, 100], "two of three end somewhere"


def test_a_chain_of_mounts_is_read(tmp_path: Path) -> None:
    (tmp_path / "data").write_bytes(b"x" * 1000)
    at = [tmp_path / f"m{number}" for number in range(4)]
    before, mounts = tmp_path / "data", []
    for mine in at:
        mounts.append((document(tmp_path / f"{mine.name}.json", {"v": [str(before), 0, 1000]}), mine, list[str]()))
        before = mine / "v"
    with together(*mounts):
        assert [read(mine / "v") for mine in reversed(at)] == [1000] * 4


def archive(path: Path, data: bytes) -> Path:
    """Write an archive with one file that is named like its blob, sha1-...; return the name."""
    ref = f"sha1-{hashlib.sha1(data).hexdigest()}"
    path.write_text(json.dumps([
        {"path": ref, "mode": 0o100644, "size": len(data), "encoding": "blobvec", "data": [[0, len(data), ref]]}
    ]))  # fmt: skip
    return Path(ref)


def test_a_document_in_a_mount_is_read_again_after_the_mount_is_replaced(tmp_path: Path) -> None:
    """The two documents have the same inode number, size, mtime and ctime."""
    for value in "AAAA", "BBBB":
        entry = {"mode": 0o100644, "mtime": 1_000_000_000, "encoding": "utf-8", "data": json.dumps({"k": value})}
        (tmp_path / "archive.json").write_text(json.dumps({"refs.json": entry}))
        with together((tmp_path / "archive.json", tmp_path / "m", [])):
            assert run("cat", tmp_path / "m/refs.json", "k").stdout == value


@pytest.mark.parametrize("first", [0, 1])
def test_archives_that_contain_the_blobs_of_each_other_are_an_error(first: int, tmp_path: Path) -> None:
    at = [tmp_path / "one", tmp_path / "two"]
    for mine in at:
        mine.mkdir()
        name = archive(tmp_path / f"{mine.name}.json", b"x" * 10_000)
    mounts = [
        (tmp_path / f"{mine.name}.json", mine, [f"blobs={at[1 - number]}"]) for number, mine in enumerate(at)
    ]
    with together(*mounts):
        assert read(at[first] / name) in REFUSED
        assert RULE in log_of(at[0]) + log_of(at[1])


@pytest.mark.parametrize("first", [0, 1])
def test_an_archive_and_a_set_that_read_from_each_other_are_an_error(first: int, tmp_path: Path) -> None:
    at = [tmp_path / "archive", tmp_path / "set"]
    name = archive(tmp_path / "archive.json", b"x" * 10_000)
    document(tmp_path / "set.json", {str(name): [str(at[0] / name)]})
    at[1].mkdir()
    with together((tmp_path / "archive.json", at[0], [f"blobs={at[1]}"]), (tmp_path / "set.json", at[1], [])):
        assert read(at[first] / name) in REFUSED
        assert RULE in log_of(at[0]) + log_of(at[1])


def test_a_mount_that_holds_the_cache_of_another_may_not_read_from_it(tmp_path: Path) -> None:
    """The mount that holds the cache can still read its other targets. It cannot hold an upper directory."""
    keeper, reader = tmp_path / "keeper", tmp_path / "reader"
    (tmp_path / "data").write_bytes(b"x" * 1000)
    refs: dict[str, object] = {"v": [str(reader / "v"), 0, 100], "end": [str(tmp_path / "data"), 0, 100]}
    document(tmp_path / "keeper.json", refs)
    document(tmp_path / "reader.json", {"v": [str(tmp_path / "data"), 0, 100]})
    (tmp_path / "upper").mkdir()
    with together((tmp_path / "keeper.json", keeper, [f"upperdir={tmp_path / 'upper'}"])):
        (keeper / "place").mkdir()
        with together((tmp_path / "reader.json", reader, [f"cache_dir={keeper / 'place'}"])):
            assert read(reader / "v") == 100
            assert read(keeper / "v") in REFUSED
            assert RULE in log_of(keeper)
            assert read(keeper / "end") == 100
        done = run("mount", tmp_path / "reader.json", reader, "-o", f"upperdir={keeper / 'place'}")
        assert done.returncode == 1
        assert "no upper directory: cannot write there: invalid argument (it lies in another mount" in done.stderr
        assert "Traceback" not in done.stderr


@pytest.mark.parametrize("cached", [False, True])
def test_a_cycle_is_an_error_though_only_one_worker_knows_of_it(cached: bool, tmp_path: Path) -> None:
    """Only the process that has read from the other mount knows this; another process may get the next request."""
    one, two = tmp_path / "one", tmp_path / "two"
    (tmp_path / "data").write_bytes(b"x" * 1000)
    end = [str(tmp_path / "data"), 0, 100]
    document(tmp_path / "one.json", {"to": [str(two / "end"), 0, 100], "end": end})
    document(tmp_path / "two.json", {"x": [str(one / "end"), 0, 100], "end": end})
    options = ["workers=2", *([f"cache_dir={tmp_path / 'cache'}"] if cached else [])]
    with together((tmp_path / "one.json", one, options), (tmp_path / "two.json", two, options)):
        until(lambda: running(one) == running(two) == 2)
        with stopped(daemon_pid(one)):
            assert read(one / "to") == 100
        assert read(two / "x") in REFUSED
        assert RULE in log_of(two)
        assert read(two / "end") == 100

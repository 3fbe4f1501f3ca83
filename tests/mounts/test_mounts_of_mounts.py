"""Reference sets whose targets are in other zarrfs mounts."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import run
from tests.mounts.mounting import daemon_pid, log_of, mount_lines, until

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


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    try:
        os.kill(pid, signal.SIGSTOP)
        until(lambda: Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T")
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


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


def test_a_document_in_a_mount_is_read_again_after_the_mount_is_replaced(tmp_path: Path) -> None:
    """The two documents have the same inode number, size, mtime and ctime."""
    for value in "AAAA", "BBBB":
        entry = {"mode": 0o100644, "mtime": 1_000_000_000, "encoding": "utf-8", "data": json.dumps({"k": value})}
        (tmp_path / "archive.json").write_text(json.dumps({"refs.json": entry}))
        with together((tmp_path / "archive.json", tmp_path / "m", [])):
            assert run("cat", tmp_path / "m/refs.json", "k").stdout == value


def test_a_suspended_mount_delays_only_reads_from_it(tmp_path: Path) -> None:
    (tmp_path / "data").write_bytes(b"x" * 1000)
    good, bad, reader = (tmp_path / name for name in ("good", "bad", "reader"))
    end = {"v": [str(tmp_path / "data"), 0, 1000]}
    both = {"good": [str(good / "v"), 0, 1000], "bad": [str(bad / "v"), 0, 1000]}
    with together(
        (document(tmp_path / "good.json", dict(end)), good, []),
        (document(tmp_path / "bad.json", dict(end)), bad, []),
        (document(tmp_path / "reader.json", dict(both)), reader, []),
    ):
        (bad / "v").stat()  # the kernel need not look it up again
        with stopped(daemon_pid(bad)):
            waiting = subprocess.Popen(["cat", reader / "bad"], stdout=subprocess.DEVNULL)
            time.sleep(0.5)
            assert read(reader / "good") == 1000
            assert waiting.poll() is None
        assert waiting.wait(60) == 0


def test_signals_are_handled_while_reads_from_a_dead_file_server_take_all_threads(tmp_path: Path) -> None:
    (tmp_path / "data").write_bytes(b"x" * 1000)
    dead, reader = tmp_path / "dead", tmp_path / "reader"
    names = [f"v{number}" for number in range(60)]
    with together(
        (document(tmp_path / "dead.json", {name: [str(tmp_path / "data"), 0, 9] for name in names}), dead, []),
        (document(tmp_path / "reader.json", {name: [str(dead / name), 0, 9] for name in names}), reader, []),
    ):
        pid = daemon_pid(reader)
        for name in names:
            (dead / name).stat()
        with stopped(daemon_pid(dead)):
            waiting = [subprocess.Popen(["cat", reader / name], stdout=subprocess.DEVNULL) for name in names]
            time.sleep(2)
            for number, words in (signal.SIGUSR1, "statistics: "), (signal.SIGTERM, "cannot unmount: in use by"):
                os.kill(pid, number)
                until(lambda words=words: words in log_of(reader), 30)  # type: ignore[misc]
        assert [each.wait(60) for each in waiting] == [0] * len(waiting)

"""Tests of `zarrfs stats` and `zarrfs top` on real mounts."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import select
import shutil
import signal
import subprocess
import termios
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.conftest import PROGRAM, run
from tests.mounts.mounting import counters_of, daemon_pid, mounted, until
from tests.servers import Nginx, nginx
from zarrfs.errors import MountError
from zarrfs.metrics import statistics
from zarrfs.metrics.counters import METRICS

__all__ = ["nginx"]

ATTRIBUTE = "user.zarrfs.stats"
SIZE, NUMBER = 40_000, 5


@pytest.fixture
def mount(nginx: Nginx, tmp_path: Path) -> Iterator[Path]:
    """Mount five values that lie far apart in one target on nginx, without read-ahead."""
    value = os.urandom(1 << 20)
    (nginx.plain.root / "stats.bin").write_bytes(value)
    url = f"{nginx.plain.url}/stats.bin"
    refs = {f"a/{number}": [url, number * 200_000, SIZE] for number in range(NUMBER)}
    (tmp_path / "refs.json").write_text(json.dumps({"version": 1, "refs": refs}))
    with mounted(tmp_path / "refs.json", tmp_path / "mnt", "prefetch=0B") as root:
        yield root


def read(path: Path) -> int:
    """Drop a file's pages from the page cache, read it from the daemon, and return the number of bytes."""
    with open(path, "rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return len(file.readall())


def test_counters_move_by_what_was_read(mount: Path) -> None:
    assert counters_of(mount).get("remote", {}).get("requests", 0) == 0
    for number in range(NUMBER):
        assert read(mount / "a" / str(number)) == SIZE
    first = counters_of(mount)
    assert first["bytes"] == NUMBER * SIZE
    assert first["open"] == NUMBER
    remote = first["remote"]
    assert remote["bytes"] == NUMBER * SIZE
    assert remote["requests"] == NUMBER
    assert (remote["repeated"], remote["failed"], remote["in_flight"], remote["waiting"]) == (0, 0, 0, 0)
    assert remote["cache"]["misses"] == NUMBER
    assert [host["requests"] for host in remote["hosts"].values()] == [NUMBER]
    assert remote["latency_histogram"][-1][1] == NUMBER
    assert read(mount / "a/0") == SIZE
    second = counters_of(mount)
    assert second["bytes"] == (NUMBER + 1) * SIZE
    assert second["remote"]["requests"] == NUMBER
    assert second["remote"]["cache"]["hits"] > remote["cache"]["hits"]
    assert second["remote"]["cache"]["hit_bytes"] > 0


def test_json_table_and_prometheus_output_agree(mount: Path) -> None:
    read(mount / "a/1")
    found = json.loads(run("stats", "--json", mount).stdout)
    assert found["mount"] == str(mount)
    assert found["pid"] == daemon_pid(mount)
    now = counters_of(mount)
    assert found.pop("process").keys() == now.pop("process").keys()  # CPU time and memory change meanwhile
    assert found.items() >= now.items()
    table = run("stats", mount).stdout
    assert f"from network  {SIZE / 1024:.1f} KiB, 1 requests, 0 repeated, 0 failed" in table
    assert table.startswith(f"mount         {mount}: {found['source']} (references, pid {found['pid']})\n")
    samples = {
        sample.name: sample
        for family in text_string_to_metric_families(run("stats", "--prometheus", mount).stdout)
        for sample in family.samples
    }
    assert samples["zarrfs_network_bytes_total"].value == SIZE
    assert samples["zarrfs_requests_total"].labels == {"mount": str(mount), "source": found["source"]}
    assert samples["zarrfs_request_duration_seconds_count"].value == 1
    remote = {metric.name for metric in METRICS if metric.path[:2] in (("remote", "cache"), ("remote", "requests"))}
    assert samples.keys() >= remote


def test_a_path_inside_the_mount_selects_the_mount(mount: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(mount)
    (tmp_path / "other").mkdir()
    for path, where in ("a/1", mount), ("mnt/a", tmp_path), ("link", tmp_path), ("../link/a", tmp_path / "other"):
        assert json.loads(run("stats", "--json", path, cwd=where).stdout)["mount"] == str(mount), path


def test_the_attribute_is_large_and_not_listed(mount: Path, tmp_path: Path) -> None:
    """Tools that copy listed attributes do not copy it: other file systems may refuse its size."""
    read(mount / "a/1")
    assert 0 < len(os.getxattr(mount, ATTRIBUTE)) < 65_536
    assert os.listxattr(mount) == ["user.zarrfs.mount"]
    for path in (mount / "a", mount / "a/1"):
        with pytest.raises(OSError, match="No data available"):
            os.getxattr(path, ATTRIBUTE)
    assert ATTRIBUTE.encode() not in subprocess.run(["getfattr", "-d", mount], capture_output=True, check=True).stdout
    subprocess.run(["cp", "-a", mount, tmp_path / "copy"], check=True)
    assert ATTRIBUTE not in os.listxattr(tmp_path / "copy")


def test_many_servers_do_not_overflow_the_attribute(tmp_path: Path) -> None:
    refs = {str(number): [f"http://127.1.0.{number + 1}:9/x", 0, 10] for number in range(50)}
    (tmp_path / "refs.json").write_text(json.dumps({"version": 1, "refs": refs}))
    with mounted(tmp_path / "refs.json", tmp_path / "mnt", "retries=0,prefetch=0B") as root:
        for name in refs:
            with pytest.raises(OSError, match="Input/output error"):
                (root / name).read_bytes()
        assert counters_of(root)["remote"]["failed"] >= 50  # the kernel may read twice
        assert len(counters_of(root)["remote"]["hosts"]) == 32
        assert len(os.getxattr(root, ATTRIBUTE)) > 2048


def test_a_store_behind_a_url_has_the_same_names(nginx: Nginx, tmp_path: Path) -> None:
    place = nginx.listing.root / "stats.zarr"
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir()
    (place / "zarr.json").write_text('{"zarr_format": 3, "node_type": "group"}')
    (place / "value").write_bytes(bytes(SIZE))
    with mounted(f"{nginx.listing.url}/stats.zarr/", tmp_path / "mnt", "prefetch=0B") as root:
        before = counters_of(root)
        assert read(root / "value") == SIZE
        after = counters_of(root)
        assert after["bytes"] - before["bytes"] == SIZE
        assert after["remote"]["bytes"] - before["remote"]["bytes"] == SIZE


@pytest.mark.parametrize("source", ["directory", "archive"])
def test_sources_without_remote_data_have_no_network_lines(source: str, tmp_path: Path) -> None:
    place = tmp_path / "source"
    if source == "directory":
        place.mkdir()
        (place / "x").write_bytes(bytes(SIZE))
    else:
        place.write_text(json.dumps({"x": {"mode": 0o100644, "data": "x" * SIZE, "encoding": "utf-8"}}))
    with mounted(place, tmp_path / "mnt", f"type={'zarr' if source == 'directory' else 'archive'}") as root:
        assert read(root / "x") == SIZE
        found = run("stats", root).stdout.splitlines()
        assert found[1].startswith(f"served        {SIZE / 1024:.1f} KiB, ")
        assert not [line for line in found if line.startswith(("from", "memory", "latency"))]


# -- mounts that do not answer


def test_a_hanging_daemon_is_reported(mount: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pid = daemon_pid(mount)
    monkeypatch.setattr(statistics, "_ANSWER", 0.2)
    os.kill(pid, signal.SIGSTOP)
    try:
        with pytest.raises(MountError, match=f"{mount}: does not answer"):
            statistics.statistics(str(mount / "a/1"))
    finally:
        os.kill(pid, signal.SIGCONT)


def test_a_dead_daemon_is_reported(tmp_path: Path) -> None:
    (tmp_path / "refs.json").write_text('{"version": 1, "refs": {"a": "1"}}')
    (tmp_path / "mnt").mkdir()
    assert run("mount", tmp_path / "refs.json", tmp_path / "mnt").returncode == 0
    with watching(tmp_path / "mnt") as top:
        wait_for(top.stdout, b"reads")
        os.kill(daemon_pid(tmp_path / "mnt"), signal.SIGKILL)
        assert top.wait(60) == 1
        assert top.stderr.read() == f"zarrfs: {tmp_path}/mnt: its daemon has died\n".encode()
    try:
        done = run("stats", tmp_path / "mnt/a")
        assert (done.returncode, done.stderr) == (1, f"zarrfs: {tmp_path}/mnt: its daemon has died\n")
    finally:
        subprocess.run(["umount", "-l", tmp_path / "mnt"], check=True)


# -- top


@contextlib.contextmanager
def watching(mountpoint: Path) -> Iterator[Any]:
    """Start `zarrfs top` with its output in pipes; kill it at the end."""
    command = [PROGRAM, "top", "--interval", "0.1", str(mountpoint)]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def wait_for(stream: Any, text: bytes, times: int = 1) -> bytes:
    """Read a pipe or terminal until `text` has occurred `times` times; return everything read."""
    seen, deadline = b"", time.monotonic() + 60
    while seen.count(text) < times:
        assert select.select([stream], [], [], deadline - time.monotonic())[0], seen
        part = os.read(stream if isinstance(stream, int) else stream.fileno(), 65_536)
        assert part, seen
        seen += part
    return seen


def test_top_once_shows_the_current_reads(mount: Path) -> None:
    ended = threading.Event()

    def reader() -> None:
        while not ended.is_set():
            read(mount / "a/1")

    def shown() -> bool:
        done = run("top", "--once", "--interval", "300ms", mount)
        assert (done.returncode, done.stderr) == (0, "")
        assert "\x1b" not in done.stdout
        lines = done.stdout.splitlines()
        assert lines[0].startswith(f"{mount}  ")
        [reads] = [line for line in lines if line.startswith("reads ")]
        return float(reads.split()[1].replace(",", "")) > 0

    thread = threading.Thread(target=reader)
    thread.start()
    try:
        until(shown)  # on a busy machine an interval may pass without a read
    finally:
        ended.set()
        thread.join()


def test_top_writes_frames_until_the_unmount(tmp_path: Path) -> None:
    (tmp_path / "refs.json").write_text('{"version": 1, "refs": {"a": "1"}}')
    with mounted(tmp_path / "refs.json", tmp_path / "mnt") as root, watching(root) as top:
        seen = wait_for(top.stdout, b"reads", times=3)
        assert b"\x1b" not in seen
        assert run("umount", root).returncode == 0
        assert top.wait(60) == 0
        assert top.stderr.read() == f"zarrfs: {root}: no longer mounted\n".encode()
        assert run("mount", tmp_path / "refs.json", root).returncode == 0  # `mounted` unmounts it


@pytest.mark.parametrize("key", [b"q", b"\x03"])
def test_top_on_a_terminal_ends_with_a_key(key: bytes, mount: Path) -> None:
    ours, theirs = pty.openpty()
    before = termios.tcgetattr(theirs)
    command = [PROGRAM, "top", "--interval", "0.1", str(mount)]
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100", "LINES": "30"}
    process = subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment, start_new_session=True,
        preexec_fn=lambda: os.close(os.open(os.ttyname(0), os.O_RDWR)),  # makes it the controlling terminal
    )  # fmt: skip
    try:
        seen = wait_for(ours, b"reads", times=2)
        assert b"\x1b[?1049h" in seen  # the alternate screen
        os.write(ours, key)
        assert b"\x1b[?1049l" in wait_for(ours, b"\x1b[?25h")
        assert process.wait(60) == 0
        assert termios.tcgetattr(theirs) == before
    finally:
        process.kill()
        process.wait()
        os.close(ours)
        os.close(theirs)

"""Readers that are interrupted, daemons that are killed, suspended or out of memory: nothing blocks forever."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.conftest import PROGRAM, run
from tests.mounts.mounting import alive, counters_of, daemon_pid, log_of, mount_lines, mounted
from tests.mounts.remotevalues import wait_for
from tests.mounts.test_semantics import document, error_of
from tests.servers import Faulty, faulty

__all__ = ["faulty"]

SIZE = 1 << 28  # bytes
AT_ONCE = 20.0  # seconds that count as immediate on a busy machine; a third of the timeouts, 60 s
MIB = 1 << 20


def ended(command: list[object], number: signal.Signals, after: Callable[[], bool]) -> tuple[int, float]:
    """Run a program and signal it once `after()` is true; return its status and the seconds that it took to end.

    The program must not have ended before the signal.
    """
    reader = subprocess.Popen(list(map(str, command)), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_for(after)
        time.sleep(0.2)
        assert reader.poll() is None, "it has ended by itself"
        began = time.monotonic()
        reader.send_signal(number)
        return reader.wait(60), time.monotonic() - began
    finally:
        reader.kill()


# -- readers


def test_a_reader_of_a_silent_server_is_interrupted(faulty: Faulty, tmp_path: Path) -> None:
    """cat ends immediately. Another reader that waits for the same bytes gets them, and no request stays in flight."""
    url = faulty.put("/silent", bytes(200_000), forever="slow")
    source = document(tmp_path, {"value": [url, 0, 100_000]})
    with mounted(source, tmp_path / "mnt", "read_timeout=300s,prefetch=0B") as root:
        other = subprocess.Popen(["cmp", "-n", "100000", root / "value", "/dev/zero"])
        status, seconds = ended(["cat", root / "value"], signal.SIGINT, faulty.arrived.is_set)
        assert (status, seconds < AT_ONCE) == (-signal.SIGINT, True), seconds
        faulty.release()
        assert other.wait(60) == 0
        wait_for(lambda: not counters_of(root)["requests_in_flight"])


def test_a_file_of_authorities_that_cannot_be_read_keeps_neither_readers_nor_the_daemon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Opening a FIFO waits, as opening a file of a file server that is down does."""
    os.mkfifo(tmp_path / "authorities")
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "authorities"))
    source = document(tmp_path, {"value": ["https://127.0.0.1:9/value", 0, 100]})
    with mounted(source, tmp_path / "mnt", "read_timeout=3s") as root:
        assert error_of(lambda: (root / "value").read_bytes()) == errno.EIO
    # and the daemon has ended, else mounted() fails


# -- daemons that are suspended


@pytest.fixture
def suspended(tmp_path: Path) -> Iterator[tuple[Path, int]]:
    """Yield (mount point, pid) of a suspended daemon; afterwards resume it, unmount, and wait until it has ended."""
    (tmp_path / "mnt").mkdir()
    assert run("mount", document(tmp_path, {"a": "here", "b": "there"}), tmp_path / "mnt").returncode == 0
    pid = daemon_pid(tmp_path / "mnt")
    os.kill(pid, signal.SIGSTOP)
    try:
        yield tmp_path / "mnt", pid
    finally:
        os.kill(pid, signal.SIGCONT)
        while mount_lines(tmp_path / "mnt"):
            subprocess.run(["umount", "-l", tmp_path / "mnt"], check=True)
    wait_for(lambda: not alive(pid))


def test_readers_of_a_suspended_daemon_are_interrupted(suspended: tuple[Path, int]) -> None:
    root, pid = suspended
    for command in (["cat", root / "a"], ["ls", root], ["stat", root / "b"], ["df", root]):
        status, seconds = ended(list(command), signal.SIGINT, lambda: True)
        assert (status, seconds < AT_ONCE) == (-signal.SIGINT, True), command
    assert subprocess.run(["cat", "/proc/mounts"], capture_output=True, timeout=AT_ONCE, check=True).stdout
    os.kill(pid, signal.SIGCONT)
    assert (root / "a").read_text() == "here"


def test_commands_do_not_wait_forever_for_a_suspended_daemon(suspended: tuple[Path, int]) -> None:
    root, pid = suspended
    commands = [["stats", root], ["mount", root.parent / "refs.json", root]]
    asking = [subprocess.Popen([PROGRAM, *command], stderr=subprocess.PIPE, text=True) for command in commands]
    told = [one.communicate(timeout=60)[1] for one in asking]
    assert [one.returncode for one in asking] == [1, 1]
    assert told[0] == f"zarrfs: {root}: does not answer\n"
    assert "already a mount point" in told[1]
    assert run("umount", root).returncode == 0
    assert not mount_lines(root)
    assert alive(pid)  # it ends when it is resumed


# -- mounts that fail


def test_a_mount_that_fails_makes_no_files(tmp_path: Path) -> None:
    """A log would look like one of a running daemon."""
    (tmp_path / "mnt").mkdir()
    (tmp_path / "bad.json").write_text("{")
    options = f"log_file={tmp_path}/log"
    done = run("mount", tmp_path / "bad.json", tmp_path / "mnt", "-o", options)
    assert done.returncode == 1
    assert sorted(os.listdir(tmp_path)) == ["bad.json", "mnt"]


# -- daemons without memory


@pytest.fixture
def bomb(tmp_path: Path) -> Path:
    """Make a store with one chunk of 256 MiB of zeros in about 1 MiB; to read one byte, all of it is decoded."""
    store = tmp_path / "bomb.zarr"
    (store / "x").mkdir(parents=True)
    (store / ".zgroup").write_text('{"zarr_format": 2}')
    metadata = {"zarr_format": 2, "shape": [SIZE], "chunks": [SIZE], "dtype": "|u1", "fill_value": 0,
                "compressor": {"id": "zlib", "level": 1}, "filters": None, "order": "C"}  # fmt: skip
    (store / "x/.zarray").write_text(json.dumps(metadata))
    deflate, zeros = zlib.compressobj(1), bytes(16 * MIB)
    with (store / "x/0").open("wb") as file:
        for _ in range((SIZE) // len(zeros)):
            file.write(deflate.compress(zeros))
        file.write(deflate.flush())
    return store


def test_a_daemon_that_may_not_have_the_memory(bomb: Path, tmp_path: Path) -> None:
    """With a low RLIMIT_AS, the read gets EIO, the log says why, and the mount keeps serving."""
    root = tmp_path / "mnt"
    root.mkdir()
    command = ["prlimit", f"--as={400 * MIB}", PROGRAM, "mount", bomb, root]
    subprocess.run([*command, "-o", f"view=arrays,log_file={root}.log"], check=True, timeout=60)
    try:
        assert error_of((root / "x.npy").open("rb").read, 1000) == errno.EIO
        assert "no memory for" in log_of(root)
        assert json.loads((root / "x.json").read_text()) == {}
    finally:
        assert run("umount", root).returncode == 0


def test_a_document_that_no_memory_holds(tmp_path: Path) -> None:
    """The child process that prepares the document runs out of memory; zarrfs prints one line and mounts nothing."""
    text = ",".join(f'"k{number}": "{number:020}"' for number in range(2000))
    path = tmp_path / "refs.json"
    path.write_text('{"version": 1, "refs": {"a": "' + "x" * (100 * MIB) + '", ' + text + "}}")
    (tmp_path / "mnt").mkdir()
    command = ["prlimit", f"--as={180 * MIB}", PROGRAM, "mount", path, tmp_path / "mnt"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert "memory" in done.stderr
    assert not mount_lines(tmp_path / "mnt")

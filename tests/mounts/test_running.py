"""Running mounts: the report at their end, and signals."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from pathlib import Path

import pytest

from tests.conftest import run
from tests.mounts.mounting import alive, daemon_pid, log_of, mounted, until
from tests.servers import Faulty, faulty

__all__ = ["faulty"]


def test_the_daemon_logs_a_report_when_it_ends(faulty: Faulty, tmp_path: Path) -> None:
    url, document, mountpoint = faulty.put("/data", b"x" * 5000), tmp_path / "set.json", tmp_path / "mnt"
    document.write_text(json.dumps({"version": 1, "refs": {"a": [url, 0, 5000], "b": [faulty.url + "/none", 0, 5]}}))
    mountpoint.mkdir()
    log = tmp_path / "log"
    assert run("mount", document, mountpoint, "-o", f"log_file={log},allow=private").returncode == 0
    pid = daemon_pid(mountpoint)
    (mountpoint / "a").read_bytes()
    with pytest.raises(OSError, match="Input/output error"):
        (mountpoint / "b").read_bytes()
    os.kill(pid, signal.SIGTERM)
    until(lambda: not alive(pid))
    [line] = [line for line in log.read_text().splitlines() if "unmounted after" in line]
    assert re.search(r"mnt: unmounted after [\d.]+ s: 5000 bytes served in 1 reads", line)
    assert re.search(r"[1-9]\d* requests \([1-9]\d* failed\), [1-9]\d* errors", line)


def test_usr1_logs_statistics_and_memory(tmp_path: Path) -> None:
    document = tmp_path / "set.json"
    document.write_text('{"version": 1, "refs": {"a": "x"}}')
    with mounted(document, tmp_path / "mnt") as root:
        os.kill(daemon_pid(root), signal.SIGUSR1)
        until(lambda: re.search(r'statistics: {.*"process_resident_memory_bytes": [1-9]', log_of(root)))


def test_sigterm_does_not_unmount_another_mount_on_top(tmp_path: Path) -> None:
    document = tmp_path / "set.json"
    document.write_text('{"version": 1, "refs": {"a": "x"}}')
    with mounted(document, tmp_path / "mnt") as root:
        daemon = daemon_pid(root)
        subprocess.run(["mount", "-t", "tmpfs", "other", root], check=True)
        try:
            (root / "precious").write_text("of somebody else")
            os.kill(daemon, signal.SIGTERM)
            until(lambda: "something else is mounted over it (other, tmpfs)" in log_of(root))
            assert (root / "precious").read_text() == "of somebody else"
        finally:
            subprocess.run(["umount", root], check=True)
        assert (root / "a").read_text() == "x"

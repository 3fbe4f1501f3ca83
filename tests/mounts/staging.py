"""Fixtures for tests of stage, unstage, run and stage-out: a node with its own records, and a check for leftovers."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import run
from tests.mounts.mounting import alive, mount_lines


class Node:
    """A simulated node: its own directory for records, and its own local directory for jobs."""

    def __init__(self, path: Path) -> None:
        self.path, self.state, self.local = path, path / "state", path / "local"
        self.local.mkdir()

    def records(self) -> list[dict[str, Any]]:
        """Return all records on disk."""
        found = []
        for file in self.state.glob("staged/*.json"):
            with contextlib.suppress(FileNotFoundError):  # removed since the listing
                found.append(json.loads(file.read_text()))
        return found

    def mounts(self) -> list[str]:
        """Return the mount points of zarrfs below the test's directory."""
        with open("/proc/self/mountinfo") as file:
            points = [line.split(" ")[4] for line in file if " - fuse.zarrfs " in line]
        return [point for point in points if point.startswith(f"{self.path}/")]

    def processes(self) -> list[str]:
        """Return the command lines of zarrfs processes that name the test's directory or the id of a record."""
        known = [str(self.path).encode(), *(record["id"].encode() for record in self.records())]
        found = []
        for pid in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError):
                line = Path(f"/proc/{pid}/cmdline").read_bytes()
                if b"zarrfs" in line and any(word in line for word in known) and alive(int(pid)):
                    found.append(line.replace(b"\0", b" ").decode())
        return found

    def clean(self) -> bool:
        """Return whether no mount, record, job directory or process is left."""
        return not (self.mounts() or self.records() or list(self.local.iterdir()) or self.processes())


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    """Yield a node for this test; unstage and unmount all that is left on it at the end."""
    made = Node(tmp_path)
    monkeypatch.setenv("ZARRFS_STATE_DIR", str(made.state))
    monkeypatch.setenv("TMPDIR", str(made.local))
    for variable in ("SLURM_TMPDIR", "FLUX_JOB_TMPDIR", "SLURM_JOB_ID", "FLUX_JOB_ID"):
        monkeypatch.delenv(variable, raising=False)
    try:
        yield made
    finally:
        run("unstage", "--all", "--lazy", "--remove-copies")
        for point in made.mounts():
            subprocess.run(["umount", "-l", point], check=False)


def eventually(condition: Callable[[], object], seconds: float = 60) -> bool:
    """Poll `condition`; return whether it becomes true."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def kill(pid: int) -> None:
    """Kill a process with SIGKILL, and wait until it has ended."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    assert eventually(lambda: not alive(pid))


def one_line(text: str) -> str:
    """Assert that `text` is one line, and return it without its line end."""
    assert text.count("\n") == 1, text
    return text.rstrip("\n")


def is_mounted(path: Path) -> bool:
    """Return whether `path` is a mount point."""
    return bool(mount_lines(path))

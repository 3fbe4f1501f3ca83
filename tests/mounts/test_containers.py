"""The statements of docs/mounting.md about mounts and namespaces, tested without a container runtime."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import DATA, run
from tests.machine import without_others
from tests.mounts.mounting import daemon_pid

SOURCE = DATA / "archives/flux-list.json"
pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="makes mount namespaces")


class Inside:
    """A shell in a mount namespace of its own, in which a directory is bind-mounted."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def run(self, command: str) -> str:
        """Run a command; return its output and errors."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{{ {command}; }} 2>&1; echo .\n")
        self._process.stdin.flush()
        said = ""
        while (line := self._process.stdout.readline()) not in (".\n", ""):
            said += line
        return said


@contextlib.contextmanager
def container(top: Path) -> Iterator[Inside]:
    """Bind top/above to top/inside in a new mount namespace, as a container runtime does; yield a shell in it."""
    script = f"mount --rbind {top}/above {top}/inside\n{without_others(top)}exec sh"
    command = ["unshare", "--mount", "--propagation=slave", "sh", "-c", script]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        inside = Inside(process)
        inside.run("true")
        yield inside
        process.kill()


@pytest.fixture
def top(tmp_path: Path) -> Iterator[Path]:
    """Yield a shared mount with the directories `above/mnt`, where the sample is mounted, and `inside`."""
    subprocess.run(["mount", "-t", "tmpfs", "none", str(tmp_path)], check=True)
    subprocess.run(["mount", "--make-shared", str(tmp_path)], check=True)
    for name in ("above/mnt", "inside"):
        (tmp_path / name).mkdir(parents=True)
    assert run("mount", SOURCE, tmp_path / "above/mnt").returncode == 0
    yield tmp_path
    subprocess.run(["umount", "-l", "-R", str(tmp_path)], check=False)


def test_a_bind_with_rslave_sees_mounts_come_and_go(top: Path) -> None:
    mountpoint = top / "above/mnt"
    with container(top) as inside:
        assert inside.run(f"ls {top}/inside/mnt") == "job\n"
        assert inside.run(f"exec 3<{top}/inside/mnt/job/bin/run.sh") == ""
        done = run("umount", mountpoint)
        assert (done.returncode, "in use by" in done.stderr) == (1, True)
        assert inside.run("exec 3<&-") == ""
        assert run("umount", mountpoint).returncode == 0
        assert inside.run(f"ls {top}/inside/mnt") == ""
        assert run("mount", SOURCE, mountpoint).returncode == 0
        assert inside.run(f"ls {top}/inside/mnt") == "job\n"


def test_a_killed_daemon_is_an_error_inside(top: Path) -> None:
    mountpoint = top / "above/mnt"
    with container(top) as inside:
        os.kill(daemon_pid(mountpoint), 9)
        assert "connect" in inside.run(f"ls {top}/inside/mnt")
        assert run("mount", SOURCE, mountpoint).returncode == 0  # unmounts the dead mount first
        assert inside.run(f"ls {top}/inside/mnt") == "job\n"

"""Messages of failures to unmount, and the names of processes in them."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import run
from zarrfs.errors import MountError
from zarrfs.jobs import processes
from zarrfs.system import mounts
from zarrfs.system.processes import shown

NAMED = "import sys; open('/proc/self/comm', 'wb').write(b'caf\\xe9'); print(flush=True); sys.stdin.read()"


@pytest.fixture
def user(tmp_path: Path) -> Iterator[int]:
    """Run a process in tmp_path with a name that is not UTF-8, as when the kernel's 15-byte limit cuts a character."""
    with subprocess.Popen(
        [sys.executable, "-c", NAMED], cwd=tmp_path, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process.pid
        process.kill()


def test_a_holder_whose_name_is_not_utf8_is_shown_escaped(user: int, tmp_path: Path) -> None:
    assert mounts.holders(str(tmp_path)) == [f"pid {user} (caf\\xe9)"]


def test_a_child_whose_name_is_not_utf8_is_found(user: int) -> None:
    child = processes.process(user)
    assert child is not None
    assert child in processes.children()
    assert shown(child.pid) == f"pid {user} (caf\\xe9)"


def test_a_refusal_for_a_mount_point_that_is_not_utf8(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "fusermount3"
    program.write_text('#!/bin/sh\nprintf "fusermount3: failed to unmount %s: Invalid argument\\n" "$3" >&2; exit 1\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(MountError, match=r"cannot unmount: invalid argument$"):
        mounts.unmount("/mnt/caf\udce9")


def test_a_system_error_is_the_reason_in_the_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unmount(*_: object) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), "/proc")

    monkeypatch.setattr(mounts, "unmount", unmount)
    with pytest.raises(MountError, match=f"^{tmp_path}: cannot unmount: too many open files$"):
        mounts.unmount_own(str(tmp_path), None)


@pytest.mark.parametrize("command", ["mount SOURCE", "umount", "stats", "refresh", "top --once"])
def test_an_empty_name_does_not_mean_the_working_directory(command: str, tmp_path: Path) -> None:
    (tmp_path / "set.json").write_text('{"version": 1, "refs": {"a": "x"}}')
    done = run(*command.replace("SOURCE", f"{tmp_path}/set.json").split(" "), "", cwd=tmp_path)
    assert done.returncode == 1
    assert "an empty name of a " in done.stderr
    assert os.listdir(tmp_path) == ["set.json"]

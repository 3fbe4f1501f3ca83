"""Mounts that end: before they are ready, while they are busy, and without free descriptors."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import DATA, PROGRAM, run
from tests.mounts.mounting import alive, daemon_pid, mount_lines, until
from zarrfs.system import mounts


@pytest.mark.parametrize("words", [["_main"], ["Refresher", "foreground"]], ids=str)
def test_a_daemon_that_fails_before_it_answers_leaves_nothing_mounted(words: list[str], tmp_path: Path) -> None:
    mnt = tmp_path / "mnt"
    mnt.mkdir()
    program = Path(__file__).with_name("broken_start.py")
    command = [sys.executable, program, words[0], DATA / "archives/flux-list.json", mnt, *words[1:]]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    try:
        assert done.returncode == 1
        assert "a fault of the test" in done.stderr
        assert not mount_lines(mnt)
    finally:
        if mount_lines(mnt):
            subprocess.run(["umount", "-l", str(mnt)], check=True)


@pytest.mark.parametrize(
    ("number", "command"),
    [
        ("SIGINT", ["zarrfs", "mount"]), ("SIGKILL", ["zarrfs", "mount"]),
        ("SIGKILL", ["zarrfs", "mount", "-o", "hold"]), ("SIGTERM", ["mount.zarrfs"]),
        ("SIGTERM", ["zarrfs", "mount", "-f"]),
    ],
)  # fmt: skip
def test_a_mount_command_ended_by_a_signal_before_the_mount_is_ready_leaves_no_mount(
    command: list[str], number: str, tmp_path: Path
) -> None:
    """The signal arrives after mount(2). If it is SIGKILL, the kernel signals the daemon when the command dies."""
    mnt, pids = tmp_path / "mnt", tmp_path / "pids"
    mnt.mkdir()
    program = Path(__file__).with_name("interrupted_mount.py")
    words = [sys.executable, str(program), number, str(pids), *command, str(DATA / "zarr/v2_hier"), str(mnt)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    expected = -signal.SIGKILL if number == "SIGKILL" else {"mount.zarrfs": 8, "-f": 0}.get(command[-1], 130)
    assert done.returncode == expected, done.stderr
    daemon = int(pids.read_text())
    if number == "SIGKILL":  # the killed command does not wait for its daemon
        until(lambda: not alive(daemon) and not mount_lines(mnt))
    assert not alive(daemon)
    assert not mount_lines(mnt)


def test_a_statfs_in_progress_does_not_keep_a_mount_busy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """df makes such calls. Here the daemon is stopped, so that the call outlasts the first attempt to unmount."""
    mnt, refusals, refusal = tmp_path / "mnt", [], mounts._refusal
    mnt.mkdir()
    assert run("mount", DATA / "zarr/v2_hier", mnt).returncode == 0
    daemon = daemon_pid(mnt)

    def try_once(mountpoint: str, lazy: bool) -> tuple[str, bool] | None:
        refusals.append(refusal(mountpoint, lazy))
        os.kill(daemon, signal.SIGCONT)
        return refusals[-1]

    monkeypatch.setattr(mounts, "_refusal", try_once)
    monkeypatch.setattr(mounts, "_BUSY", 60.0)
    os.kill(daemon, signal.SIGSTOP)
    with subprocess.Popen([sys.executable, "-c", "import os, sys; os.statvfs(sys.argv[1])", str(mnt)]) as client:
        try:
            until(lambda: Path(f"/proc/{client.pid}/wchan").read_text() == "request_wait_answer")
            mounts.unmount(str(mnt))
            assert client.wait(60) == 0
        finally:
            os.kill(daemon, signal.SIGCONT)
            while mount_lines(mnt):
                subprocess.run(["umount", "-l", str(mnt)], check=True)
    assert refusals[0] == ("device or resource busy", True)
    assert refusals[-1] is None


def test_a_mount_made_by_others_meanwhile_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While zarrfs waits for a busy mount, another process unmounts it and mounts something else there."""
    mnt, tries = tmp_path / "mnt", []
    mnt.mkdir()

    def busy(mountpoint: str, lazy: bool) -> tuple[str, bool]:
        tries.append(mountpoint)
        assert run("umount", mnt).returncode == 0
        assert run("mount", DATA / "zarr/v3_hier", mnt).returncode == 0
        return "device or resource busy", True

    try:
        assert run("mount", DATA / "zarr/v2_hier", mnt).returncode == 0
        monkeypatch.setattr(mounts, "_refusal", busy)
        mounts.unmount(str(mnt))
        assert tries == [str(mnt)]
        assert (mnt / "zarr.json").exists()
    finally:
        while mount_lines(mnt):
            subprocess.run(["umount", "-l", str(mnt)], check=True)


def test_a_daemon_without_free_descriptors_survives_sigterm(tmp_path: Path) -> None:
    """To unmount, the daemon has to open the mount table and to look for users of the mount, and can do neither."""
    (tmp_path / "store/a").mkdir(parents=True)
    for number in range(100):
        (tmp_path / f"store/a/{number}").write_text(str(number))
    (tmp_path / "mnt").mkdir()
    log = tmp_path / "log"
    command = ["sh", "-c", f'ulimit -n 70; exec "$@" -o log_file={log}', "sh", PROGRAM, "mount", "-o", "type=zarr"]
    subprocess.run([*command, tmp_path / "store", tmp_path / "mnt"], check=True)
    with contextlib.ExitStack() as opened:

        def open_all() -> None:
            for number in range(100):
                opened.enter_context(open(tmp_path / f"mnt/a/{number}"))

        with pytest.raises(OSError, match="Too many open files"):
            open_all()
        pid = daemon_pid(tmp_path / "mnt")
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (8, 70))  # an open needs two descriptors: one may be free
        os.kill(pid, signal.SIGTERM)
        until(lambda: log.exists() and "cannot unmount: " in log.read_text())
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (70, 70))
    assert (tmp_path / "mnt/a/7").read_text() == "7"
    assert run("umount", tmp_path / "mnt").returncode == 0

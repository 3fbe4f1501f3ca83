"""A reader with an open Zarr array, and all the ways its mount can end: it must never silently get fill values."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.conftest import DATA, PROGRAM, run
from tests.mounts.mounting import alive, daemon_pid, mount_lines, until
from zarrfs.system import mounts

# A program that reads an array's document, prints "open", waits for a line, and reads a chunk, as a Zarr reader does
READER = """
import os, sys
os.stat(sys.argv[1] + "/.zarray")
print("open", flush=True)
sys.stdin.readline()
try:
    print("data" if open(sys.argv[1] + "/0.0.0", "rb").read() else "fill")
except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
    print("fill")
except OSError:
    print("error")
"""


def umount(mnt: Path) -> None:
    run("umount", mnt)


def terminate(mnt: Path) -> None:
    pid, log = daemon_pid(mnt), mnt.with_suffix(".log")
    os.kill(pid, signal.SIGTERM)
    stays = "cannot unmount: in use by"
    until(lambda: not alive(pid) or (log.exists() and stays in log.read_text()))


def kill(mnt: Path) -> None:
    pid = daemon_pid(mnt)
    os.kill(pid, signal.SIGKILL)
    until(lambda: not alive(pid))


# root without the capabilities to bypass permissions: like an ordinary user, but still the owner of the mount
PLAIN_USER = ["setpriv", "--bounding-set=-dac_override,-dac_read_search"]


def see(mnt: Path, end: Callable[[Path], None], busy: bool, *options: str, prefix: Sequence[str] = ()) -> str:
    """Return what a reader with an open array gets after `end`; with `busy`, its working directory is the mount."""
    mnt.mkdir(mode=0o755)
    log = mnt.with_suffix(".log")
    assert run("mount", DATA / "zarr/v2_hier", mnt, "-o", f"log_file={log}", *options).returncode == 0
    reader = subprocess.Popen(
        [*prefix, sys.executable, "-I", "-S", "-c", READER, mnt / "gzip"], stdin=subprocess.PIPE,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=mnt if busy else "/",
    )  # fmt: skip
    try:
        assert reader.stdout is not None
        assert reader.stdout.readline() == "open\n", reader.communicate()[1]
        end(mnt)
        return reader.communicate("\n", timeout=60)[0].split()[0]
    finally:
        reader.kill()
        reader.wait()
        while mount_lines(mnt):
            subprocess.run(["umount", "-l", str(mnt)], check=True)


@pytest.mark.parametrize("end", [umount, terminate])
def test_a_mount_held_busy_stays(end: Callable[[Path], None], tmp_path: Path) -> None:
    assert see(tmp_path / "mnt", end, True) == "data"


def test_a_killed_daemon_is_an_error(tmp_path: Path) -> None:
    assert see(tmp_path / "mnt", kill, False) == "error"


@pytest.mark.skipif(os.geteuid() != 0, reason="setpriv needs root")
@pytest.mark.parametrize("end", [umount, terminate])
def test_a_guarded_mount_point_gives_readers_an_error(end: Callable[[Path], None], tmp_path: Path) -> None:
    """The mount is not busy, and is unmounted. The directory beneath is then EACCES instead of empty."""
    assert see(tmp_path / "mnt", end, False, "-o", "guard", prefix=PLAIN_USER) == "error"
    assert (tmp_path / "mnt").stat().st_mode & 0o777 == 0


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

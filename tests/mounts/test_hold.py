"""Mounts with hold and owner=: what ends them, and what a reader in a loop sees meanwhile."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import PROGRAM, run
from tests.mounts.mounting import alive, daemon_pid, mount_lines, until
from tests.mounts.test_restarts import VALUE, kill_daemon, reading
from tests.mounts.test_restarts import source as source

ROOT = os.geteuid() == 0


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    """Yield a mount point; unmount what is left there at the end."""
    path = tmp_path / "mnt"
    path.mkdir()
    yield path
    while mount_lines(path):
        subprocess.run(["umount", "-l", path], check=True)
    path.chmod(0o755)


def mount(source: Path, root: Path, *options: str) -> int:
    """Mount; return the pid of the daemon."""
    done = run("mount", source, root, "-o", ",".join(options))
    assert done.returncode == 0, done.stderr
    return daemon_pid(root)


def sleeper() -> subprocess.Popen[bytes]:
    return subprocess.Popen(["sleep", "100"])


def gone(root: Path, daemon: int) -> bool:
    return not mount_lines(root) and not alive(daemon)


def plain_umount(root: Path) -> bool:
    """Try a plain unmount, with umount(8) or fusermount3; return whether it has succeeded."""
    words = ["umount", str(root)] if ROOT else ["fusermount3", "-u", str(root)]
    return subprocess.run(words, capture_output=True, check=False).returncode == 0


def test_a_held_mount_stays_over_signals_and_plain_unmounts(source: Path, root: Path) -> None:
    daemon = mount(source, root, "hold")
    with reading(root) as reader:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGTERM):
            os.kill(daemon, number)
            assert not plain_umount(root)
            time.sleep(0.2)
        assert reader.end() == {"right"}
    done = run("umount", root)
    assert done.returncode == 0, done.stderr
    assert gone(root, daemon)
    assert root.stat().st_mode & 0o777 == 0


def test_a_mount_ends_with_the_last_of_its_owners(source: Path, root: Path) -> None:
    owners = [sleeper(), sleeper()]
    daemon = mount(source, root, *(f"owner={owner.pid}" for owner in owners))
    owners[0].kill()
    owners[0].wait()
    time.sleep(1)
    assert (root / "a/0.0").read_bytes() == VALUE
    owners[1].kill()
    owners[1].wait()
    until(lambda: gone(root, daemon))


def test_a_reader_by_path_sees_an_error_when_the_owner_has_ended(source: Path, root: Path) -> None:
    owner = sleeper()
    daemon = mount(source, root, f"hold,owner={owner.pid}")
    with reading(root, 0.005) as reader:  # without pauses it would keep the mount busy
        os.kill(daemon, signal.SIGTERM)  # as a scheduler does first
        time.sleep(0.5)
        owner.kill()
        owner.wait()
        until(lambda: gone(root, daemon))
        reader.sees("EACCES")
        found = reader.end()
    assert found == {"right", "EACCES"}, found


def test_a_mount_in_use_stays_after_its_owner_has_ended(source: Path, root: Path) -> None:
    owner = sleeper()
    daemon = mount(source, root, f"hold,owner={owner.pid}")
    with open(root / "a/0.0", "rb") as file:
        owner.kill()
        owner.wait()
        time.sleep(1.5)
        assert (root / "a/0.0").read_bytes() == file.read() == VALUE
    until(lambda: gone(root, daemon))


def test_a_held_mount_whose_daemon_is_killed_gives_errors(source: Path, root: Path) -> None:
    mount(source, root, "hold")
    with reading(root) as reader:
        kill_daemon(root)
        reader.sees("ENOTCONN")
        assert run("umount", "--below", root.parent, "--dead").returncode == 0
        reader.sees("EACCES")
        found = reader.end()
    assert found <= {"right", "ENOTCONN", "ECONNABORTED", "EACCES"}, found
    assert not mount_lines(root)


def test_a_second_mount_does_not_disturb_the_readers_of_a_held_one(source: Path, root: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.json"
    other.write_text('{"version": 1, "refs": {"a/0.0": "other"}}')
    (tmp_path / "beside").mkdir()
    mount(source, root, "hold")
    with reading(root) as reader:
        for _ in range(2):
            assert run("mount", other, root, "-o", "hold").returncode == 1
            mount(other, tmp_path / "beside", "hold")
            assert run("umount", tmp_path / "beside").returncode == 0
        assert reader.end() == {"right"}
    assert run("umount", root).returncode == 0


def test_a_lazy_unmount_ends_the_daemon(source: Path, root: Path) -> None:
    daemon = mount(source, root, "hold")
    subprocess.run(["umount", "-l", root], check=True)
    until(lambda: gone(root, daemon))


def test_in_the_foreground_too(source: Path, root: Path) -> None:
    with subprocess.Popen([PROGRAM, "mount", "-f", "-o", "hold", source, root], stderr=subprocess.PIPE) as daemon:
        assert daemon.stderr is not None
        assert b"zarrfs umount" in daemon.stderr.readline()
        daemon.terminate()
        time.sleep(0.5)
        assert (root / "a/0.0").read_bytes() == VALUE
        assert run("umount", root).returncode == 0
        assert daemon.wait(60) == 0


@pytest.mark.skipif(not ROOT, reason="only root mounts into mounts of others")
def test_umount_below_unmounts_innermost_first(source: Path, root: Path) -> None:
    daemons = [mount(source, root, "hold"), mount(source, root / "a", "ro")]
    assert run("umount", "--below", root, "--dead").returncode == 0
    assert [len(mount_lines(path)) for path in (root, root / "a")] == [1, 1]
    os.symlink(root.parent, root.parent / "link")
    assert run("umount", "--below", root.parent / "link/mnt").returncode == 0
    assert not mount_lines(root)
    assert not any(map(alive, daemons))
    mount(source, root, "hold")
    kill_daemon(root)
    mount(source, root, "hold")  # over the dead mount
    assert run("umount", "--below", root).returncode == 0
    assert not mount_lines(root)
    assert run("umount", "--below", root).returncode == 0  # nothing to do
    assert run("umount", "--below", "/nowhere").returncode == 0


def test_umount_below_names_who_uses_a_mount_and_unmounts_the_others(source: Path, root: Path, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    mount(source, tmp_path / "other", "hold")
    daemon = mount(source, root, "hold")
    with subprocess.Popen(["sleep", "100"], cwd=root) as user:
        done = run("umount", "--below", tmp_path)
        assert done.returncode == 1
        assert done.stderr.count("\n") == 1
        assert f"{root}: " in done.stderr
        assert f"pid {user.pid} (sleep)" in done.stderr
        assert not mount_lines(tmp_path / "other")
        assert (root / "a/0.0").read_bytes() == VALUE
        user.kill()
    until(lambda: gone(root, daemon))  # its hold has ended


BAD = [
    (["mount", "{source}", "{root}", "-o", "owner={gone}"], 1, "no such process"),
    (["mount", "{source}", "{root}", "-o", "owner=self"], 2, "owner=self"),
    (["mount", "{source}", "{root}", "-o", "owner="], 2, "owner="),
    (["umount", "{root}"], 1, "not mounted"),
    (["umount", "/proc"], 1, "proc"),
    (["umount", ""], 1, "an empty name"),
    (["umount"], 2, "--below"),
    (["umount", "--dead"], 2, "--below"),
    (["umount", "{root}", "--below", "{root}"], 2, "--below"),
    (["umount", "--below", ""], 1, "an empty name"),
]


def test_bad_input_is_one_line(source: Path, root: Path) -> None:
    ended = sleeper()
    ended.kill()
    ended.wait()
    for words, status, said in BAD:
        done = run(*(word.format(source=source, root=root, gone=ended.pid) for word in words))
        assert done.returncode == status, words
        assert done.stderr.count("\n") == 1
        assert said in done.stderr
    assert not mount_lines(root)
    assert "proc" in Path("/proc/self/mounts").read_text()


def test_owner_alone_is_an_option_of_fstab(source: Path, root: Path) -> None:
    mount(source, root, "owner", "noauto")
    assert run("umount", root).returncode == 0


def test_python_unmounts_a_held_mount(source: Path, tmp_path: Path) -> None:
    use = "print(root, (root / 'a/0.0').read_text())"
    code = f"import sys, zarrfs\nwith zarrfs.mounted(sys.argv[1], hold=True) as root: {use}"
    done = subprocess.run([sys.executable, "-c", code, source], capture_output=True, text=True, check=True)
    place, text = done.stdout.split(maxsplit=1)
    assert text.strip() == VALUE.decode()
    assert not mount_lines(place)
    assert not Path(place).exists()

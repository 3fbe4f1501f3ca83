"""Failures of zarrfs archive create (kills, full disks, files that change)."""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import shutil
import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest
import trio

from tests.conftest import PROGRAM, run
from zarrfs.archives.local_tree import LocalTree
from zarrfs.errors import SourceError

KILLS = 2  # 100 have been run as well


def check_blobs(blobs: Path) -> None:
    """Check that a directory has nothing but complete blobs."""
    for name in os.listdir(blobs):
        assert name == f"sha1-{hashlib.sha1((blobs / name).read_bytes()).hexdigest()}"


def write_tree(base: Path) -> None:
    """Write a tree with small, medium and large files."""
    numbers = random.Random(1)
    for number in range(100):
        path = base / f"d{number % 7}" / str(number)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(numbers.randbytes(numbers.choice([10, 5000, 200_000])))
    (base / "large").write_bytes(numbers.randbytes(3 << 20))


def test_a_killed_command_can_be_repeated(tmp_path: Path) -> None:
    """Kill the command at random points, then let it finish, and compare its output with that of a whole run."""
    place = tmp_path
    write_tree(place / "tree")
    command = [PROGRAM, "archive", "create", "-C", str(place / "tree"), ".", "--region-size", "100KiB"]
    began = time.monotonic()
    subprocess.run([*command, "--blobs", place / "whole", "-O", place / "whole.json"], check=True)
    took = time.monotonic() - began
    for _ in range(KILLS):
        child = subprocess.Popen([*command, "--blobs", place / "b", "-O", place / "new.json"], stdout=subprocess.PIPE)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(random.uniform(0.1, took))
        child.kill()
        child.communicate(timeout=60)
        if (place / "new.json").exists():
            assert (place / "new.json").read_bytes() == (place / "whole.json").read_bytes()
            (place / "new.json").unlink()
        for name in os.listdir(place / "b") if (place / "b").exists() else ():
            if not name.startswith(".zarrfs-staging"):
                assert (place / "whole" / name).read_bytes() == (place / "b" / name).read_bytes()
                if random.random() < 0.3:
                    (place / "b" / name).unlink()
    subprocess.run([*command, "--blobs", place / "b", "-O", place / "new.json"], check=True)
    assert (place / "new.json").read_bytes() == (place / "whole.json").read_bytes()
    assert sorted(os.listdir(place / "b")) == sorted(os.listdir(place / "whole"))
    check_blobs(place / "b")


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system")
def test_no_room_for_blobs_or_the_document(tmp_path: Path) -> None:
    write_tree(tmp_path / "tree")
    disk, create = tmp_path / "disk", ["archive", "create", "-C", tmp_path / "tree", "."]
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "none", disk], check=True)
    try:
        done = run(*create, "--inline", "-O", disk / "new.json")
        assert (done.returncode, done.stderr.count("\n")) == (1, 1)
        assert done.stderr.startswith(f"zarrfs: {disk}/new.json: cannot be written: ")
        assert os.listdir(disk) == []
        done = run(*create, "--region-size", "100KiB", "--blobs", disk, "-O", tmp_path / "new.json")
        assert (done.returncode, done.stderr.count("\n")) == (1, 1)
        assert done.stderr.startswith(f"zarrfs: {disk}/sha1-")
        assert sorted(os.listdir(tmp_path)) == ["disk", "tree"]
        check_blobs(disk)
    finally:
        subprocess.run(["umount", disk], check=True)


def test_an_interrupt_leaves_only_complete_blobs(tmp_path: Path) -> None:
    (tmp_path / "large").write_bytes(random.Random(2).randbytes(64 << 20))
    blobs = tmp_path / "b"
    command = [PROGRAM, "archive", "create", "-C", tmp_path, "large", "--blobs", blobs, "-O", tmp_path / "new.json"]
    child = subprocess.Popen([*command, "--region-size", "256"], stderr=subprocess.PIPE, start_new_session=True)
    while not (blobs.exists() and len(os.listdir(blobs)) > 10):
        assert child.poll() is None
        time.sleep(0.005)
    os.killpg(child.pid, signal.SIGINT)
    _out, told = child.communicate(timeout=60)
    assert (child.returncode, told) == (-signal.SIGINT, b"")
    assert sorted(os.listdir(tmp_path)) == ["b", "large"]
    check_blobs(blobs)


def test_a_file_that_changes_while_it_is_read_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(range(256)) * (32 << 12))
    ended = threading.Event()

    def write() -> None:
        with open(path, "r+b") as file:
            while not ended.is_set():
                os.pwrite(file.fileno(), os.urandom(1), 5)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(20):
            done = run("archive", "create", "file", "--blobs", "b", "-O", "new.json", cwd=tmp_path)
            if done.returncode:
                break
            (tmp_path / "new.json").unlink()  # the writer thread did not run meanwhile
            shutil.rmtree(tmp_path / "b", ignore_errors=True)
    finally:
        ended.set()
        writer.join()
    assert done.returncode == 1
    assert done.stderr == "zarrfs: file: changed while it was read: try again when nothing writes to it\n"
    assert sorted(os.listdir(tmp_path)) in (["b", "file"], ["file"])


def test_a_directory_that_turns_into_a_link_meanwhile(tmp_path: Path) -> None:
    (tmp_path / "base/a").mkdir(parents=True)
    (tmp_path / "base/z").mkdir()
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside/private").touch()
    seen = []

    async def archive() -> None:
        with LocalTree(str(tmp_path / "base"), print) as tree:
            async for entry in tree.entries(["."]):
                seen.append(entry.key)
                if entry.key == "a":
                    (tmp_path / "base/z").rmdir()
                    (tmp_path / "base/z").symlink_to(tmp_path / "outside")

    with pytest.raises(SourceError, match="z: "):
        trio.run(archive)
    assert seen == ["a", "z"]

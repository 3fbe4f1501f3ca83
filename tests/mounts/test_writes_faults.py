"""Writable mounts with upper directories on full, read-only and vanished disks, and with killed daemons."""

from __future__ import annotations

import concurrent.futures
import contextlib
import errno
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import run
from tests.faultproxy import proxy
from tests.mounts.mounting import alive, daemon_pid, mount_lines, mounted, until
from tests.mounts.test_semantics import DEAD, document, error_of
from tests.mounts.treemodel import differences, snapshot
from tests.servers import Faulty, Nginx, faulty, nginx

__all__ = ["faulty", "nginx", "proxy"]

LARGE = 4 << 20
KILLS = 2
STEPS = 25


def sample(directory: Path, size: int = LARGE) -> Path:
    """Write a reference set with a large file and small ones."""
    target = directory / "target.bin"
    target.write_bytes(os.urandom(size))
    return document(directory, {"d/large": [str(target), 0, size], "d/small": "text", "d/sub/x": "x", "e/y": "y"})


def upper(directory: Path) -> str:
    (directory / "upper").mkdir(exist_ok=True)
    return f"upperdir={directory}/upper"


def names_in(directory: Path) -> list[str]:
    """Return the names in an upper directory, without those of zarrfs itself."""
    found = (str(path.relative_to(directory)) for path in directory.rglob("*"))
    return sorted(name for name in found if not name.startswith(".zarrfs-"))


def start(source: Path, mountpoint: Path, *options: str) -> int:
    """Mount without unmounting at the end; return the daemon's process id."""
    mountpoint.mkdir(exist_ok=True)
    done = run("mount", source, mountpoint, "-o", ",".join((*options, f"log_file={mountpoint}.log")))
    assert done.returncode == 0, done.stderr
    return daemon_pid(mountpoint)


def kill(pid: int, mountpoint: Path) -> None:
    """Kill the daemon, as a crash would, and unmount; waiting requests fail."""
    os.kill(pid, signal.SIGKILL)
    until(lambda: not alive(pid))
    while mount_lines(mountpoint):
        subprocess.run(["umount", "-l", str(mountpoint)], check=True)


# -- disks


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a file system of 2 MiB and 60 inodes, with a directory `upper`."""
    path = tmp_path / "disk"
    path.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m,nr_inodes=60", "none", str(path)], check=True)
    (path / "upper").mkdir()
    yield path
    subprocess.run(["umount", "-l", str(path)], check=True)


def fill(path: Path) -> bytes:
    """Write to a file until ENOSPC; return the bytes that were fsynced before."""
    synced = b""
    with contextlib.suppress(OSError), open(path, "ab", buffering=0) as file:  # close() may fail for the last piece
        for number in range(1000):
            piece = bytes([number % 251]) * 10_000
            try:
                file.write(piece)
                os.fsync(file.fileno())
            except OSError as exc:
                if exc.errno != errno.ENOSPC:
                    raise
                return synced
            synced += piece
    raise AssertionError("the disk is never full")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a file system")
def test_a_disk_that_is_read_only_full_or_without_inodes(small_disk: Path, tmp_path: Path) -> None:
    """A change fails with its errno and changes nothing; reads succeed, and no synced byte is lost."""
    source, options = sample(tmp_path), upper(small_disk)
    large = (tmp_path / "target.bin").read_bytes()
    with mounted(source, tmp_path / "mnt", options) as root:
        (root / "d/own").write_bytes(b"own")

        def all_fail(code: int, *more: tuple[object, ...]) -> None:
            before = snapshot(root)
            for call, *arguments in (
                (os.mkdir, root / "new"), (os.symlink, "a", root / "new"), (os.mkfifo, root / "new"),
                (os.unlink, root / "d/small"), (os.truncate, root / "d/small", 1), (os.chmod, root / "d/small", 0o600),
                (os.rename, root / "d/small", root / "new"), (os.link, root / "d/small", root / "new"),
                (os.rename, root / "d/own", root / "d/sub/x"), (os.utime, root / "e", (1, 1)),
                ((root / "new").write_bytes, b"x"), *more,
            ):  # fmt: skip
                assert error_of(call, *arguments) == code, (call, arguments)
                assert differences(snapshot(root), before) == [], (call, arguments)

        command = ["mount", "-o", "remount,ro", str(small_disk)]
        until(lambda: subprocess.run(command, capture_output=True, check=False).returncode == 0)
        try:
            all_fail(errno.EROFS, ((root / "d/own").write_bytes, b"x"), (os.unlink, root / "d/own"))
        finally:
            subprocess.run(["mount", "-o", "remount,rw", str(small_disk)], check=True)

        written = fill(root / "d/filler")
        assert len(written) > 1_000_000
        assert (root / "d/filler").read_bytes().startswith(written)
        assert (small_disk / "upper/d/filler").read_bytes().startswith(written)
        assert error_of(os.truncate, root / "d/large", LARGE - 1) == errno.ENOSPC
        assert error_of(os.open, root / "d/large", os.O_RDWR) == errno.ENOSPC
        assert (root / "d/large").read_bytes() == large  # still the source's file
        assert names_in(small_disk / "upper") == ["d", "d/filler", "d/own"]
        (root / "d/filler").unlink()

        made = [f"file{n}" for n in range(70) if error_of((root / f"file{n}").write_bytes, b"") is None]
        assert 40 < len(made) < 60
        all_fail(errno.ENOSPC)
        for name in made[:10]:
            (root / name).unlink()
        (root / "d/small").write_text("more")
        (root / "d/own").rename(root / "d/sub/x")
    with mounted(source, tmp_path / "mnt", options) as root:
        assert sorted(os.listdir(root / "d")) == ["large", "small", "sub"]
        assert ((root / "d/small").read_text(), (root / "d/sub/x").read_bytes()) == ("more", b"own")
        assert (root / "d/large").read_bytes() == large


def test_after_the_upper_directory_vanishes_the_source_is_readable(tmp_path: Path) -> None:
    """Writes fail, and the daemon neither hangs nor dies."""
    with mounted(sample(tmp_path), tmp_path / "mnt", upper(tmp_path)) as root:
        (root / "d/own").write_bytes(b"own")
        (root / "d/sub/x").write_bytes(b"own")
        shutil.rmtree(tmp_path / "upper")
        hung = threading.Timer(60, os.kill, (daemon_pid(root), signal.SIGKILL))
        hung.start()
        found = error_of(os.rename, root / "d/sub/x", root / "d/sub/y")
        hung.cancel()
        assert found in (errno.EIO, errno.ENOENT, errno.ESTALE)
        assert error_of((root / "d/new").write_bytes, b"x") in (errno.EIO, errno.ENOENT, errno.ESTALE)
        assert error_of((root / "d/small").write_bytes, b"x") in (errno.EIO, errno.ENOENT, errno.ESTALE)
        assert error_of(os.mkdir, root / "new") in (errno.EIO, errno.ENOENT, errno.ESTALE)
        assert (root / "e/y").read_text() == "y"
        assert (root / "d/large").read_bytes() == (tmp_path / "target.bin").read_bytes()


# -- kill -9


@pytest.mark.timeout(300)
def test_fsynced_writes_survive_a_killed_daemon(tmp_path: Path) -> None:
    """A writer appends records and replaces a file by rename; nothing that was confirmed before the kill is lost."""
    source, options = sample(tmp_path), upper(tmp_path)
    chance, synced, renamed = random.Random(2), 0, 0
    for _ in range(KILLS):
        pid = start(source, tmp_path / "mnt", options)
        root = tmp_path / "mnt"
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            progress = {"renamed": renamed}
            writing = pool.submit(write_until_it_fails, root, synced, progress)
            least = renamed + 2  # the sleep below can be too short for a rename
            until(lambda: writing.done() or progress["renamed"] >= least)  # noqa: B023
            time.sleep(chance.uniform(0, 0.2))
            kill(pid, root)
            synced, renamed = writing.result(), progress["renamed"]
        with mounted(source, root, options):
            data = (root / "log").read_bytes()
            records = data[: len(data) // 8 * 8]
            numbers = [int(records[at : at + 8]) for at in range(0, len(records), 8)]
            assert numbers == list(range(len(numbers)))
            assert len(numbers) >= synced
            os.truncate(root / "log", len(records))
            synced = len(numbers)
            if renamed:
                whole = (root / "d/small").read_bytes()
                assert len({whole[at : at + 8] for at in range(0, len(whole), 8)}) == 1
                assert len(whole) == 80_000
                assert int(whole[:8]) >= renamed
                renamed = int(whole[:8])
            leftovers = [name for name in os.listdir(root) if name.startswith("temporary")]
            assert len(leftovers) <= 1
    assert synced > KILLS
    assert renamed > KILLS


def write_until_it_fails(root: Path, synced: int, progress: dict[str, int]) -> int:
    """Return how many records were fsynced; `progress` has the number of the last file that was renamed."""
    try:
        with open(root / "log", "ab", buffering=0) as log:
            while True:
                log.write(b"%08d" % synced)
                os.fsync(log.fileno())
                synced += 1
                (root / "temporary").write_bytes(b"%08d" % (progress["renamed"] + 1) * 10_000)
                os.rename(root / "temporary", root / "d/small")
                progress["renamed"] += 1
    except OSError as exc:
        # EIO: the kernel cannot write back dirty pages any more; ENOENT: the bare directory, after the unmount
        if exc.errno not in (*DEAD, errno.EIO, errno.ENOENT):
            raise
    return synced


@pytest.mark.parametrize(("call", "number"), [("chmod", 0), ("utime", 1)])
def test_a_copied_up_directory_is_complete_or_absent_after_a_kill(call: str, number: int, tmp_path: Path) -> None:
    lower, root, options = tmp_path / "lower", tmp_path / "mnt", f"{upper(tmp_path)},attr_timeout=0"
    (lower / "d/sub").mkdir(parents=True)
    (lower / "d/link").symlink_to("away")
    os.utime(lower / "d/link", ns=(2 * 10**18, 10**18), follow_symlinks=False)
    for directory in ("d/sub", "d"):
        (lower / directory).chmod(0o715)
        os.utime(lower / directory, ns=(2 * 10**18, 10**18))
    names = ("d", "d/sub", "d/link")

    def facts(base: Path) -> list[tuple[int, int]]:
        return [((base / name).lstat().st_mode, (base / name).lstat().st_mtime_ns) for name in names]

    root.mkdir()
    daemon = Path(__file__).with_name("killed_daemon.py")
    subprocess.run([sys.executable, daemon, call, str(number), lower, root, options], check=True, timeout=60)
    pid = daemon_pid(root)
    assert error_of((root / "d/sub").chmod, 0o715) in DEAD
    kill(pid, root)
    with mounted(lower, root, options):
        assert facts(root)[number:] == facts(lower)[number:]  # the killed copy changed the time of its parent
        (root / "d/sub").chmod(0o715)
        os.chown(root / "d/link", os.getuid(), os.getgid(), follow_symlinks=False)
        assert facts(root)[number:] == facts(lower)[number:]
        shutil.rmtree(root / "d")
        assert os.listdir(root) == []


# -- concurrent writers


def test_a_file_that_takes_the_name_during_a_copy_up_is_kept(nginx: Nginx, tmp_path: Path) -> None:
    """A reader of the old file reads the old bytes, or gets an error."""
    data = os.urandom(48 << 20)
    (nginx.late.root / "copied.bin").write_bytes(data)
    source = document(tmp_path, {"big": [f"{nginx.late.url}/copied.bin", 0, len(data)], "small": "text"})
    options = f"{upper(tmp_path)},memory_limit=64MiB,prefetch=0B"
    with mounted(source, tmp_path / "mnt", options) as root:
        reader = os.open(root / "big", os.O_RDONLY)
        outcomes: list[int | None] = []
        writer = threading.Thread(target=lambda: outcomes.append(error_of(lambda: (root / "big").open("r+b").close())))
        writer.start()

        def copying() -> bool:
            """Return whether the daemon has a file without a name open in the upper directory."""
            for path in Path(f"/proc/{daemon_pid(root)}/fd").iterdir():
                with contextlib.suppress(OSError):
                    if (target := os.readlink(path)).startswith(f"{tmp_path}/upper/") and target.endswith("(deleted)"):
                        return True
            return False

        until(lambda: copying() or bool(outcomes))  # a slow test may miss the copy
        (root / "tmp").write_bytes(b"another")
        (root / "tmp").rename(root / "big")
        writer.join()
        assert outcomes in ([None], [errno.ESTALE], [errno.ENOENT])
        assert os.stat(root / "big").st_size == 7
        assert (root / "big").read_bytes() == b"another"
        with open(root / "big", "ab") as file:
            file.write(b" one")
        assert (root / "big").read_bytes() == b"another one"
        for at in (0, 20 << 20, len(data) - 4096):
            with contextlib.suppress(OSError):
                assert os.pread(reader, 4096, at) == data[at : at + 4096]
        os.close(reader)
    with mounted(source, tmp_path / "mnt", options) as root:
        assert (root / "big").read_bytes() == b"another one"


def work(root: Path, number: int, size: int) -> dict[str, bytes]:
    """Do random operations on names of this worker in directories that all share; return the files it must leave."""
    chance, own = random.Random(number), {}
    for step in range(STEPS):
        directory = chance.choice(["d", "d/sub", "e", "shared"])
        name, data = f"{directory}/w{number}-{step}", b"%d" % step * chance.randrange(500)
        with contextlib.suppress(FileExistsError):
            (root / "shared").mkdir()
        (root / name).write_bytes(data)
        own[name] = data
        victim = chance.choice(sorted(own))
        what = chance.randrange(4)
        if what == 0:
            (root / victim).unlink()
            del own[victim]
        elif what == 1:
            moved = f"{chance.choice(['d', 'e', 'shared'])}/w{number}-{step}-moved"
            os.rename(root / victim, root / moved)
            own[moved] = own.pop(victim)
        elif what == 2:
            with open(root / victim, "ab") as file:
                file.write(b"more")
            own[victim] += b"more"
        with open(root / "log", "ab", buffering=0) as file:
            file.write(b"%d %d\n" % (number, step))
        with open(root / "d/large", "r+b") as file:  # all workers change this file, each in its own ranges
            file.seek((step * 8 + number) * size)
            file.write(bytes([number + 1]) * size)
        assert (root / victim).exists() == (victim in own)
        os.listdir(root / directory)
    return own


def test_concurrent_writers_lose_no_change(tmp_path: Path) -> None:
    source, options, size = sample(tmp_path), upper(tmp_path), 1000
    expected = bytearray((tmp_path / "target.bin").read_bytes())
    for at in range(STEPS * 8):
        expected[at * size : (at + 1) * size] = bytes([at % 8 + 1]) * size
    with mounted(source, tmp_path / "mnt", options) as root, concurrent.futures.ThreadPoolExecutor(8) as pool:
        left = {}
        for own in pool.map(lambda number: work(root, number, size), range(8)):
            left.update(own)
        for _ in range(2):
            found = {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*/w*")}
            assert found == left
            assert (root / "d/large").read_bytes() == expected
        lines = sorted(f"{number} {step}" for number in range(8) for step in range(STEPS))
        assert sorted((root / "log").read_text().splitlines()) == lines
    with mounted(source, tmp_path / "mnt", options) as root:
        assert {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*/w*")} == left
        assert (root / "d/large").read_bytes() == expected


@pytest.mark.parametrize("call", ["unlink", "rename", "rmdir"])
def test_a_server_that_does_not_answer_holds_up_only_the_change_that_needs_it(
    call: str, faulty: Faulty, tmp_path: Path
) -> None:
    faulty.put("/s/.zgroup", b'{"zarr_format": 2}')
    faulty.put("/s/a/.zarray", b'{"zarr_format": 2, "shape": [2], "chunks": [1], "dtype": "|u1", "fill_value": 0, '
               b'"order": "C", "compressor": null, "filters": null}')  # fmt: skip
    chunks = {"/s/a/0": b"\1", "/s/a/1": b"\2"}
    for path, value in chunks.items():
        faulty.put(path, value)
    options = "members=a", "metadata_ttl=0", "attr_timeout=600", upper(tmp_path)
    with mounted(f"{faulty.url}/s", tmp_path / "mnt", *options) as at:
        for name in "de":
            (at / name).mkdir()
        for name in "01":
            os.stat(at / "a" / name)  # the kernel has looked it up
        os.rename(at / "a/1", at / "e/1")
        for path, value in chunks.items():
            faulty.put(path, value, forever="slow")
            faulty.head(path, forever="slow")
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            one = {
                "unlink": lambda: os.unlink(at / "a/0"), "rename": lambda: os.rename(at / "e/1", at / "a/0"),
                "rmdir": lambda: error_of(os.rmdir, at / "a"),
            }[call]  # fmt: skip
            waiting = pool.submit(one)
            try:
                assert faulty.arrived.wait(60)
                pool.submit((at / "d/new").write_text, "written").result(60)
                assert not waiting.done()
            finally:
                faulty.release()
            assert waiting.result(60) == (errno.ENOTEMPTY if call == "rmdir" else None)
        assert (at / "d/new").read_text() == "written"
        assert os.listdir(at / "e") == ([] if call == "rename" else ["1"])

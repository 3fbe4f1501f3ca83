"""The promises of docs/semantics.md, checked on real mounts."""

from __future__ import annotations

import base64
import errno
import functools
import json
import os
import signal
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from tests import caches
from tests.conftest import DATA, run
from tests.mounts.mounting import counters_of, daemon_pid, log_of, mount_lines, mounted, until

HERE = Path(__file__).parent
DEAD = (errno.ENOTCONN, errno.ECONNABORTED)
BLOBS = f"blobs={DATA / 'archives/blobs'}"


@pytest.fixture(autouse=True)
def caches_are_kept() -> Iterator[None]:
    """Keep the kernel's caches: these tests count its requests."""
    with caches.kept():
        yield


def document(directory: Path, refs: dict[str, object], name: str = "refs.json") -> Path:
    path = directory / name
    path.write_text(json.dumps({"version": 1, "refs": refs}))
    return path


def error_of(call: object, *arguments: object) -> int | None:
    try:
        call(*arguments)  # type: ignore[operator]
    except OSError as exc:
        return exc.errno
    return None


def kernel_answers(root: Path, call: Callable[[], object]) -> bool:
    """Return whether a call ends while the daemon is suspended, which is for two seconds at most."""
    pid = daemon_pid(root)
    resume = threading.Timer(2, os.kill, (pid, signal.SIGCONT))
    os.kill(pid, signal.SIGSTOP)
    began = time.monotonic()
    resume.start()
    try:
        call()
        return time.monotonic() - began < 2
    finally:
        resume.cancel()
        os.kill(pid, signal.SIGCONT)


def test_the_kernel_caches_negative_entries(tmp_path: Path) -> None:
    with mounted(document(tmp_path, {"a": "x"}), tmp_path / "mnt") as root:
        look = functools.partial(error_of, os.stat, root / "nothing")
        assert look() == errno.ENOENT
        # for a second, which a busy machine may take in between
        assert any(look() == errno.ENOENT and kernel_answers(root, look) for _ in range(5))


def test_a_listed_name_is_never_enoent(tmp_path: Path) -> None:
    refs = {"gone": [str(tmp_path / "gone.bin"), 0, 10], "whole": [str(tmp_path / "gone.bin")],
            "below": [str(tmp_path / "file/x"), 0, 10], "directory": [str(tmp_path), 0, 10]}  # fmt: skip
    (tmp_path / "file").write_text("")
    with mounted(document(tmp_path, refs), tmp_path / "mnt") as root:
        assert sorted(os.listdir(root)) == sorted(refs)
        for name in refs:
            assert error_of((root / name).read_bytes) == errno.EIO, name
        assert error_of(os.stat, root / "whole") == errno.EIO
        lines = [line for line in log_of(root).splitlines() if "read gone" in line]
        assert lines
        assert all(str(tmp_path / "gone.bin") in line for line in lines)


def test_the_size_of_a_whole_target_is_not_needed_for_a_listing(tmp_path: Path) -> None:
    target = tmp_path / "target.bin"
    with mounted(document(tmp_path, {"whole": [str(target)]}), tmp_path / "mnt") as root:
        assert os.listdir(root) == ["whole"]
        target.write_bytes(b"x" * 1000)  # the target did not exist before
        with os.scandir(root) as entries:
            [entry] = entries
            assert entry.is_file()
        assert (root / "whole").stat().st_size == 1000
        assert (root / "whole").read_bytes() == b"x" * 1000


def test_link_counts_dot_entries_and_block_counts(tmp_path: Path) -> None:
    with mounted(DATA / "archives/flux-list.json", tmp_path / "mnt", BLOBS) as root:
        assert root.stat().st_nlink == 3
        assert (root / "job").stat().st_nlink == 4
        assert (root / "job/inputs/empty").stat().st_nlink == 2
        assert (root / "job/inputs/table.csv").stat().st_nlink == 1
        names = subprocess.run(["ls", "-a", root / "job"], capture_output=True, text=True, check=True).stdout
        assert names.split() == [".", "..", "bin", "config", "inputs"]
        assert (root / "job/inputs/hole").stat().st_blocks == 0
        assert (root / "job/inputs/sparse").stat().st_blocks == 8
        assert (root / "job/inputs/mesh.bin").stat().st_blocks == -(-1500000 // 512)


def test_listings_resume_anywhere(tmp_path: Path) -> None:
    count = 2500
    with mounted(document(tmp_path, {f"{n:05}": "x" for n in range(count)}), tmp_path / "mnt") as root:
        script = (
            "import ctypes, sys\n"
            "libc = ctypes.CDLL(None, use_errno=True)\n"
            "libc.opendir.restype = libc.readdir.restype = ctypes.c_void_p\n"
            "libc.telldir.restype = ctypes.c_long\n"
            "libc.readdir.argtypes = libc.telldir.argtypes = libc.rewinddir.argtypes = [ctypes.c_void_p]\n"
            "libc.seekdir.argtypes = [ctypes.c_void_p, ctypes.c_long]\n"
            "d = ctypes.c_void_p(libc.opendir(sys.argv[1].encode()))\n"
            "def name():\n"
            "    e = libc.readdir(d)\n"
            "    return e and ctypes.string_at(e + 19).decode()\n"
            "def rest():\n"
            "    found = []\n"
            "    while n := name(): found.append(n)\n"
            "    return found\n"
            "places = []\n"
            "while True:\n"
            "    places.append(libc.telldir(d))\n"
            "    n = name()\n"
            "    if not n: break\n"
            "    places[-1] = (places[-1], n)\n"
            "for place, n in [*places[:3], *places[-5:-1:2], *places[1000:2400:377], *places[600:100:-133]]:\n"
            "    libc.seekdir(d, place)\n"
            "    assert name() == n, (place, n)\n"
            "libc.rewinddir(d)\n"
            "found = rest()\n"
            "assert found == ['.', '..', *(f'{i:05}' for i in range(2500))], found[:9]\n"
        )
        subprocess.run(["python3", "-c", script, str(root)], check=True, timeout=60)
        with os.scandir(root) as entries:  # files are read while the listing is in progress
            seen = [entry.name for entry in entries if entry.stat().st_size == 1 and Path(entry.path).read_text()]
        assert seen == [f"{n:05}" for n in range(count)]


def test_inode_numbers_are_distinct_and_stable(tmp_path: Path) -> None:
    names = ("a", "b", "d/a", "d")
    with mounted(document(tmp_path, {"a": "x", "b": "y", "d/a": "z"}), tmp_path / "mnt") as root:
        descriptors = [os.open(root / name, os.O_RDONLY) for name in names]
        numbers = [(root / name).stat().st_ino for name in names]
        assert len(set(numbers)) == 4
        assert numbers == [(root / name).stat().st_ino for name in names]
        for descriptor in descriptors:
            os.close(descriptor)


def test_reads_beyond_the_end_of_a_target_are_eio(tmp_path: Path) -> None:
    target = tmp_path / "target.bin"
    target.write_bytes(bytes(range(256)) * 400)  # 102,400 bytes: 25 pages
    refs = {"half": [str(target), 4096, 200_000]}
    with mounted(document(tmp_path, refs), tmp_path / "mnt") as root:
        assert (root / "half").stat().st_size == 200_000
        descriptor = os.open(root / "half", os.O_RDONLY)
        assert os.pread(descriptor, 4096, 0) == target.read_bytes()[4096:8192]
        assert os.pread(descriptor, 4096, 94_208) == target.read_bytes()[98_304:102_400]
        assert error_of(os.pread, descriptor, 4096, 98_304) == errno.EIO
        assert error_of(os.pread, descriptor, 100, 199_000) == errno.EIO
        os.close(descriptor)
        assert error_of((root / "half").read_bytes) == errno.EIO


def test_a_target_that_has_changed_is_eio(tmp_path: Path) -> None:
    target = tmp_path / "target.bin"
    target.write_bytes(b"a" * 100_000)
    refs = {"x": [str(target), 0, 10], "y": [str(target), 50_000, 10]}
    with mounted(document(tmp_path, refs), tmp_path / "mnt") as root:
        assert (root / "x").read_bytes() == b"a" * 10
        target.write_bytes(b"b" * 100_000)
        assert error_of((root / "y").read_bytes) == errno.EIO
        assert "changed" in log_of(root)


def test_a_target_with_fewer_bytes_than_its_size_is_eio(tmp_path: Path) -> None:
    """A file of sysfs has a size of 4096 bytes, whatever it contains."""
    target = "/sys/kernel/uevent_seqnum"
    with mounted(document(tmp_path, {"x": [target, 0, 4096]}), tmp_path / "mnt", "allow_path=/sys") as root:
        assert error_of((root / "x").read_bytes) == errno.EIO
        assert "ends before byte 4096" in log_of(root)


def test_a_second_read_sends_no_request_to_the_daemon(tmp_path: Path) -> None:
    target = tmp_path / "target.bin"
    target.write_bytes(os.urandom(3_000_000))
    refs = {"d/x": [str(target), 0, 2_000_000], "d/y": "text"}
    with mounted(document(tmp_path, refs), tmp_path / "mnt") as root:
        first = ((root / "d/x").read_bytes(), (root / "d/y").read_bytes(), os.stat(root / "d/x"))
        with caches.pinned(root / "d/x"), caches.pinned(root / "d/y"):
            for name in ("x", "y"):
                with (root / "d" / name).open("rb") as file:
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # a busy machine may do this too
            before = counters_of(root)
            assert ((root / "d/x").read_bytes(), (root / "d/y").read_bytes(), os.stat(root / "d/x")) == first
            after = counters_of(root)
        assert after["reads_total"] == before["reads_total"]
        assert kernel_answers(root, lambda: os.stat(root / "d/x"))


def test_the_source_attribute_says_where_the_bytes_are(tmp_path: Path) -> None:
    def where(path: Path) -> dict[str, object]:
        assert os.listxattr(path) == ["user.zarrfs.source"]
        found: dict[str, object] = json.loads(os.getxattr(path, "user.zarrfs.source"))
        return found

    target = tmp_path / "t.bin"
    target.write_bytes(b"x" * 100)
    refs = {"a": ["t.bin", 5, 10], "b": "text", "w": [f"file://{target}"]}
    with mounted(document(tmp_path, refs), tmp_path / "mnt") as root:
        found = where(root / "a")
        assert (found["offset"], found["length"]) == (5, 10)
        assert str(found["url"]).endswith(str(target))
        assert where(root / "b") == {"inline": 4}
        assert where(root / "w")["url"]
        assert error_of(os.getxattr, root / "a", "user.other") == errno.ENODATA
        assert os.listxattr(root) == ["user.zarrfs.mount"]
    with mounted(DATA / "archives/flux-list.json", tmp_path / "mnt", BLOBS) as root:
        assert where(root / "job/inputs/hole") == {"hole": 65536}
        [region] = where(root / "job/inputs/sparse")["regions"]  # type: ignore[misc]
        assert (region["start"], region["length"]) == (2998272, 4096)


def test_a_read_only_mount_refuses_all_changes(tmp_path: Path) -> None:
    with mounted(document(tmp_path, {"d/a": "x"}), tmp_path / "mnt") as root:
        file = root / "d/a"
        changes: list[Callable[[], object]] = [
            lambda: file.write_text("y"), lambda: (root / "new").write_text("y"), file.unlink,
            lambda: (root / "d").rmdir(), lambda: (root / "e").mkdir(), lambda: file.rename(root / "b"),
            lambda: file.chmod(0o600), lambda: os.utime(file), lambda: os.symlink("a", root / "l"),
            lambda: os.link(file, root / "h"), lambda: os.truncate(file, 0),
            lambda: os.setxattr(file, "user.x", b"1"), lambda: os.open(file, os.O_RDWR),
            lambda: os.open(file, os.O_WRONLY | os.O_APPEND), lambda: os.open(file, os.O_TRUNC),
            lambda: os.mkfifo(root / "p"), lambda: os.removexattr(file, "user.x"),
        ]  # fmt: skip
        for change in changes:
            assert error_of(change) == errno.EROFS
        assert file.read_text() == "x"
        if os.geteuid() == 0:
            env = {**os.environ, "LIBMOUNT_FORCE_MOUNT2": "always"}  # the new system calls cannot remount FUSE
            subprocess.run(["mount", "-i", "-o", "remount,rw", root], check=True, env=env)  # without mount.zarrfs
            for change in changes:
                assert error_of(change) == errno.EROFS
            assert file.read_text() == "x"
            subprocess.run(["mount", "-i", "-o", "remount,ro", root], check=True, env=env)
        [line] = mount_lines(root)
        assert {"ro", "nosuid", "nodev"} <= set(line.split(" ")[5].split(","))


def test_signals_do_not_unmount_a_mount_in_use(tmp_path: Path) -> None:
    with mounted(document(tmp_path, {"a": "x", "b": "y"}), tmp_path / "mnt") as root, (root / "a").open():
        os.kill(daemon_pid(root), signal.SIGTERM)
        until(lambda: "in use" in log_of(root))
        assert f"pid {os.getpid()}" in log_of(root)
        assert (root / "b").read_text() == "y"
        done = run("umount", root)
        assert done.returncode == 1
        assert f"pid {os.getpid()}" in done.stderr


def test_statvfs_counts_bytes_and_files(tmp_path: Path) -> None:
    target = tmp_path / "target.bin"
    target.write_bytes(b"x")
    refs = {"a": [str(target), 0, 1_000_000], "b": "text"}
    with mounted(document(tmp_path, refs), tmp_path / "mnt") as root:
        usage = os.statvfs(root)
        assert usage.f_blocks * usage.f_frsize >= 1_000_004
        assert (usage.f_bavail, usage.f_files, usage.f_favail, usage.f_namemax) == (0, 2, 0, 255)


def test_listings_from_a_truncated_index_are_eio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    refs: dict[str, object] = {f"d{n}/{m}": "x" for n in range(100) for m in range(100)}
    with mounted(document(tmp_path, refs), tmp_path / "mnt") as root:
        [index] = (tmp_path / "zarrfs/index").glob("*.index")
        os.truncate(index, 8192)
        failed = [error_of(os.listdir, root / f"d{n}") for n in range(100)]
        assert set(failed) <= {None, errno.EIO}
        assert errno.EIO in failed
        assert os.stat(root).st_nlink == 102


def test_without_root_the_rest_of_a_value_is_pushed_into_the_page_cache(tmp_path: Path) -> None:
    target, mnt = tmp_path / "target.bin", tmp_path / "mnt"
    target.write_bytes(os.urandom(4 << 20))
    mnt.mkdir()
    source = document(tmp_path, {f"v{n}": [str(target), n, (4 << 20) - 16] for n in range(16)})
    daemon = HERE / "unraised_daemon.py"
    subprocess.run([sys.executable, str(daemon), str(source), str(mnt), str(tmp_path / "mnt.log")], check=True)
    try:
        requests = [0]
        for number in range(16):
            assert (mnt / f"v{number}").read_bytes() == target.read_bytes()[number : number + (4 << 20) - 16]
            requests.append(counters_of(mnt)["reads_total"])
            time.sleep(0.05)  # the daemon finds out after mounting that it cannot raise the read-ahead
        assert min(after - before for before, after in pairwise(requests)) < 4  # instead of 32
    finally:
        assert run("umount", mnt).returncode == 0


def test_a_target_inside_the_mount_does_not_hang(tmp_path: Path) -> None:
    """The size of a whole target is needed while the kernel looks up the file's name with the directory locked."""
    mnt = tmp_path / "mnt"
    refs = {"a": [str(mnt / "b"), 0, 1], "whole": [str(mnt / "b")], "itself": [str(mnt / "itself")], "b": "x"}
    with mounted(document(tmp_path, refs), mnt) as root:
        for name in ("whole", "itself"):
            done = subprocess.run(["stat", root / name], timeout=60, check=False, capture_output=True, text=True)
            assert "Too many levels of symbolic links" in done.stderr
        for name in ("a", "whole", "itself"):
            assert error_of((root / name).read_bytes) == errno.ELOOP
        assert (root / "b").read_text() == "x"


def test_a_lookup_does_not_access_the_target(tmp_path: Path) -> None:
    with mounted(document(tmp_path, {"gone": [str(tmp_path / "nothing")], "b": "x"}), tmp_path / "mnt") as root:
        with open(os.open(root / "gone", os.O_PATH)) as found:
            assert error_of(lambda: os.fstat(found.fileno())) == errno.EIO
        assert error_of((root / "gone").read_bytes) == errno.EIO


def test_a_zip_file_inside_the_mount_is_not_opened(tmp_path: Path) -> None:
    """A mount could never be unmounted if its own daemon had a file in it open."""
    archive, mnt = tmp_path / "t.zip", tmp_path / "mnt"
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("d/a", "text")
    inline = "base64:" + base64.b64encode(archive.read_bytes()).decode()
    with mounted(document(tmp_path, {"t.zip": inline, "z": [f"zip://d/a::{mnt}/t.zip", 0, 1]}), mnt) as root:
        assert error_of((root / "z").read_bytes) == errno.ELOOP
        assert (root / "t.zip").read_bytes() == archive.read_bytes()

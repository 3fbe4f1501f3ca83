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


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("semantics")


@pytest.fixture(scope="module")
def refs(place: Path) -> dict[str, object]:
    """Make a set with targets that exist, or not, or change, or are in its own mount."""
    whole, mnt = place / "target.bin", place / "mnt"
    whole.write_bytes(bytes(range(256)) * 400)  # 102,400 bytes: 25 pages
    (place / "changing.bin").write_bytes(b"a" * 100_000)
    (place / "file").write_text("")
    with zipfile.ZipFile(place / "t.zip", "w") as file:
        file.writestr("d/a", "text")
    inline = "base64:" + base64.b64encode((place / "t.zip").read_bytes()).decode()
    return {
        "gone/part": [str(place / "gone.bin"), 0, 10], "gone/whole": [str(place / "gone.bin")],
        "gone/below": [str(place / "file/x"), 0, 10], "gone/directory": [str(place), 0, 10],
        "late/whole": [str(place / "late.bin")],
        "part": ["target.bin", 5, 10], "text": "text", "whole": [f"file://{whole}"], "large": [str(whole), 0, 100_000],
        "half": [str(whole), 4096, 200_000],
        "changing/x": [str(place / "changing.bin"), 0, 10], "changing/y": [str(place / "changing.bin"), 50_000, 10],
        "own/part": [str(mnt / "text"), 0, 1], "own/whole": [str(mnt / "text")],
        "own/itself": [str(mnt / "own/itself")],
        "own/zip": [f"zip://d/a::{mnt}/t.zip", 0, 1], "t.zip": inline,
    }  # fmt: skip


@pytest.fixture(scope="module")
def root(place: Path, refs: dict[str, object]) -> Iterator[Path]:
    with mounted(document(place, refs), place / "mnt") as path:
        yield path


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with mounted(DATA / "archives/flux-list.json", tmp_path_factory.mktemp("archive") / "mnt", BLOBS) as path:
        yield path


def test_the_kernel_caches_negative_entries(root: Path) -> None:
    look = functools.partial(error_of, os.stat, root / "nothing")
    assert look() == errno.ENOENT
    # for a second, which a busy machine may take in between
    assert any(look() == errno.ENOENT and kernel_answers(root, look) for _ in range(5))


def test_a_listed_name_is_never_enoent(root: Path, place: Path) -> None:
    """A lookup does not access the target."""
    names = os.listdir(root / "gone")
    assert len(names) == 4
    for name in names:
        with open(os.open(root / "gone" / name, os.O_PATH)) as found:
            code = error_of(os.fstat, found.fileno())
        assert code == (errno.EIO if name == "whole" else None)
        assert error_of((root / "gone" / name).read_bytes) == errno.EIO, name
    assert error_of(os.stat, root / "gone/whole") == errno.EIO
    lines = [line for line in log_of(root).splitlines() if "read gone/part" in line]
    assert lines
    assert all(str(place / "gone.bin") in line for line in lines)


def test_the_size_of_a_whole_target_is_not_needed_for_a_listing(root: Path, place: Path) -> None:
    assert os.listdir(root / "late") == ["whole"]
    (place / "late.bin").write_bytes(b"x" * 1000)  # the target did not exist before
    with os.scandir(root / "late") as entries:
        [entry] = entries
        assert entry.is_file()
    assert (root / "late/whole").stat().st_size == 1000
    assert (root / "late/whole").read_bytes() == b"x" * 1000


def test_link_counts_dot_entries_and_block_counts(archive: Path) -> None:
    assert archive.stat().st_nlink == 3
    assert (archive / "job").stat().st_nlink == 4
    assert (archive / "job/inputs/empty").stat().st_nlink == 2
    assert (archive / "job/inputs/table.csv").stat().st_nlink == 1
    names = subprocess.run(["ls", "-a", archive / "job"], capture_output=True, text=True, check=True).stdout
    assert names.split() == [".", "..", "bin", "config", "inputs"]
    assert (archive / "job/inputs/hole").stat().st_blocks == 0
    assert (archive / "job/inputs/sparse").stat().st_blocks == 8
    assert (archive / "job/inputs/mesh.bin").stat().st_blocks == -(-1500000 // 512)


SEEK = """
import ctypes, sys
libc = ctypes.CDLL(None, use_errno=True)
libc.opendir.restype = libc.readdir.restype = ctypes.c_void_p
libc.telldir.restype = ctypes.c_long
libc.readdir.argtypes = libc.telldir.argtypes = libc.rewinddir.argtypes = [ctypes.c_void_p]
libc.seekdir.argtypes = [ctypes.c_void_p, ctypes.c_long]
d = ctypes.c_void_p(libc.opendir(sys.argv[1].encode()))
places = []
def name():
    places.append(libc.telldir(d))
    e = libc.readdir(d)
    return e and ctypes.string_at(e + 19).decode()
expected = [".", "..", *(f"{i:05}" for i in range(int(sys.argv[2])))]
assert [*iter(name, None)] == expected
for at in [0, 1, 2, *range(5, len(expected), 177), *range(len(expected) - 1, 0, -133)]:
    libc.seekdir(d, places[at])
    assert name() == expected[at], at
libc.rewinddir(d)
assert [*iter(name, None)] == expected
"""


def test_listings_resume_anywhere(tmp_path: Path) -> None:
    count = 1200
    with mounted(document(tmp_path, {f"{n:05}": "x" for n in range(count)}), tmp_path / "mnt") as root:
        subprocess.run([sys.executable, "-c", SEEK, str(root), str(count)], check=True, timeout=60)
        with os.scandir(root) as entries:  # files are read while the listing is in progress
            seen = [entry.name for entry in entries if entry.name[-1] != "0" or Path(entry.path).read_text()]
        assert seen == [f"{n:05}" for n in range(count)]


def test_inode_numbers_are_distinct_and_stable(root: Path) -> None:
    names = ("part", "text", "late", "own")
    descriptors = [os.open(root / name, os.O_RDONLY) for name in names]
    numbers = [(root / name).stat().st_ino for name in names]
    assert len(set(numbers)) == 4
    assert numbers == [(root / name).stat().st_ino for name in names]
    for descriptor in descriptors:
        os.close(descriptor)


def test_reads_beyond_the_end_of_a_target_are_eio(root: Path, place: Path) -> None:
    data = (place / "target.bin").read_bytes()
    assert (root / "half").stat().st_size == 200_000
    descriptor = os.open(root / "half", os.O_RDONLY)
    assert os.pread(descriptor, 4096, 0) == data[4096:8192]
    assert os.pread(descriptor, 4096, 94_208) == data[98_304:102_400]
    assert error_of(os.pread, descriptor, 4096, 98_304) == errno.EIO
    assert error_of(os.pread, descriptor, 100, 199_000) == errno.EIO
    os.close(descriptor)
    assert error_of((root / "half").read_bytes) == errno.EIO


def test_a_target_that_has_changed_is_eio(root: Path, place: Path) -> None:
    assert (root / "changing/x").read_bytes() == b"a" * 10
    (place / "changing.bin").write_bytes(b"b" * 100_000)
    assert error_of((root / "changing/y").read_bytes) == errno.EIO
    assert "changed" in log_of(root)


def test_a_target_with_fewer_bytes_than_its_size_is_eio(tmp_path: Path) -> None:
    """A file of sysfs has a size of 4096 bytes, whatever it contains."""
    target = "/sys/kernel/uevent_seqnum"
    with mounted(document(tmp_path, {"x": [target, 0, 4096]}), tmp_path / "mnt", "allow_path=/sys") as root:
        assert error_of((root / "x").read_bytes) == errno.EIO
        assert "ends before byte 4096" in log_of(root)


def test_a_second_read_sends_no_request_to_the_daemon(root: Path) -> None:
    paths = root / "large", root / "text"
    first = [*(path.read_bytes() for path in paths), os.stat(paths[0])]
    with caches.pinned(paths[0]), caches.pinned(paths[1]):
        for path in paths:
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # a busy machine may do this too
        before = counters_of(root)
        assert [*(path.read_bytes() for path in paths), os.stat(paths[0])] == first
        after = counters_of(root)
    assert after["reads_total"] == before["reads_total"]
    assert any(kernel_answers(root, lambda: os.stat(paths[0])) for _ in range(5))


def test_the_source_attribute_says_where_the_bytes_are(root: Path, archive: Path, place: Path) -> None:
    def where(path: Path) -> dict[str, object]:
        assert os.listxattr(path) == ["user.zarrfs.source"]
        found: dict[str, object] = json.loads(os.getxattr(path, "user.zarrfs.source"))
        return found

    found = where(root / "part")
    assert (found["offset"], found["length"]) == (5, 10)
    assert str(found["url"]).endswith(str(place / "target.bin"))
    assert where(root / "text") == {"inline": 4}
    assert where(root / "whole")["url"]
    assert error_of(os.getxattr, root / "part", "user.other") == errno.ENODATA
    assert os.listxattr(root) == ["user.zarrfs.mount"]
    assert where(archive / "job/inputs/hole") == {"hole": 65536}
    [region] = where(archive / "job/inputs/sparse")["regions"]  # type: ignore[misc]
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


def test_statvfs_counts_bytes_and_files(root: Path, refs: dict[str, object]) -> None:
    usage = os.statvfs(root)
    assert usage.f_blocks * usage.f_frsize >= 300_004
    assert (usage.f_bavail, usage.f_files, usage.f_favail, usage.f_namemax) == (0, len(refs), 0, 255)


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

    def pushed(number: int) -> bool:
        before = counters_of(mnt)["reads_total"]
        assert (mnt / f"v{number}").read_bytes() == target.read_bytes()[number : number + (4 << 20) - 16]
        return counters_of(mnt)["reads_total"] - before < 4  # instead of 32

    try:  # the daemon finds out after mounting that it cannot raise the read-ahead
        assert any(pushed(number) or time.sleep(0.05 * number) for number in range(16))
    finally:
        assert run("umount", mnt).returncode == 0


def test_a_target_inside_the_mount_does_not_hang(root: Path, place: Path) -> None:
    """The size of a whole target is needed while the kernel looks up the file's name with the directory locked.

    A mount could never be unmounted if its own daemon had a file in it open, such as the zip file.
    """
    for name in ("whole", "itself"):
        done = subprocess.run(["stat", root / "own" / name], timeout=60, check=False, capture_output=True, text=True)
        assert "Too many levels of symbolic links" in done.stderr
    for name in ("part", "whole", "itself", "zip"):
        assert error_of((root / "own" / name).read_bytes) == errno.ELOOP
    assert (root / "text").read_text() == "text"
    assert (root / "t.zip").read_bytes() == (place / "t.zip").read_bytes()

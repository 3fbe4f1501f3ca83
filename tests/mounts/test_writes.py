"""POSIX semantics of writable mounts: of a reference set with an upper directory, and of a plain directory."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import shutil
import stat
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.mounts.mounting import counters_of, log_of, mounted, until
from tests.mounts.test_semantics import document, error_of

LOWER = {"v/.zgroup": '{"zarr_format": 2}', "v/a/0": "zero", "v/a/1": "one", "v/b/0": "bee", "top": "top"}
EXCHANGE = 2
TREES = 20  # more than there are tests
libc = ctypes.CDLL(None, use_errno=True)


@pytest.fixture(scope="module", params=["merged", "plain"])
def trees(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Iterator[Path]]:
    """Mount a source with many trees like LOWER for all users; yield an iterator over the trees."""
    place, more = tmp_path_factory.mktemp(request.param), "allow_other,dev,suid"
    lower = {f"{number}/{key}": text for number in range(TREES) for key, text in LOWER.items()}
    (place / request.param).mkdir()
    if request.param == "merged":
        mount = mounted(document(place, lower), place / "mnt", more, f"upperdir={place / 'merged'}")
    else:
        for key, text in lower.items():
            (place / "plain" / key).parent.mkdir(parents=True, exist_ok=True)
            (place / "plain" / key).write_text(text)
        mount = mounted(place / "plain", place / "mnt", more, "rw")
    with mount as at:
        yield (at / str(number) for number in range(TREES))
    assert "ERROR" not in log_of(place / "mnt")  # refused calls are not logged as errors


@pytest.fixture
def root(trees: Iterator[Path]) -> Path:
    """Return a tree of its own in the shared mount."""
    return next(trees)


def upper_of(root: Path, key: str) -> Path:
    """Return the file behind a changed file of `root`."""
    place = root.parents[1]
    return next(path for name in ("merged", "plain") if (path := place / name / root.name / key).exists())


def renameat2(old: Path, new: Path, flags: int) -> int:
    """Call renameat2(2); return 0 or an errno."""
    return ctypes.get_errno() if libc.renameat2(-100, os.fsencode(old), -100, os.fsencode(new), flags) else 0


def as_user(directory: Path, program: str) -> None:
    """Run Python code as another user, in a directory whose parents that user need not be able to search."""
    code = f"import os\nos.setgroups([]); os.setgid(1234); os.setuid(1234)\n{program}"
    subprocess.run([sys.executable, "-c", code], cwd=directory, check=True, timeout=60)


# -- files


def test_a_reader_sees_what_is_written_after_it_opened(root: Path) -> None:
    reader = os.open(root / "v/a/0", os.O_RDONLY)
    assert os.pread(reader, 10, 0) == b"zero"
    with open(root / "v/a/0", "r+b") as file:
        file.write(b"Z")
        file.flush()
        os.fsync(file.fileno())
    os.posix_fadvise(reader, 0, 0, os.POSIX_FADV_DONTNEED)  # the kernel reads again
    assert os.pread(reader, 10, 0) == b"Zero"
    (root / "v/a/0").unlink()
    assert os.pread(reader, 10, 0) == b"Zero"
    assert os.fstat(reader).st_nlink == 0
    os.close(reader)


def test_unlinked_and_replaced_files_stay_usable_while_open(root: Path) -> None:
    new = os.open(root / "new", os.O_RDWR | os.O_CREAT, 0o644)
    old = os.open(root / "v/a/1", os.O_RDONLY)
    for name in ("new", "v/a/1"):
        (root / name).unlink()
    (root / "new").write_text("another")
    os.write(new, b"kept")
    os.ftruncate(new, 3)
    os.fchmod(new, 0o600)
    found = os.fstat(new)
    assert (found.st_nlink, found.st_size, stat.S_IMODE(found.st_mode)) == (0, 3, 0o600)
    assert Path(f"/proc/self/fd/{new}").read_bytes() == b"kep"
    assert (os.pread(old, 9, 0), os.fstat(old).st_nlink) == (b"one", 0)
    with contextlib.suppress(OSError):  # ESTALE: a removed file of the source has no place for a change
        os.truncate(f"/proc/self/fd/{old}", 1)
        assert os.fstat(old).st_size == 1
    assert (root / "new").read_text() == "another"
    replaced = os.open(root / "v/b/0", os.O_RDWR)
    os.rename(root / "new", root / "v/b/0")
    os.fchmod(replaced, 0o600)
    assert (os.fstat(replaced).st_nlink, Path(f"/proc/self/fd/{replaced}").read_bytes()) == (0, b"bee")
    assert (root / "v/b/0").read_text() == "another"
    for handle in (new, old, replaced):
        os.close(handle)


def test_writes_through_a_mapping_of_a_file_opened_for_appending_stay_in_place(root: Path) -> None:
    descriptor = os.open(root / "new", os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
    os.write(descriptor, b"." * 10_000)
    with mmap.mmap(descriptor, 10_000) as mapping:
        mapping[5_000:5_005] = b"HELLO"
        mapping.flush()
    os.fsync(descriptor)
    os.close(descriptor)
    expected = b"." * 5_000 + b"HELLO" + b"." * 4_995
    assert (root / "new").read_bytes() == expected
    descriptor = os.open(root / "new", os.O_RDWR | os.O_APPEND)  # an existing file
    with mmap.mmap(descriptor, 10_000) as mapping:
        mapping[:5] = b"HELLO"
        mapping.flush()
    os.close(descriptor)
    assert upper_of(root, "new").read_bytes() == b"HELLO" + expected[5:]


def dirty_pages(path: Path) -> int:
    """Return the number of a file's pages that are not on disk yet; -1 without cachestat(2) (Linux 6.5)."""
    whole, found = (ctypes.c_uint64 * 2)(0, 0), (ctypes.c_uint64 * 5)()
    with open(path, "rb") as file:
        failed = libc.syscall(451, file.fileno(), whole, found, 0)
    return -1 if failed else found[1] + found[2]


def test_fsync_reaches_the_disk(root: Path) -> None:
    with open(root / "new", "wb", buffering=0) as file:
        file.write(b"." * 100_000)
        file.flush()
    if dirty_pages(upper_of(root, "new")) <= 0:
        pytest.skip("the kernel does not tell, or this file system writes at once")
    with open(root / "new", "r+b") as file:
        os.fsync(file.fileno())
    assert dirty_pages(upper_of(root, "new")) == 0


# -- attributes


def test_new_files_belong_to_the_user_who_creates_them(root: Path) -> None:
    work = root / "work"
    work.mkdir()
    os.chown(work, 1234, 1234)
    as_user(work, "os.umask(0o27); open('f', 'w').close(); os.mkdir('d'); os.symlink('f', 's')")
    for name, mode in (("f", 0o640), ("d", 0o750), ("s", 0o777)):
        found = os.lstat(work / name)
        assert (found.st_uid, found.st_gid, stat.S_IMODE(found.st_mode)) == (1234, 1234, mode)
    os.chmod(work, 0o2777)
    os.chown(work, -1, 77)
    as_user(work, "open('g', 'w').close(); os.mkdir('e')")
    assert (os.stat(work / "g").st_gid, os.stat(work / "e").st_gid) == (77, 77)
    assert os.stat(work / "e").st_mode & stat.S_ISGID
    as_user(work, "os.umask(0); os.open('p', os.O_CREAT, 0o4755); os.mknod('n', 0o104711)")
    assert [stat.S_IMODE(os.stat(work / name).st_mode) for name in "pn"] == [0o4755, 0o4711]
    denied = "try: open('w', 'w')\nexcept PermissionError: pass\nelse: raise SystemExit('written')"
    as_user(root / "v", denied)


def test_a_write_clears_the_set_uid_bit(root: Path) -> None:
    truncating = "os.open(path, os.O_WRONLY | os.O_TRUNC)"
    for name, call in (("w", "os.write(f, b'x')"), ("t", "os.ftruncate(f, 0)"), ("o", truncating)):
        (root / name).write_text("text")
        os.chown(root / name, 1234, 1234)
        os.chmod(root / name, 0o6777)
        as_user(root, f"path = {name!r}; f = os.open(path, os.O_RDWR); {call}")
        assert stat.S_IMODE((root / name).stat().st_mode) == 0o777
        os.chmod(root / name, 0o6777)
        with open(root / name, "a") as file:  # a write by root keeps the bits
            file.write("x")
        os.close(os.open(root / name, os.O_WRONLY | os.O_TRUNC))
        assert stat.S_IMODE((root / name).stat().st_mode) == 0o6777


# -- names


@pytest.mark.parametrize("again", [False, True], ids=["one handle", "a handle for each piece"])
def test_a_listing_is_complete_while_its_entries_are_deleted(again: bool, root: Path) -> None:
    """An NFS server opens the directory for each READDIR, and seeks to the last offset it returned."""
    names = {f"n{number}" for number in range(120)}
    for name in names:
        (root / name).touch()
    descriptor, place, seen = os.open(root, os.O_RDONLY | os.O_DIRECTORY), 0, list[str]()
    while piece := getdents(descriptor, 1000):
        place = piece[-1][1]
        for name in names & {name for name, _ in piece}:
            os.unlink(root / name)
        seen += [name for name, _ in piece]
        if again:
            os.close(descriptor)
            descriptor = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
            os.lseek(descriptor, place, os.SEEK_SET)
    os.close(descriptor)
    assert sorted(seen) == sorted([".", "..", "top", "v", *names])
    assert sorted(os.listdir(root)) == ["top", "v"]


def getdents(descriptor: int, size: int) -> list[tuple[str, int]]:
    """Return the names in one piece of a listing, and the offset after each, as getdents64(2) does."""
    buffer = ctypes.create_string_buffer(size)
    length, entries, at = libc.getdents64(descriptor, buffer, size), [], 0
    assert length >= 0, os.strerror(ctypes.get_errno())
    while at < length:
        _, offset, long, _ = struct.unpack_from("=QqHB", buffer, at)
        entries.append((os.fsdecode(buffer.raw[at + 19 : at + long].split(b"\0")[0]), offset))
        at += long
    return entries


def test_exchanged_names_swap_what_they_name(root: Path) -> None:
    (root / "file").write_text("1")
    (root / "directory").mkdir()
    (root / "directory/x").write_text("x")
    for one, other in (("file", "directory"), ("top", "v/a/0")):
        (root / other).stat()
        assert renameat2(root / one, root / other, EXCHANGE) == 0
    assert [(root / name).read_text() for name in ("directory", "file/x", "top", "v/a/0")] == ["1", "x", "zero", "top"]


def test_creating_a_name_that_appeared_beneath_the_mount_leaves_no_inode(tmp_path: Path) -> None:
    """The kernel still believes the name to be absent, so it sends a request to create it."""
    plain = tmp_path / "plain"
    plain.mkdir()
    with mounted(plain, tmp_path / "mnt", "rw", "attr_timeout=600") as root:
        before = counters_of(root)["inodes"]
        for name in "abc":
            assert not (root / name).exists()
            (plain / name).mkdir()
            assert error_of(os.open, root / name, os.O_WRONLY | os.O_CREAT, 0o644) == errno.EISDIR
            (root / name).rmdir()
        until(lambda: counters_of(root)["inodes"] == before)
        assert not (root / "d").exists()
        (plain / "d").write_text("there")
        descriptor = os.open(root / "d", os.O_RDWR | os.O_CREAT, 0o644)
        assert os.read(descriptor, 10) == b"there"
        os.close(descriptor)


def test_a_listing_does_not_bring_back_old_attributes(root: Path) -> None:
    descriptor = os.open(root, os.O_RDONLY)
    for number in range(100):
        (root / f"n{number:03}").touch()
    with os.scandir(descriptor) as listing:
        first = next(listing).name
        for number in range(100):
            os.truncate(root / f"n{number:03}", 7)
        names = [first, *(entry.name for entry in listing)]
    os.close(descriptor)
    assert len(names) == 102
    assert {os.stat(root / name).st_size for name in names if name[0] == "n"} == {7}


def test_paths_can_be_longer_than_path_max(root: Path) -> None:
    name, here = "x" * 250, os.getcwd()
    try:
        os.chdir(root)
        for _ in range(18):
            os.mkdir(name)
            os.chdir(name)
        Path("file").write_text("deep")
        os.rename("file", "moved")
        assert (Path("moved").read_text(), os.listdir(".")) == ("deep", ["moved"])
    finally:
        os.chdir(here)
    shutil.rmtree(root / name)
    assert sorted(os.listdir(root)) == ["top", "v"]


def test_changes_in_a_mounted_directory_itself_are_seen(tmp_path: Path) -> None:
    """A name that returns is found again: for ENOENT, a Zarr reader would return the fill value."""
    plain = tmp_path / "plain"
    (plain / "arr/c").mkdir(parents=True)
    (plain / "arr/c/0").write_text("chunk")
    (plain / "a").write_text("old")
    (plain / "l").write_text("linked")
    os.link(plain / "l", plain / "m")
    with mounted(plain, tmp_path / "mnt", "rw", "attr_timeout=0") as root:
        held = os.open(root / "a", os.O_RDWR)
        (plain / "beside").write_text("another")
        (plain / "beside").rename(plain / "a")
        assert (root / "a").read_text() == "another"
        assert (os.pread(held, 9, 0), os.fstat(held).st_size) == (b"old", 3)
        os.close(held)
        with open(root / "a", "a") as file:
            file.write(" one")
        (plain / "a").rename(plain / "b")
        assert ((root / "b").read_text(), sorted(os.listdir(root))) == ("another one", ["arr", "b", "l", "m"])
        os.rename(root / "b", root / "c")
        (plain / "c").unlink()
        assert error_of(os.stat, root / "c") == errno.ENOENT
        assert (root / "l").stat().st_ino == (root / "m").stat().st_ino
        (plain / "m").unlink()
        assert (root / "l").read_text() == "linked"
        assert os.listdir(root / "arr") == ["c"]
        (plain / "arr").rename(plain / "old")
        assert os.listdir(root / "old") == ["c"]
        (plain / "old").rename(plain / "arr")
        assert (root / "arr/c/0").read_text() == "chunk"


def test_open_files_of_a_lower_directory_that_changes(tmp_path: Path) -> None:
    """The daemon reads such a file through its own descriptor, which it must replace after the copy up."""
    (tmp_path / "upper").mkdir()
    (tmp_path / "src").mkdir()
    for name in ("written", "directory", "link"):
        (tmp_path / "src" / name).write_text("hello")
    with mounted(tmp_path / "src", tmp_path / "mnt", f"upperdir={tmp_path}/upper,attr_timeout=0") as root:
        files = {name: (root / name).open("rb", buffering=0) for name in os.listdir(root)}
        assert files["written"].read() == b"hello"
        (root / "written").write_text("changed")
        files["written"].seek(0)
        assert files["written"].read() == b"changed"
        for name, kind in (("directory", stat.S_IFDIR), ("link", stat.S_IFLNK)):
            (tmp_path / "src" / name).unlink()
            if name == "link":
                (tmp_path / "src" / name).symlink_to("elsewhere")
            else:
                (tmp_path / "src" / name).mkdir()
            assert os.fstat(files[name].fileno()).st_size == 5
            assert files[name].read() == b"hello"
            assert error_of(os.utime, files[name].fileno()) == errno.ESTALE
            assert os.fstat(files[name].fileno()).st_size == 5
            assert stat.S_IFMT(os.lstat(root / name).st_mode) == kind
        for file in files.values():
            file.close()


# -- upper directories


def test_the_upper_directory_stores_changes_and_whiteouts(tmp_path: Path) -> None:
    upper = tmp_path / "upper"
    upper.mkdir()
    with mounted(document(tmp_path, LOWER), tmp_path / "mnt", f"upperdir={upper}") as root:
        (root / "v/a/0").unlink()
        (root / "v/a/1").write_text("changed")
        (root / "top").unlink()
        (root / "top").mkdir()
        found = {str(path.relative_to(upper)) for path in upper.rglob("*") if path.is_file()}
        assert found == {".zarrfs-upper", "v/a/.wh.0", "v/a/1", ".wh.top"}
        (root / "v/a/1").unlink()
        (root / "v/a").rmdir()
        assert sorted(os.listdir(upper / "v")) == [".wh.a"]
        assert error_of(os.rename, root / "v", root / "w") == errno.EXDEV  # a lower directory is copied, not renamed
        assert renameat2(root / "v", root / "top", EXCHANGE) == errno.EXDEV
        done = subprocess.run(["mv", root / "v", root / "w"], capture_output=True, text=True, check=True, timeout=60)
        assert done.stderr == ""
        assert (root / "w/b/0").read_text() == "bee"
        assert sorted(os.listdir(upper)) == [".wh.top", ".wh.v", ".zarrfs-upper", "top", "w"]


def test_an_open_that_truncates_does_not_copy_the_file(tmp_path: Path) -> None:
    source, upper = document(tmp_path, {"gone": ["/nowhere/at/all", 0, 1000], "kept": "kept"}), tmp_path / "upper"
    upper.mkdir()
    with mounted(source, tmp_path / "mnt", f"upperdir={upper}") as root:
        assert error_of(os.open, root / "gone", os.O_RDWR) == errno.EIO  # it cannot be copied up
        (root / "gone").write_text("there now")
        assert (root / "gone").read_text() == "there now"
        os.stat(root / "kept")
        with (root / "kept").open("r+b"):  # copies it up: the kernel drops the attributes that it has
            until(lambda: os.stat(root / "kept").st_blocks == os.stat(upper / "kept").st_blocks)
    assert (upper / "gone").read_text() == "there now"


def test_times_are_the_same_after_a_remount(tmp_path: Path) -> None:
    """This holds also with the kernel's writeback cache, which writes later than the program."""
    source, options, seen = document(tmp_path, {"a": "text"}), f"upperdir={tmp_path}/upper", {}
    (tmp_path / "upper").mkdir()
    with mounted(source, tmp_path / "mnt", options) as root:
        for number in range(5):
            descriptor = os.open(root / f"new{number}", os.O_CREAT | os.O_WRONLY)
            os.write(descriptor, b"x" * 5000)
            time.sleep(0.1)
            os.close(descriptor)
        with open(root / "a", "ab") as file:
            file.write(b" and more")
        (root / "new0").rename(root / "renamed")
        for path in root.iterdir():
            seen[path.name] = path.stat().st_mtime_ns
    with mounted(source, tmp_path / "mnt", options) as root:
        assert {path.name: path.stat().st_mtime_ns for path in root.iterdir()} == seen

"""Upper directories and names that are refused, and files outside the upper directory that no write may change."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import stat
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import DATA, run
from tests.mounts.mounting import daemon_pid, log_of, mount_lines, mounted
from tests.mounts.test_semantics import document, error_of
from tests.mounts.test_writes_faults import kill, names_in, sample, start, upper


def refused(source: Path, mountpoint: Path, *options: str) -> str:
    """Try to mount; return the one line that says why the mount is refused."""
    mountpoint.mkdir(exist_ok=True)
    done = run("mount", source, mountpoint, "-o", ",".join(options))
    try:
        assert done.returncode != 0, "it was mounted"
    finally:
        while mount_lines(mountpoint):
            subprocess.run(["umount", "-l", str(mountpoint)], check=True)
    lines = done.stderr.splitlines()
    assert len(lines) == 1, done.stderr
    assert "Traceback" not in lines[0]
    return lines[0]


def contents(directory: Path) -> dict[str, tuple[object, ...]]:
    """Return hashes, modes, times, owners and attribute names of a directory and everything below it."""
    found: dict[str, tuple[object, ...]] = {}
    for path in sorted([directory, *directory.rglob("*")]):
        status = path.lstat()
        text = hashlib.sha256(path.read_bytes()).hexdigest() if stat.S_ISREG(status.st_mode) else ""
        text = os.readlink(path) if stat.S_ISLNK(status.st_mode) else text
        attributes = os.listxattr(path, follow_symlinks=False)
        found[str(path)] = (text, status.st_mode, status.st_mtime_ns, status.st_ctime_ns, status.st_uid, attributes)
    return found


# -- readers and writers


@pytest.mark.parametrize("own", [False, True], ids=["upperdir", "rw"])
def test_one_mount_writes_at_a_time(own: bool, tmp_path: Path) -> None:
    source, options = sample(tmp_path), upper(tmp_path)
    if own:
        (tmp_path / "directory").mkdir()
        source, options = tmp_path / "directory", "rw"
    place = str(tmp_path / ("directory" if own else "upper"))
    pid = start(source, tmp_path / "one", options)
    try:
        line = refused(source, tmp_path / "two", options)
        assert place in line
        assert str(pid) in line
        (tmp_path / "one/new").write_text("new")
    finally:
        kill(pid, tmp_path / "one")
    with mounted(source, tmp_path / "two", options) as root:  # a dead process holds no lock
        assert (root / "new").read_text() == "new"


def test_readers_share_an_upper_and_change_nothing_in_it(tmp_path: Path) -> None:
    """Readers do not share an upper directory with a writer, because the kernel caches names and bytes for them."""
    source, options = sample(tmp_path), upper(tmp_path)
    with mounted(source, tmp_path / "one", options, "ro") as one, mounted(source, tmp_path / "two", options, "ro"):
        for root in (one, tmp_path / "two"):
            assert error_of((root / "d/small").write_text, "x") == errno.EROFS
            assert error_of(os.mkdir, root / "new") == errno.EROFS
            assert (root / "d/small").read_text() == "text"
        assert f"{tmp_path}/upper" in refused(source, tmp_path / "three", options)
    assert os.listdir(tmp_path / "upper") == []
    with mounted(source, tmp_path / "one", options) as root:
        (root / "new").write_text("new")
        assert "in use" in refused(source, tmp_path / "two", options, "ro")
    with mounted(source, tmp_path / "one", options, "ro") as root:
        assert (root / "new").read_text() == "new"


def test_a_source_as_its_own_upper_directory_has_no_whiteouts(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    with mounted(tmp_path / "source", tmp_path / "mnt", f"upperdir={tmp_path}/source") as root:
        (root / ".wh.x").write_text("no whiteout: nothing lies below")
        (root / "x").write_text("x")
        (root / "x").unlink()
        assert os.listdir(root) == [".wh.x"]
        assert error_of(os.mkdir, root / ".zarrfs-upper") == errno.EINVAL
    assert os.listdir(tmp_path / "source") == [".wh.x"]
    (tmp_path / "source/.zgroup").write_text('{"zarr_format": 2}')
    line = refused(tmp_path / "source", tmp_path / "mnt", f"upperdir={tmp_path}/source", "view=arrays")
    assert "source: is neither an upper directory of zarrfs" in line


# -- directories that cannot be an upper directory


RECORDS = ("", "[]", '{"zarrfs_upper": 99}', "\x00\xff")
UNFIT: list[Callable[[Path], object]] = [  # what is made in an upper directory that is refused
    lambda upper: (upper / "precious").write_text("x"),
    lambda upper: (upper / ".zarrfs-upper").symlink_to(upper.parent / "nowhere"),
    *(lambda upper, record=record: (upper / ".zarrfs-upper").write_text(record) for record in RECORDS),  # type: ignore[misc]
]


def test_a_directory_with_other_files_or_a_bad_record_is_refused_as_an_upper(tmp_path: Path) -> None:
    source = sample(tmp_path)
    for number, make in enumerate(UNFIT):
        (place := tmp_path / f"upper{number}").mkdir()
        make(place)
        before = contents(place)
        assert str(place) in refused(source, tmp_path / "mnt", f"upperdir={place}")
        assert contents(place) == before
    assert not (tmp_path / "nowhere").exists()


def test_an_upper_that_is_no_directory_of_its_own_is_refused(tmp_path: Path) -> None:
    """It lies in or around the mount point or the source, is no directory, or is not there."""
    (tmp_path / "source/below").mkdir(parents=True)
    (tmp_path / "source/file").write_text("x")
    (tmp_path / "mnt/below").mkdir(parents=True)
    (tmp_path / "link").symlink_to("source/below")
    for place in ("mnt", "mnt/below", "source/below", ".", "link", "source/file", "nothing/at/all"):
        path = os.path.normpath(tmp_path / place)
        line = refused(tmp_path / "source", tmp_path / "mnt", f"upperdir={path}")
        assert path in line or place == "link"
    assert not list(tmp_path.rglob(".zarrfs*"))


def test_an_upper_of_another_or_a_changed_source_is_refused(tmp_path: Path) -> None:
    source, options = sample(tmp_path), upper(tmp_path)
    with mounted(source, tmp_path / "mnt", options) as root:
        (root / "d/own").write_text("own")
    before = contents(tmp_path / "upper")
    other = document(tmp_path, {"other": "x"}, "other.json")
    line = refused(other, tmp_path / "mnt", options)
    assert str(other) in line
    assert str(source) in line
    refs = json.loads(source.read_text())
    refs["refs"]["d/new"] = "new"
    source.write_text(json.dumps(refs))
    line = refused(source, tmp_path / "mnt", options)
    assert "changed" in line
    assert str(source) in line
    assert contents(tmp_path / "upper") == before


def test_rw_without_an_upper_does_not_make_a_reference_set_writable(tmp_path: Path) -> None:
    """The mount is refused or stays read-only; a message names the reason."""
    (tmp_path / "mnt").mkdir()
    done = run("mount", sample(tmp_path), tmp_path / "mnt", "-o", "rw")
    if done.returncode == 0:
        assert "read-only" in done.stderr
        assert error_of((tmp_path / "mnt/x").write_text, "x") == errno.EROFS
        assert run("umount", tmp_path / "mnt").returncode == 0
    else:
        assert "upper" in done.stderr


# -- names


RESERVED = (".wh.x", ".wh.", ".wh..wh..opq", ".zarrfs-upper", ".zarrfs-staging")


def test_reserved_names_cannot_be_created(tmp_path: Path) -> None:
    with mounted(sample(tmp_path), tmp_path / "mnt", upper(tmp_path)) as root:
        (root / "d/own").write_text("own")
        for directory in (root, root / "d", root / "d/sub"):
            for name in RESERVED:
                path = directory / name
                makers: list[Callable[[], object]] = [
                    lambda path=path: path.write_text("x"), path.mkdir, lambda path=path: path.symlink_to("a"),
                    lambda path=path: os.mkfifo(path), lambda path=path: os.rename(root / "d/own", path),
                    lambda path=path: os.rename(root / "d/small", path),
                    lambda path=path: os.link(root / "d/own", path),
                ]
                assert [error_of(call) for call in makers] == [errno.EINVAL] * len(makers), path
                assert error_of(os.stat, path) == errno.ENOENT
                assert error_of(os.unlink, path) == errno.ENOENT
        assert sorted(os.listdir(root)) == ["d", "e"]
        assert "reserved" in log_of(root)
    assert names_in(tmp_path / "upper") == ["d", "d/own"]


# -- symbolic links in an upper directory


def attacked(directory: Path) -> tuple[Path, Path]:
    """Make a source, an upper directory with a file, and a directory outside; return the source and the last one."""
    source, outside = sample(directory), directory / "outside"
    with mounted(source, directory / "mnt", upper(directory)) as root:
        (root / "e/own").write_text("own")
    outside.mkdir()
    (outside / "small").write_text("precious")
    (outside / "sub").mkdir()
    return source, outside


def changes_in(directory: int, own: Path) -> list[Callable[[], object]]:
    """Return all changes to try in an open directory; `own` is a file in another directory."""
    return [
        lambda: os.close(os.open("new", os.O_CREAT | os.O_WRONLY, dir_fd=directory)),
        lambda: os.mkdir("new", dir_fd=directory), lambda: os.symlink("a", "new", dir_fd=directory),
        lambda: os.unlink("small", dir_fd=directory), lambda: os.rmdir("sub", dir_fd=directory),
        lambda: os.close(os.open("small", os.O_WRONLY | os.O_TRUNC, dir_fd=directory)),
        lambda: os.chmod("small", 0o777, dir_fd=directory), lambda: os.utime("small", dir_fd=directory),
        lambda: os.rename("small", "moved", src_dir_fd=directory, dst_dir_fd=directory),
        lambda: os.link(own, "linked", dst_dir_fd=directory),
        lambda: os.rename(own, "moved", dst_dir_fd=directory),
        lambda: os.fchmod(directory, 0o700),
    ]


def test_a_directory_is_replaced_by_a_link_under_the_mount(tmp_path: Path) -> None:
    """The kernel still has the entry cached as a directory, and requests changes in it."""
    source, outside = attacked(tmp_path)
    with mounted(source, tmp_path / "mnt", upper(tmp_path), "attr_timeout=100s") as root:
        (root / "d/own").write_text("own")
        (root / "d/sub/own").write_text("own")
        before = contents(outside)
        for place in ("d/sub", "d"):
            directory = os.open(root / place, os.O_RDONLY | os.O_DIRECTORY)
            shutil.rmtree(tmp_path / "upper" / place)
            (tmp_path / "upper" / place).symlink_to(outside)
            for call in changes_in(directory, root / "e/own"):
                error_of(call)
            os.close(directory)
            assert contents(outside) == before, place
        assert (root / "e/y").read_text() == "y"


def test_a_file_is_replaced_by_a_link_under_the_mount(tmp_path: Path) -> None:
    source, outside = attacked(tmp_path)
    with mounted(source, tmp_path / "mnt", upper(tmp_path), "attr_timeout=100s") as root:
        before = contents(outside)
        for name in ("e/own", "d/small"):
            (root / name).write_text("changed")
            descriptor = os.open(root / name, os.O_PATH | os.O_NOFOLLOW)
            (tmp_path / "upper" / name).unlink()
            (tmp_path / "upper" / name).symlink_to(outside / "small")
            itself = f"/proc/self/fd/{descriptor}"  # by the name, the kernel itself would follow the link
            changes: list[tuple[Callable[..., object], object]] = [
                (os.truncate, 0), (os.open, os.O_WRONLY), (os.open, os.O_RDWR | os.O_TRUNC), (os.chmod, 0o777),
                (os.utime, (1, 1)),
            ]  # fmt: skip
            for call, argument in changes:
                assert error_of(call, itself, argument) is not None, call
            assert error_of(os.chown, itself, 1, 1) is not None
            assert error_of(os.setxattr, itself, "user.x", b"1") == errno.EOPNOTSUPP
            os.close(descriptor)
            assert contents(outside) == before, name


def test_links_with_the_names_of_zarrfs_files_are_not_followed(tmp_path: Path) -> None:
    source, outside = attacked(tmp_path)
    (tmp_path / "upper/d").mkdir()
    for name in (".zarrfs-staging", "d/.wh.small", "d/.wh..wh..opq", "d/.wh.sub", "d/.zarrfs-staging.new"):
        (tmp_path / "upper" / name).symlink_to(outside if name == ".zarrfs-staging" else outside / "small")
    before = contents(outside)
    with mounted(source, tmp_path / "mnt", upper(tmp_path)) as root:
        for call in (
            lambda: (root / "d/large").open("r+b").close(), lambda: (root / "d/small").write_text("x"),
            lambda: (root / "d/small").unlink(), lambda: shutil.rmtree(root / "d/sub"),
            lambda: (root / "d/sub").mkdir(), lambda: (root / "d/small").write_text("y"),
        ):  # fmt: skip
            error_of(call)
        assert contents(outside) == before
        assert daemon_pid(root)
    assert contents(outside) == before


def test_directories_with_what_a_killed_process_left_are_removed(tmp_path: Path) -> None:
    source, _ = attacked(tmp_path)
    with mounted(source, tmp_path / "mnt", upper(tmp_path)) as root:
        for name in ("a", "b", "c"):
            (root / name).mkdir()
            (tmp_path / "upper" / name / ".zarrfs-staging.0123").write_bytes(b"half")
        (root / "a").rmdir()
        (root / "b").rename(root / "c")
        shutil.rmtree(root / "c")
        assert not {"a", "b", "c"} & set(os.listdir(root))


# -- the source


def test_the_source_is_never_touched(tmp_path: Path) -> None:
    shutil.copytree(DATA / "zarr/v2_hier", tmp_path / "source", symlinks=True)
    (tmp_path / "source/link").symlink_to(".zgroup")
    before = contents(tmp_path / "source")
    with mounted(tmp_path / "source", tmp_path / "mnt", upper(tmp_path)) as root:
        for number, path in enumerate(sorted(root.rglob("*"), reverse=True)):
            change = (lambda path: path.unlink(), lambda path: path.write_bytes(b"x"), lambda path: path.chmod(0o700),
                      lambda path: os.utime(path, (1, 1)), lambda path: path.rename(f"{path}.moved"),
                      lambda path: os.link(path, f"{path}.linked"), lambda path: os.chown(path, 1, 1),
                      lambda path: os.setxattr(path, "user.x", b"1"))  # fmt: skip
            error_of(change[number % len(change)], path)
        assert error_of(shutil.rmtree, root / sorted(os.listdir(root))[-1]) in (None, errno.ENOTDIR)
        (root / "link").unlink()
    assert contents(tmp_path / "source") == before
    assert names_in(tmp_path / "upper")

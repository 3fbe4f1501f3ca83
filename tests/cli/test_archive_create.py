"""zarrfs archive create: its arguments, refusals and outputs."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import os
import socket
import stat
import subprocess
from pathlib import Path
from typing import Any

import pytest
import zstandard
from click.testing import CliRunner, Result

from tests.conftest import PROGRAM, run, tmpfs
from tests.copying.trees import snapshot
from zarrfs.archives.blobrefs import MAX_SIZE, PATH_MAX
from zarrfs.cli import main


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write a few files to a new directory, change to it, and return it."""
    for path, text in {"in/a.txt": "a", "in/sub/b.txt": "b", "in/sub/c.tmp": "c", "in/z": "z", "more": "m"}.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def paths(text: str | bytes) -> list[str]:
    """Return the paths of the entries of an archive."""
    return [entry["path"] for entry in json.loads(text)]


def create(*arguments: object, **more: Any) -> Result:
    """Run the command in this process."""
    return CliRunner().invoke(main, ["archive", "create", *map(str, arguments)], **more)


def archived(*arguments: object, told: str = "", **more: Any) -> list[str]:
    """Archive to standard output, and return the sorted paths of the entries."""
    done = create(*arguments, **more)
    assert (done.exit_code, done.stderr) == (0, told)
    return sorted(paths(done.stdout))


def refused(*arguments: object, status: int = 1, **more: Any) -> str:
    """Run a command that must fail, and return its one line of error."""
    done = create(*arguments, **more)
    assert (done.exit_code, done.stderr.count("\n")) == (status, 1), done
    return done.stderr.removeprefix("zarrfs: ").rstrip("\n")


def test_paths_are_normalised_and_archived_once(place: Path) -> None:
    everything = ["in", "in/a.txt", "in/sub", "in/sub/b.txt", "in/sub/c.tmp", "in/z"]
    assert archived("in") == everything
    assert archived(".") == [*everything, "more"]
    assert archived("-C", "in", ".") == ["a.txt", "sub", "sub/b.txt", "sub/c.tmp", "z"]
    assert archived("-C", place / "in", "sub//./b.txt", "./z") == ["sub/b.txt", "z"]
    assert archived("in/sub/", "in/sub", "in/sub/b.txt", "more") == ["in/sub", "in/sub/b.txt", "in/sub/c.tmp", "more"]


def test_exclude_patterns_leave_out_matching_paths(place: Path) -> None:
    kept = ["in", "in/a.txt", "in/sub", "in/sub/b.txt", "in/z"]
    assert archived(".", "--exclude", "*.tmp", "--exclude", "more") == kept
    assert archived("in", "--exclude", "sub") == ["in", "in/a.txt", "in/z"]
    assert archived("in", "--exclude", "in/sub/*") == ["in", "in/a.txt", "in/sub", "in/z"]
    assert archived(".", "--exclude", "/in/sub", "--exclude", "/a.txt") == ["in", "in/a.txt", "in/z", "more"]
    assert archived("in", "more", "--exclude", "./more", "--exclude", "sub/b.txt", "--exclude", "[az]*") == [
        "in", "in/sub", "in/sub/b.txt", "in/sub/c.tmp",
    ]  # fmt: skip
    listed = "./in/a.txt\n./in/sub/b.txt\n./more\n"  # by find(1), without directories
    assert archived("--files-from", "-", "--exclude", "sub", input=listed) == ["in/a.txt", "more"]
    assert archived("--files-from", "-", "--exclude", "./in", input=listed) == ["more"]
    assert archived("in/sub/b.txt", "more", "--exclude", "in/s*") == ["more"]


def test_files_from_reads_paths_from_a_list(place: Path) -> None:
    (place / "list").write_text("in/a.txt\n\nmore\n")
    assert archived("--files-from", "list", "in/z") == ["in/a.txt", "in/z", "more"]
    (place / "new\nline").write_text("1")
    assert archived("-0", "--files-from", "-", input="in/z\0new\nline\0") == ["in/z", "new\nline"]
    assert archived("-C", "in", "--files-from", "-", input="z") == ["z"]
    assert "missing: no such file" in refused("--files-from", "missing", status=2)
    assert archived("--files-from", "-", input="in/z\r\n\r\nmore\r\n") == ["in/z", "more"]
    (place / "cr\r").write_text("1")
    assert archived("-0", "--files-from", "-", input="cr\r\0") == ["cr\r"]


def test_missing_paths_and_paths_through_links_below_other_paths_are_errors(place: Path) -> None:
    assert refused("-C", "in", "a.txt/b").startswith("in: a.txt/b: no such file or directory")
    assert refused("in", "in/gone") == "in/gone: no such file or directory"
    assert refused(".", "in/a.txt/b").startswith("in/a.txt/b: no such file or directory")
    os.symlink("../in", "in/link")
    through = "is below a symbolic link, which"
    assert refused("in", "in/link/sub/b.txt").startswith(f"in/link/sub/b.txt: {through}")
    assert refused("in/link/z", "in/link").startswith(f"in/link/z: {through}")
    assert refused(".", "in/link/gone").startswith("in/link/gone: ")
    assert archived("in/sub", "in/sub/gone", "--exclude", "gone") == ["in/sub", "in/sub/b.txt", "in/sub/c.tmp"]
    assert archived("in/link", "in/link/sub", "--exclude", "link") == []


def make(kind: str, at: str) -> None:
    """Create an entry that no archive can hold."""
    if kind == "socket":
        with socket.socket(socket.AF_UNIX) as one:
            one.bind(at)
    elif kind == "link":
        os.symlink(b"\xff", at)
    else:
        modes = {"fifo": stat.S_IFIFO, "character": stat.S_IFCHR, "block": stat.S_IFBLK}
        os.mknod(at, modes[kind] | 0o600, os.makedev(1, 3))


RULES = {
    "fifo": "is a FIFO, which is not opened", "socket": "is a socket, which is not opened",
    "character": "is a device, which is not opened", "block": "is a device, which is not opened",
    "link": "a symbolic link whose target is not UTF-8, which no archive can hold",
}  # fmt: skip


@pytest.mark.parametrize("kind", RULES)
def test_entries_that_no_archive_can_hold_are_refused_or_left_out(place: Path, kind: str) -> None:
    if kind in ("character", "block") and os.geteuid():
        pytest.skip("makes devices")
    make(kind, "in/bad")
    told = f"in/bad: {RULES[kind]}"
    assert refused("in", "-O", "new.json", "--blobs", "b") == f"{told} (--skip-unsupported leaves it out)"
    assert sorted(os.listdir()) == ["in", "more"]
    assert refused("in/bad") == f"{told} (--skip-unsupported leaves it out)"
    left = archived("in", "--skip-unsupported", told=f"zarrfs: warning: {told}: left out\n")
    assert left == ["in", "in/a.txt", "in/sub", "in/sub/b.txt", "in/sub/c.tmp", "in/z"]
    assert archived("-q", "in/bad", "more", "--skip-unsupported") == ["more"]


@pytest.mark.parametrize("directory", [False, True])
def test_a_name_that_is_not_utf8_is_refused_or_left_out(place: Path, directory: bool) -> None:
    os.makedirs(b"in/\xff") if directory else Path(os.fsdecode(b"in/\xff")).touch()
    if directory:
        Path(os.fsdecode(b"in/\xff/x")).touch()
    assert "a name that is not UTF-8, which no archive can hold" in refused("in")
    done = run("archive", "create", "in", "--skip-unsupported")
    assert (done.returncode, done.stderr.count("\n")) == (0, 1)
    assert len(paths(done.stdout)) == 6


def test_a_path_that_is_too_long_is_refused(place: Path) -> None:
    at = os.open("in", os.O_RDONLY)
    for _ in range(20):
        os.mkdir("d" * 200, dir_fd=at)
        above, at = at, os.open("d" * 200, os.O_RDONLY, dir_fd=at)
        os.close(above)
    os.close(os.open("f" * 75, os.O_CREAT | os.O_WRONLY, dir_fd=at))
    os.close(at)
    assert f"a path over {PATH_MAX:,} bytes" in refused("in")
    assert len(archived("-C", "in", "d" * 200)) == 21


def test_the_output_is_compressed_as_its_name_says(place: Path) -> None:
    opened = {
        "xz": lzma.decompress, "json.bz2": bz2.decompress, "any": lambda data: data, "tar.json.GZ": gzip.decompress,
        "json.zst": lambda data: zstandard.ZstdDecompressor().stream_reader(data).read(),
    }  # fmt: skip
    for ending, decompressed in opened.items():
        assert run("archive", "create", "in", "-O", f"new.{ending}").returncode == 0
        assert len(paths(decompressed((place / f"new.{ending}").read_bytes()))) == 6
    assert run("archive", "create", "more", "-O", "new.json", "--force").returncode == 0
    assert paths((place / "new.json").read_bytes()) == ["more"]
    with open("/dev/full", "wb") as full:
        done = subprocess.run([PROGRAM, "archive", "create", "in"], stdout=full, stderr=subprocess.PIPE, check=False)
    told = b"zarrfs: standard output: cannot be written: no space left on device\n"
    assert (done.returncode, done.stderr) == (1, told)


def test_outputs_are_not_archived(place: Path) -> None:
    command = ("archive", "create", ".", "-O", "in/new.json", "--blobs", "in/blobs", "--inline-threshold", "0")
    done = run(*command)
    assert (done.returncode, done.stderr) == (0, "zarrfs: warning: in/blobs: is an output of this command: left out\n")
    first = (place / "in/new.json").read_bytes()
    assert sorted(paths(first)) == ["in", "in/a.txt", "in/sub", "in/sub/b.txt", "in/sub/c.tmp", "in/z", "more"]
    done = run(*command, "--force")
    told = [f"zarrfs: warning: in/{name}: is an output of this command: left out" for name in ("blobs", "new.json")]
    assert (done.returncode, sorted(done.stderr.splitlines())) == (0, told)
    assert sorted(paths((place / "in/new.json").read_bytes())) == sorted(paths(first))
    assert "is an output of this command" in refused(".", "--blobs", ".", status=2)
    with open("in/out.json", "wb") as file:
        subprocess.run([PROGRAM, "archive", "create", "in", "--exclude", "blobs"], stdout=file, check=True)
    assert "in/out.json" not in paths((place / "in/out.json").read_bytes())
    (place / "link").symlink_to("in")
    for _ in range(2):
        done = run("archive", "create", "link/sub", "-O", "in/sub/new.json", "--blobs", "in/sub/blobs", "--force")
        assert done.returncode == 0
        assert paths((place / "in/sub/new.json").read_bytes()) == ["link/sub", "link/sub/b.txt", "link/sub/c.tmp"]


def test_names_that_are_reserved_for_unfinished_copies_are_not_archived(place: Path) -> None:
    for above in "in", "in/sub":
        (place / above / ".zarrfs-staging").mkdir()
        (place / above / ".zarrfs-staging/note").write_text("{}")
    assert archived("-C", "in", ".") == ["a.txt", "sub", "sub/b.txt", "sub/c.tmp", "z"]
    assert "no such file" in refused("in/.zarrfs-staging/note", "more")


def test_a_file_of_a_size_that_no_archive_can_hold_is_refused_or_left_out(place: Path) -> None:
    with tmpfs(place / "large", "size=64k"):  # other file systems allow no files of this size
        for name, size in ("most", MAX_SIZE), ("over", MAX_SIZE + 1):
            (place / "large" / name).touch()
            os.truncate(place / "large" / name, size)
        told = f"large/over: a size over {MAX_SIZE:,} bytes, which no archive can hold"
        assert refused("large") == f"{told} (--skip-unsupported leaves it out)"
        document = place / "new.json"
        done = run("archive", "create", "large", "--skip-unsupported", "-O", document)
        assert (done.returncode, done.stderr) == (0, f"zarrfs: warning: {told}: left out\n")
    assert run("ls", document, "large").stdout == "most\n"


def test_only_symlinks_in_the_parents_of_a_path_are_followed(place: Path) -> None:
    os.symlink("in", "link")
    assert archived("link/") == ["link"]
    assert archived("link/sub") == ["link/sub", "link/sub/b.txt", "link/sub/c.tmp"]
    os.symlink("a.txt", "in/inner")
    (place / "in/large").write_bytes(os.urandom(5 << 20))
    named = ["link/a.txt", "link/inner", "link/large"]
    assert archived(*named, "--blobs", "blobs") == named
    assert archived("link/sub", "link/sub/b.txt") == ["link/sub", "link/sub/b.txt", "link/sub/c.tmp"]


def test_creating_and_extracting_an_archive_restores_the_tree(tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "a/b").mkdir(parents=True)
    (source / "a/b/big").write_bytes(os.urandom(3 << 20))
    (source / "a/small").write_bytes(b"\0\xff")
    (source / "a/text").write_text("text")
    (source / "empty").mkdir(mode=0o2700)
    (source / "link").symlink_to("a/b")
    with open(source / "sparse", "wb") as file:
        file.truncate(1 << 30)
        os.pwrite(file.fileno(), b"x", 1 << 29)
    (source / "a/small").chmod(0o4711)
    for name in ("a/b/big", "a/small", "a/text", "a/b", "a", "empty", "link", "sparse", "."):
        os.utime(source / name, (1_500_000_000, 1_500_000_000), follow_symlinks=False)
    blobs = ("--blobs", tmp_path / "blobs")
    assert run("archive", "create", "-C", source, "-O", tmp_path / "a.json", *blobs, ".").returncode == 0
    assert run("copy", tmp_path / "a.json", tmp_path / "out", *blobs).returncode == 0
    found, expected = snapshot(tmp_path / "out"), snapshot(source)
    del found[""], expected[""]  # the directory itself is not in the archive
    expected["a/small"] = expected["a/small"]._replace(mode=0o711)  # a copy never has set-ID bits
    assert found == expected
    assert os.stat(tmp_path / "out/sparse").st_blocks == os.stat(source / "sparse").st_blocks


def test_files_that_report_size_0_but_have_content_are_refused() -> None:
    done = run("archive", "create", "-C", "/proc/self", "--inline", "status")
    assert done.returncode == 1
    assert "status: has bytes, but a size of 0" in done.stderr

"""zarrfs archive create -O FILE.tar: an archive and its blobs in one tar, read by zarrfs, tar and tarfile."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import random
import subprocess
import tarfile
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.archives.compiled import nodes_of
from tests.archives.createdtrees import Model, expected, models, on_disk, shown, silent, small_pieces, write
from tests.archives.test_create import HOW
from tests.archives.test_create_failures import KILLS, MEMORY, peak, small_disk, write_tree
from tests.conftest import PROGRAM, run
from tests.fakeflux import dump_tar
from tests.mounts.mounting import mounted
from zarrfs.archives.blob_reader import BlobReader
from zarrfs.archives.create import Progress, create
from zarrfs.archives.dump_writer import check_name, header
from zarrfs.archives.pack_tree import CreateOptions
from zarrfs.errors import ReadError, UsageError

small_disk = small_disk


def made(base: Path, tar: Path, dump: str = "main", **how: Any) -> Path:
    """Archive all of `base` into `tar` with create(), and fail on a warning; return `tar`."""
    with open(tar, "wb") as file:
        create(str(base), ["."], file, CreateOptions(dump=dump, **how), Progress(), silent)
    return tar


def blobs_of(tar: Path, name: str = "main") -> list[bytes]:
    """Return the blobs of a tar by number, read with tarfile, after checking them against the document."""
    with tarfile.open(tar) as found:
        members = {member.name: found.extractfile(member).read() for member in found}  # type: ignore[union-attr]
    document = json.loads(members.pop(f"archive/{name}"))
    entries = document if isinstance(document, list) else document.values()
    wanted = [
        region for entry in entries if entry.get("encoding") == "blobvec" for region in entry["data"]
    ]  # fmt: skip
    blobs = [members.pop(f"archive/{name}_blobs/{number}") for number in range(len(wanted))]
    assert not members
    for (_offset, length, blobref), data in zip(wanted, blobs, strict=True):
        assert len(data) == length
        assert blobref.endswith("-" + hashlib.new(blobref.partition("-")[0], data).hexdigest())
    return blobs


@settings(deadline=None, max_examples=20)
@given(models(), HOW, st.booleans())
def test_tars_of_random_trees_equal_the_trees(model: Model, how: dict[str, Any], pieces: bool) -> None:
    with tempfile.TemporaryDirectory() as name, small_pieces() if pieces else contextlib.nullcontext():
        base = Path(name, "tree")
        base.mkdir()
        write(base, model)
        tar = made(base, Path(name, "a.tar"), **how)
        found = nodes_of(tar)
        assert {path: shown(node) for path, node in found.items() if path} == {
            path: expected(model, path) for path in model
        }
        blobs_of(tar)
        assert tar.stat().st_size % 10_240 == 0
        again = made(base, Path(name, "b.tar"), **how | {"jobs": 3 - how["jobs"]})
        assert tar.read_bytes() == again.read_bytes()  # the output is deterministic


@given(st.from_regex(r"[a-z/._0-9-]{1,100}", fullmatch=True), st.integers(0, (1 << 33) - 1) | st.integers(0, 9999))
def test_headers_equal_those_of_tarfile(path: str, size: int) -> None:
    theirs = tarfile.TarInfo(path)
    theirs.size = size
    assert header(path, size) == theirs.tobuf(tarfile.USTAR_FORMAT)


@pytest.mark.parametrize("size", [(1 << 33) - 1, 1 << 33, 1 << 40])
def test_headers_of_documents_of_any_size(size: int) -> None:
    found = tarfile.TarInfo.frombuf(header("archive/main", size), "utf-8", "strict")
    assert (found.name, found.size, found.isreg()) == ("archive/main", size, True)


def test_thousands_of_tiny_regions_fit_the_memory_of_a_task(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    tree.mkdir()
    for number in range(20):
        (tree / str(number)).write_bytes(random.Random(number).randbytes(3000 + number * 100))
    (tree / "long").write_bytes(os.urandom(9000))
    (tree / "large").write_bytes(os.urandom(100_000))  # 33,000 blobs; a task holds 2,000
    how = {"inline": 0, "region": 3}
    assert sum(map(len, blobs_of(made(tree, tmp_path / "a.tar", jobs=2, **how)))) == sum(
        path.stat().st_size for path in tree.iterdir()
    )
    assert (tmp_path / "a.tar").read_bytes() == made(tree, tmp_path / "b.tar", jobs=1, **how).read_bytes()


def test_small_files_after_a_file_of_many_extents_fit_the_memory_of_a_task(tmp_path: Path) -> None:
    base = tmp_path / "tree"
    for name, count in (("a", 60), ("b", 64)):  # together one task
        (base / name).mkdir(parents=True)
        for number in range(count):
            (base / name / f"{number + 1:03}").write_bytes(os.urandom(32 << 10))
    with open(base / "a/0", "wb") as file:
        for at in range(511):
            os.pwrite(file.fileno(), os.urandom(4096), 8192 * at)
    assert len(blobs_of(made(base, tmp_path / "x.tar", region=32 << 10))) == 635


def test_regions_larger_than_a_task(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    tree.mkdir()
    data = os.urandom(40 << 20)
    (tree / "large").write_bytes(data)
    (tree / "small").write_bytes(data[:5000])
    assert blobs_of(made(tree, tmp_path / "a.tar", region=16 << 20, jobs=2)) == [
        data[: 16 << 20], data[16 << 20 : 32 << 20], data[32 << 20 :], data[:5000],
    ]  # fmt: skip


def test_a_tar_can_be_listed_mounted_extracted_and_verified(tmp_path: Path) -> None:
    write_tree(tmp_path / "tree")
    tar = tmp_path / "job.tar"
    done = run("archive", "create", "-C", tmp_path / "tree", ".", "-O", tar, "--name", "a.b")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    listed = subprocess.run(["tar", "-tf", tar], capture_output=True, text=True, check=True).stdout.splitlines()
    assert (listed[0], listed[-1]) == ("archive/a/b_blobs/0", "archive/a/b")
    with mounted(tar, tmp_path / "mnt") as mountpoint:
        assert on_disk(mountpoint) == on_disk(tmp_path / "tree")
        counts = json.loads(run("stats", "--json", mountpoint).stdout)
        assert counts["blobs_fetched"] == {}  # every blob was read in place, where the document locates it
    assert run("archive", "extract", "-C", tmp_path / "out", f"{tar}#a.b").returncode == 0
    assert on_disk(tmp_path / "out") == on_disk(tmp_path / "tree")
    assert run("archive", "verify", tar).returncode == 0
    again = run("archive", "create", "-C", tmp_path / "tree", ".", "-O", tar)
    assert "already exists; --force replaces it" in again.stderr
    with open(tar, "r+b") as file:
        file.seek(1000)  # in the first blob
        file.write(bytes(100))
    done = run("archive", "verify", tar)
    assert done.returncode == 1
    assert "wrong hash: large: " in done.stdout


@pytest.mark.parametrize("name", ["", ".", "a.", ".a", "a..b", "a/b", "../x", "é", "a b", "a" * 65, "a\n"])
def test_invalid_names(name: str) -> None:
    with pytest.raises(Exception, match="a name has up to 64 letters"):
        check_name(name)


@pytest.mark.parametrize("name", ["a_blobs.1", "a.b_blobs.02"])
def test_names_of_blobs_are_refused(name: str) -> None:
    with pytest.raises(UsageError, match="has the form of a blob's name; choose another"):
        check_name(name)


@pytest.mark.parametrize("name", ["main", "a", "a.b-c_d.9", "a" * 64])
def test_valid_names(name: str, tmp_path: Path) -> None:
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree/file").write_bytes(b"x" * 5000)
    tar = made(tmp_path / "tree", tmp_path / "a.tar", name)
    assert blobs_of(tar, name.replace(".", "/")) == [b"x" * 5000]
    assert nodes_of(Path(f"{tar}#{name}"))["file"].data == b"x" * 5000


def test_a_tar_in_the_directory_that_it_is_mounted_on(tmp_path: Path) -> None:
    write_tree(tmp_path / "tree")
    place = tmp_path / "place"
    place.mkdir()
    made(tmp_path / "tree", place / "job.tar")
    with mounted(place / "job.tar", place, "read_timeout=60") as mountpoint:
        assert on_disk(mountpoint) == on_disk(tmp_path / "tree")


def test_a_fifo_in_place_of_a_tar_is_an_error(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x.tar")

    async def main() -> None:
        reader = BlobReader((str(tmp_path / "x.tar"),))
        with trio.fail_after(60), pytest.raises(ReadError):
            await reader.read(f"sha1-{'0' * 40}:1", 0, 1, 0, 1)
        await reader.aclose()

    trio.run(main)


def test_text_that_looks_like_a_region_is_harmless(tmp_path: Path) -> None:
    """The text may lead to wrong locations of blobs, which are then found by their hashes."""
    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / "a").write_text(f'[0, 7, "sha1-{"a" * 40}"]')
    for name in "bcd":
        (tree / name).write_bytes(name.encode() * 5000)
    assert nodes_of(made(tree, tmp_path / "a.tar"))["c"].data == b"c" * 5000
    document = [{"path": "x", "mode": 0o100644, "data": [0, 7, f"sha1-{'a' * 40}"]}]
    with tarfile.open(tmp_path / "a.tar") as tar:
        member = tar.extractfile("archive/main")
        assert member is not None
        document += json.load(member)
        blobs = [tar.extractfile(f"archive/main_blobs/{number}").read() for number in range(3)]  # type: ignore[union-attr]
    dump_tar(tmp_path / "b.tar", {"main": (document, blobs)})
    found = nodes_of(tmp_path / "b.tar")
    assert [found[name].data for name in "bcd"] == [name.encode() * 5000 for name in "bcd"]


def test_no_memory_for_a_task(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x" * 5000)
    command = [PROGRAM, "archive", "create", "file", "-O", "x.tar", "--jobs", "1000", "--region-size", "64MiB"]
    limited = ["sh", "-c", 'ulimit -v 4000000; exec "$@"', "sh", *command]
    done = subprocess.run(limited, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "of memory for what is read at once: give fewer --jobs" in done.stderr
    assert os.listdir(tmp_path) == ["file"]


def test_a_killed_command_leaves_no_partial_tar(tmp_path: Path) -> None:
    write_tree(tmp_path / "tree")
    command = [PROGRAM, "archive", "create", "-C", str(tmp_path / "tree"), ".", "--jobs", "2", "-O"]
    began = time.monotonic()
    subprocess.run([*command, tmp_path / "whole.tar"], check=True)
    took = time.monotonic() - began
    for _ in range(KILLS):
        child = subprocess.Popen([*command, tmp_path / "new.tar"], stdout=subprocess.PIPE)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(random.uniform(0.1, took))
        child.kill()
        child.communicate(timeout=60)
        if (tmp_path / "new.tar").exists():
            assert (tmp_path / "new.tar").read_bytes() == (tmp_path / "whole.tar").read_bytes()
            (tmp_path / "new.tar").unlink()
    subprocess.run([*command, tmp_path / "new.tar"], check=True)
    assert (tmp_path / "new.tar").read_bytes() == (tmp_path / "whole.tar").read_bytes()


@pytest.mark.parametrize("jobs", ["1", "2"])
def test_a_full_disk_is_an_error_and_leaves_no_tar(tmp_path: Path, small_disk: Path, jobs: str) -> None:
    write_tree(tmp_path / "tree")
    done = run("archive", "create", "-C", tmp_path / "tree", ".", "--jobs", jobs, "-O", small_disk / "new.tar")
    told = f"zarrfs: {small_disk}/new.tar: cannot be written: No space left on device\n"
    assert (done.returncode, done.stderr) == (1, told)
    assert os.listdir(small_disk) == []


def test_memory_does_not_grow_with_file_size(tmp_path: Path) -> None:
    with open(tmp_path / "sparse", "wb") as file:
        os.truncate(file.fileno(), 100 << 30)
        for number in range(2000):
            os.pwrite(file.fileno(), b"%d" % number, number * (50 << 20) + 12345)
        for number in range(64):
            os.pwrite(file.fileno(), os.urandom(1 << 20), number << 20)
    assert peak("sparse", "-O", "new.tar", "--jobs", "2", cwd=tmp_path) < MEMORY // 3
    assert len(blobs_of(tmp_path / "new.tar")) > 2000


def test_blobs_are_found_with_a_dictionary_document(tmp_path: Path) -> None:
    (tmp_path / "tree").mkdir()
    for name in "abc":
        (tmp_path / "tree" / name).write_bytes(name.encode() * 5000)
    tar = made(tmp_path / "tree", tmp_path / "a.tar", dictionary=True)
    with mounted(tar, tmp_path / "mnt") as mountpoint:
        assert (mountpoint / "b").read_bytes() == b"b" * 5000
        assert json.loads(run("stats", "--json", mountpoint).stdout)["blobs_fetched"] == {}


def test_a_tar_needs_a_file_with_a_descriptor(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="fileno"):
        create(str(tmp_path), ["."], io.BytesIO(), CreateOptions(dump="main"), Progress(), silent)

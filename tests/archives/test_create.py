"""zarrfs archive create: archives of trees, read back as sources."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import stat
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import trio

from tests.archives.compiled import tree
from tests.conftest import DATA
from zarrfs.archives.local_tree import LocalTree
from zarrfs.archives.writer import MAX_INLINE, BlobDirectory, write_archive
from zarrfs.store.api import KINDS, Kind


def silent(text: str) -> None:
    """Fail on a warning."""
    raise AssertionError(text)


def made(
    base: Path, paths: list[str], blobs: Path | None = None, algorithm: str = "sha1", all_inline: bool = False,
    inline: int = 1024, **how: Any,
) -> bytes:  # fmt: skip
    """Return the document of an archive of `paths`, and fail on a warning."""
    out, most = io.BytesIO(), MAX_INLINE if all_inline else inline

    async def write() -> None:
        with contextlib.ExitStack() as stack:
            local = stack.enter_context(LocalTree(str(base), silent))
            put = None if blobs is None else stack.enter_context(BlobDirectory(str(blobs), algorithm))
            async with contextlib.aclosing(local.entries(paths)) as entries:
                await write_archive(entries, local, out.write, put, most, **how)

    trio.run(write)
    return out.getvalue()


ODD = ["a", "a-", "é", "x y", "n\nl", '"', ".h", "z" * 200, os.fsdecode("日本".encode())]


@pytest.mark.parametrize(
    "how",
    [
        {}, {"algorithm": "sha256", "inline": 0, "region": 5000}, {"dictionary": True, "inline": 20_000},
        {"all_inline": True, "region": 100},
    ],
)  # fmt: skip
def test_an_archive_equals_the_tree(tmp_path: Path, how: dict[str, Any]) -> None:
    """Odd names, sizes, modes and times, holes, links, empty directories."""
    base, blobs, expected = tmp_path / "tree", tmp_path / "blobs", {}
    base.mkdir()
    blobs.mkdir()
    for number, name in enumerate(ODD):
        (base / name).mkdir()
        (base / name / "empty").mkdir(mode=0o2700)
        (base / name / "link").symlink_to(["a", "../x", "/é", "n\nl", "x" * 4000][number % 5])
        data = b"\xff" * [0, 1, 9, 1025, 30_000][number % 5] + bytes([0, 0, 1, 5000, 300_000][(number + 2) % 5])
        (base / name / "file").write_bytes(data)
        (base / name / "file").chmod([0o644, 0o4755, 0o2750, 0o1777, 0][number % 5])
        with open(base / name / "sparse", "wb") as file:
            os.truncate(file.fileno(), 70_000)
            os.pwrite(file.fileno(), b"x" * 9000, 4096 * number)
        (base / name).chmod([0o755, 0o700, 0o2775, 0o1777][number % 4])
    for at, path in enumerate(sorted(base.rglob("*"), reverse=True)):
        seconds = [-(2**31), -1, 0, 2**33][at % 4]
        os.utime(path, ns=(0, seconds * 10**9 + 999_999_999), follow_symlinks=False)
        status = path.lstat()
        kind = KINDS[stat.S_IFMT(status.st_mode)]
        data = {Kind.FILE: path.read_bytes, Kind.SYMLINK: lambda at=path: os.readlink(at)}.get(kind, lambda: None)()
        mode = None if kind is Kind.SYMLINK else stat.S_IMODE(status.st_mode)
        expected[str(path.relative_to(base))] = kind, mode, seconds * 10**9, data
    document = made(base, ["."], blobs, **how)
    found = tree(document, blobs=(str(blobs),), type="archive")
    assert found.warnings == ()
    assert {
        path: (node.kind, None if node.kind is Kind.SYMLINK else node.mode, node.mtime_ns, node.data)
        for path, node in found.nodes.items() if path
    } == expected  # fmt: skip
    for blob in blobs.iterdir():  # every file is a blob
        algorithm, _, digest = blob.name.partition("-")
        assert algorithm == how.get("algorithm", "sha1")
        assert len(blob.read_bytes()) <= how.get("region", 1 << 20)
        assert hashlib.new(algorithm, blob.read_bytes()).hexdigest() == digest
    assert any(blobs.iterdir()) is ("all_inline" not in how)
    assert document == made(base, ["."], blobs, **how)  # the output is deterministic


@pytest.mark.parametrize("form", ["list", "dict"])
def test_equal_to_an_archive_of_flux(tmp_path: Path, form: str) -> None:
    """The sample is Flux's archive of the same tree: its entries and blobs are equal."""
    sample: Any = json.loads((DATA / f"archives/flux-{form}.json").read_bytes())
    blobs = DATA / "archives/blobs"
    for path, node in tree(sample, blobs=(str(blobs),)).nodes.items():
        at = tmp_path / path
        if node.kind is Kind.DIRECTORY:
            at.mkdir(exist_ok=True)
        elif node.kind is Kind.SYMLINK:
            at.symlink_to(str(node.data))
        else:
            assert isinstance(node.data, bytes)
            with open(at, "wb") as file:
                for start in range(0, node.size, 4096):
                    if any(node.data[start : start + 4096]):
                        os.pwrite(file.fileno(), node.data[start : start + 4096], start)
                os.truncate(file.fileno(), node.size)
    entries = sample if form == "list" else [{"path": path, **fields} for path, fields in sample.items()]
    for entry in sorted(entries, key=lambda entry: str(entry["path"]), reverse=True):
        if entry["path"] != "job/config":
            os.chmod(tmp_path / entry["path"], entry["mode"] & 0o7777)
        os.utime(tmp_path / entry["path"], (0, entry["mtime"]), follow_symlinks=False)
        del entry["ctime"]
    (tmp_path / "blobs").mkdir()
    document = made(tmp_path, ["job"], tmp_path / "blobs", dictionary=form == "dict")
    found: Any = json.loads(document)
    if form == "dict":
        found = [{"path": path, **fields} for path, fields in found.items()]
    assert sorted(found, key=lambda entry: str(entry["path"])) == sorted(entries, key=lambda entry: str(entry["path"]))
    assert {path.name: path.read_bytes() for path in (tmp_path / "blobs").iterdir()} == {
        path.name: path.read_bytes() for path in blobs.iterdir()
    }


def test_text_and_binary_inline_data(tmp_path: Path) -> None:
    files = {"text": "é\u0001\n".encode(), "nul": b"a\0b", "latin": b"\xe9", "half": "€".encode()[:2]}
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    large = {f"{name}2": data + b"x" * 300_000 + data for name, data in files.items()}
    for name, data in large.items():
        (tmp_path / name).write_bytes(data)
    found = json.loads(made(tmp_path, ["."], all_inline=True))
    encodings = {entry["path"]: entry["encoding"] for entry in found}
    assert {name for name in encodings if encodings[name] == "utf-8"} == {"text", "text2"}
    assert set(encodings.values()) == {"utf-8", "base64"}
    assert {path: node.data for path, node in tree(found).nodes.items() if path} == files | large


def test_equal_contents_are_one_blob(tmp_path: Path) -> None:
    tree_, blobs = tmp_path / "tree", tmp_path / "blobs"
    tree_.mkdir()
    blobs.mkdir()
    for name in "abc":
        (tree_ / name).write_bytes(b"1" * 5000)
    made(tree_, ["."], blobs)
    (only,) = blobs.iterdir()
    before = only.stat()
    made(tree_, ["."], blobs)
    assert only.stat().st_ino == before.st_ino
    os.truncate(only, 4999)  # a blob of the wrong length is replaced
    made(tree_, ["."], blobs)
    assert only.read_bytes() == b"1" * 5000
    only.rename(tmp_path / "elsewhere")
    only.symlink_to(tmp_path / "elsewhere")
    made(tree_, ["."], blobs)
    assert only.is_symlink()


@pytest.mark.parametrize("more", [[], ["attributes"], ["jobspec", "refs", "version"]])
def test_files_named_like_the_keys_of_a_jobspec(tmp_path: Path, more: list[str]) -> None:
    assert made(tmp_path, ["."], dictionary=True) == b"{}\n"
    for name in ("resources", "tasks", *more):
        (tmp_path / name).write_text(name)
    found = tree(made(tmp_path, ["."], dictionary=True))
    assert found.kind == "archive"
    assert found.nodes["tasks"].data == b"tasks"


@pytest.mark.parametrize(
    ("size", "written", "regions"),
    [
        (100, [], None), (5000, [], None), (1 << 40, [], None),
        (20_000, [(8192, 4096)], [[8192, 4096]]), (20_000, [(0, 1)], [[0, 4096]]),
        (20_000, [(19_999, 1)], [[16384, 3616]]),
        (20_000, [(0, 9000)], [[0, 10_000], [10_000, 2288]]),
        (40_000, [(4096, 12_288)], [[4096, 10_000], [14_096, 2288]]),
        (90_000, [(0, 1), (40_960, 1)], [[0, 4096], [40_960, 4096]]), (4096, [(0, 4096)], [[0, 4096]]),
    ],
)  # fmt: skip
def test_regions_are_cut_from_the_start_of_each_extent(
    tmp_path: Path, size: int, written: list[tuple[int, int]], regions: list[list[int]] | None
) -> None:
    (tmp_path / "b").mkdir()
    with open(tmp_path / "file", "wb") as file:
        os.truncate(file.fileno(), size)
        for at, length in written:
            os.pwrite(file.fileno(), b"x" * length, at)
    (entry,) = json.loads(made(tmp_path, ["file"], tmp_path / "b", region=10_000))
    assert entry["size"] == size
    assert [region[:2] for region in entry["data"]] == regions if regions else "data" not in entry


def test_memory_does_not_grow_with_the_number_of_files(tmp_path: Path) -> None:
    """Files in the document and files in blobs take turns."""
    (tmp_path / "0").write_bytes(b"x" * (7 << 20))
    (tmp_path / "1").write_bytes(b"x" * (9 << 20))
    paths = [str(number) for number in range(40)]
    for path in paths[2:]:
        os.link(tmp_path / str(int(path) % 2), tmp_path / path)

    async def write() -> None:
        with LocalTree(str(tmp_path), silent) as local, BlobDirectory(str(tmp_path / "blobs")) as put:
            async with contextlib.aclosing(local.entries(paths)) as entries:
                await write_archive(entries, local, len, put, 8 << 20)

    tracemalloc.start()
    try:
        trio.run(write)
        assert tracemalloc.get_traced_memory()[1] < 128 << 20
    finally:
        tracemalloc.stop()

"""zarrfs archive create: archives of trees, read back as sources."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.archives.compiled import Node, tree
from tests.conftest import DATA
from zarrfs.archives.local_tree import LocalTree
from zarrfs.archives.writer import MAX_INLINE, BlobDirectory, write_archive
from zarrfs.store.api import Kind

BLOCK = 4096  # block size, in bytes, of the file systems that tests run on

_NAMES = st.sampled_from(["a", "b", "ab", "a-", "é", "日本", "x y", "n\nl", '"', ".h", "z" * 200])
_PATHS = st.lists(_NAMES, min_size=1, max_size=4).map("/".join)
_TIMES = st.integers(-(2**31), 2**33).flatmap(lambda s: st.sampled_from([s * 10**9, s * 10**9 + 999_999_999]))
_PIECES = st.lists(
    st.tuples(
        st.integers(0, 60_000), st.binary(max_size=9) | st.text(max_size=9).map(str.encode) | st.just(b"x" * 9000)
    ), max_size=4,
)  # fmt: skip
_FILES = st.builds(
    lambda pieces, more, mode, time: File(pieces, more, mode, time),
    _PIECES, st.sampled_from([0, 0, 1, 5000, 300_000]), st.sampled_from([0o644, 0o4755, 0o2750, 0o1777, 0]), _TIMES,
)  # fmt: skip
_LINKS = st.sampled_from(["a", "../x", "/é", "b c", "n\nl", "x" * 4000])


class File(NamedTuple):
    """A regular file: (offset, data) to write, `more` bytes of hole at the end, permission bits, mtime in ns."""

    pieces: list[tuple[int, bytes]]
    more: int
    mode: int
    mtime_ns: int

    def data(self) -> bytes:
        found = bytearray()
        for at, data in self.pieces:
            found = found.ljust(at + len(data), b"\0") if data else found
            found[at : at + len(data)] = data
        return bytes(found) + bytes(self.more)

    def allocated(self) -> int:
        """Return the number of bytes in the blocks that were written to."""
        blocks = {at // BLOCK for start, data in self.pieces for at in range(start, start + len(data))}
        return sum(min(BLOCK, len(self.data()) - block * BLOCK) for block in blocks)


Directory = tuple[int, int]  # permission bits, mtime in ns
Model = dict[str, Any]  # by path: a File, a Directory, or the target of a symlink


def models() -> st.SearchStrategy[Model]:
    """Return a strategy for trees; every parent of an entry is a directory."""
    directories = st.tuples(st.sampled_from([0o755, 0o700, 0o2775, 0o1777]), _TIMES)
    entries = st.lists(st.tuples(_PATHS, st.one_of(_FILES, _LINKS, directories)), max_size=8)
    return st.tuples(entries, directories).map(lambda drawn: _model(*drawn))


def _model(entries: list[tuple[str, Any]], usual: Directory) -> Model:
    model: Model = {}
    for path, what in entries:
        above = ["/".join(path.split("/")[:depth]) for depth in range(1, path.count("/") + 1)]
        if path not in model and all(isinstance(model.get(at, usual), tuple) and type(model.get(at)) is not File
                                     for at in above):  # fmt: skip
            for at in above:
                model.setdefault(at, usual)
            model[path] = what
    return model


def write(place: Path, model: Model) -> None:
    """Create the tree of a model in the directory `place`."""
    for path, what in model.items():
        at = place / path
        if isinstance(what, str):
            at.symlink_to(what)
        elif isinstance(what, File):
            with open(at, "wb") as file:
                for start, data in what.pieces:
                    os.pwrite(file.fileno(), data, start)
                os.truncate(file.fileno(), len(what.data()))
            os.chmod(at, what.mode)
            os.utime(at, ns=(0, what.mtime_ns))
        else:
            at.mkdir()
    for path in sorted(model, reverse=True):
        what = model[path]
        if not isinstance(what, File | str):
            os.chmod(place / path, what[0])
            os.utime(place / path, ns=(0, what[1]))


def expected(model: Model, path: str) -> tuple[Any, ...]:
    """Return (kind, mode, mtime_ns, data) as an archive must show them, times in whole seconds.

    A directory has no data; a symlink has only its kind and target.
    """
    what = model[path]
    if isinstance(what, str):
        return Kind.SYMLINK, what
    if isinstance(what, File):
        return Kind.FILE, what.mode, what.mtime_ns // 10**9 * 10**9, what.data()
    return Kind.DIRECTORY, what[0], what[1] // 10**9 * 10**9


def shown(node: Node) -> tuple[Any, ...]:
    """Return the tuple of expected() for a node that was read from an archive."""
    if node.kind is Kind.SYMLINK:
        return node.kind, node.data
    both = node.kind, node.mode, node.mtime_ns
    return (*both, node.data) if node.kind is Kind.FILE else both


def silent(text: str) -> None:
    """Fail on a warning."""
    raise AssertionError(text)


HOW = st.fixed_dictionaries(
    {
        "algorithm": st.sampled_from(["sha1", "sha256"]), "inline": st.sampled_from([0, 8, 1024, 20_000]),
        "region": st.sampled_from([100, 4096, 5000, 1 << 20]), "dictionary": st.booleans(),
        "all_inline": st.sampled_from([False, False, True]),
    }
)  # fmt: skip


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


@settings(deadline=None, max_examples=15)
@given(models(), HOW)
def test_archives_of_random_trees_equal_the_trees(model: Model, how: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory() as name:
        base, blobs = Path(name, "tree"), Path(name, "blobs")
        base.mkdir()
        blobs.mkdir()
        write(base, model)
        document = made(base, ["."], blobs, **how)
        found = tree(document, blobs=(str(blobs),), type="archive")
        assert found.warnings == ()
        assert {path: shown(node) for path, node in found.nodes.items() if path} == {
            path: expected(model, path) for path in model
        }
        whole = {path: what for path, what in model.items() if isinstance(what, File)}
        for path, what in whole.items():
            if len(what.data()) > how["inline"] and not how["all_inline"]:
                held = found.nodes[path].allocated
                assert (len(what.data()) if held is None else held) == what.allocated()
        for blob in os.listdir(blobs):  # every file is a blob
            algorithm, _, digest = blob.partition("-")
            assert algorithm == how["algorithm"]
            data = (blobs / blob).read_bytes()
            assert len(data) <= how["region"]
            assert hashlib.new(algorithm, data).hexdigest() == digest
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

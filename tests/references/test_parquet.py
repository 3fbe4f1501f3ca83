"""Sets in the Parquet layout: those that kerchunk and fsspec write, rows, the order of keys, lazy reading."""

from __future__ import annotations

import itertools
import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import kerchunk.df
import pyarrow as pa
import pytest
import trio
from fsspec.implementations.reference import LazyReferenceMapper, ReferenceFileSystem
from hypothesis import strategies as st

from tests.references.parquetsets import Reference, ask, chunks_of, columns, tree_of, write_record, write_set, zarray
from tests.sources.opening import open_source
from tests.store.contract import StoreContract, Tree, children, keys, listed
from zarrfs.config.options import Options
from zarrfs.errors import NotFound, SourceError
from zarrfs.metrics.counters import COUNTS, counters
from zarrfs.references.parquet import ParquetStore
from zarrfs.sources import plan_source
from zarrfs.store.api import Kind

_numbers = itertools.count()


def json_text(document: object) -> bytes:
    """Return the text of a document in `.zmetadata`."""
    return json.dumps(document, separators=(",", ":")).encode()


@pytest.fixture
def target(tmp_path: Path) -> str:
    """Create a target file of 1000 bytes and return its path."""
    path = tmp_path / "target.bin"
    path.write_bytes(bytes(index % 251 for index in range(1000)))
    return str(path)


# -- sets written by kerchunk and fsspec


def test_a_set_written_by_kerchunk(references: Path, tmp_path: Path) -> None:
    """fsspec reads the same keys and bytes."""
    refs = json.loads((references / "combined_v1.json").read_text())["refs"]
    root = str(tmp_path / "set")
    kerchunk.df.refs_to_dataframe(refs, root, record_size=5, categorical_threshold=1)
    theirs = ReferenceFileSystem(root + "/", remote_protocol="file")
    found = tree_of(root)
    assert found.keys() == {*refs, ".zmetadata"}
    for key, value in found.items():
        expected = theirs.cat_file(key)
        assert value == expected or json.loads(value) == json.loads(expected), key


@pytest.mark.parametrize("engine", ["fastparquet", "pyarrow"])
def test_sets_written_by_fsspec(engine: Any, target: str, tmp_path: Path) -> None:
    """A column without text has an unusual type: null from one engine, categorical from the other."""
    root = str(tmp_path / "set")
    theirs = LazyReferenceMapper.create(
        root, fs=fsspec.filesystem("file"), record_size=10, engine=engine, categorical_threshold=3
    )
    written = {
        ".zgroup": {"zarr_format": 2}, "a/.zarray": zarray([25], [1]), "a/.zattrs": {"units": "m/s"},
        "raw/.zarray": zarray([], []), "paths/.zarray": zarray([3], [1]), "none/.zarray": zarray([0, 3], [1, 1]),
        "g/s/.zgroup": {}, "g/s/deep/.zarray": zarray([2], [1]),
    }  # fmt: skip
    for key, document in written.items():
        theirs[key] = json.dumps(document)
    model = {f"a/{number}": [target, number * 10, number] for number in range(1, 20) if number != 7}
    values = {"a/22": b"\0\xff", "raw/0": b"123", "g/s/deep/1": b"deep"}
    model |= {"paths/0": [target], "paths/1": [target, 5, 5], "paths/2": [target, 990, 10]}
    for key, value in (model | values).items():
        theirs[key] = value
    theirs.flush()
    data = Path(target).read_bytes()
    expected = {key: json_text(document) for key, document in written.items()} | values
    for key, (_, *part) in model.items():
        offset, size = part or (0, 1000)
        expected[key] = data[offset : offset + size]
    found = tree_of(root)
    assert found.pop(".zmetadata") == Path(root, ".zmetadata").read_bytes()
    assert found == expected


# -- rows

URL = "{target}"
RULES: dict[str, tuple[dict[str, Any], Any]] = {
    "a range": ({"path": URL, "offset": 3, "size": 4}, bytes([3, 4, 5, 6])),
    "a range of nothing": ({"path": URL, "offset": 3, "size": 0}, b""),
    "a whole target": ({"path": URL, "offset": 0, "size": 0}, 1000),
    "inline": ({"raw": b"abc"}, b"abc"),
    "inline, empty": ({"raw": b""}, b""),
    "inline beats a path": ({"path": URL, "offset": 1, "size": 1, "raw": b"abc"}, b"abc"),
    "base64, as fsspec decodes it": ({"raw": b"base64:AAEC\n/w=="}, b"\x00\x01\x02\xff"),
    "absent": ({}, None),
    "malformed base64": ({"raw": b"base64:A"}, "raw: malformed base64"),
    "a size without a path": ({"size": 5}, "an offset or size without a path"),
    "an offset without a path": ({"offset": 5}, "an offset or size without a path"),
    "a null size": ({"path": URL, "offset": 5, "size": None}, "a path without offset or size"),
    "a null offset": ({"path": URL, "offset": None, "size": 5}, "a path without offset or size"),
    "a negative offset": ({"path": URL, "offset": -1, "size": 5}, "a negative offset or size"),
    "a negative size": ({"path": URL, "offset": 5, "size": -1}, "a negative offset or size"),
    "beyond all files": ({"path": URL, "offset": 2**63 - 1, "size": 1}, "offset + size is over 2^63 - 1"),
    "an empty path": ({"path": "", "offset": 0, "size": 5}, "path: empty"),
    "a NUL in a path": ({"path": "a\0b", "offset": 0, "size": 5}, "path: a NUL character"),
    "a long path": ({"path": "x" * 300_000, "offset": 0, "size": 5}, "path: over 262144 bytes"),
    "beyond the target": ({"path": URL, "offset": 990, "size": 20}, "has 1000 bytes"),
    "a lost target": ({"path": "/nowhere", "offset": 0, "size": 20}, "/nowhere: no such file"),
}  # fmt: skip
TARGETS = ("beyond the target", "a lost target")  # errors that name the target, not the row


def test_each_row_gives_its_bytes_or_an_error(target: str, tmp_path: Path) -> None:
    """A bad row is an error for its own key only."""
    record = columns([None] * len(RULES), len(RULES))
    for number, (row, _) in enumerate(RULES.values()):
        for column, value in row.items():
            record[column][number] = target if value == URL else value
    root = write_set(tmp_path / "set", {"a/.zarray": zarray([len(RULES)], [1])}, {}, len(RULES))
    write_record(root / "a/refs.0.parq", record)
    found = chunks_of(root)
    for number, (name, (_, wanted)) in enumerate(RULES.items()):
        value = found.get(str(number))
        if isinstance(wanted, str):
            assert wanted in str(value), name
            assert name in TARGETS or f"{root}/a/refs.0.parq: row {number}: " in str(value)
        else:
            assert value == (Path(target).read_bytes() if wanted == 1000 else wanted), name


KINDS = [
    {"path": pa.large_string(), "raw": pa.large_binary()},
    {"path": pa.binary(), "raw": pa.string()},
    {"path": pa.string_view(), "raw": pa.binary_view()},
    {"path": pa.dictionary(pa.int8(), pa.string()), "raw": pa.dictionary(pa.int32(), pa.binary())},
    {"path": pa.dictionary(pa.uint32(), pa.string()), "raw": pa.dictionary(pa.uint8(), pa.binary())},
    {"path": pa.dictionary(pa.int64(), pa.large_string()), "offset": pa.int8(), "size": pa.uint64()},
    {"offset": pa.uint16(), "size": pa.int32()},
]


@pytest.mark.parametrize("kinds", KINDS, ids=str)
def test_columns_of_other_types_are_read(kinds: dict[str, Any], target: str, tmp_path: Path) -> None:
    record = columns([b"text", None, [target, 100, 5], [target]], 4)
    usual = {"path": pa.string(), "offset": pa.int64(), "size": pa.int64(), "raw": pa.binary()}
    found = {name: pa.array(values, usual[name]).cast(kinds.get(name, usual[name])) for name, values in record.items()}
    root = write_set(tmp_path / "set", {"a/.zarray": zarray([4], [1])}, {})
    write_record(root / "a/refs.0.parq", pa.table(found))
    data = Path(target).read_bytes()
    assert chunks_of(root) == {"0": b"text", "2": data[100:105], "3": data}


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["raw"], {"0": b"x"}),
        (["path", "offset", "size"], {"2": bytes(range(5))}),
        (["more", "raw", "size", "path", "offset"], {"0": b"x", "2": bytes(range(5))}),
    ],
)
def test_columns_may_be_missing_or_unknown(
    names: list[str], expected: dict[str, bytes], target: str, tmp_path: Path
) -> None:
    record = columns([b"x", None, [target, 0, 5]], 4) | {"more": [1, 2, 3, 4]}
    root = write_set(tmp_path / "set", {"a/.zarray": zarray([3], [1])}, {})
    write_record(root / "a/refs.0.parq", {name: record[name] for name in names})
    assert chunks_of(root) == expected


@pytest.mark.parametrize(("inline", "power"), [(0, 5), (100, 4)], ids=["targets", "inline"])
def test_texts_may_be_more_than_the_numbers_of_a_dictionary(inline: int, power: int, tmp_path: Path) -> None:
    rows: list[Reference] = [[f"/target/{at}", at**power, 300 * at + 1] for at in range(200 - inline)]
    rows += [b"text %d" % number for number in range(inline)]
    record = {name: pa.array(values) for name, values in columns(rows, 200).items()}
    if inline:
        kind = pa.dictionary(pa.int8(), pa.binary())
        record["raw"] = record["raw"].cast(pa.binary()).dictionary_encode().cast(kind)
    root = write_set(tmp_path / "set", {"a/.zarray": zarray([200], [1])}, {}, 200)
    write_record(root / "a/refs.0.parq", pa.table(record))

    async def check(store: ParquetStore) -> None:
        for number, row in enumerate(rows):
            if isinstance(row, bytes):
                assert bytes(await store.get(f"a/{number}")) == row
            else:
                assert list((await store.locate(f"a/{number}")).values()) == row

    ask(root, check)


def test_each_row_group_may_have_its_own_dictionary(target: str, tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    rows: list[Reference] = [[f"{target}{number % 7}", number + 1, 1] for number in range(50)]
    root = write_set(tmp_path / "set", {"a/.zarray": zarray([50], [1])}, {"a": rows}, 50)
    path = root / "a/refs.0.parq"
    pq.write_table(pq.read_table(path), path, row_group_size=6)

    async def check(store: ParquetStore) -> None:
        for number in range(50):
            assert list((await store.locate(f"a/{number}")).values()) == rows[number]

    ask(root, check)


# -- the tree


def test_the_order_of_all_keys(target: str, tmp_path: Path) -> None:
    metadata = {
        "b/.zarray": zarray([12, 2], [1, 1]), "b/.zattrs": {}, ".zgroup": {}, "b/sub/.zarray": zarray([1], [1]),
        "a/.zgroup": {}, "b/5.1/.zgroup": {}, "b/4.0": {"a": "document"},
    }  # fmt: skip
    rows: list[Reference] = [None if number in (3, 20) else b"%d" % number for number in range(24)]
    root = write_set(tmp_path / "set", metadata, {"b": rows, "b/sub": [b"x"]})
    chunks = [f"b/{number // 2}.{number % 2}" for number in range(24) if number not in (3, 8, 11, 20)]
    expected = [
        ".zgroup", ".zmetadata", "a/.zgroup", "b/.zarray", "b/.zattrs", "b/4.0", "b/5.1/.zgroup", "b/sub/.zarray",
        "b/sub/0", *chunks,
    ]  # fmt: skip

    async def check(store: ParquetStore) -> None:
        assert await keys(store) == expected
        assert bytes(await store.get("b/4.0")) == b'{"a":"document"}'
        assert (await store.info("b/5.1")).kind is Kind.DIRECTORY

    ask(root, check)


def test_relative_targets_resolve_against_the_set(tmp_path: Path) -> None:
    root = write_set(tmp_path / "set", {"a/.zarray": zarray([1], [1])}, {"a": [["near/x", 0, 2]]})
    for place in (root, tmp_path / "else"):
        (place / "near").mkdir(parents=True)
        (place / "near/x").write_bytes(place.name.encode())
    assert chunks_of(root) == {"0": b"se"}
    assert chunks_of(root, base=str(tmp_path / "else")) == {"0": b"el"}


def test_a_missing_pyarrow_is_an_error_that_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = write_set(tmp_path / "set", {}, {})
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(SourceError, match=r"the package pyarrow: .* extra parquet"):
        plan_source(str(root), Options())


# -- laziness


def grid_set(root: Path, count: int = 40, record_size: int = 4) -> Path:
    """Write a set with an array of `count` chunks, each of which holds its own number inline."""
    rows: list[Reference] = [b"%d" % number for number in range(count)]
    return write_set(root, {"a/.zarray": zarray([count], [1])}, {"a": rows}, record_size)


def test_only_needed_record_files_are_read(tmp_path: Path) -> None:
    root = grid_set(tmp_path / "set")

    async def check(store: ParquetStore) -> None:
        before = COUNTS["memory_misses_total"]

        def read() -> int:
            return COUNTS["memory_misses_total"] - before

        assert [info.name for info in await listed(store, "")] == [".zmetadata", "a"]
        assert (await store.info("a/.zarray")).size
        for key in ("a/40", "a/x", "a/.zattrs", "a/0.0", "a/refs.0.parq", "x"):
            with pytest.raises(NotFound):
                await store.info(key)
        assert read() == 0
        for key in ("a/21", "a/22", "a/23", "a/20"):
            assert bytes(await store.get(key)) == key[2:].encode()
        assert read() == 1
        listing = store.list_dir("a", "a/18"[2:])
        assert (await anext(listing)).name == "19"  # type: ignore[arg-type]
        assert read() == 2
        await trio.testing.wait_all_tasks_blocked()
        assert read() <= 3  # read-ahead may have read the next record file
        await store.info("a/0")
        assert read() <= 4

    ask(root, check)


def test_memory_of_record_files_is_bounded(tmp_path: Path) -> None:
    root = grid_set(tmp_path / "set", 400, 40)

    async def check(store: ParquetStore) -> None:
        before = COUNTS["memory_misses_total"]
        for _ in range(3):
            for number in range(0, 400, 40):
                assert bytes(await store.get(f"a/{number}")) == b"%d" % number
        assert 10 < COUNTS["memory_misses_total"] - before <= 30
        assert counters()["memory_kept_bytes"] <= 5000

    ask(root, check, memory_limit=20_000)


def test_a_huge_grid_is_listed_as_a_stream(tmp_path: Path) -> None:
    count = 10**15
    root = write_set(tmp_path / "set", {"a/.zarray": zarray([count, 3], [1, 1])}, {}, 1000)
    last = count * 3 - 1
    write_record(root / f"a/refs.{last // 1000}.parq", columns([b"x"] * 1000, 1000))

    async def sparse(store: ParquetStore) -> None:
        names = [info.name for info in await listed(store, "a")]
        assert (names[0], names[1], names[-1]) == (".zarray", f"{count - 334}.2", f"{count - 1}.2")
        assert bytes(await store.get(f"a/{count - 1}.2")) == b"x"
        assert [info.name for info in await listed(store, "a", f"{count - 1}.0")] == [
            f"{count - 1}.1", f"{count - 1}.2",
        ]  # fmt: skip
        assert (await store.usage()).files == count * 3 + 2
        assert len(names) == 1001
        assert await store.absences() == (count * 3 // 1000 - 1, count * 3 // 1000)
        assert await store.absences("b") == (0, 0)

    ask(root, sparse)


# -- the store contract, and random sets


def set_order(tree: Tree, prefix: str) -> list[str]:
    """Return the names below `prefix`: documents and directories by name, then chunks in C order."""
    names = sorted(children(tree, prefix))
    chunks = [name for name in names if name[0].isdigit() and children(tree, prefix)[name] is Kind.FILE]
    chunks.sort(key=lambda name: tuple(map(int, name.split("."))))
    return [name for name in names if name not in chunks] + chunks


def with_document(tree: Tree) -> Tree:
    """Return `tree` with the `.zmetadata` of its documents."""
    metadata = {key: json.loads(value) for key, value in tree.items() if "/.z" in f"/{key}"}
    return {**tree, ".zmetadata": json.dumps({"metadata": metadata, "record_size": 3}).encode()}


@st.composite
def set_trees(draw: st.DrawFn) -> Tree:
    tree: Tree = {".zgroup": b'{"zarr_format":2}'}
    for name in draw(st.sets(st.sampled_from(["a", "b", "g/c", "g/h/d", "é b"]))):
        counts = draw(st.lists(st.integers(0, 12 if name == "a" else 3), max_size=3))
        tree[f"{name}/.zarray"] = json_text(zarray([2 * count for count in counts], [2] * len(counts)))
        for index in itertools.product(*map(range, counts)):
            value = draw(st.none() | st.binary(max_size=300))
            if value is not None and not value.startswith(b"base64:"):
                tree[f"{name}/{'.'.join(map(str, index)) or '0'}"] = value
    return with_document(tree)


class TestParquet(StoreContract):
    examples: ClassVar[int] = 20
    tree: ClassVar[Tree] = with_document({
        ".zgroup": b'{"zarr_format":2}',
        "a b/.zarray": json_text(zarray([3, 24], [1, 2])),
        "a b/.zattrs": json_text({"units": "m/s", "é": 1e-7}),
        **{f"a b/{row}.{column}": b"%d" % column * row for row in range(3) for column in range(12) if column != 5},
        "a b/0.0": bytes(range(256)) * 40,
        "g/s/.zgroup": b"{}",
        "g/s/scalar/.zarray": json_text(zarray([], [])),
        "g/s/scalar/0": b"x",
        "g/none/.zarray": json_text(zarray([0], [1])),
    })  # fmt: skip
    file: ClassVar[str] = "a b/0.11"
    trees: ClassVar[st.SearchStrategy[Tree]] = set_trees()
    sorted_by_name: ClassVar[bool] = False
    place: Path

    @pytest.fixture(autouse=True)
    def _place(self, request: pytest.FixtureRequest, tmp_path: Path) -> None:
        self.place = tmp_path

    def order(self, tree: Tree, prefix: str) -> list[str]:
        return set_order(tree, prefix)

    @asynccontextmanager
    async def open(self, tree: Tree) -> AsyncIterator[ParquetStore]:
        root = self.place / str(next(_numbers))
        document = json.loads(tree[".zmetadata"])
        arrays: dict[str, list[Reference]] = {}
        for key, array in document["metadata"].items():
            if key.endswith(".zarray"):
                counts = [shape // chunk for shape, chunk in zip(array["shape"], array["chunks"], strict=True)]
                names = (".".join(map(str, index)) or "0" for index in itertools.product(*map(range, counts)))
                arrays[os.path.dirname(key)] = [tree.get(f"{os.path.dirname(key)}/{name}") for name in names]
        write_set(root, document["metadata"], arrays, document["record_size"])
        (root / ".zmetadata").write_bytes(tree[".zmetadata"])
        store = open_source(str(root), Options())
        assert isinstance(store, ParquetStore)
        yield store
        await store.aclose()

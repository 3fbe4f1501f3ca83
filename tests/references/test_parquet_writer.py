"""Sets written by ParquetWriter and read by fsspec and ParquetStore; references that the layout cannot hold."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow.parquet as pq
import pytest
from fsspec.implementations.reference import LazyReferenceMapper, ReferenceFileSystem
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.references.parquetsets import ask, tree_of, zarray
from zarrfs.errors import SourceError
from zarrfs.references import parquet_writer
from zarrfs.references.parquet import ParquetStore
from zarrfs.references.parquet_metadata import json_text
from zarrfs.references.parquet_writer import ParquetWriter
from zarrfs.store.api import Reference


def document(key: str, value: object) -> Reference:
    return Reference(key, json.dumps(value).encode())


def write(root: Path, references: Iterable[Reference], record_size: int = 3) -> Path:
    with ParquetWriter(str(root), record_size) as writer:
        for reference in references:
            writer.add(reference)
        writer.commit()
    return root


def read(root: Path) -> dict[str, Reference]:
    """Return the chunks of a set, read with ParquetStore."""

    async def collect(store: ParquetStore) -> dict[str, Reference]:
        return {reference.key: reference async for reference in store.references() if "/.z" not in f"/{reference.key}"}

    return ask(root, collect)


def of_fsspec(value: Any) -> Any:
    """Convert a value from fsspec to plain Python types; None for an absent chunk, which pandas shows as NaN."""
    if isinstance(value, list):
        if isinstance(value[0], float):
            return None
        return [part.item() if isinstance(part, np.generic) else part for part in value]
    if isinstance(value, bytes):
        fs = ReferenceFileSystem({"x": value}, remote_protocol="file")
        return fs.cat_file("x")  # this decodes base64
    return value


ARRAYS = {"a": [5, 3], "b c": [4], "g/s": [], "g/none": [0, 2], "g/big": [40]}
URLS = ["/d/x.nc", "s3://b/y", "é 😀", "http://h/" + "z" * 300]
PARTS = st.tuples(st.sampled_from(URLS), st.integers(0, 2**40), st.integers(0, 2**40))
VALUES = st.binary(max_size=20) | st.sampled_from([b"base64:AAAA", b"base64:!", b""]) | st.sampled_from(URLS) | PARTS


@st.composite
def sets(draw: st.DrawFn) -> list[Reference]:
    found = [document(".zgroup", {"zarr_format": 2})]
    for array, shape in ARRAYS.items():
        found.append(document(f"{array}/.zarray", zarray(shape, [1] * len(shape))))
        for index in np.ndindex(*shape):
            value: Any = draw(st.none() | VALUES)
            key = f"{array}/{'.'.join(map(str, index)) or '0'}"
            if isinstance(value, bytes):
                found.append(Reference(key, value))
            elif value is not None:
                found.append(Reference(key, None, *((value,) if isinstance(value, str) else value)))
    return found


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    references=sets(), record_size=st.integers(1, 50), seed=st.none() | st.integers(), held=st.sampled_from([0, 300])
)  # fmt: skip
def test_a_set_written_in_any_order_is_read_back(
    references: list[Reference], record_size: int, seed: int | None, held: int, tmp_path_factory: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """With `held` of 300 bytes, memory is so short that record files are written more than once."""
    if seed is not None:
        random.Random(seed).shuffle(references)
    root = tmp_path_factory.mktemp("sets") / "set"
    with monkeypatch.context() as patch:
        patch.setattr(parquet_writer, "_HELD_MAX", held or 128 << 20)
        write(root, references, record_size)
    chunks = {reference.key: reference for reference in references if "/.z" not in f"/{reference.key}"}
    expected = {
        key: Reference(key, b"") if reference.offset == 0 == reference.length else reference
        for key, reference in chunks.items()
    }
    assert read(root) == expected
    for engine in ("fastparquet", "pyarrow"):
        theirs = LazyReferenceMapper(str(root), fs=fsspec.filesystem("file"), engine=engine)  # type: ignore[arg-type]
        for array, shape in ARRAYS.items():
            for index in np.ndindex(*shape):
                key = f"{array}/{'.'.join(map(str, index)) or '0'}"
                found = of_fsspec(theirs.get(key))
                assert found == _as_fsspec(expected.get(key)), (engine, key)
        assert theirs[".zgroup"] == b'{"zarr_format":2}'


def _as_fsspec(reference: Reference | None) -> Any:
    if reference is None or reference.data is not None:
        return None if reference is None else reference.data
    if reference.length is None:
        return [reference.url]
    return [reference.url, reference.offset, reference.length]


def test_bytes_are_those_that_fsspec_reads(references: Path, tmp_path: Path) -> None:
    """fsspec's file system and ParquetStore read the same bytes of the combined sample."""
    refs = json.loads((references / "combined_v1.json").read_text())["refs"]
    plain = ReferenceFileSystem(refs, remote_protocol="file")
    found = []
    for key, value in refs.items():
        found.append(Reference(key, None, *value) if isinstance(value, list) else Reference(key, plain.cat_file(key)))
    root = write(tmp_path / "set", found, 100)
    theirs = ReferenceFileSystem(f"{root}/", remote_protocol="file")
    ours = tree_of(root)
    assert ours.keys() == {*refs, ".zmetadata"}
    for key, value in refs.items():
        wanted = plain.cat_file(key) if "/.z" not in f"/{key}" else json_text(json.loads(value))
        assert ours[key] == theirs.cat_file(key) == wanted


def test_the_form_of_a_record_file(tmp_path: Path) -> None:
    """Absent chunks take rows without path and raw; a file is written even if all of its chunks are absent."""
    root = write(tmp_path / "set", [document("a/.zarray", zarray([10], [1])), Reference("a/4", None, "u", 5, 6)], 4)
    assert sorted(path.name for path in (root / "a").iterdir()) == ["refs.0.parq", "refs.1.parq", "refs.2.parq"]
    table = pq.read_table(root / "a/refs.1.parq")
    assert table.to_pydict() == {
        "path": ["u", None, None, None], "offset": [5, 0, 0, 0], "size": [6, 0, 0, 0], "raw": [None] * 4,
    }  # fmt: skip
    assert pq.read_metadata(root / "a/refs.0.parq").num_rows == 4
    about = pq.read_metadata(root / "a/refs.1.parq").row_group(0).column(0)
    assert (about.compression, about.has_dictionary_page) == ("ZSTD", True)


def test_an_empty_array_whose_chunks_are_0_is_listed_by_fsspec(tmp_path: Path) -> None:
    found = [document("a/.zarray", zarray([0], [0])), document("b/.zarray", zarray([2], [1])), Reference("b/1", b"x")]
    root = write(tmp_path / "set", found)
    theirs = ReferenceFileSystem(f"{root}/", remote_protocol="file")
    assert "b/1" in theirs.find("")
    assert tree_of(root).keys() == {*theirs.find("")} | {".zmetadata"}


def test_the_zmetadata_is_consolidated_metadata(tmp_path: Path) -> None:
    """The layout's own `.zmetadata` replaces the one that the set had."""
    root = write(tmp_path / "set", [document(".zgroup", {"zarr_format": 2}), Reference(".zmetadata", b"old")])
    assert json.loads((root / ".zmetadata").read_text()) == {
        "metadata": {".zgroup": {"zarr_format": 2}}, "zarr_consolidated_format": 1, "record_size": 3,
    }  # fmt: skip


def test_a_later_reference_replaces_an_earlier_one(tmp_path: Path) -> None:
    found = [document("a/.zarray", zarray([4], [1]))]
    for key in ("a/0", "a/1", "a/2", "a/3"):
        found += [Reference(key, b"old"), Reference(key, None, "u", 1, 2)]
    found.append(Reference("a/1", b"new"))
    read_back = read(write(tmp_path / "set", found, 4))
    assert [read_back[f"a/{row}"].data for row in range(4)] == [None, b"new", None, None]


GRID = document("a/.zarray", zarray([2, 2], [1, 1]))
REFUSED: dict[str, tuple[list[Reference], str, str]] = {
    "a chunk of nothing": ([Reference("b/0", b"")], "b/0", "neither metadata nor a chunk: no b/.zarray"),
    "a file at the root": ([Reference("README", b"x")], "README", "neither metadata nor a chunk: no .zarray"),
    "beyond the grid": ([GRID, Reference("a/2.0", b"")], "a/2.0", "no chunk of its array, whose grid is 2 x 2"),
    "another name": ([GRID, Reference("a/x", b"")], "a/x", "no chunk of its array"),
    "another rank": ([Reference("a/0", b""), GRID], "a/0", "no chunk of its array"),
    "nested chunks": ([GRID, Reference("a/0/1", b"")], "a/0/1", "no a/0/.zarray"),
    "a separator": (
        [document("a/.zarray", zarray([2, 2], [1, 1], dimension_separator="/"))], "a/.zarray",
        'the Parquet layout has chunk names with ".", not "/"',
    ),
    "no grid": ([document("a/.zarray", {"shape": [1]})], "a/.zarray", "no chunks"),
    "an array at the root": ([document(".zarray", zarray([1], [1]))], ".zarray", "no place for an array at the root"),
    "text": ([Reference("a/.zattrs", b"text")], "a/.zattrs", "not JSON"),
    "bytes": ([Reference("a/.zattrs", b"\xff")], "a/.zattrs", "not JSON"),
    "metadata elsewhere": ([Reference(".zattrs", None, "u", 0, 1)], ".zattrs", "metadata must be inline"),
    "metadata twice": ([GRID, GRID], "a/.zarray", "comes twice"),
    "no key": ([document("../.zattrs", {})], "../.zattrs", "not a key"),
    "zarr 3": ([document("a/zarr.json", {})], "a/zarr.json", "cannot hold Zarr v3"),
    "below metadata": ([document("a/.zx/.zattrs", {})], "a/.zx/.zattrs", "below a name that begins with .z"),
    "a lone surrogate": ([GRID, Reference("a/0.0", None, "\ud800")], "a/0.0", "url: a lone surrogate"),
    "too many record files": (
        [document("a/.zarray", zarray([10**9], [1]))], "a/.zarray", "a larger record size takes fewer",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_references_that_the_layout_cannot_hold(name: str, tmp_path: Path) -> None:
    references, key, rule = REFUSED[name]
    with pytest.raises(SourceError) as caught:
        write(tmp_path / "set", references)
    assert (caught.value.source, caught.value.entry) == (str(tmp_path / "set"), key)
    assert rule in caught.value.rule
    assert list(tmp_path.iterdir()) == []


def test_without_commit_no_files_are_left(tmp_path: Path) -> None:
    with ParquetWriter(str(tmp_path / "set")) as writer:
        writer.add(GRID)
        writer.add(Reference("a/0.0", b"x"))
        assert not (tmp_path / "set").exists()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("what", ["file", "full", "link"])
def test_an_existing_destination_is_not_touched(what: str, tmp_path: Path) -> None:
    path = tmp_path / "set"
    if what == "file":
        path.write_text("mine")
    elif what == "link":
        path.symlink_to(tmp_path)
    else:
        (path / "mine").mkdir(parents=True)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(SourceError, match="is there already, and is no empty directory"):
        write(path, [])
    assert sorted(tmp_path.rglob("*")) == before


def test_an_empty_directory_is_filled(tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    assert list(tree_of(write(tmp_path / "set", [GRID]))) == [".zmetadata", "a/.zarray"]


def test_a_destination_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="cannot be written: No such file"):
        write(tmp_path / "no/set", [])


def test_memory_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks scattered over a huge grid touch many record files, of which few are held in memory."""
    monkeypatch.setattr(parquet_writer, "_HELD_MAX", 1_000_000)
    writer = ParquetWriter(str(tmp_path / "set"), 1000)
    with writer:
        writer.add(document("a/.zarray", zarray([1_000_000], [1])))
        for number in range(0, 1_000_000, 5000):
            writer.add(Reference(f"a/{number}", b"x" * 30_000))
            assert writer._held <= 1_000_000
        assert len(list(tmp_path.rglob("refs.*.parq"))) > 100

"""Sets in the Parquet layout that are broken or remote: one clear error each, for the affected keys only."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.decoders import kill_decoders
from tests.references.parquetsets import ask, chunks_of, columns, tree_of, write_record, write_set, zarray
from tests.servers import Faulty, Nginx
from tests.store.contract import listed
from zarrfs.config.options import Options
from zarrfs.copying.check import check
from zarrfs.copying.check_report import CheckReport
from zarrfs.errors import AccessDenied, NotFound, ReadError, SourceError, TargetChanged, TargetMissing
from zarrfs.metrics.counters import COUNTS
from zarrfs.references import parquet
from zarrfs.references.parquet import ParquetStore
from zarrfs.references.parquet_metadata import Bound
from zarrfs.references.parquet_records import parse_record
from zarrfs.sources import plan_source
from zarrfs.system.processes import children

VALUES = {str(number): b"%d" % number for number in range(10)}


def make(root: Path) -> Path:
    """Write a set with an array of ten chunks in three record files."""
    return write_set(root, {"a/.zarray": zarray([10], [1])}, {"a": list(VALUES.values())})


# -- record files


def _cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def _rewrite(**changed: Any) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        table = columns([b"x"] * 4, 4)
        write_record(path, {name: values for name, values in (table | changed).items() if values is not None})

    return damage


def _twice(path: Path) -> None:
    raw = pa.array([b"x"] * 4)
    write_record(path, pa.table([raw, raw], names=["raw", "raw"]))


def _nested(path: Path) -> None:
    write_record(path, pa.table({"path": pa.array([{"raw": b"x"}] * 4), "offset": [0] * 4, "size": [0] * 4}))


def _a_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _garbage_inside(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[4:60] = os.urandom(56)
    path.write_bytes(data)


DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "a dangling link": (lambda path: (path.unlink(), path.symlink_to("x"))[1], "is a symbolic link to x"),
    "a directory": (lambda path: (path.unlink(), path.mkdir())[1], "is a directory"),
    "a fifo": (_a_fifo, "is a FIFO"),
    "empty": (lambda path: os.truncate(path, 0), "not a Parquet file"),
    "cut off": (_cut, "not a Parquet file"),
    "garbage inside": (_garbage_inside, "a damaged Parquet file"),
    "too many rows": (_rewrite(**columns([b"x"] * 5, 5)), "5 rows, record_size is 4"),
    "no columns of use": (
        _rewrite(path=None, raw=None, more=[1] * 4), "neither a column path nor a column raw",
    ),
    "a path without sizes": (_rewrite(size=None), "a column path, but no column size"),
    "numbers as paths": (_rewrite(path=pa.array([1, 2, 3, 4])), "column path: expected text or bytes, not int64"),
    "dates as bytes": (_rewrite(raw=pa.array([1.5] * 4)), "column raw: expected text or bytes, not double"),
    "fractions as sizes": (_rewrite(size=pa.array([1.5] * 4)), "column size: expected whole numbers, not double"),
    "numbered categories": (
        _rewrite(path=pa.array([1, 2, 3, 4]).dictionary_encode()), "column path: expected text or bytes, not int64",
    ),
    "a column twice": (_twice, "two columns raw"),
    "a nested column": (_nested, "column path: expected text or bytes, not struct"),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGES)
def test_a_broken_record_file_fails_only_its_own_keys(name: str, tmp_path: Path) -> None:
    root = make(tmp_path / "set")
    path = root / "a/refs.1.parq"
    damage, reason = DAMAGES[name]
    damage(path)
    found = chunks_of(root)
    assert list(found) == list(VALUES)
    for key in "4567":
        message = str(found.pop(key))
        assert message.startswith(f"{path}: ")
        assert reason in message
        assert "\n" not in message
    assert found == {key: value for key, value in VALUES.items() if key not in "4567"}

    async def sizes(store: ParquetStore) -> list[int | None]:
        return [info.size for info in await listed(store, "a")][1:]

    assert ask(root, sizes) == [1, 1, 1, 1, None, None, None, None, 1, 1]


def test_rows_missing_from_a_record_file_are_errors(tmp_path: Path) -> None:
    """Only padding, the rows after the last chunk of the array, may be missing."""
    root = make(tmp_path / "set")
    write_record(root / "a/refs.2.parq", columns([b"8", b"9"], 2))
    write_record(root / "a/refs.1.parq", columns([b"4", None], 2))
    found = chunks_of(root)
    assert list(found) == [*"0123", *"46789"]
    assert found["6"] == f"{root}/a/refs.1.parq: row 2: missing: the file has 2 rows"
    assert (found["4"], found["8"], found["9"]) == (b"4", b"8", b"9")


def test_a_failure_is_cached_for_a_while(tmp_path: Path) -> None:
    root = make(tmp_path / "set")
    (root / "a/refs.1.parq").unlink()
    (root / "a/refs.1.parq").symlink_to("nowhere")

    async def read(store: ParquetStore) -> int:
        before = COUNTS["memory_misses_total"]
        for key in ("a/4", "a/5", "a/4"):
            with pytest.raises(TargetMissing):
                await store.get(key)
        with pytest.raises(TargetMissing):
            await store.info("a/6")
        return COUNTS["memory_misses_total"] - before

    assert ask(root, read) == 1


# -- absent record files


def test_failures_that_are_not_absent_record_files(tmp_path: Path) -> None:
    """A dangling symlink, a file in place of an array's directory and a removed set are errors, not absent chunks."""
    metadata = {f"{name}/.zarray": zarray([2], [1]) for name in ("link", "links", "file", "a", "far")}
    root = write_set(tmp_path / "set", metadata, {"a": [None], "link": [None], "real": [None]}, 1)
    (root / "link/refs.1.parq").symlink_to("../.git/annex/objects/x")
    (root / "links").symlink_to("nowhere")
    (root / "far").symlink_to("real")
    (root / "file").write_bytes(b"")

    async def read(store: ParquetStore) -> None:
        assert not [info for array in ("a", "far") for info in (await listed(store, array))[1:]]
        for key in ("link/1", "links/0", "links/1", "file/0"):
            with pytest.raises(ReadError):
                await store.info(key)
            with pytest.raises(ReadError):
                await store.get(key)
        assert [info.name for info in (await listed(store, "links"))[1:]] == ["0", "1"]
        assert [info.name for info in (await listed(store, "link"))[1:]] == ["1"]

    ask(root, read)

    async def gone(store: ParquetStore) -> None:
        assert len(await listed(store, "a")) == 1
        shutil.rmtree(root)
        with pytest.raises(ReadError):
            await store.get("far/1")

    ask(root, gone)


def test_a_removed_zip_file_is_not_an_absent_member(nginx: Nginx, tmp_path: Path) -> None:
    root = make(tmp_path / "set")
    (root / "a/refs.2.parq").unlink()
    (root / "z").mkdir()
    for name in ("before", "z/after"):  # otherwise one request fetches the record files with the index of the zip file
        (root / name).write_bytes(os.urandom(1 << 20))
    archive = Path(shutil.make_archive(str(nginx.plain.root / "gone"), "zip", root))

    async def read(store: ParquetStore) -> None:
        await store.info("a")
        archive.unlink()
        with pytest.raises(TargetMissing):
            await store.get("a/0")
        with pytest.raises(NotFound):
            await store.get("a/9")

    ask(f"zip://::{nginx.plain.url}/gone.zip", read)


def test_the_size_of_a_decompressed_record_file_is_limited(tmp_path: Path) -> None:
    root = write_set(tmp_path / "set", {"a/.zarray": zarray([3], [1])}, {"a": [b"x" * 100_000] * 3})
    assert chunks_of(root)["0"] == b"x" * 100_000
    found = chunks_of(root, document_limit=50_000)
    assert "expands to more than 50000 bytes" in str(found["0"])
    assert "more than 400 bytes" in str(chunks_of(root, document_limit=400)["0"])


def _thrift_integer(value: int) -> bytes:
    """Encode a 64-bit integer in Thrift's compact protocol."""
    value, found = value << 1, bytearray()
    while value > 127:
        found.append(value & 127 | 128)
        value >>= 7
    return bytes([*found, value])


def test_a_small_record_file_that_expands_to_much(tmp_path: Path) -> None:
    """The file takes no more than 300 MB, although its footer claims a small size."""
    kill_decoders()
    root = write_set(tmp_path / "set", {"a/.zarray": zarray([1], [1])}, {}, 1)
    table, path = pa.table({"raw": pa.array([bytes(300 << 20)])}), root / "a/refs.0.parq"
    path.parent.mkdir(exist_ok=True)
    pa.parquet.write_table(table, path, compression="zstd", write_statistics=False, use_dictionary=False)
    del table
    data = path.read_bytes()
    group = pa.parquet.read_metadata(path).row_group(0)
    for size in {group.total_byte_size, group.column(0).total_uncompressed_size}:
        true = _thrift_integer(size)
        assert true in data
        data = data.replace(true, b"\xe4" + b"\x80" * (len(true) - 2) + b"\0")
    path.write_bytes(data)
    assert pa.parquet.read_metadata(path).row_group(0).column(0).total_uncompressed_size == 50
    refused = chunks_of(root, memory_limit=256 << 20)["0"]
    assert isinstance(refused, str)  # else a failure would print 100 MiB
    assert refused == f"{path}: expands to more than {64 << 20} bytes (-o memory_limit=)"
    for process in children():
        assert int(Path(f"/proc/{process}/status").read_text().split("VmHWM:")[1].split()[0]) < 300_000


def test_a_large_record_file_behind_a_url_is_not_fetched_whole(faulty: Faulty, tmp_path: Path) -> None:
    root = make(tmp_path / "set")
    for path in root.rglob("*.parq"):
        faulty.put(f"/large/{path.relative_to(root)}", path.read_bytes())
    faulty.put("/large/.zmetadata", (root / ".zmetadata").read_bytes())
    faulty.put("/large/a/refs.0.parq", bytes((64 << 20) + 1000))

    async def read(store: ParquetStore) -> None:
        with pytest.raises(ReadError, match=rf"refs\.0\.parq: more than {64 << 20} bytes \(-o memory_limit=\)$"):
            await store.get("a/0")
        assert bytes(await store.get("a/4")) == b"4"

    ask(f"{faulty.url}/large", read, memory_limit=256 << 20)
    fetched = [extent for _, path, extent in faulty.requests if path.endswith("refs.0.parq")]
    assert fetched
    assert all(int(extent.rpartition("-")[2]) < 16 << 20 for extent in fetched)


@settings(max_examples=100, deadline=None)
@given(at=st.integers(0, 10_000), byte=st.integers(0, 255), cut=st.integers(0, 10_000))
def test_damage_anywhere_is_an_error_or_a_record(at: int, byte: int, cut: int) -> None:
    sink = pa.BufferOutputStream()
    pa.parquet.write_table(pa.table(columns([b"x", None, ["u", 1, 2]], 4)), sink)
    data = bytearray(sink.getvalue().to_pybytes())
    data[at % len(data)] = byte
    with contextlib.suppress(ValueError):
        record = parse_record(bytes(data[: len(data) - cut % 40]), 4, Bound(1 << 20, "memory_limit"))
        assert len(record.sizes(0, 4)) == 4
        assert len([record.row(number) for number in range(4)]) == 4


@pytest.mark.parametrize("far", [False, True])
def test_a_set_replaced_while_its_store_is_open_is_an_error(
    far: bool, nginx: Nginx, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cached rows stay readable; rows of the new version are never returned, also when a record file is read again."""
    monkeypatch.setattr(parquet, "_RETRY", 0)
    at = (nginx.plain.root if far else tmp_path) / "set"
    new = at.with_name("new")
    for root in (at, new):
        shutil.rmtree(root, ignore_errors=True)
    make(at)
    write_set(new, {"a/.zarray": zarray([10], [1], order="F"), "a/.zattrs": {}}, {"a": [b"new"] * 10})

    async def read(store: ParquetStore) -> None:
        assert bytes(await store.get("a/0")) == b"0"
        shutil.copytree(new, at, dirs_exist_ok=True)
        assert bytes(await store.get("a/1")) == b"1"
        for key in ("a/4", "a/9", "a/4"):
            with pytest.raises(TargetChanged, match=r"set/\.zmetadata: has changed since it was first read"):
                await store.get(key)
        shutil.rmtree(at)
        assert bytes(await store.get("a/2")) == b"2"
        with pytest.raises(ReadError):
            await store.info("a/8")

    ask(f"{nginx.plain.url}/set" if far else at, read)


def test_a_record_file_that_is_replaced_alone_is_an_error_when_it_is_read_again(tmp_path: Path) -> None:
    root = make(tmp_path / "set")

    async def read(store: ParquetStore) -> None:
        assert bytes(await store.get("a/0")) == b"0"
        write_record(root / "a/refs.0.parq", columns([b"new"] * 4, 4))
        assert bytes(await store.get("a/9")) == b"9"
        with pytest.raises(TargetChanged, match=r"refs\.0\.parq: has changed since it was first read"):
            await store.get("a/1")

    ask(root, read, memory_limit=4)  # so that only the last record file stays in memory


# -- .zmetadata

DOCUMENTS = {
    '{"record_size": 4, "metadata": []}': "metadata: expected an object",
    '{"record_size": 4}': "metadata: missing",
    '{"record_size": 0, "metadata": {}}': "record_size: expected a whole number from 1 to 2147483647",
    '{"record_size": 1.5, "metadata": {}}': "record_size: expected",
    '{"record_size": "10", "metadata": {}}': "record_size: expected",
    '{"record_size": 99999999999999999999, "metadata": {}}': "record_size: expected",
}


@pytest.mark.parametrize("text", DOCUMENTS)
def test_a_broken_zmetadata_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / ".zmetadata").write_text(text)
    with pytest.raises(SourceError) as caught:
        plan_source(str(tmp_path), Options())
    assert str(caught.value).startswith(f"{tmp_path}/.zmetadata: {DOCUMENTS[text]}")
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("text", ["x", '{"metadata": {}}', "[" * 100_000, '"record_size"'])
def test_another_zmetadata_is_not_taken_for_a_set(text: str, tmp_path: Path) -> None:
    (tmp_path / ".zmetadata").write_text(text)
    assert plan_source(str(tmp_path), Options()).kind == "zarr"
    with pytest.raises(SourceError, match="a reference set in a directory has the Parquet layout"):
        plan_source(str(tmp_path), Options(type="references"))


@pytest.mark.parametrize("text", ["", "x", '{"record_size": 4}'])
def test_a_zmetadata_that_breaks_while_the_store_is_open_is_an_error(text: str, tmp_path: Path) -> None:
    root = make(tmp_path / "set")

    async def read(store: ParquetStore) -> None:
        (root / ".zmetadata").write_text(text)
        assert (await store.info("")).name == ""
        with pytest.raises(ReadError, match=r"set/\.zmetadata: "):
            await store.info("a")

    ask(root, read)


ARRAYS: dict[str, tuple[Any, str]] = {
    "text": ("x", "expected an object"),
    "no shape": ({"chunks": [1]}, "no shape"),
    "chunks of nothing": (zarray([1], [0]), "chunks: expected whole numbers, 1 or more"),
    "a negative shape": (zarray([-1], [1]), "shape: expected whole numbers"),
    "another rank": (zarray([1, 2], [1]), "shape has 2 dimensions, chunks has 1"),
    "nested chunks": (zarray([2, 2], [1, 1], dimension_separator="/"), 'has chunk names with ".", not "/"'),
    "another separator": (zarray([2], [1], dimension_separator="-"), "dimension_separator: expected"),
}


@pytest.mark.parametrize("name", ARRAYS)
def test_a_broken_zarray_makes_errors_of_its_chunks_only(name: str, tmp_path: Path) -> None:
    """The chunks are errors, never absent, because it is unknown which of them exist."""
    document, rule = ARRAYS[name]
    metadata = {"a/.zarray": zarray([1], [1]), "b/.zarray": document, "b/.zattrs": {}, "c/.zgroup": {}}
    root = write_set(tmp_path / "set", metadata, {"a": [b"fine"], "b": [b"x"]})
    [warning] = plan_source(str(root), Options()).warnings
    assert warning.startswith("b/.zarray: ")
    assert warning.endswith(": the array's chunks cannot be read")
    assert rule in warning

    async def read(store: ParquetStore) -> CheckReport:
        assert bytes(await store.get("a/0")) == b"fine"
        assert json.loads(bytes(await store.get("b/.zarray"))) == document
        for key in ("b/0", "b/0.0", "b/0/1"):
            with pytest.raises(ReadError, match=r"set/\.zmetadata: b/\.zarray: "):
                await store.info(key)
        for key in ("b/.zgroup", "b/zarr.json", "b/refs.0.parq"):
            with pytest.raises(Exception, match="no such key"):
                await store.info(key)
        listing = store.list_dir("b")
        assert [(await anext(listing)).name for _ in range(2)] == [".zarray", ".zattrs"]  # type: ignore[arg-type]
        with pytest.raises(ReadError, match=r"b/\.zarray: "):
            await anext(listing)  # type: ignore[arg-type]
        report = CheckReport()
        await check(store, "", report)
        return report

    report = ask(root, read)
    assert [entry for entry, _ in report.problems] == ["b/.zarray"]
    assert not report.clean
    assert "b" in [bad.key for bad in report.bad]


def test_documents_with_bad_keys_are_left_out(tmp_path: Path) -> None:
    bad = ["../x", "a//b", "/x", "x/", "", "a/./b", "x" * 300, "\0", "y/" * 120 + "z", "dir"]
    metadata = {**{key: {} for key in bad}, "dir/.zgroup": {}, "ok": {}}
    root = write_set(tmp_path / "set", metadata, {})
    assert list(tree_of(root)) == [".zmetadata", "dir/.zgroup", "ok"]

    async def problems(store: ParquetStore) -> list[tuple[str, str]]:
        return await store.problems()

    found = ask(root, problems)
    assert sorted(entry for entry, _ in found) == sorted("\\x00" if key == "\0" else key for key in bad)
    warnings = plan_source(str(root), Options()).warnings
    assert len(warnings) == len(bad)
    assert all("\n" not in warning for warning in warnings)


def test_an_array_at_the_root_has_its_record_files_there(tmp_path: Path) -> None:
    """fsspec cannot read such a set. Were its chunks absent, a Zarr reader would return fill values."""
    root = write_set(tmp_path / "set", {".zarray": zarray([6], [1])}, {"": [b"0", b"1", None, b"3"]})
    (root / "refs.1.parq").symlink_to("nowhere")
    found = tree_of(root)
    assert list(found) == [".zarray", ".zmetadata", "0", "1", "3", "4", "5"]
    assert (found["3"], "refs.1.parq: is a symbolic link" in str(found["5"])) == (b"3", True)


# -- remote sets


def publish(root: Path) -> Path:
    """Write a set with inline values and a relative target to `root`, in place of anything there; return `root`."""
    shutil.rmtree(root, ignore_errors=True)
    metadata = {".zgroup": {}, "a/.zarray": zarray([6], [1]), "g/b/.zarray": zarray([], [])}
    write_set(root, metadata, {"a": [b"in", ["t.bin", 2, 3], None, ["t.bin"]], "g/b": [b"scalar"]})
    (root / "t.bin").write_bytes(b"0123456789")
    return root


EXPECTED = {"0": b"in", "1": b"234", "3": b"0123456789"}


@pytest.mark.parametrize(("lists", "slash", "kind"), [(True, "", None), (False, "/", "references")])
def test_a_set_is_read_over_http(lists: bool, slash: str, kind: str | None, nginx: Nginx) -> None:
    web = nginx.listing if lists else nginx.plain
    root = publish(web.root / "remote.parq")
    url = f"{web.url}/remote.parq"
    plan = plan_source(url + slash, Options(type=kind))
    assert (plan.kind, plan.url, plan.origin, plan.base) == ("references", url + slash, url + slash, url + "/")
    assert (plan.mtime_ns or 0) // 10**9 == (root / ".zmetadata").stat().st_mtime_ns // 10**9
    assert chunks_of(url + slash, type=kind) == EXPECTED


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        (404, NotFound), (410, TargetMissing), (403, AccessDenied), (500, ReadError), ("truncate", ReadError),
        ("html", None),
    ],
)  # fmt: skip
def test_a_record_file_that_cannot_be_fetched(fault: object, kind: Any, faulty: Faulty, tmp_path: Path) -> None:
    root = make(tmp_path / "set")
    for path in root.rglob("*"):
        if path.is_file():
            faulty.put(f"/set/{path.relative_to(root)}", path.read_bytes())
    faulty.put("/set/a/refs.1.parq", (root / "a/refs.1.parq").read_bytes(), forever=fault)
    url = f"{faulty.url}/set"

    async def read(store: ParquetStore) -> None:
        assert bytes(await store.get("a/0")) == b"0"
        assert bytes(await store.get("a/9")) == b"9"
        if kind is None:
            assert bytes(await store.get("a/4")) == b"4"
            return
        for key in ("a/4", "a/7"):
            with pytest.raises(kind, match="no such key" if fault == 404 else r"/set/a/refs\.1\.parq: "):
                await store.get(key)

    ask(url, read, storage={"http": {}})


def test_a_set_from_the_network_reaches_no_local_file(nginx: Nginx, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(b"secret")
    root = nginx.plain.root / "evil.parq"
    shutil.rmtree(root, ignore_errors=True)
    write_set(root, {"a/.zarray": zarray([2], [1])}, {"a": [[str(secret), 0, 6], [f"file://{secret}"]]})
    for value in chunks_of(f"{nginx.plain.url}/evil.parq").values():
        assert "a set from the network reaches no local file" in str(value)

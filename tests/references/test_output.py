"""zarrfs refs convert and expand: zarrfs and fsspec read the same set in every format; a failure leaves no output."""

from __future__ import annotations

import base64
import bz2
import gzip
import itertools
import json
import lzma
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.conftest import PROGRAM, run
from tests.references.parquetsets import write_set, zarray
from tests.references.refsets import TARGET, as_fsspec_reads, done, entries, random_sets, refs, targets
from zarrfs import sources
from zarrfs.cli import commit as commit_command
from zarrfs.cli.refs import running
from zarrfs.copying import commit
from zarrfs.references import output
from zarrfs.sources.prepare import prepare

OPENERS = {"json": bytes, "json.gz": gzip.decompress, "json.xz": lzma.decompress, "json.bz2": bz2.decompress,
           "json.zst": lambda data: zstandard.ZstdDecompressor().decompressobj().decompress(data)}  # fmt: skip
RANDOM = settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(autouse=True)
def _in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plan in this process, as a child process for each of hundreds of documents would take minutes."""
    monkeypatch.setattr(sources, "_plan_in_child", lambda source, given, *_more: prepare(source, given))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("targets")


@pytest.fixture(scope="module")
def urls(place: Path) -> list[str]:
    return targets(place)


def written(document: dict[str, Any]) -> str:
    """Return a set in the form of entries() as the text of a version 0 document."""
    return json.dumps(
        {k: f"base64:{base64.b64encode(v).decode()}" if isinstance(v, bytes) else v for k, v in document.items()}
    )


@pytest.mark.parametrize("form", [*OPENERS, "index"])
def test_every_format_holds_the_same_set(form: str, tmp_path: Path, place: Path, urls: list[str]) -> None:
    document = {".zgroup": b"{}", "a/0": [urls[0], 3, 9], "a/1": [urls[1]], "a/raw": b"\xff\0", "a/text": "é".encode()}
    (tmp_path / "set.json").write_text(written(document))
    done("convert", tmp_path / "set.json", tmp_path / f"out.{form}")
    assert entries(tmp_path / f"out.{form}") == document
    if form in OPENERS:
        text = OPENERS[form]((tmp_path / f"out.{form}").read_bytes())
        assert json.loads(text)["version"] == 1
    done("convert", tmp_path / f"out.{form}", tmp_path / "back.json")
    assert entries(tmp_path / "back.json") == document
    assert sorted(os.listdir(tmp_path)) == sorted({"set.json", f"out.{form}", "back.json"})


@RANDOM
@given(data=st.data())
def test_random_sets_survive_an_index(data: st.DataObject, tmp_path: Path, urls: list[str]) -> None:
    document = data.draw(random_sets([*urls, "rel/{{x}}", "s3://b/{c", "//x"]))
    document.pop("version", None)
    (tmp_path / "set.json").write_text(written(document))
    done("convert", tmp_path / "set.json", tmp_path / "set.index", "--force")
    done("convert", tmp_path / "set.index", tmp_path / "back.json", "--force")
    assert entries(tmp_path / "back.json") == document


def meant(document: dict[str, Any]) -> dict[str, bytes]:
    """Return the bytes that each file of a set in the form of entries() must have."""
    found = {}
    for key, value in document.items():
        start = value[1] if len(value) == 3 and isinstance(value, list) else 0
        stop = start + value[2] if isinstance(value, list) and len(value) == 3 else None
        found[key] = value if isinstance(value, bytes) else TARGET[start:stop]
    return found


@RANDOM
@given(data=st.data())
def test_fsspec_reads_the_same_bytes(data: st.DataObject, tmp_path: Path, urls: list[str]) -> None:
    document = data.draw(random_sets(urls, st.sampled_from(["a", "b/c", "b/é", "d{{u}}", "e/f/g", "h"])))
    (tmp_path / "set.json").write_text(written(document))
    done("convert", tmp_path / "set.json", tmp_path / "out.json", "--force")
    assert as_fsspec_reads(tmp_path / "out.json") == meant(document)
    assert as_fsspec_reads(tmp_path / "out.json", simple_templates=False) == meant(document)
    done("expand", tmp_path / "set.json", "-O", tmp_path / "v0.json", "--force")
    assert as_fsspec_reads(tmp_path / "v0.json") == meant(document)


def test_the_command_line_knows_every_format() -> None:
    assert running.FORMATS == output.FORMATS
    assert commit_command.FORMATS == commit.FORMATS


def test_a_plain_set_needs_no_templates(tmp_path: Path) -> None:
    (tmp_path / "set.json").write_text('{"a": ["/x{y}", 1, 2], "b": "{{text}}"}')
    done("convert", tmp_path / "set.json", tmp_path / "out.json")
    assert json.loads((tmp_path / "out.json").read_text()) == {
        "version": 1, "refs": {"a": ["/x{y}", 1, 2], "b": "{{text}}"},
    }  # fmt: skip


# -- expand


def test_expand_renders_templates_and_gen(tmp_path: Path) -> None:
    (tmp_path / "set.json").write_text(
        json.dumps(
            {
                "version": 1, "templates": {"u": "s3://b"}, "refs": {"a": ["{{u}}/x", 0, 5], "m": {"zarr_format": 2}},
                "gen": [{"key": "g{{i}}", "url": "{{u}}/{{i}}", "dimensions": {"i": {"stop": 2}}}],
            }
        )
    )  # fmt: skip
    assert json.loads(done("expand", tmp_path / "set.json").stdout) == {
        "a": ["s3://b/x", 0, 5], "g0": ["s3://b/0"], "g1": ["s3://b/1"], "m": '{"zarr_format":2}',
    }  # fmt: skip


def test_expand_refuses_a_set_that_would_read_as_version_1(tmp_path: Path) -> None:
    (tmp_path / "set.json").write_text('{"version": 1, "refs": {"version": "x", "a": "b"}}')
    result = refs("expand", tmp_path / "set.json", "-O", tmp_path / "out.json")
    assert result.exit_code == 1
    assert result.stderr.startswith("zarrfs: version: ")
    assert "zarrfs refs convert" in result.stderr
    assert os.listdir(tmp_path) == ["set.json"]
    done("convert", tmp_path / "set.json", tmp_path / "out.json")
    assert entries(tmp_path / "out.json") == {"a": b"b", "version": b"x"}


# -- relative URLs


def cat(*arguments: object) -> bytes:
    """Return the output of zarrfs cat."""
    return subprocess.run([PROGRAM, "cat", *map(str, arguments)], capture_output=True, check=True).stdout


@pytest.fixture
def relative(tmp_path: Path) -> Path:
    """Make a set with targets relative to itself."""
    (tmp_path / "here").mkdir()
    (tmp_path / "there").mkdir()
    (tmp_path / "here" / "data").write_bytes(TARGET)
    path = tmp_path / "here" / "set.json"
    path.write_text('{"a": ["data", 1, 2], "b": ["file://./data"], "c": ["/abs"], "d": ["s3://b/c"], "e": ["zip://m::z.zip"]}')
    return path


@pytest.mark.parametrize("form", ["json", "index"])
def test_a_set_beside_its_source_moves_with_its_targets(form: str, relative: Path, tmp_path: Path) -> None:
    done("convert", relative, relative.parent / f"new.{form}")
    assert entries(relative.parent / f"new.{form}") == entries(relative)
    if form == "json":
        relative.parent.rename(tmp_path / "moved")
        assert cat(tmp_path / "moved" / "new.json", "a", "b") == TARGET[1:3] + TARGET


@pytest.mark.parametrize("form", ["json", "json.gz", "index"])
def test_a_set_elsewhere_finds_its_targets(form: str, relative: Path, tmp_path: Path) -> None:
    out = tmp_path / "there" / f"new.{form}"
    done("convert", relative, out)
    (tmp_path / "far").mkdir()
    shutil.copy(out, tmp_path / "far")
    for path in out, tmp_path / "far" / out.name:
        assert cat(path, "a", "b") == TARGET[1:3] + TARGET
    if form != "index":
        here = relative.parent
        assert entries(out) == {
            "a": [f"{here}/data", 1, 2], "b": [f"file://{here}/./data"], "c": ["/abs"], "d": ["s3://b/c"],
            "e": [f"zip://m::file://{here}/z.zip"],
        }  # fmt: skip


def test_relative_urls_resolve_against_the_option_base(relative: Path) -> None:
    out = json.loads(done("expand", relative, "--base", "https://user:secret@host/dir").stdout)
    assert out["a"] == ["https://host/dir/data", 1, 2]
    assert out["e"] == ["zip://m::https://host/dir/z.zip"]


# -- destinations


@pytest.mark.parametrize(
    ("name", "said", "rule"),
    [
        ("out", [], "--to"),
        ("old.json", [], "--force"),
        ("no/such/out.json", [], "no such directory"),
        ("directory", ["--to", "json"], "is a directory"),
        ("directory", ["--force"], "something else"),
        ("old.json", ["--to", "parquet", "--force"], "is a file"),
        ("pipe.json", ["--force"], "no regular file"),
        ("-", ["--to", "index"], "standard output"),
        ("out/", ["--to", "json"], "a directory"),
    ],
)
def test_a_destination_that_is_refused(name: str, said: list[str], rule: str, tmp_path: Path) -> None:
    (tmp_path / "set.json").write_text('{"a": "b"}')
    (tmp_path / "old.json").write_text("old")
    (tmp_path / "directory").mkdir()
    (tmp_path / "directory" / "mine").write_text("mine")
    os.mkfifo(tmp_path / "pipe.json")
    before = sorted(os.listdir(tmp_path))
    result = refs("convert", tmp_path / "set.json", name if name == "-" else f"{tmp_path}/{name}", *said)
    assert result.exit_code == 2
    assert rule in result.stderr
    assert sorted(os.listdir(tmp_path)) == before
    assert (tmp_path / "old.json").read_text() == "old"
    assert (tmp_path / "directory" / "mine").read_text() == "mine"


def test_force_replaces_and_standard_output_is_json(tmp_path: Path) -> None:
    (tmp_path / "set.json").write_text('{"a": "b"}')
    (tmp_path / "old.json").write_text("old")
    done("convert", tmp_path / "set.json", tmp_path / "old.json", "--force")
    assert entries(tmp_path / "old.json") == {"a": b"b"}
    assert done("convert", tmp_path / "set.json", "-").stdout == '{"version":1,"refs":{"a":"b"}}\n'


@pytest.mark.parametrize("kind", ["archive", "store"])
def test_sources_that_are_no_reference_set(kind: str, tmp_path: Path) -> None:
    (tmp_path / "archive").write_text('[{"path": "a", "mode": 33188, "data": "x", "encoding": "utf-8"}]')
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / ".zgroup").write_text('{"zarr_format": 2}')
    result = refs("convert", tmp_path / kind, tmp_path / "out.json")
    assert result.exit_code == 1
    assert ("is a file archive" if kind == "archive" else "from-store") in result.stderr
    assert not (tmp_path / "out.json").exists()


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Make a set that takes a moment to write, with its index in the cache."""
    path = tmp_path_factory.mktemp("large") / "large.json"
    path.write_text(json.dumps({f"v/{n}": [f"s3://bucket/{n * 7919}", n, 5] for n in range(200_000)}))
    assert run("info", path).returncode == 0
    yield path
    path.unlink()


# A zarrfs that sleeps before every write to an .xz file, so that a signal arrives during the conversion
SLOW = """
import lzma, time
write = lzma.LZMAFile.write
def slow(self, data):
    time.sleep(0.2)
    return write(self, data)
lzma.LZMAFile.write = slow
from zarrfs.__main__ import program
program()
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_convert_ended_by_a_signal_leaves_no_output(number: signal.Signals, large: Path, tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", SLOW, "refs", "convert", large, tmp_path / "out.json.xz"])
    until = time.monotonic() + 60
    while not os.listdir(tmp_path) and time.monotonic() < until:
        time.sleep(0.01)
    assert os.listdir(tmp_path) != ["out.json.xz"]
    process.send_signal(number)
    process.wait(60)
    assert not (tmp_path / "out.json.xz").exists()
    if number != signal.SIGKILL:
        assert (process.returncode, os.listdir(tmp_path)) == (130, [])


@pytest.mark.parametrize("form", ["json", "index"])
def test_a_write_that_fails_is_an_error_and_leaves_no_output(form: str, large: Path, tmp_path: Path) -> None:
    def limit() -> None:  # simulates a full disk
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))

    result = run("refs", "convert", large, tmp_path / f"out.{form}", preexec_fn=limit)
    assert result.returncode == 1
    assert result.stderr.startswith(f"zarrfs: {tmp_path}/out.{form}: cannot be written: ")
    assert len(result.stderr.splitlines()) == 1
    assert os.listdir(tmp_path) == []


# -- Parquet


def for_parquet(data: st.DataObject, urls: list[str]) -> dict[str, Any]:
    """Draw a random set that the Parquet layout can hold: metadata and chunks of arrays."""
    document: dict[str, Any] = {".zgroup": b'{"zarr_format":2}', ".zattrs": b'{"a":"\\u00e9"}'}
    for name in data.draw(st.lists(st.sampled_from(["x", "y/z", "é"]), unique=True, max_size=3)):
        shape = data.draw(st.lists(st.integers(0, 25), min_size=1, max_size=2))
        chunks = [data.draw(st.integers(1, 5)) for _ in shape]
        document[f"{name}/.zarray"] = json.dumps({"chunks": chunks, "shape": shape}, separators=(",", ":")).encode()
        counts = [-(-extent // step) for extent, step in zip(shape, chunks, strict=True)]
        cells = st.sampled_from([".".join(map(str, cell)) for cell in itertools.product(*map(range, counts))] or ["-"])
        for cell in data.draw(st.lists(cells, max_size=6)):
            if cell != "-":
                document[f"{name}/{cell}"] = data.draw(chunk_values(urls))
    return document


def chunk_values(urls: list[str]) -> st.SearchStrategy[Any]:
    url, number = st.sampled_from(urls), st.integers(0, len(TARGET) // 2)
    return st.binary(max_size=5) | st.tuples(url).map(list) | st.tuples(url, number, st.integers(1, 99)).map(list)


@RANDOM
@given(data=st.data())
def test_random_sets_survive_parquet_and_an_index(data: st.DataObject, tmp_path: Path, urls: list[str]) -> None:
    document = for_parquet(data, urls)
    (tmp_path / "set.json").write_text(written(document))
    size = data.draw(st.integers(1, 30))
    done("convert", tmp_path / "set.json", tmp_path / "set.parq", "--force", "--record-size", size)
    done("convert", tmp_path / "set.parq", tmp_path / "set.index", "--force")
    done("convert", tmp_path / "set.index", tmp_path / "back.json", "--force")
    found = entries(tmp_path / "back.json")
    consolidated = json.loads(found.pop(".zmetadata"))
    assert found == document
    metadata = {key: json.loads(value) for key, value in document.items() if "/.z" in f"/{key}"}
    assert consolidated["metadata"] == metadata
    assert "record_size" not in consolidated
    done("convert", tmp_path / "set.index", tmp_path / "again.parq", "--force", "--record-size", size)
    assert entries(tmp_path / "again.parq") == entries(tmp_path / "set.parq")


def test_relative_urls_of_parquet(relative: Path, tmp_path: Path) -> None:
    """A Parquet set is a directory, and its relative URLs resolve against that directory."""
    array = '{"shape": [2], "chunks": [1]}'
    relative.write_text(json.dumps({"x/.zarray": array, "x/0": ["data", 1, 2], "x/1": ["data"]}))
    done("convert", relative, relative.parent / "set.parq")
    assert cat(relative.parent / "set.parq", "x/0", "x/1") == TARGET[1:3] + TARGET
    rules = ["--from", f"{relative.parent}/", "--to", "../"]
    done("relocate", relative.parent / "set.parq", *rules, "-O", tmp_path / "there" / "r.parq")
    (tmp_path / "there" / "data").write_bytes(TARGET[::-1])
    assert cat(tmp_path / "there" / "r.parq", "x/0") == TARGET[::-1][1:3]
    done("convert", tmp_path / "there" / "r.parq", tmp_path / "there" / "r.json")
    assert cat(tmp_path / "there" / "r.json", "x/0") == TARGET[::-1][1:3]


def test_a_chunk_size_of_0_is_written_to_parquet_as_1(tmp_path: Path) -> None:
    """kerchunk writes a chunk size of 0 for an empty dataset, and fsspec would divide by it."""
    array = b'{"shape":[0,3],"chunks":[0,3]}'
    (tmp_path / "set.json").write_text(json.dumps({"x/.zarray": array.decode()}))
    done("convert", tmp_path / "set.json", tmp_path / "set.parq")
    assert entries(tmp_path / "set.parq")["x/.zarray"] == array.replace(b'"chunks":[0', b'"chunks":[1')


def test_urls_that_are_too_long_for_json(tmp_path: Path) -> None:
    """A Parquet set may hold such URLs. Bytes inside a data: URL become an inline value; any other URL is an error."""
    data = "data:;base64," + "AAEC" * 25_000
    rows = [[data, 0, 75_000], [data, 4, 5]]
    write_set(tmp_path / "set.parq", {"x/.zarray": zarray([2], [1])}, {"x": rows})
    done("convert", tmp_path / "set.parq", tmp_path / "set.json")
    found = entries(tmp_path / "set.json")
    assert (found["x/0"], found["x/1"]) == (b"\0\1\2" * 25_000, b"\1\2\0\1\2")
    for url, length in ("s3://b/" + "x" * 65_536, 5), (data, 75_001), (data + "!", 5):
        write_set(tmp_path / "set.parq", {"x/.zarray": zarray([2], [1])}, {"x": [rows[1], [url, 0, length]]})
        refused = refs("convert", tmp_path / "set.parq", tmp_path / "new.json")
        assert refused.exit_code == 1
        assert refused.stderr == "zarrfs: x/1: a URL over 65536 characters, which no JSON set can hold\n"
        assert not (tmp_path / "new.json").exists()


def test_a_set_that_parquet_cannot_hold_leaves_no_output(tmp_path: Path) -> None:
    (tmp_path / "set.json").write_text('{".zgroup": "{}", "x/0": ["/t", 0, 1]}')
    result = refs("convert", tmp_path / "set.json", tmp_path / "out.parq")
    assert result.exit_code == 1
    assert result.stderr.startswith(f"zarrfs: {tmp_path}/out.parq: x/0: ")
    assert os.listdir(tmp_path) == ["set.json"]


def test_force_replaces_a_parquet_set_by_another(tmp_path: Path) -> None:
    (tmp_path / "set.json").write_text('{".zgroup": "{}"}')
    (tmp_path / "out").mkdir()
    done("convert", tmp_path / "set.json", tmp_path / "out")
    assert refs("convert", tmp_path / "set.json", tmp_path / "out").exit_code == 2
    (tmp_path / "set.json").write_text('{".zattrs": "{}"}')
    done("convert", tmp_path / "set.json", tmp_path / "out", "--force")
    assert sorted(entries(tmp_path / "out")) == [".zattrs", ".zmetadata"]
    assert sorted(os.listdir(tmp_path)) == ["out", "set.json"]


def test_merge_sorts_the_chunks_of_parquet(tmp_path: Path) -> None:
    document = {"x/.zarray": '{"shape":[12],"chunks":[1]}'} | {f"x/{n}": [f"/t{n}", n, 1] for n in range(12)}
    (tmp_path / "set.json").write_text(json.dumps(document))
    done("convert", tmp_path / "set.json", tmp_path / "set.parq")
    done("merge", f"a={tmp_path}/set.parq", f"b={tmp_path}/set.json", "--no-group", "-O", tmp_path / "m.json")
    found = entries(tmp_path / "m.json")
    assert found.pop("a/.zmetadata")
    for prefix in "ab":
        for key, value in document.items():
            assert found.pop(f"{prefix}/{key}") == (value.encode() if isinstance(value, str) else value)
    assert not found

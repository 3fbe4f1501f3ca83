"""zarrfs refs validate: every fault is reported with its position, and the exit status."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.references.refsets import done, refs
from tests.references.test_output import _in_this_process
from zarrfs.store.indexfile import IndexWriter, Region

__all__ = ["_in_this_process"]

NOTES = {"kind": "references", "source": "x.json", "warnings": "[]"}


def found(path: Path, document: Any = None, *said: str) -> tuple[list[str], list[str], int]:
    """Validate `path`, with `document` as its new content if given; return (errors, warnings, exit status)."""
    if document is not None:
        path.write_text(document if isinstance(document, str) else json.dumps(document))
    result = refs("validate", path, "--json", *said)
    assert result.stderr == ""
    told = json.loads(result.stdout)
    assert told["valid"] == (result.exit_code == 0)
    lists = ([f"{one['entry']}: {one['rule']}" for one in told[name]] for name in ("errors", "warnings"))
    return *lists, result.exit_code  # type: ignore[return-value]


EVERYTHING = {
    "version": 2,
    "extra": 1,
    "templates": {"a": 5, "b": "{{ x", "c": "{{ y }}", "ok": "s3://b"},
    "gen": [
        {"key": "k"},
        5,
        {"key": "g{{i}}", "url": "{{nope}}", "dimensions": {"i": {"stop": 3}}},
        {
            "key": 5, "url": "x", "offset": "1", "more": 1, "less": 2,
            "dimensions": {"i": {"start": "a", "step": 0}, "ok": [1, "x", None]},
        },
        {"key": "h/../{{i}}", "url": "u", "dimensions": {"i": [1, 2]}},
        {"key": "n{{i}}", "url": "u", "offset": "{{i}}", "length": "x", "dimensions": {"i": [1]}},
    ],
    "refs": {
        "a//b": "x", 'q"x': 5, "x/0": ["{{nope}}/x", 1, 2], "x/1": ["u", -1, 2], "x/2": ["u", 1],
        "y": "base64:!!", "fine": ["{{ok}}"], "/lead": "x", "file": "x", "file/x": "y",
    },
}  # fmt: skip
ERRORS = [
    "version: must be the number 1, not the number 2 (version 0 has no such member)",
    "templates.a: expected a string, not the number 5",
    "gen[0]: url is required",
    "gen[0]: dimensions is required",
    "gen[1]: expected an object, not the number 5",
    "gen[3]: unknown member 'more'",
    "gen[3]: unknown member 'less'",
    "gen[3]: offset and length are given together or not at all",
    "gen[3].key: expected a string (a template), not the number 5",
    "gen[3].dimensions.i: stop is required",
    "gen[3].dimensions.i.start: expected a whole number, not a string",
    "gen[3].dimensions.i: a step of 0",
    "gen[3].dimensions.ok: a dimension named like a template",
    "gen[3].dimensions.ok[1]: expected a whole number, not a string",
    "gen[3].dimensions.ok[2]: expected a whole number, not null",
    'refs["a//b"]: not a key: an empty part',
    'refs["q\\"x"]: expected a string, an object or an array, not the number 5',
    "refs[\"x/0\"]: url '{{nope}}/x': 'nope' is undefined",
    'refs["x/1"]: offset: negative',
    'refs["x/2"]: expected [url] or [url, offset, length], not an array of 2',
    'refs["y"]: malformed base64: only base64 data is allowed',
    "gen[2].url: 'nope' is undefined (i=0)",
    "gen[4][\"h/../1\"]: not a key: a part '..'",
    "gen[4][\"h/../2\"]: not a key: a part '..'",
    "gen[5][\"n1\"]: expected a whole number, not 'x'",
    "templates.b: not a template: unexpected end of template, expected 'end of print statement'.",
    'refs["file"]: a file and a directory: the directory wins',
]


def test_every_fault_of_a_document_is_reported(tmp_path: Path) -> None:
    errors, warnings, status = found(tmp_path / "set.json", EVERYTHING)
    assert sorted(errors) == sorted(ERRORS)
    assert warnings == [
        ": extra: not a member of a reference set of version 1: ignored",
        ': /lead: a leading "/" is taken off (1 such keys)',
    ]
    assert status == 1


def test_the_first_shard_reports_all_faults_of_a_document(tmp_path: Path) -> None:
    path = tmp_path / "set.json"
    assert len(found(path, EVERYTHING, "--shard", "0/2")[0]) == len(ERRORS)
    assert found(path, None, "--shard", "1/2") == ([], [], 0)
    assert refs("validate", path, "--shard", "2/2").exit_code == 2


def test_output_has_a_line_for_each_fault_and_a_count(tmp_path: Path) -> None:
    path = tmp_path / "set.json"
    path.write_text(json.dumps(EVERYTHING))
    result = refs("validate", path)
    lines = result.stdout.splitlines()
    assert (len(lines), lines[-1], result.exit_code) == (30, "27 errors, 2 warnings", 1)
    assert lines[-2].startswith("warning: ")
    path.write_text('{"a": "b"}')
    assert done("validate", path).stdout == "0 errors, 0 warnings\n"


@pytest.mark.parametrize(
    ("document", "errors"),
    [
        ({"version": 1, "templates": [], "refs": 5, "gen": {}}, ["templates", "gen", "refs"]),
        ({"a": 1, "b": "x", "c": [2]}, ['["a"]', '["c"]']),
        ({"version": 1, "gen": [{"key": "{{i}}", "url": "u", "dimensions": {"i": {"stop": 10**9}}}]}, ["gen"]),
        ('{"a": "b", ', [""]),
        ("[]", [""]),
        ("5", [""]),
    ],
)
def test_a_fault_of_a_whole_member_is_reported_once(document: Any, errors: list[str], tmp_path: Path) -> None:
    told, _warnings, status = found(tmp_path / "set.json", document)
    assert [line.partition(": ")[0] for line in told] == errors
    assert status == 1


def test_warnings_fail_the_command_if_strict(tmp_path: Path) -> None:
    assert found(tmp_path / "set.json", {"version": 1, "odd": 1})[2] == 0
    assert found(tmp_path / "set.json", None, "--strict")[2] == 1
    assert found(tmp_path / "set.json", {"version": 1}, "--strict") == ([], [], 0)


BAD = st.sampled_from(["", "a//", "../x"])
GOOD = st.text(st.sampled_from("abc"), min_size=1, max_size=3)


@settings(deadline=None, max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.dictionaries(BAD | GOOD, st.sampled_from(["text", ["u", 1, 2], ["u"], 5, ["u", -1, 0], None]), max_size=8))
def test_a_set_is_valid_if_and_only_if_strict_conversion_accepts_it(tmp_path: Path, document: dict[str, Any]) -> None:
    errors, _warnings, status = found(tmp_path / "set.json", {"version": 1, "refs": document})
    taken = refs("convert", tmp_path / "set.json", "-", "--strict").exit_code
    assert (status, taken) in ((0, 0), (1, 1))
    bad = [k for k, v in document.items() if k in ("", "a//", "../x") or v in (5, None) or v == ["u", -1, 0]]
    assert sorted(line.partition('"]: ')[0] for line in errors) == sorted(f'refs["{key}' for key in bad)


# -- indexes


def test_an_index_is_validated_row_by_row(tmp_path: Path) -> None:
    path = tmp_path / "set.index"
    with IndexWriter(str(path)) as writer:
        for name in ("good", "long", "lost", "negative", "valueless"):
            writer.range(f"d/{name}", f"/{name}", 1, 2)
        writer.inline("inline", b"x")
        writer.whole("whole", "/t")
        writer.symlink("link", "x")
        writer.regions("regions", 9, [Region(0, 5, "/t")])
        writer.problem("gone", "was bad")
        writer.commit(NOTES.items())
    with sqlite3.connect(path) as db:
        db.execute("DELETE FROM target WHERE url='/lost'")
        db.execute("UPDATE entry SET start=-1 WHERE name='negative'")
        db.execute("UPDATE entry SET size=? WHERE name='long'", (2**63 - 1,))
        db.execute("UPDATE entry SET place=0, ref=99 WHERE name='valueless'")
        db.execute("INSERT INTO entry SELECT 2, 'again', kind, size, mode, mtime_ns, place, 2, start, held "
                   "FROM entry WHERE name='d'")  # fmt: skip
        db.execute("UPDATE entry SET name='a/b' WHERE name='whole'")
    db.close()
    errors, warnings, status = found(path)
    assert [line.partition(":")[0] for line in errors] == [
        "a/b", "d/again", "d/long", "d/lost", "d/negative", "d/valueless", "link", "regions",
    ]  # fmt: skip
    assert errors[1] == "d/again: a directory that is in two places"
    assert (warnings, status) == (["gone: was bad: left out of the index"], 1)


@pytest.mark.parametrize("size", [2, 4, 3 << 30, 2**63 - 1])
def test_an_inline_value_of_another_size_than_its_entry_is_an_error(size: int, tmp_path: Path) -> None:
    path, out = tmp_path / "set.index", tmp_path / "out.json"
    with IndexWriter(str(path)) as writer:
        writer.inline("d/short", b"abc", size=size)
        writer.inline("good", b"abc", size=3)
        writer.commit(NOTES.items())
    with sqlite3.connect(path) as db:
        db.execute("UPDATE entry SET size=? WHERE name='short'", (size,))
    db.close()
    rule = f"3 bytes inline, and a size of {size}"
    assert found(path) == ([f"d/short: {rule}"], [], 1)
    result = refs("convert", path, out)
    assert (result.exit_code, result.stdout, out.exists()) == (1, "", False)
    assert result.stderr == f"zarrfs: d/short: the index is damaged: {rule}\n"


def test_a_valid_index_has_no_faults(tmp_path: Path) -> None:
    (tmp_path / "set.json").write_text('{"a/b": ["/t", 0, 5], "c": "", "d": ["/t"]}')
    done("convert", tmp_path / "set.json", tmp_path / "set.index")
    assert found(tmp_path / "set.index") == ([], [], 0)


# -- Parquet


def test_every_record_file_and_row_of_parquet_is_validated(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    array = '{"shape": [10], "chunks": [1]}'
    chunks = {f"{name}/{i}": [f"/t{i}", i, 5] for name in "xy" for i in range(10)}
    (tmp_path / "set.json").write_text(json.dumps({"x/.zarray": array, "y/.zarray": array} | chunks))
    place = tmp_path / "set.parq"
    done("convert", tmp_path / "set.json", place, "--record-size", 4)
    assert found(place) == ([], [], 0)
    (place / "x" / "refs.1.parq").unlink()
    (place / "y" / "refs.0.parq").write_bytes(b"junk")
    rows = {"path": ["/t", None, "/t", "/t"], "offset": [0, 5, -1, 0], "size": [5, 5, 5, 5], "raw": [None] * 4}
    pq.write_table(pa.table(rows), place / "y" / "refs.2.parq")
    document = json.loads((place / ".zmetadata").read_text())
    document["metadata"]["z/.zarray"] = {"shape": 5}
    (place / ".zmetadata").write_text(json.dumps(document))
    errors, warnings, status = found(place)
    assert [line.partition(": ")[0] for line in errors] == [
        "z/.zarray", "y/refs.0.parq", *["y/refs.2.parq"] * 3,
    ]  # fmt: skip
    assert [line.partition(": ")[2] for line in errors[-3:]] == [
        "row 1: an offset or size without a path", "row 2: a negative offset or size", "row 3: beyond the last chunk",
    ]  # fmt: skip
    lost = "x/refs.1.parq: is not there (absent record files: 1 of 6): its chunks count as absent"
    assert (warnings, status) == ([lost], 1)
    errors, warnings, _ = found(place, None, "--missing-records=error")
    assert errors[1].startswith("x/refs.1.parq: no such file")
    assert warnings == []
    pq.write_table(pa.table({name: column[:1] for name, column in rows.items()}), place / "y" / "refs.2.parq")
    assert "y/refs.2.parq: 1 rows for 2 chunks" in found(place)[0]

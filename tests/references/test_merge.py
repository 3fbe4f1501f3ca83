"""zarrfs refs merge and relocate, compared with the same operation on a dict, and their errors."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.references.parquetsets import write_set, zarray
from tests.references.refsets import done, entries, random_sets, refs
from tests.references.test_output import _in_this_process, written
from zarrfs.references.merge import split_prefix

__all__ = ["_in_this_process"]

RANDOM = settings(deadline=None, max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
URLS = ["s3://b/x", "s3://b/y/x", "s3://b", "/abs/x", "http://h/{{x}}", "rel/x"]
PREFIXES = st.sampled_from(["", "a", "b", "a/b", "a.b", "é/ "])
GROUP = b'{"zarr_format":2}'


def wrong(*arguments: object, status: int = 1) -> str:
    """Run a command that must fail; return its message without the name of the program."""
    result = refs(*arguments)
    assert (result.exit_code, result.stdout) == (status, "")
    assert len(result.stderr.splitlines()) == 1
    return result.stderr.removeprefix("zarrfs: ").rstrip("\n")


def made(path: Path, document: dict[str, Any]) -> Path:
    path.write_text(json.dumps(document))
    return path


# -- merge


@RANDOM
@given(data=st.data())
def test_merge_equals_merging_dicts(data: st.DataObject, tmp_path: Path) -> None:
    sets = data.draw(st.lists(st.tuples(PREFIXES, random_sets(URLS)), min_size=1, max_size=3))
    which = data.draw(st.sampled_from(["first", "last", "error"]))
    given_, expected, twice = [], {}, False
    for number, (prefix, document) in enumerate(sets):
        document.pop("version", None)
        (tmp_path / f"{number}.json").write_text(written(document))
        given_.append(f"{prefix}={tmp_path}/{number}.json")
        for key, value in document.items():
            whole = f"{prefix}/{key}" if prefix else key
            if isinstance(value, list) and value[0] == "rel/x":
                value = [f"{tmp_path}/rel/x", *value[1:]]
            twice = twice or expected.get(whole, value) != value
            if which == "last" or whole not in expected:
                expected[whole] = value
    (tmp_path / "out").mkdir(exist_ok=True)
    result = refs("merge", *given_, "-O", tmp_path / "out" / "m.json", "--duplicates", which, "--force", "--no-group")
    both = any(other.startswith(f"{key}/") for key in expected for other in expected)
    if both or (twice and which == "error"):
        assert result.exit_code == 1
    else:
        assert (result.exit_code, result.stderr) == (0, "")
        assert entries(tmp_path / "out" / "m.json") == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("set.json", ("", "set.json")),
        ("a=set.json", ("a", "set.json")),
        ("a/b/=set.json", ("a/b", "set.json")),
        ("=a=set.json", ("", "a=set.json")),
        ("https://h/set.json?a=b", ("", "https://h/set.json?a=b")),
        ("a=https://h/set.json?a=b", ("a", "https://h/set.json?a=b")),
        ("./a=b/set.json", ("", "./a=b/set.json")),
        ("/data/a=b/set.json", ("", "/data/a=b/set.json")),
    ],
)
def test_a_prefix_is_split_from_its_source(text: str, expected: tuple[str, str]) -> None:
    assert split_prefix(text) == expected


def test_a_name_with_an_equals_sign(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    made(tmp_path / "b.json", {"other": "1"})
    made(tmp_path / "a=b.json", {"key": "1"})
    for source, prefix in ("=a=b.json", ""), ("./a=b.json", ""), (f"{tmp_path}/a=b.json", ""), ("x=a=b.json", "x/"):
        done("merge", source, "-O", "m.json", "--force")
        assert list(entries(tmp_path / "m.json")) == [f"{prefix}key"]


def test_the_error_of_a_key_in_two_sets_names_both_sets(tmp_path: Path) -> None:
    one, two = made(tmp_path / "1.json", {"x/a": "1"}), made(tmp_path / "2.json", {"a": "2"})
    assert wrong("merge", one, f"x={two}", "-O", tmp_path / "m.json") == (
        f"{two}: x/a: has another value in {one} (--duplicates first or last takes one of them)"
    )
    other = made(tmp_path / "3.json", {"x": "3"})
    assert wrong("merge", other, one, "-O", tmp_path / "m.json") == f"{one}: x/a: x is a file in {other}"
    assert not (tmp_path / "m.json").exists()


def test_an_entry_that_is_the_same_in_all_sets_is_taken_once(tmp_path: Path) -> None:
    spaced, dense = '{"zarr_format": 2}', '{"zarr_format":2}'
    one = made(tmp_path / "1.json", {".zgroup": spaced, "t/0": ["http://h/x", 0, 9], "t/1": "1"})
    two = made(tmp_path / "2.json", {".zgroup": dense, "t/0": ["http://h/x", 0, 9], "t/2": "2"})
    done("merge", one, two, "-O", tmp_path / "m.json")
    assert entries(tmp_path / "m.json").keys() == {".zgroup", "t/0", "t/1", "t/2"}
    other = made(tmp_path / "3.json", {"t/0": ["http://h/x", 0, 8]})
    assert f"t/0: has another value in {one}" in wrong("merge", one, other, "-O", tmp_path / "n.json")
    chunk = made(tmp_path / "4.json", {"t/1": "1.0"})  # equal as JSON, but chunks are compared as bytes
    assert f"t/1: has another value in {one}" in wrong("merge", one, chunk, "-O", tmp_path / "n.json")


def test_more_sets_than_the_soft_limit_on_open_files_are_merged(tmp_path: Path) -> None:
    program = "import resource as r; r.setrlimit(r.RLIMIT_NOFILE, (48, r.getrlimit(r.RLIMIT_NOFILE)[1]))"
    sets = [f"{number}={made(tmp_path / f'{number}.json', {'x': 'y'})}" for number in range(60)]
    command = [sys.executable, "-c", f"{program}; from zarrfs.cli import main; main()", "refs", "merge", *sets]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (0, "")
    assert json.loads(result.stdout)["refs"]["59/x"] == "y"


def test_metadata_with_nan_is_the_same_in_all_sets(tmp_path: Path) -> None:
    one = made(tmp_path / "1.json", {"t/.zattrs": '{"_FillValue": NaN, "a": 1}'})
    two = made(tmp_path / "2.json", {"t/.zattrs": '{"a":1,"_FillValue":NaN}'})
    done("merge", one, two, "-O", tmp_path / "m.json")
    other = made(tmp_path / "3.json", {"t/.zattrs": '{"a":1,"_FillValue":Infinity}'})
    assert f"t/.zattrs: has another value in {one}" in wrong("merge", one, other, "-O", tmp_path / "n.json")


@pytest.mark.parametrize(("value", "other"), [("true", "1"), ("false", "0"), ("0.0", "-0.0"), ("0", "-0")])
def test_metadata_that_only_python_calls_equal_differs(value: str, other: str, tmp_path: Path) -> None:
    one = made(tmp_path / "1.json", {"t/.zattrs": f'{{"a": {value}}}'})
    two = made(tmp_path / "2.json", {"t/.zattrs": f'{{"a": {other}}}'})
    assert f"t/.zattrs: has another value in {one}" in wrong("merge", one, two, "-O", tmp_path / "m.json")
    same = made(tmp_path / "3.json", {"t/.zattrs": '{"a": 1}'})
    equal = made(tmp_path / "4.json", {"t/.zattrs": '{"a": 1.0}'})
    done("merge", same, equal, "-O", tmp_path / "m.json")


def test_consolidated_metadata_of_parquet_does_not_hide_other_sets(tmp_path: Path) -> None:
    sets = [
        write_set(tmp_path / f"{name}.parq", {f"{name}/.zarray": zarray([1], [1])}, {name: [b"x"]})
        for name in ("air", "sea")
    ]
    for prefixes, expected in (("", ""), []), (("", "a"), ["a/.zmetadata"]), (("a", "a/b"), ["a/b/.zmetadata"]):
        given_ = [f"{prefix}={path}" for prefix, path in zip(prefixes, sets, strict=True)]
        done("merge", *given_, "-O", tmp_path / "m.json", "--force")
        found = entries(tmp_path / "m.json")
        assert [key for key in found if key.endswith(".zmetadata")] == expected
        assert len([key for key in found if key.endswith("/0")]) == 2
        for key in expected:
            assert json.loads(found[key])["zarr_consolidated_format"] == 1


def test_a_prefix_that_is_not_utf8_is_taken_as_part_of_the_source(tmp_path: Path) -> None:
    one = made(tmp_path / "1.json", {"a": "1"})
    assert "no such file or directory" in wrong("merge", f"p\udcff={one}", "-O", tmp_path / "m.json")


def test_keys_too_deep_for_a_set_are_an_error(tmp_path: Path) -> None:
    one = made(tmp_path / "1.json", {"d/" * 100 + "f": "1"})
    said = wrong("merge", f"p={one}", "-O", tmp_path / "m.json")
    assert "over 100 directories deep, which no reference set can hold" in said
    assert not (tmp_path / "m.json").exists()


@pytest.mark.parametrize(("which", "expected"), [("first", b"1"), ("last", b"3")])
def test_the_chosen_duplicate_wins(which: str, expected: bytes, tmp_path: Path) -> None:
    sets = [made(tmp_path / f"{n}.json", {"a": str(n), f"b{n}": ""}) for n in (1, 2, 3)]
    done("merge", *sets, "--duplicates", which, "-O", tmp_path / "m.json")
    assert entries(tmp_path / "m.json") == {"a": expected, "b1": b"", "b2": b"", "b3": b""}


def test_groups_are_made_only_for_zarr_v2(tmp_path: Path) -> None:
    v2 = made(tmp_path / "v2.json", {".zgroup": "{}", "x/.zarray": "{}"})
    array = made(tmp_path / "array.json", {".zarray": "{}"})
    v3 = made(tmp_path / "v3.json", {"zarr.json": "{}"})
    plain = made(tmp_path / "plain.json", {"x": "1"})
    below = made(tmp_path / "below.json", {"x/.zarray": "{}"})

    def merged(*arguments: object) -> list[str]:
        done("merge", *arguments, "-O", tmp_path / "m.json", "--force")
        found = entries(tmp_path / "m.json")
        return [key for key, value in found.items() if value == GROUP]

    assert merged(f"a={v2}", f"b/c={array}") == [".zgroup", "b/.zgroup"]
    assert merged(f"a={v2}", f"b/c={array}", "--no-group") == []
    assert merged(v2, f"b/c={array}") == ["b/.zgroup"]
    assert merged(f"a={v2}", f"a/b={array}") == [".zgroup"]
    assert merged(f"a={below}") == [".zgroup"]
    assert merged(f"a={v2}", f"b={plain}") == [".zgroup"]
    assert merged(f"a={v2}", f"b={v3}") == merged(f"a={plain}", f"b={plain}") == merged(array) == []


# -- relocate


@RANDOM
@given(data=st.data())
def test_relocate_equals_replacing_prefixes_in_a_dict(data: st.DataObject, tmp_path: Path) -> None:
    document = data.draw(random_sets(URLS))
    document.pop("version", None)
    olds = data.draw(
        st.lists(st.sampled_from(["s3://b", "s3://b/", "s3://b/y/", "/abs/", "h", "http://h/{{"]), unique=True)
    )
    pairs = {old: f"gs://{number}/" for number, old in enumerate(olds)} or {"x": "y"}

    def moved(url: str) -> str:
        fit = max((old for old in pairs if url.startswith(old)), key=len, default=None)
        return url if fit is None else pairs[fit] + url[len(fit) :]

    expected = {
        key: [moved(value[0]), *value[1:]] if isinstance(value, list) else value for key, value in document.items()
    }
    (tmp_path / "set.json").write_text(written(document))
    rules = [word for old, new in pairs.items() for word in ("--from", old, "--to", new)]
    done("relocate", tmp_path / "set.json", *rules, "-O", tmp_path / "out.json", "--force", "--allow-unused")
    assert entries(tmp_path / "out.json") == expected


@pytest.fixture
def some(tmp_path: Path) -> Path:
    return made(tmp_path / "set.json", {"a": ["s3://b/x", 0, 1], "b": ["s3://b/y"], "c": ["data/x"], "d": "s3://b/"})


def test_a_dry_run_prints_counts_and_writes_nothing(some: Path, tmp_path: Path) -> None:
    rules = ["--from", "s3://b/", "--to", "/m/", "--from", "data/", "--to", "/d/"]
    out = done("relocate", some, *rules, "--dry-run").stdout
    assert out.splitlines() == [
        "           2  s3://b/ -> /m/", "           1  data/ -> /d/", "           0  unchanged",
    ]  # fmt: skip
    assert os.listdir(tmp_path) == ["set.json"]


def test_rules_match_relative_urls_as_written_then_resolved(some: Path, tmp_path: Path) -> None:
    rules = ["--from", "s3://b/", "--to", "/m/", "--from", f"{tmp_path}/", "--to", "http://h/"]
    assert json.loads(done("relocate", some, *rules).stdout)["refs"]["c"] == ["http://h/data/x"]
    rules += ["--from", "data/", "--to", "D/"]
    assert "no target begins so" in wrong("relocate", some, *rules, "-O", tmp_path / "o.json", status=2)
    assert not (tmp_path / "o.json").exists()
    out = done("relocate", some, *rules, "--allow-unused").stdout
    assert json.loads(out)["refs"]["c"] == ["D/x"]


def test_rules_that_are_refused(some: Path) -> None:
    assert "1 --from and 2 --to" in wrong("relocate", some, "--from", "a", "--to", "b", "--to", "c", status=2)
    twice = ["--from", "s3", "--to", "b", "--from", "s3", "--to", "c"]
    assert "the same beginning twice" in wrong("relocate", some, *twice, status=2)
    assert "not UTF-8" in wrong("relocate", some, "--from", "s3", "--to", "\udcff", status=2)
    assert "nothing would be left" in wrong("relocate", some, "--from", "data/x", "--to", "", status=2)

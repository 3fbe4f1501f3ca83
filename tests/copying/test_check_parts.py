"""A check in parts: merged, they report the same as one check; parts that do not fit together are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from click.testing import CliRunner, Result

from tests.conftest import run
from zarrfs.cli import main


def check(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["check", *map(str, arguments)])


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return three arrays with bad metadata, undecodable and unreadable chunks, and a chunk outside the grid."""
    path = tmp_path_factory.mktemp("parts") / "store.zarr"
    group = zarr.open_group(path, mode="w", zarr_format=2)
    for name, extent in (("a", 40), ("b", 64), ("c", 16)):
        group.create_array(name, shape=(extent, extent), chunks=(8, 8), dtype="f4")[:] = np.eye(extent)
    zarr.consolidate_metadata(path)
    (path / "a/1.1").write_bytes(b"x")
    (path / "a/9.9").write_bytes(b"x")
    (path / "b/.zattrs").unlink()
    (path / "c/.zarray").write_text("{")
    (path / "b/2.2").unlink()
    (path / "b/2.2").mkdir()
    (path / "link").symlink_to("nowhere")
    return path


def parts(store: Path, directory: Path, count: int, *more: object) -> list[Path]:
    paths = [directory / f"part-{index}.json" for index in range(count)]
    for index, path in enumerate(paths):
        done = check("--shard", f"{index}/{count}", "--report", path, *more, store)
        assert path.exists(), done.output
    return paths


def told(done: Result) -> dict[str, Any]:
    about: dict[str, Any] = json.loads(done.stdout)
    about["bad"].sort(key=lambda one: (one["key"], one["kind"]))
    about["arrays"].sort(key=lambda one: one["path"])
    return about


@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize("more", [(), ("--twice",)])
def test_merged_parts_report_the_same_as_one_check(
    store: Path, tmp_path: Path, count: int, more: tuple[str, ...]
) -> None:
    whole = check("--json", *more, store)
    paths = parts(store, tmp_path, count, *more)
    ok = [json.loads(path.read_text())["ok"] for path in paths]
    assert count == 1 or max(ok) < sum(ok) / count + 25
    done = check("--merge", "--json", "--report", tmp_path / "whole", *reversed(paths))
    expected = told(whole) | {"parts": count, "missing_parts": []}
    assert (done.exit_code, whole.exit_code) == (1, 1)
    assert told(done) == expected
    assert {one["kind"] for one in expected["bad"]} >= {"bad metadata", "undecodable", "outside grid", "unreadable"}
    assert json.loads((tmp_path / "whole").read_text())["ok"] == expected["ok"]
    named = check("--merge", "-n", 1, *paths)
    assert named.stdout.endswith(f"and {len(expected['bad']) - 1} more\n")


def test_missing_parts_are_named(store: Path, tmp_path: Path) -> None:
    first, _second, third, _last = parts(store, tmp_path, 4)
    done = check("--merge", third, first)
    assert done.exit_code == 1
    assert done.stderr == "zarrfs: missing parts: 1/4, 3/4: these have not been checked\n"
    done = check("--merge", "--json", first)
    assert json.loads(done.stdout)["missing_parts"] == ["1/4", "2/4", "3/4"]


def test_a_missing_part_of_a_sound_store_is_a_failure(tmp_path: Path) -> None:
    zarr.create_array(tmp_path / "sound.zarr", shape=(9,), chunks=(1,), dtype="i4")[:] = 1
    one, two = parts(tmp_path / "sound.zarr", tmp_path, 2)
    assert check("--merge", one, two).exit_code == 0
    assert check("--merge", two).exit_code == 1


def test_a_part_whose_source_has_changed_is_refused(store: Path, tmp_path: Path) -> None:
    """The changed source is divided differently, so a key may be in neither part."""
    zarr.create_array(tmp_path / "x.zarr", shape=(9,), chunks=(1,), dtype="i4")[:] = 1
    one, _ = parts(tmp_path / "x.zarr", tmp_path, 2)
    (tmp_path / "x.zarr/c/7").write_bytes(b"longer than it was")
    two = tmp_path / "two.json"
    check("--shard", "1/2", "--report", two, tmp_path / "x.zarr")
    done = check("--merge", one, two)
    assert (done.exit_code, done.stdout) == (1, "")
    assert done.stderr.startswith(f"zarrfs: {two}: saw other names or sizes (")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("option", ["base", "view", "upperdir"])
def test_parts_of_other_variants_of_a_source_are_refused(option: str, tmp_path: Path) -> None:
    """The variants have the same names, sizes and version."""
    (tmp_path / "refs.json").write_text(json.dumps({"a": "data"}))
    for name in "one", "two":
        (tmp_path / name).mkdir()
    paths = []
    for index, value in enumerate(("v2", "v3") if option == "view" else (tmp_path / "one", tmp_path / "two")):
        paths.append(tmp_path / f"part-{index}.json")
        done = check("--shard", f"{index}/2", "--report", paths[-1], tmp_path / "refs.json", "-o", f"{option}={value}")
        assert paths[-1].exists(), done.output
    done = check("--merge", *paths)
    assert (done.exit_code, done.stdout) == (1, "")
    assert done.stderr.startswith(f"zarrfs: {paths[1]}: {option}= is "), done.stderr


def _changed(**changed: Any) -> Callable[[str], str]:
    def change(text: str) -> str:
        about = json.loads(text)
        about["part"] |= changed
        return json.dumps(about)

    return change


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda text: "", "is empty: run `zarrfs check --shard I/N --report FILE` again for this share"),
        (lambda text: text[:-20], "is damaged, or no report of a part of a check: run"),
        (lambda text: "[" * 100_000, "is damaged, or no report of a part of a check: run"),
        (lambda text: '{"clean": true}', "is damaged, or no report of a part of a check: run"),
        (lambda text: text.replace('"ok": ', '"ok": -'), "is a damaged part of a check (ok): run its share again"),
        (lambda text: text.replace('"links": 0', '"links": true').replace('"links": 1', '"links": true'),
         "is a damaged part of a check (links): run its share again"),
        (_changed(share="auto"), "is a damaged part of a check"),
        (_changed(share="2/2"), "is a damaged part of a check"),
        (_changed(common={"missing": 1}), "is a damaged part of a check (common): run its share again"),
        (_changed(zarrfs_check_part=2), "is a part of version 2; this program reads 1"),
        (_changed(share="0/2"), "is of the share 0/2, as {first} is"),
        (_changed(share="1/3"), "the number of shares is 3, and 2 in {first}"),
        (_changed(source="/other"), "the source is /other, and {store} in {first}"),
        (_changed(base="/other/"), "base= is /other/, and none in {first}"),
        (_changed(view="v3"), "view= is v3, and none in {first}"),
        (_changed(upperdir="/other"), "upperdir= is /other, and none in {first}"),
        (_changed(key="a"), "KEY is a, and none in {first}"),
        (_changed(decode=False), "decoding of chunks is off, and on in {first}"),
    ],
)  # fmt: skip
def test_damaged_and_unrelated_parts_are_refused(
    damage: Callable[[str], str], message: str, store: Path, tmp_path: Path
) -> None:
    first, second = parts(store, tmp_path, 2)
    second.write_text(damage(second.read_text()))
    done = check("--merge", first, second)
    assert (done.exit_code, done.stdout) == (1, "")
    assert done.stderr.startswith(f"zarrfs: {second}: {message.format(first=first, store=store)}"), done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--merge", "--shard", "0/2", "x"), "--merge reads reports of parts: "),
        (("--shard", "3/2", "x"), "--shard 3/2: "),
        (("--shard", "0/0", "x"), "--shard 0/0: "),
        (("--report", "/nowhere/x", "x"), "--report /nowhere/x: no such directory"),
        (("a", "b", "c"), "c: a check is of one SOURCE"),
    ],
)
def test_a_wrong_command_line_is_a_usage_error(words: tuple[str, ...], message: str) -> None:
    done = check(*words)
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr.startswith(f"zarrfs: {message}")


def test_auto_outside_of_a_job_is_a_usage_error(store: Path, tmp_path: Path) -> None:
    done = run("check", "--shard", "auto", "--report", tmp_path / "part", store, env={"PATH": "/bin"})
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert not (tmp_path / "part").exists()

"""RFC 37 archives: every accepted form, and every decision in docs/archives.md."""

from __future__ import annotations

import hashlib
import json
import stat
import sys
from pathlib import Path
from typing import Any

import pytest
import trio

from tests.archives.compiled import D, F, L, blobref, file, opened, put, refused, tree
from tests.conftest import DATA
from zarrfs.archives import parse as archive
from zarrfs.config.options import Options
from zarrfs.errors import ReadError, UsageError
from zarrfs.sources import plan_source
from zarrfs.store.api import KINDS, Kind

SAMPLES = DATA / "archives"
EXPECTED = json.loads((SAMPLES / "expected.json").read_text())
SHA1 = blobref(b"x")
HUGE = "9" * 4000


# -- samples made by Flux


def compare(name: str, found: Any, expected: dict[str, Any]) -> None:
    assert found.mode == stat.S_IMODE(expected["mode"]), name
    assert found.mtime_ns == (expected["mtime"] * 10**9 if "mtime" in expected else None), name
    assert found.kind is KINDS[stat.S_IFMT(expected["mode"])], name
    if "target" in expected:
        assert found.data == expected["target"]
    if "sha256" in expected:
        assert hashlib.sha256(found.data).hexdigest() == expected["sha256"], name
        assert found.size == expected["size"], name


@pytest.mark.parametrize("form", ["flux-list.json", "flux-dict.json"])
def test_samples_equal_the_originals(form: str) -> None:
    found = tree((SAMPLES / form).read_bytes(), blobs=(str(SAMPLES / "blobs"),))
    assert found.kind == "archive"
    assert found.warnings == ()
    assert found.nodes.keys() - {""} == EXPECTED.keys()
    for name, expected in EXPECTED.items():
        compare(name, found.nodes[name], expected)
    allocated = {name.rpartition("/")[2]: node.allocated for name, node in found.nodes.items()}
    assert allocated["sparse"] == 4096  # one region; the rest is a hole
    assert allocated["hole"] == 0
    assert allocated["mesh.bin"] is None  # no holes


def test_the_files_of_a_jobspec() -> None:
    jobspec = json.loads((SAMPLES / "jobspec.json").read_text())
    found = tree(jobspec)
    assert found.nodes.keys() == {"", "config.json", "mesh.bin", "run.sh"}
    for name in ("config.json", "mesh.bin"):
        expected = EXPECTED[f"job/inputs/{name}"]
        assert found.nodes[name].mode == 0o644
        assert hashlib.sha256(found.nodes[name].data).hexdigest() == expected["sha256"]
    assert found.nodes["run.sh"].mode == 0o755
    assert tree({"jobspec": jobspec, "jobid": 1, "options": {}}).nodes == found.nodes


# -- accepted forms


def test_all_forms_of_a_document_give_the_same_tree() -> None:
    files = {"a/b": file("text"), "a": {"mode": D}}
    as_list = [{"path": path, **entry} for path, entry in files.items()]
    jobspec = {"version": 1, "resources": [], "tasks": [], "attributes": {"system": {"files": files}}}
    assert tree(files).nodes == tree(as_list).nodes == tree(jobspec).nodes
    assert tree(files).nodes["a/b"].data == b"text"
    assert tree([]).nodes.keys() == {""}


CONTENTS = {
    "utf-8": (file("été\n"), "été\n".encode()),
    "utf-8 with size": (file("é", size=2), "é".encode()),
    "utf-8 with NUL": (file("a\0b"), b"a\0b"),
    "empty utf-8": (file("", size=0), b""),
    "empty data of a jobspec": ({"mode": F, "data": "", "size": 0}, b""),
    "empty": (file(size=0), b""),
    "hole": (file(size=5), bytes(5)),
    "base64": (file("gIEA", encoding="base64", size=3), b"\x80\x81\0"),
    "base64 without padding": (file("gIEAgA", encoding="base64"), b"\x80\x81\0\x80"),
    "base64 with half its padding": (file("gA=", encoding="base64"), b"\x80"),
    "empty base64": (file("", encoding="base64"), b""),
    "JSON object, in order": (file({"b": [1, 2.5, None, True], "a": "é/\x7f\n"}),
                              '{"b":[1,2.5,null,true],"a":"é/\x7f\\n"}'.encode()),
    "JSON string": ({"mode": F, "data": "text"}, b'"text"'),
    "JSON null": ({"mode": F, "data": None}, b"null"),
    "JSON with its size": (file([1], size=3), b"[1]"),
    "empty blobvec": (file([], encoding="blobvec", size=4), bytes(4)),
    "region of length 0": (file([[4, 0, SHA1]], encoding="blobvec", size=4), bytes(4)),
}  # fmt: skip


@pytest.mark.parametrize(("entry", "expected"), CONTENTS.values(), ids=CONTENTS.keys())
def test_contents_of_files(entry: dict[str, Any], expected: bytes) -> None:
    found = tree({"f": entry})
    assert found.nodes["f"].data == expected
    assert found.warnings == ()


@pytest.mark.parametrize(("mode", "mtime"), [(0, 0), (0o7777, -(2**33)), (0o4755, (2**63 - 1) // 10**9)])
def test_modes_and_times_as_stored(mode: int, mtime: int) -> None:
    link = {"mode": L, "data": "f", "mtime": mtime}
    directory = {"mode": stat.S_IFDIR | mode, "mtime": mtime}
    found = tree({"f": file("", mode=stat.S_IFREG | mode, mtime=mtime), "d": directory, "l": link}).nodes
    assert (found["f"].mode, found["d"].mode) == (mode, mode)
    assert {found[name].mtime_ns for name in "fdl"} == {mtime * 10**9}


PATHS = {"./x": "x", "a//x": "a/x", "a/./x": "a/x", ".//./a/x": "a/x", "a/..b": "a/..b", "...": "..."}


@pytest.mark.parametrize(("path", "key"), PATHS.items())
def test_paths_are_normalised(path: str, key: str) -> None:
    found = tree([{"path": path, **file("")}])
    assert key in found.nodes
    assert len(found.nodes) == 2 + key.count("/")
    assert found.warnings == ()


@pytest.mark.parametrize("path", [".", ".//.", "d/"])
def test_a_directory_before_or_after_its_children(path: str) -> None:
    entries = [{"path": path, "mode": 0o40700, "mtime": 7}, {"path": f"{path}/x", **file("")}]
    for listed in (entries, entries[::-1]):
        found = tree(listed).nodes
        assert found.keys() == {"", "x"} if path != "d/" else {"", "d", "d/x"}
        assert (found[path.strip("./")].mode, found[path.strip("./")].mtime_ns) == (0o700, 7 * 10**9)


def test_a_sparse_file_of_a_tebibyte() -> None:
    hole, sparse = file(size=2**40), file([[2**40 - 1, 1, SHA1]], encoding="blobvec", size=2**40)
    found = tree({"hole": hole, "sparse": sparse, "cap": file(size=2**62)}, blobs=(str(DATA),))
    assert [found.nodes[name].size for name in ("hole", "sparse", "cap")] == [2**40, 2**40, 2**62]
    assert [found.nodes[name].allocated for name in ("hole", "sparse")] == [0, 1]


def test_usage_of_declared_sizes_beyond_64_bits() -> None:
    vec = file([[0, 2**62, SHA1]], encoding="blobvec", size=2**62)
    with opened({"a": vec, "b": vec, "c": vec}) as (store, _):
        assert trio.run(store.usage).bytes == 2**63 - 1


def test_a_tree_deeper_than_the_stack() -> None:
    path = "d/" * 2000 + "f"
    with opened({path: file("deep")}) as (store, _):

        async def main() -> None:
            assert bytes(await store.get(path)) == b"deep"
            assert [key async for key in store.list_prefix("")] == [path]

        trio.run(main)


def test_duplicate_keys_in_the_json_text() -> None:
    found = tree(b'{"f": {"mode": 33188, "data": "a"}, "f": {"mode": 33188, "data": "b"}}')
    assert found.nodes["f"].data == b'"b"'


# -- decisions: accepted with a warning


DUPLICATES = [{"path": "f", **file("1")}, {"path": "g", **file("")}, {"path": "./f", **file("2")}]


def test_of_duplicates_the_last_wins() -> None:
    found = tree([*DUPLICATES, {"path": "f", **file("3")}])
    assert found.nodes["f"].data == b"3"
    assert found.warnings == ("./f and 1 more: a path named more than once: the last one wins",)


def test_duplicates_of_another_kind() -> None:
    one, two = {"path": "x", "mode": D}, {"path": "x", **file("")}
    assert tree([one, two]).nodes["x"].kind is Kind.FILE
    assert tree([two, one]).nodes["x"].kind is Kind.DIRECTORY
    refused([one, {"path": "x/y", **file("")}, two], "x", "the parent of x/y")


IGNORED = {
    "unknown keys": ({"f": file("a", owner=1), "g": file("", x=1)}, "f (owner) and 1 more: keys"),
    "data on a directory": ({"d": {"mode": D, "data": "x"}}, "d (data): keys"),
    "size on a symlink": ({"l": {"mode": L, "data": "t", "size": 1}}, "l (size): keys"),
}


@pytest.mark.parametrize(("document", "warning"), IGNORED.values(), ids=IGNORED.keys())
def test_ignored_fields_cause_one_warning(document: dict[str, Any], warning: str) -> None:
    (found,) = tree(document).warnings
    assert found.startswith(warning)


# -- decisions: refused, left out, or listed and not readable


REFUSED: dict[str, tuple[Any, str | None, str]] = {
    "no archive": (3, None, "a list or an object"),
    "jobspec without files": ({"resources": [], "tasks": [], "attributes": {}}, None, "without files"),
    "files of another type": ({"attributes": {"system": {"files": 1}}}, None, "a list or an object"),
    "below a file": ({"f/x/y": file(""), "f": file("")}, "f", "the parent of f/x/y"),
    "below a symlink": ({"l": {"mode": L, "data": "t"}, "l/x": file("")}, "l", "a symlink, and the parent of l/x"),
    "directory below a file": ({"f": file(""), "f/d": {"mode": D}}, "f", "the parent of f/d"),
    "below a bad entry": ({"d": {}, "d/x": file("")}, "d", "the parent of d/x"),
}


@pytest.mark.parametrize(("document", "entry", "rule"), REFUSED.values(), ids=REFUSED.keys())
def test_refused(document: Any, entry: str | None, rule: str) -> None:
    refused(document, entry, rule)


LEFT_OUT: dict[str, tuple[Any, str, str]] = {
    "no object": ([1], "[0]", "not an object"),
    "no path": ([file("")], "[0]", "a path"),
    "path that is no string": ([{"path": 1, **file("")}], "[0]", "a path that is a string"),
    "empty path": ([{"path": "", **file("")}], "[0]", "an empty path"),
    "absolute path": ({"/etc/f": file("")}, "/etc/f", "an absolute path"),
    "..": ({"a/../f": file("")}, "a/../f", "a path with a part '..'"),
    "NUL in a path": ({"a\0b": file("")}, "'a\\x00b'", "NUL"),
    "surrogate in a path": ({"a\ud800": file("")}, "'a\\ud800'", "a lone surrogate at character 1"),
    "long name": ({"a" * 256: file("")}, "a" * 200 + "...", "ENAMETOOLONG"),
    "long name of few characters": ({"é" * 128: file("")}, "é" * 128, "ENAMETOOLONG"),
    "long path": ({"d/" * 2048: {"mode": D}}, "d/" * 100 + "...", "ENAMETOOLONG"),
    "root as a file": ({".": file("")}, ".", "the root is a directory"),
}


@pytest.mark.parametrize(("document", "entry", "rule"), LEFT_OUT.values(), ids=LEFT_OUT.keys())
def test_only_an_entry_without_a_valid_path_is_left_out(document: Any, entry: str, rule: str) -> None:
    good = {"path": "good", **file("x")} if isinstance(document, list) else file("x")
    more = [*document, good] if isinstance(document, list) else {**document, "good": good}
    with opened(more, type="archive") as (store, _):

        async def main() -> None:
            assert [info.name async for info in store.list_dir("")] == ["good"]
            ((named, why),) = await store.problems()
            assert named == entry
            assert rule in why

        trio.run(main)


BROKEN: dict[str, tuple[Any, str, str]] = {
    "no object in a dictionary": ({"f": 1}, "f", "not an object"),
    "path inside a dictionary entry": ({"f": file("", path="f")}, "f", "a path inside"),
    "trailing slash on a file": ({"f/": file("")}, "f/", "a trailing slash"),
    "trailing /. on a file": ({"f/.": file("")}, "f/.", "a trailing slash"),
    "trailing slash on a symlink": ({"l/": {"mode": L, "data": "t"}}, "l/", "a trailing slash"),
    "no mode": ({"f": {"data": ""}}, "f", "no mode"),
    "float mode": ({"f": file("", mode=33188.0)}, "f", "mode 33188.0"),
    "no type bits": ({"f": file("", mode=0o644)}, "f", "mode 0o644"),
    "negative mode": ({"f": file("", mode=-1)}, "f", "mode -0o1"),
    "fifo": ({"f": {"mode": 0o010644}}, "f", "mode 0o10644"),
    "mode of many bits": ({"f": file("", mode=0o300644)}, "f", "mode 0o300644"),
    "neither size nor data": ({"f": file()}, "f", "neither size nor data"),
    "encoding without data": ({"f": file(encoding="utf-8", size=0)}, "f", "encoding without data"),
    "unknown encoding": ({"f": file("", encoding="utf-16")}, "f", "encoding utf-16"),
    "encoding of another type": ({"f": file("", encoding=[1])}, "f", "encoding [1]"),
    "utf-8 that is no string": ({"f": file([1], encoding="utf-8")}, "f", "utf-8 data is not a string"),
    "surrogate in utf-8": ({"f": file("ab\udc80")}, "f", "data has a lone surrogate at character 2"),
    "surrogate in JSON content": ({"f": file(["\ud800"])}, "f", "JSON content has a lone surrogate"),
    "NaN in JSON content": ({"f": file([float("nan")])}, "f", "NaN"),
    "infinity in JSON content": ({"f": file([float("inf")])}, "f", "larger than a double can be"),  # such as 1e400
    "float size": ({"f": file(size=1.0)}, "f", "size 1.0"),
    "negative size": ({"f": file(size=-1)}, "f", "size -1"),
    "size over the cap": ({"f": file(size=2**62 + 1)}, "f", "not an integer from 0"),
    "size smaller than data": ({"f": file("abc", size=2)}, "f", "size 2"),
    "size larger than data": ({"f": file("abc", size=4)}, "f", "size 4"),
    "symlink without data": ({"l": {"mode": L}}, "l", "not its target"),
    "symlink to nothing": ({"l": {"mode": L, "data": ""}}, "l", "not its target"),
    "long target": ({"l": {"mode": L, "data": "t" * 4096}}, "l", "ENAMETOOLONG"),
    "surrogate in a target": ({"l": {"mode": L, "data": "\ud800"}}, "l", "the target has a lone surrogate"),
}
BASE64 = ["g", "gIEA=", "gIEAg", "gA===", "=", "gI EA", "gIEA\n", "g-_A", "gA==gA==", "é"]
BROKEN |= {f"base64 {data!r}": ({"f": file(data, encoding="base64")}, "f", "malformed base64") for data in BASE64}
BLOBVECS = {
    "no list": ({}, "a blobvec that is not a list"),
    "region that is no list": ([{}], "region 0 is not"),
    "short region": ([[0, 1, SHA1], [0, 1]], "region 1 is not"),
    "true as size": ([[0, True, SHA1]], "region 0 is not"),
    "negative offset": ([[-1, 1, SHA1]], "region 0 is not within size 10"),
    "negative size": ([[0, -1, SHA1]], "region 0 is not within size 10"),
    "past the size": ([[9, 2, SHA1]], "region 0 is not within size 10"),
    "far past the size": ([[int(HUGE), int(HUGE), SHA1]], "region 0 is not within size 10"),
    "blobref that is no string": ([[0, 1, 7]], "region 0 is not"),
    "blobref of other letters": ([[0, 1, "sha1-" + "g" * 40]], "is not a blobref"),
    "short blobref": ([[0, 1, SHA1[:-1]]], "is not a blobref"),
    "long blobref": ([[0, 1, SHA1 + "0"]], "is not a blobref"),
    "blobref of the other length": ([[0, 1, "sha256-" + "0" * 40]], "is not a blobref"),
    "path for a blobref": ([[0, 1, "../" + SHA1]], "is not a blobref"),
    "newline after a blobref": ([[0, 1, SHA1 + "\n"]], "is not a blobref"),
    "overlapping regions": ([[5, 1, SHA1], [0, 3, SHA1], [2, 2, SHA1]], "regions overlap at byte 2"),
    "blobref of nothing": ([[0, 0, "sha1-"]], "is not a blobref"),
}
for name, (data, rule) in BLOBVECS.items():
    BROKEN[f"blobvec, {name}"] = {"f": file(data, encoding="blobvec", size=10)}, "f", rule
BROKEN["blobvec without size"] = ({"f": file([], encoding="blobvec")}, "f", "a blobvec without size")


@pytest.mark.parametrize(("document", "entry", "rule"), BROKEN.values(), ids=BROKEN.keys())
def test_an_entry_that_breaks_a_rule_is_listed_and_cannot_be_read(document: Any, entry: str, rule: str) -> None:
    with opened({**document, "good": file("x")}, type="archive") as (store, plan):

        async def main() -> None:
            name = entry.strip("/.")
            assert [info.name async for info in store.list_dir("")] == sorted(["good", name])
            assert (await store.info(name)).kind is Kind.FILE
            with pytest.raises(ReadError) as caught:
                await store.get(name)
            assert rule in str(caught.value)
            assert bytes(await store.get("good")) == b"x"
            assert len([text for text in plan.warnings if text.startswith(f"{entry}: ")]) == 1

        trio.run(main)


MTIMES = [1.0, None, 2**63 // 10**9 + 1, -(2**63) // 10**9 - 1]


@pytest.mark.parametrize("mtime", MTIMES)
def test_an_invalid_mtime_is_ignored_with_a_warning(mtime: Any) -> None:
    found = tree({"f": file("x", mtime=mtime), "d": {"mode": D, "mtime": mtime}})
    assert (found.nodes["f"].data, found.nodes["f"].mtime_ns) == (b"x", None)
    assert found.nodes["d"].kind is Kind.DIRECTORY
    (warning,) = found.warnings
    assert "mtime" in warning


@pytest.mark.parametrize(
    ("text", "rule"),
    [(b"[] x", "at byte 3"), (b'[{"path": "a"', "at byte 13"), (b"[" * 100_000 + b"]" * 100_000, "nested too deeply")],
    ids=["garbage", "end", "depth"],
)
def test_text_that_is_not_json(text: bytes, rule: str) -> None:
    refused(text, None, rule)


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="json writes it")
def test_json_content_too_deep_for_the_writer() -> None:
    text = b'{"f":{"mode":33188,"data":' + b"[" * 1010 + b"]" * 1010 + b"}}"
    with opened(text, type="archive") as (store, _), pytest.raises(ReadError, match="nested too deeply"):
        trio.run(store.get, "f")


# -- detection


DETECTED = {
    "list": ([], True),
    "list of anything": ([1], True),
    "dictionary": ({"a": {"mode": F}}, True),
    "dictionary with a bad entry": ({"a": {}, "b": {"mode": F}}, True),
    "dictionary of metadata": ({".zattrs": {"mode": F}, "zarr.json": {"mode": F}}, True),
    "jobspec": ({"version": 1, "resources": [], "tasks": [], "attributes": {"system": {}}}, True),
    "jobspec with files": ({"attributes": {"system": {"files": {}}}}, True),
    "wrapped jobspec": ({"jobspec": {"attributes": {"system": {"files": {}}}}}, True),
    "files with names of a jobspec": ({"attributes": {"mode": F}, "jobspec": {"mode": F}}, True),
    "files with names of a reference set": ({"version": {"mode": F}, "refs": {"mode": F}}, True),
    "nothing": ({}, False),
    "number": (1, False),
    "references": ({"a": "text", "b": ["u", 0, 1]}, False),
    "references with metadata as objects": ({".zgroup": {"zarr_format": 2}}, False),
    "references with one object": ({".zattrs": {"mode": F}, "a": ["u"]}, False),
    "an entry that is no object": ({"a": ["u"], "b": {"mode": F, "data": "x"}}, True),
    "references beside an object with a mode": ({"a": ["u"], "b": {"mode": 3}}, False),
    "references beside an object with an impossible mode": ({"a": ["u"], "b": {"mode": 10**30}}, False),
    "references, version 1": ({"version": 1, "refs": {}}, False),
    "references without version": ({"refs": {"a": "b"}}, False),
    "references beside a mode": ({"refs": {"a": "b"}, "x": {"mode": F}}, False),
}


@pytest.mark.parametrize(("document", "expected"), DETECTED.values(), ids=DETECTED.keys())
def test_archives_are_told_from_other_documents(document: Any, expected: bool) -> None:
    assert archive.detect(document) is expected


# -- blob sources


@pytest.mark.parametrize("cached", [False, True])
def test_a_blob_source_must_be_an_existing_directory(tmp_path: Path, cached: bool) -> None:
    document = tmp_path / "a.json"
    document.write_text("[]")
    if cached:
        plan_source(str(document), Options(blobs=(str(tmp_path),)), child=False)
    bad = {str(document): "not a directory", f"{tmp_path}/absent": "no such file", "flux:main": "is named flux: alone"}
    for place, rule in bad.items():
        with pytest.raises(UsageError, match=f"blobs={place}: .*{rule}") as caught:
            plan_source(str(document), Options(blobs=(str(tmp_path), place)), child=False)
        assert "\n" not in str(caught.value)
    plan_source(str(document), Options(blobs=("flux:", "http://host/x", "s3://b/y", tmp_path.as_uri())), child=False)


def test_the_warning_about_missing_blob_sources_is_not_cached(tmp_path: Path) -> None:
    document = tmp_path / "a.json"
    data = [[0, 1, put(tmp_path, b"x")]]
    document.write_text(json.dumps({"f": file(data, encoding="blobvec", size=1)}))
    for blobs in ((), (str(tmp_path),), ()):
        plan = plan_source(str(document), Options(blobs=blobs), child=False)
        assert (plan.warnings == ()) is bool(blobs)

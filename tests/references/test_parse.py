"""Reference sets of versions 0 and 1: which entries are accepted or left out, and which sets are refused."""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.reference import ReferenceFileSystem

from tests.conftest import DATA
from tests.references.referencesets import SPEC_EQUIVALENT, SPEC_EXAMPLE, compiled, refusal
from zarrfs.errors import ReadError
from zarrfs.references.parse import detect

# -- the samples and the example of the specification

EXPECTED = json.loads((DATA / "references/expected.json").read_text())


@pytest.mark.parametrize("name", EXPECTED)
def test_samples_hold_the_expected_bytes(name: str, references: Path) -> None:
    with compiled(json.loads((references / f"{name}.json").read_text())) as made:
        assert not made.warnings
        found = {
            key: {"size": made.size(key), "sha256": hashlib.sha256(made.get(key)).hexdigest()}
            for key in made.keys()  # noqa: SIM118
        }
    assert found == EXPECTED[name]


def test_the_example_of_the_specification_equals_its_version_0_form() -> None:
    with compiled(SPEC_EXAMPLE) as made:
        version_1 = made.tree()
    with compiled(SPEC_EQUIVALENT) as made:
        assert made.tree() == version_1
    assert version_1 == {**SPEC_EQUIVALENT, "key0": b"data"}


# -- detection


@pytest.mark.parametrize(
    ("document", "is_one"),
    [
        ({}, True),
        ({"a": "text"}, True),
        ({"a": ["url"]}, True),
        ({"a": ["url", 0, 1]}, True),
        ({"a": None, "b": ["url", 0, 1]}, True),
        ({".zgroup": {"zarr_format": 2}}, True),
        ({"x/zarr.json": {"zarr_format": 3}}, True),
        ({"version": 1}, True),
        ({"version": 1, "refs": {}}, True),
        ({"version": 1, "gen": []}, True),
        ({"version": 2, "refs": {}}, True),  # so that the error is about the version
        ({"version": "1", "templates": {}}, True),
        ({"refs": {}}, True),
        ({"version": 1, "resources": []}, False),
        ({"version": "1.0", "name": "x"}, False),
        ({"a": {"mode": 33188}}, False),
        ({"a": 1}, False),
        ({"a": ["url", 0]}, False),
        ({"a": [1]}, False),
        ([], False),
        ("text", False),
        (None, False),
    ],
)
def test_which_documents_are_reference_sets(document: Any, is_one: bool) -> None:
    assert detect(document) is is_one


# -- values


@pytest.mark.parametrize(
    ("value", "data"),
    [
        ("", b""),
        ("data", b"data"),
        ("é\0\n", b"\xc3\xa9\0\n"),
        ("base64:", b""),
        ("base64:AAEC/w==", b"\0\1\2\xff"),
        ("base64: AAEC\n/w\t==\r\n", b"\0\1\2\xff"),
        (" base64:AAEC", b" base64:AAEC"),
        ("Base64:AAEC", b"Base64:AAEC"),
        ("{{u}}", b"{{u}}"),
        ({}, b"{}"),
        ({"b": [1, 2.5, None], "a": "é"}, b'{"b":[1,2.5,null],"a":"\\u00e9"}'),
        ({"fill_value": float("nan")}, b'{"fill_value":NaN}'),
    ],
)
@pytest.mark.parametrize("version", [0, 1])
def test_inline_values(version: int, value: Any, data: bytes) -> None:
    document = {"x/k": value} if version == 0 else {"version": 1, "templates": {"u": "U"}, "refs": {"x/k": value}}
    with compiled(document) as made:
        assert made.get("x/k") == data
        assert made.size("x/k") == len(data)
        assert made.locate("x/k") == {"inline": len(data)}


def test_objects_have_the_text_that_fsspec_gives_them() -> None:
    """One of the two JSON encoders that fsspec uses writes blanks after separators; these are removed first."""
    value = {"shape": [10, 20], "attributes": {"ü": "x", "n": None, "t": True}, "f": 0.1, "e": 1e300}
    with compiled({"zarr.json": value}) as made:
        assert json.loads(made.get("zarr.json")) == value
        fs = ReferenceFileSystem(fo={"zarr.json": value, "x": ["file:///x"]})
        assert made.get("zarr.json") == fs.cat_file("zarr.json").replace(b'", "', b'","').replace(b": ", b":")


@pytest.mark.parametrize("version", [0, 1])
def test_references_keep_their_urls_and_ranges(version: int) -> None:
    refs = {
        "whole": ["/d/a"],
        "part": ["/d/a", 5, 7],
        "empty": ["/d/a", 9, 0],
        "last": ["/d/a", 2**63 - 2, 1],
        "long": ["/d/b", 0, 2**63 - 1],
        "relative": ["sub/c.nc", 1, 2],
        "remote": ["s3://bucket/é key", 1, 2],
    }
    with compiled(refs if version == 0 else {"version": 1, "refs": refs}, base="/set/") as made:
        assert made.tree() == {**refs, "relative": ["/set/sub/c.nc", 1, 2]}
        assert made.size("part") == 7
        assert made.get("empty") == b""


NOT_A_NUMBER = [
    (True, "true"), (None, "null"), (1.0, "the number 1.0"), ("1", "a string"), ([1], "an array"), ({}, "an object"),
]  # fmt: skip
BAD_VALUES: list[tuple[Any, str]] = [
    (None, "expected a string, an object or an array, not null"),
    (5, "expected a string, an object or an array, not the number 5"),
    (False, "expected a string, an object or an array, not false"),
    ([], "expected [url] or [url, offset, length], not an array of 0"),
    (["u", 1], "expected [url] or [url, offset, length], not an array of 2"),
    (["u", 1, 2, 3], "expected [url] or [url, offset, length], not an array of 4"),
    ([None], "url: expected a string, not null"),
    ([5, 0, 1], "url: expected a string, not the number 5"),
    ([""], "url: empty"),
    (["a\0b", 0, 1], "url: a NUL character"),
    (["\ud800"], "url: a lone surrogate, which UTF-8 cannot hold"),
    (["x" * 70000], "url: over 65536 characters"),
    (["u", -1, 1], "offset: negative"),
    (["u", 1, -1], "length: negative"),
    (["u", 2**63 - 1, 1], "offset + length is over 2^63 - 1"),
    (["u", 2**63, 0], "offset + length is over 2^63 - 1"),
    (["u", 0, 2**64], "offset + length is over 2^63 - 1"),
    ("\udc80", "text with a lone surrogate, which UTF-8 cannot hold"),
    ("base64:\udc80", "text with a lone surrogate, which UTF-8 cannot hold"),
    ("base64:AAE", "malformed base64: incorrect padding"),
    ("base64:AAEC/w=", "malformed base64: incorrect padding"),
    ("base64:AA==AA==", "malformed base64: excess data after padding"),
    ("base64:AA-_", "malformed base64: only base64 data is allowed"),
    ("base64:é", "malformed base64: only base64 data is allowed"),
    *((["u", bad, 1], f"offset: expected a whole number, not {name}") for bad, name in NOT_A_NUMBER),
    *((["u", 1, bad], f"length: expected a whole number, not {name}") for bad, name in NOT_A_NUMBER),
]  # fmt: skip


@pytest.mark.parametrize("version", [0, 1])
def test_a_bad_value_breaks_only_its_key(version: int) -> None:
    bad = {f"d/bad{number:03d}": value for number, (value, _) in enumerate(BAD_VALUES)}
    refs = {"d/a": "before", **bad, "d/z": ["/u", 0, 1]}
    with compiled(refs if version == 0 else {"version": 1, "refs": refs}) as made:
        assert made.keys() == [*refs]
        assert made.broken == {key: rule for key, (_, rule) in zip(bad, BAD_VALUES, strict=True)}
        assert made.tree() == {"d/a": b"before", "d/z": ["/u", 0, 1]}
        assert len(made.warnings) == 20
        with pytest.raises(ReadError, match="d/bad000: "):
            made.get("d/bad000")


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="json writes it")
def test_an_object_nested_too_deeply_is_broken() -> None:
    deep = b'{"a":' * 1000 + b"{}" + b"}" * 1000  # orjson parses it, but no encoder could write it again
    with compiled(b'{"bad": ' + deep + b', "good": {"a": {}}}') as made:
        assert made.broken == {"bad": "an object nested too deeply"}
        assert made.keys() == ["bad", "good"]


# -- versions and members


@pytest.mark.parametrize(
    ("version", "shown"),
    [
        (2, "the number 2"), (0, "the number 0"), (1.0, "the number 1.0"), (True, "true"), (None, "null"),
        ("1", "a string"), ([1], "an array"),
    ],
)  # fmt: skip
def test_other_versions_are_refused(version: Any, shown: str) -> None:
    assert refusal({"version": version, "refs": {}}) == (
        "version",
        f"must be the number 1, not {shown} (version 0 has no such member)",
    )


def test_refs_without_version_is_a_file_and_a_warning() -> None:
    with compiled({"refs": {"a": ["u", 0, 1]}, "b": "x"}) as made:
        assert made.tree() == {"refs": b'{"a":["u",0,1]}', "b": b"x"}
        (warning,) = made.warnings
        assert '"version": 1' in warning
        assert made.problems == []


@pytest.mark.parametrize(
    ("members", "entry", "rule"),
    [
        ({"refs": []}, "refs", "expected an object, not an array"),
        ({"refs": None}, "refs", "expected an object, not null"),
        ({"templates": {"u": "x" * 1_200_000}, "refs": []}, "refs", "expected an object, not an array"),
        ({"templates": []}, "templates", "expected an object, not an array"),
        ({"templates": {"u": 5}}, "templates.u", "expected a string, not the number 5"),
        ({"templates": {"u": {"a": "b"}}}, "templates.u", "expected a string, not an object"),
        ({"gen": {}}, "gen", "expected an array, not an object"),
        ({"gen": None}, "gen", "expected an array, not null"),
        ({"gen": ["x"]}, "gen[0]", "expected an object, not a string"),
    ],
)
def test_members_of_the_wrong_type_are_refused(members: Any, entry: str, rule: str) -> None:
    assert refusal({"version": 1, **members}) == (entry, rule)


def test_unknown_members_are_reported() -> None:
    with compiled({"version": 1, "refs": {"a": "x"}, "notes": "", "fo": 1}) as made:
        assert made.keys() == ["a"]
        assert [warning.partition(":")[0] for warning in made.warnings] == ["notes", "fo"]


def test_a_document_that_is_no_object_is_refused() -> None:
    assert refusal([]) == (None, "a reference set is a JSON object, not an array")


# -- templates


def test_only_urls_of_version_1_are_rendered() -> None:
    refs = {"{{u}}": "{{u}}", "o": {"{{u}}": "{{u}}"}, "r": ["/{{u}}", 0, 1], "w": ["/{{ 1 + 1 }}"], "b": ["/{%}"]}
    shown = {"{{u}}": b"{{u}}", "o": b'{"{{u}}":"{{u}}"}'}
    with compiled({"version": 1, "templates": {"u": "U"}, "refs": refs}) as made:
        assert made.tree() == {**shown, "r": ["/U", 0, 1], "w": ["/2"], "b": ["/{%}"]}
    with compiled({**refs, "templates": "x"}) as made:
        assert made.tree() == {**refs, **shown, "templates": b"x"}
    assert refusal({"version": 1, "refs": {"x": ["/{{u}}"]}}) == ("x", "url '/{{u}}': 'u' is undefined")


@pytest.mark.parametrize(
    ("url", "rule"),
    {
        "{{nope}}": "'nope' is undefined",
        "{{f}}": "in template f: 'c' is undefined",
        "{{a}}": "nested too deeply",
        "{{ 'x' * 10**10 }}": "takes too much memory to render",
        "{{": "not a template: unexpected 'end of template'",
    }.items(),
)
def test_a_template_that_fails_refuses_the_set_and_names_the_key(url: str, rule: str) -> None:
    document = {
        "version": 1,
        "templates": {"f": "{{c}}", "a": "{{b}}", "b": "{{a}}"},
        "refs": {"good": "x", "d/key": [url, 0, 1]},
    }
    entry, told = refusal(document)
    assert (entry, told) == ("d/key", f"url {url!r}: {rule}")


def test_a_rendered_url_is_checked_like_any_other() -> None:
    refs = {"empty": ["{{e}}", 0, 1], "nul": ["{{z}}"], "good": ["/{{e}}", 0, 1]}
    with compiled({"version": 1, "templates": {"e": "", "z": "\0"}, "refs": refs}) as made:
        assert [*made.tree()] == ["good"]
        assert made.broken == {"empty": "url: empty", "nul": "url: a NUL character"}


# -- gen


def with_gen(*items: dict[str, Any], refs: Any = None, **templates: str) -> dict[str, Any]:
    whole = [{"key": "k{{i}}", "url": "/u", "dimensions": {"i": {"stop": 3}}, **item} for item in items]
    return {"version": 1, "templates": templates, "refs": refs or {}, "gen": whole}


def test_gen_overrides_refs_and_later_overrides_earlier() -> None:
    document = with_gen(
        {"url": "/first"},
        {"key": "k{{ 1 + i // 2 }}", "url": "/second/{{i}}"},
        refs={"k0": "inline", "k9": "kept"},
    )
    with compiled(document) as made:
        assert made.tree() == {"k0": ["/first"], "k1": ["/second/1"], "k2": ["/second/2"], "k9": b"kept"}


def test_gen_makes_ranges_and_whole_files() -> None:
    document = with_gen({"offset": " {{ i * 10 }}\n", "length": "007"}, {"key": "w{{i}}"})
    with compiled(document) as made:
        assert made.tree() == {
            "k0": ["/u", 0, 7], "k1": ["/u", 10, 7], "k2": ["/u", 20, 7], "w0": ["/u"], "w1": ["/u"], "w2": ["/u"],
        }  # fmt: skip


BAD_GENERATED = [
    ({"offset": "{{ i - 1 }}", "length": "1"}, "offset: negative"),
    ({"offset": "0", "length": "{{ i - 1 }}"}, "length: negative"),
    ({"offset": "{{ i if i else 'x' }}", "length": "1"}, "expected a whole number, not 'x'"),
    ({"offset": "{{ i if i else 0.5 }}", "length": "1"}, "expected a whole number, not '0.5'"),
    ({"offset": "{{ i if i else '1_0' }}", "length": "1"}, "expected a whole number, not '1_0'"),
    ({"offset": "{{ i if i else '+1' }}", "length": "1"}, "expected a whole number, not '+1'"),
    ({"offset": "{{ i if i else '١' }}", "length": "1"}, "expected a whole number, not '١'"),
    ({"offset": "{{ i if i else '\u2003' + '1' }}", "length": "1"}, "expected a whole number, not '\\u20031'"),
    ({"offset": "{{ i if i else '' }}", "length": "1"}, "expected a whole number, not ''"),
    ({"offset": "{{ i if i else 2**63 }}", "length": "1"}, "offset + length is over 2^63 - 1"),
    ({"offset": "{{ i if i else '9' * 9999 }}", "length": "1"}, "offset + length is over 2^63 - 1"),
    ({"url": "{{ i or '' }}"}, "url: empty"),
    ({"url": "{{ i if i else '\\0' }}"}, "url: a NUL character"),
]


def test_a_bad_generated_value_breaks_only_its_key() -> None:
    items = [{"key": f"{number:02d}/k{{{{i}}}}", **item} for number, (item, _) in enumerate(BAD_GENERATED)]
    with compiled(with_gen(*items, refs={"a": "x"})) as made:
        expected = {f"{number:02d}/k0": f"{rule} (gen[{number}])" for number, (_, rule) in enumerate(BAD_GENERATED)}
        assert made.broken == expected
        assert [*made.tree()] == [*(f"{number:02d}/k{i}" for number in range(len(items)) for i in (1, 2)), "a"]


def test_a_bad_generated_key_leaves_out_only_itself() -> None:
    with compiled(with_gen({"key": "k/{{ i or '' }}"})) as made:
        assert made.keys() == ["k/1", "k/2"]
        assert made.problems == [("k/", "not a key: an empty part (gen[0])")]


def test_a_bad_generated_value_replaces_an_entry() -> None:
    item = {"offset": "{{ i - 1 }}", "length": "1"}
    with compiled(with_gen(item, refs={"k0": "stale", "k1": "x"})) as made:
        assert [*made.tree()] == ["k1", "k2"]
        with pytest.raises(ReadError):
            made.get("k0")
    with compiled(with_gen(item, {"url": "/new"}, refs={"k0": "stale"})) as made:
        assert made.value("k0") == ["/new"]


def test_errors_in_gen_refuse_the_set() -> None:
    for item, entry, rule in (
        ({"url": "{{nope}}"}, "gen[1].url", "'nope' is undefined (i=0)"),
        ({"dimensions": {"u": [1]}}, "gen[1].dimensions.u", "a dimension named like a template"),
        ({"offset": "1"}, "gen[1]", "offset and length are given together or not at all"),
    ):
        assert refusal(with_gen({}, item, u="x")) == (entry, rule)


# -- through the child process


@pytest.mark.parametrize("padding", [10, 8_000])  # documents of over 256 KiB are not parsed as a whole
@pytest.mark.parametrize("form", ["{%s}", '{"version": 1, "refs": {%s}}'])
def test_a_later_bad_value_replaces_an_entry(form: str, padding: int) -> None:
    entries = ['".zgroup": "{}"', '"d/x": "old"', '"d/y": "kept"', '"d/x": null', '"d/y": "new"', '"e/z": null']
    entries[3:3] = [f'"p/{number}": ["file:///tmp/target", {number}, 100]' for number in range(padding)]
    with compiled((form % ", ".join(entries)).encode()) as made:
        assert {*made.keys()} - {*made.broken} == {".zgroup", "d/y", *(f"p/{number}" for number in range(padding))}
        assert made.get("d/y") == b"new"
        assert len(made.warnings) == 2

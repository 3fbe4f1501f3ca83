"""JSON documents parsed in slices: the same result as parsing the whole, wherever the slices end."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.references.referencesets import compiled
from zarrfs.documents import json_document
from zarrfs.documents.document import Document
from zarrfs.documents.json_document import JsonDocument
from zarrfs.errors import SourceError


@pytest.fixture(params=[16, 1 << 20], autouse=True)
def window(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(json_document, "WINDOW", request.param)
    return int(request.param)


def document(text: bytes, limit: int = 1 << 30) -> JsonDocument:
    return JsonDocument(Document("x.json", text, "/", None), limit)


def together(text: bytes, apart: tuple[str, ...]) -> Any:
    """Parse `text` in slices and merge them into one value."""
    whole: Any = None
    for member, values in document(text).slices(apart):
        if member is None:
            if whole is None or not isinstance(values, dict | list):
                whole = values
            elif isinstance(values, dict):
                whole |= values
            else:
                whole += values
        else:
            whole = {} if whole is None else whole
            if isinstance(values, dict):
                whole.setdefault(member, {}).update(values)
            else:
                whole.setdefault(member, []).extend(values)
    return whole


NASTY = st.sampled_from(
    ['],"', '"],', "}", "{", "[", "\\", '\\"', "],", "},", '{"', "\\\\", "é", "\n", ",", ":", '":{']
)
TEXTS = st.one_of(st.text(max_size=8), st.lists(NASTY, max_size=5).map("".join))
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | TEXTS,
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(TEXTS, inner, max_size=5),
    max_leaves=40,
)
ROOTS = st.one_of(
    VALUES,
    st.dictionaries(TEXTS, VALUES, max_size=30),
    st.lists(VALUES, max_size=30),
    st.fixed_dictionaries(
        {"refs": st.dictionaries(TEXTS, VALUES, max_size=30), "version": VALUES}, optional={"a": VALUES}
    ),
)


@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(root=ROOTS, indent=st.sampled_from([None, 1]), raw=st.booleans(), blanks=st.sampled_from(["", " \n", " " * 40]))
def test_merged_slices_equal_the_document(root: Any, indent: int | None, raw: bool, blanks: str) -> None:
    separators = f"{blanks},{blanks}", f"{blanks}:{blanks}"
    written = json.dumps(root, indent=indent, ensure_ascii=not raw, separators=separators)
    text = (blanks + written + blanks).encode("utf-8", "replace")
    expected = json.loads(text)
    assert together(text, ()) == expected
    if not (isinstance(expected, dict) and expected.get("refs", 1) in ({}, [])):  # an empty member has no slice
        assert together(text, ("refs",)) == expected
    assert document(text).whole() == expected


@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(root=ROOTS, data=st.data())
def test_invalid_json_is_refused(root: Any, data: st.DataObject) -> None:
    text = json.dumps(root).encode()
    at = data.draw(st.integers(0, len(text) - 1))
    without, more = text[:at] + text[at + 1 :], text[:at] + b"," + text[at:]
    broken = data.draw(st.sampled_from([text[:at], without, more, text + b"]"]))
    try:
        expected = json.loads(broken)
    except ValueError:
        for apart in (), ("refs",):
            with pytest.raises(SourceError, match=r"^x\.json: not JSON: "):
                together(broken, apart)
    else:
        assert together(broken, ()) == expected


@pytest.mark.parametrize(
    "text",
    [b'{,"abcdefghijklmnop":[1]}', b'[[1,2,3,4,5,6],,[7,8,9,10]]', b'{"refs":{,"abcdefghijklm":{"a":[1,2,3]}}}',
     b"[1,\v2]", b"", b" ", b"{", b"[", b'{"a":1', b'{"a":1]', b"[1}", b'{"a":1,}', b"[1,]", b"{,}", b'{"a":1}}',
     b"[] x", b'{"refs":{"a":1],"b":1}', b'{"refs":{"a":1},}', b'{"refs":{"a":1}"b":1}', b'{"refs":{"a":1,},"b":1}',
     b'{"a":[1},"b":[]}', b'{"refs":{"a":"\n', b'{"refs"', b'{"refs":{"a":1}'],
)  # fmt: skip
def test_known_forms_of_broken_json_are_refused(text: bytes) -> None:
    for apart in (), ("refs",):
        with pytest.raises(SourceError, match=r"^x\.json: not JSON: "):
            together(text, apart)


@pytest.mark.parametrize("apart", [(), ("refs",)])
def test_bytes_that_are_not_utf_8_are_quoted(apart: tuple[str, ...]) -> None:
    text = b'{"refs":{' + b'"k":["u",1,1],' * 200 + b'"x/na\xffme":"v","z":1}}'
    with pytest.raises(SourceError, match=r"not UTF-8: '.*x/na\\\\xff.*\(at byte [\d,]+\)$") as caught:
        together(text, apart)
    (at,) = re.findall(r"at byte ([\d,]+)", caught.value.rule)
    assert int(at.replace(",", "")) == text.index(b"\xff")


def test_whole_numbers_of_any_size() -> None:
    numbers = [2**63, 2**64, 10**23 + 1, -(10**30), 5]
    text = json.dumps({"refs": {f"k{at}": {"n": number} for at, number in enumerate(numbers)}, "z": 9.969e36}).encode()
    for apart in (), ("refs",):
        assert together(text, apart) == json.loads(text)
        assert str(together(text, apart)) == str(json.loads(text))


def test_a_byte_order_mark_is_skipped() -> None:
    for text in (b'{"a": [1]}', b'{"a": ["' + b"x" * 3000 + b'"]}'):
        assert together(b"\xef\xbb\xbf" + text, ()) == json.loads(text)


ORDERS = [
    ("version", "templates", "gen", "refs"),
    ("refs", "gen", "templates", "version"),
    ("version", "refs", "templates", "gen"),
]


@pytest.mark.parametrize("order", ORDERS)
def test_the_members_of_a_set_may_come_in_any_order(order: tuple[str, ...]) -> None:
    members = {
        "version": 1,
        "templates": {"u": "s3://b", "f": "{{c}}!"},
        "gen": [{"key": "g/{{i}}", "url": "{{u}}/{{i}}", "dimensions": {"i": {"stop": 3}}}],
        "refs": {f"d/{n}": ["{{u}}/" + str(n), n, n] for n in range(50)}
        | {"g/1": "replaced", "f": ["s3://{{f(c='x')}}"]},
    }
    with compiled(json.dumps({name: members[name] for name in order}).encode()) as made:
        expected: dict[str, Any] = {f"d/{n}": [f"s3://b/{n}", n, n] for n in range(50)}
        expected |= {f"g/{n}": [f"s3://b/{n}"] for n in range(3)} | {"f": ["s3://x!"]}
        assert made.tree() == expected


def test_a_large_version_0_set_may_have_a_file_named_refs() -> None:
    values: dict[str, Any] = {f"d/{n}": ["s3://u", n, n] for n in range(50)}
    with compiled({**values, "refs": {"a": 1}}) as made:
        assert made.tree() == {**values, "refs": b'{"a":1}'}
        assert len(made.warnings) == 1

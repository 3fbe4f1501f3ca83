"""The keys of reference sets: valid and invalid keys, and keys that are both a file and a directory."""

from __future__ import annotations

from typing import Any

import pytest
import trio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.references.referencesets import compiled
from zarrfs.references import parse as references
from zarrfs.store import indexfile as indexdirs
from zarrfs.store.api import Kind, join_key

BAD_KEYS = {
    "": "not a key: an empty key",
    "/": "not a key: an empty key",
    "//a": "not a key: an absolute key",
    "a/": "not a key: an empty part",
    "a//b": "not a key: an empty part",
    ".": "not a key: a part '.'",
    "./a": "not a key: a part '.'",
    "a/./b": "not a key: a part '.'",
    "..": "not a key: a part '..'",
    "../a": "not a key: a part '..'",
    "a/../b": "not a key: a part '..'",
    "a/..": "not a key: a part '..'",
    "a\0b": "not a key: a NUL character",
    "a\0/b": "not a key: a NUL character",
    "x/" + "n" * 256: "not a key: a name over 255 bytes (ENAMETOOLONG)",
    "x/" + "é" * 128: "not a key: a name over 255 bytes (ENAMETOOLONG)",
    "n" * 256 + "/x": "not a key: a name over 255 bytes (ENAMETOOLONG)",
    "a/" * 2047 + "bc": "not a key: a key over 4095 bytes",
    "a/" * 101 + "b": "not a key: over 100 directories deep",
    "\ud800": "a key with a lone surrogate, which UTF-8 cannot hold",
    "x\udc80/y": "a key with a lone surrogate, which UTF-8 cannot hold",
}
GOOD_KEYS = [
    "a", ".zarray", "...", "..a", "a/.zattrs", "a/b/c", "a b", "a\nb", "é/ü", "x/" + "n" * 255, "x/" + "é" * 127,
    "a/" * 100 + "b", ("d" * 200 + "/") * 20 + "n" * 75, "\\", "~", "-", "c/0/0", "\u2028", "\U0001f600",
]  # fmt: skip


@pytest.mark.parametrize(("key", "rule"), BAD_KEYS.items(), ids=range(len(BAD_KEYS)))
@pytest.mark.parametrize("value", ["text", ["u", 0, 1]])
def test_a_bad_key_is_left_out_and_no_other(key: str, rule: str, value: Any) -> None:
    with compiled({"before": "1", key: value, "x/after": "2", "n/after": "3"}) as made:
        assert made.keys() == ["before", "n/after", "x/after"]
        ((_entry, told),) = made.problems
        assert told == rule


@pytest.mark.parametrize("key", GOOD_KEYS, ids=range(len(GOOD_KEYS)))
def test_valid_keys_are_kept(key: str) -> None:
    with compiled({key: "text", "x/sibling": "2"}) as made:
        assert made.keys() == sorted([key, "x/sibling"])


def test_a_bad_key_below_a_known_directory_is_left_out() -> None:
    with compiled({"d/a": "", "d/.": "", "d/..": "", "d/": "", "d/b": "", "//c": "", "d/\0": "", "": ""}) as made:
        assert made.keys() == ["d/a", "d/b"]
        assert len(made.problems) == 6


def test_messages_show_any_key_on_one_line() -> None:
    with compiled({"a\n\x1b[31m\ud800": 1, "k" * 5000: 1}) as made:
        (first, _), (second, _) = made.problems
        assert first == "a\\n\\x1b[31m\\ud800"
        assert second == "k" * 400 + "…"
        assert all(warning.isprintable() for warning in made.warnings)


def test_the_directory_wins_over_the_file() -> None:
    rule = "a file and a directory: the directory wins"
    for document in ({"a": "file", "a/b": "x"}, {"a/b": "x", "a": ["u", 0, 1]}):
        with compiled(document) as made:
            assert made.tree() == {"a/b": b"x"}
            assert made.problems == [("a", rule)]


def test_a_bad_key_makes_no_directory() -> None:
    with compiled({"a": "file", "a/..": "x", "a/bad": 5}) as made:
        assert made.keys() == ["a/bad"]
        assert [entry for entry, _ in made.problems] == ["a/..", "a"]


# -- a leading slash, and keys that are directories too


def test_a_leading_slash_is_removed() -> None:
    with compiled({"/a": "1", "b": "2", "/d/c": ["u", 0, 1], "/../e": "no"}) as made:
        assert made.keys() == ["a", "b", "d/c"]
        assert made.problems == [("/../e", "not a key: a part '..'")]
        assert made.warnings[-1] == '/a: a leading "/" is taken off (3 such keys)'
    with compiled({"a": "1", "/a": "2"}) as made:
        assert made.tree() == {"a": b"2"}
    with compiled({"z": ["/u", 0, 9], "a": ["/u", 0, 1], "/a": "2"}) as made:  # known URLs' ranges are written later
        assert made.tree() == {"a": b"2", "z": ["/u", 0, 9]}


def test_many_unknown_members_are_counted() -> None:
    with compiled({"version": 1, "refs": {}, **{f"a/{number}": "1" for number in range(1025)}}) as made:
        assert made.keys() == []
        assert made.warnings[0] == "a/0: not a member of a reference set of version 1: ignored"
        assert made.warnings[20:] == ["1,005 more members that no reference set of version 1 has: ignored"]


NAMES = st.sampled_from(["a", "a-", "b"])  # "-" sorts before "/"
@settings(deadline=None, max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(keys=st.lists(st.lists(NAMES, min_size=1, max_size=5).map("/".join), max_size=40))
def test_directories_evicted_from_the_cache(keys: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """With a directory cache so small that entries are evicted and looked up again, the tree is the same."""
    monkeypatch.setattr(indexdirs, "_REMEMBERED", 2)
    monkeypatch.setattr(references, "_REMEMBERED", 2)
    model = {key: str(number) for number, key in enumerate(keys)}
    above = {key[:at] for key in model for at in range(len(key)) if key[at] == "/"}
    with compiled(model) as made:
        left = model.keys() - above
        assert made.tree() == {key: model[key].encode() for key in left}
        listed: set[str] = set()

        async def walk() -> None:
            todo = [""]
            while todo:
                prefix = todo.pop()
                names = [info async for info in made.store.list_dir(prefix)]
                assert (await made.store.info(prefix)).links == 2 + sum(info.kind == Kind.DIRECTORY for info in names)
                for info in names:
                    key = join_key(prefix, info.name)
                    listed.add(key)
                    if info.kind == Kind.DIRECTORY:
                        todo.append(key)

        trio.run(walk)
        directories = {key[:at] for key in left for at in range(len(key)) if key[at] == "/"}
        assert left <= listed
        assert directories <= listed
        assert listed == left | above


def test_a_long_key_is_left_out_wherever_it_comes() -> None:
    """Keys in the directory of a checked key take a shorter check, which once counted characters, not bytes."""
    wide = "\U0001d11e"
    directory = "/".join([wide * 60] * 16)
    long = f"{directory}/{wide * 63}"
    for keys in ([f"{directory}/a", long], [long, f"{directory}/a"]):
        with compiled({key: ["u", 0, 1] for key in keys}) as found:
            assert found.keys() == [f"{directory}/a"]
            assert "a key over 4095 bytes: left out" in found.warnings[0]

"""Random reference sets, compared with models: a dict, plain jinja2 with loops, and fsspec where it is correct."""

from __future__ import annotations

import json
from typing import Any

from fsspec.implementations.reference import ReferenceFileSystem
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.references.referencesets import compiled


def resolved(value: Any) -> Any:
    """Return a value of a document as Compiled.value() returns it."""
    return value.encode() if isinstance(value, str) else list(value)


def without_conflicts(entries: dict[str, Any]) -> dict[str, Any]:
    directories = {key[:at] for key in entries for at, char in enumerate(key) if char == "/"}
    return {key: value for key, value in entries.items() if key not in directories}


FRAGMENTS = st.lists(
    st.sampled_from(
        [
            "x", "/", "-", "{{u}}", "{{ v }}", "{{f(c='1')}}", "{{f(c=u)}}", "{{ u | upper }}", "{{w}}", "{{ 3 * 4 }}",
        ]
    ),
    max_size=4,
).map("".join)  # fmt: skip
ITEMS = st.fixed_dictionaries(
    {
        "key": st.sampled_from(["g{{i}}", "g{{i}}/{{j}}", "{{u}}{{i}}", "a/b", "h/{{ '%02d' | format(j) }}"]),
        "url": st.tuples(FRAGMENTS, st.sampled_from(["", "{{i}}", "{{f(c=j)}}", "{% if i %}{{i}}{% endif %}"])).map(
            lambda parts: "/t" + "".join(parts)
        ),
        "dimensions": st.fixed_dictionaries(
            {
                "i": st.lists(st.integers(0, 5), max_size=3),
                "j": st.fixed_dictionaries(
                    {"stop": st.integers(0, 9)},
                    optional={"start": st.integers(0, 3), "step": st.integers(1, 4)},
                ),
            }
        ),
    },
    optional={"range": st.sampled_from([("{{i}}", "{{j}}"), ("{{ i * 10 + j }}", "5"), ("7", "{{i + j}}")])},
)


@settings(deadline=None, max_examples=50)
@given(st.lists(ITEMS, max_size=3))
def test_random_sets_of_version_1_as_fsspec_reads_them(items: list[dict[str, Any]]) -> None:
    """Draw only sets that fsspec renders as specified, in which no template refers to another."""
    for item in items:
        item["url"] = item["url"].replace("{{w}}", "w")
        if "range" in item:
            item["offset"], item["length"] = item.pop("range")
    document = {
        "version": 1,
        "templates": {"u": "U", "v": "s/{v}", "f": "<{{c}}>"},
        "refs": {"a": ["/{{u}}/{{f(c='x')}}", 1, 2], "o": {"a": [1]}, "x": "text"},
        "gen": items,
    }
    theirs = ReferenceFileSystem(fo=json.loads(json.dumps(document)), simple_templates=False).references
    theirs["o"] = theirs["o"].replace(" ", "")
    with compiled(document) as made:
        expected = without_conflicts(theirs)
        assert made.tree() == {key: resolved(value) for key, value in expected.items()}

"""Items of gen: the order of combinations, and errors with the place that each names."""

from __future__ import annotations

from typing import Any

import pytest

from tests.references.gens import rows
from zarrfs.references.gen import TemplateError, read_gen

WHOLE = "expected a whole number, not"
GOOD = {"key": "k{{i}}", "url": "u", "dimensions": {"i": {"stop": 2}}}


def test_the_last_dimension_varies_fastest() -> None:
    dimensions = {"b": [1, 0], "a": {"stop": 2}, "c": {"start": 7, "stop": 0, "step": -4}}
    keys = [row[0] for row in rows({**GOOD, "key": "{{a}}{{b}}{{c}}", "dimensions": dimensions})]
    assert keys == ["017", "013", "117", "113", "007", "003", "107", "103"]


def test_an_item_without_combinations_has_no_rows() -> None:
    for empty in ([], {"stop": 0}, {"start": 3, "stop": 3}, {"stop": 5, "step": -1}):
        assert rows({**GOOD, "dimensions": {"i": empty, "j": [1, 2]}}) == []
        assert rows({**GOOD, "dimensions": {"j": [1, 2], "i": empty}}) == []
    with pytest.raises(TemplateError, match="not a template"):
        rows({**GOOD, "url": "{{", "dimensions": {"i": []}})


@pytest.mark.parametrize(
    ("change", "entry", "rule"),
    [
        (7, "gen[0]", "expected an object, not the number 7"),
        ({"key": ...}, "gen[0]", "key is required"),
        ({"offset": "1"}, "gen[0]", "offset and length are given together or not at all"),
        ({"length": "1"}, "gen[0]", "offset and length are given together or not at all"),
        ({"lenght": "1"}, "gen[0]", "unknown member 'lenght'"),
        ({"key": 1}, "gen[0].key", "expected a string (a template), not the number 1"),
        ({"offset": 0, "length": "1"}, "gen[0].offset", "expected a string (a template), not the number 0"),
        ({"offset": "0", "length": None}, "gen[0].length", "expected a string (a template), not null"),
        ({"dimensions": {}}, "gen[0].dimensions", "expected an object with one dimension or more"),
        ({"dimensions": {"i": 5}}, "gen[0].dimensions.i", "expected an object, not the number 5"),
        ({"dimensions": {"i": {"start": 1}}}, "gen[0].dimensions.i", "stop is required"),
        ({"dimensions": {"i": {"stop": 1, "step": 0}}}, "gen[0].dimensions.i", "a step of 0"),
        ({"dimensions": {"i": {"stop": 1, "by": 1}}}, "gen[0].dimensions.i", "unknown member 'by'"),
        ({"dimensions": {"i": {"stop": 1.0}}}, "gen[0].dimensions.i.stop", f"{WHOLE} the number 1.0"),
        ({"dimensions": {"i": {"stop": True}}}, "gen[0].dimensions.i.stop", f"{WHOLE} true"),
        ({"dimensions": {"i": [1, "a"]}}, "gen[0].dimensions.i[1]", f"{WHOLE} a string"),
        ({"dimensions": {"i": [False]}}, "gen[0].dimensions.i[0]", f"{WHOLE} false"),
        ({"dimensions": {"u": [1]}}, "gen[0].dimensions.u", "a dimension named like a template"),
    ],
)
def test_errors_of_an_item(change: Any, entry: str, rule: str) -> None:
    item = change if not isinstance(change, dict) else {**GOOD, **change}
    if isinstance(item, dict):
        item = {name: value for name, value in item.items() if value is not ...}
    with pytest.raises(TemplateError) as caught:
        read_gen([item], {"u"})
    assert (caught.value.entry, caught.value.rule) == (entry, rule)


def test_a_number_of_entries_too_long_for_python_to_print_is_refused() -> None:
    dimensions = {f"d{number}": {"stop": 9 * 10**18} for number in range(300)}
    with pytest.raises(TemplateError) as caught:
        read_gen([{"key": "k", "url": "u", "dimensions": dimensions}], ())
    assert "over 10^60 entries" in caught.value.rule


@pytest.mark.parametrize(
    ("item", "entry", "rule"),
    [
        ({"url": "{{nope}}"}, "gen[0].url", "'nope' is undefined (i=0, j=5)"),
        ({"key": "{{ 1 / (1 - i) }}"}, "gen[0].key", "cannot be rendered: division by zero (i=1, j=5)"),
        ({"offset": "{{", "length": "1"}, "gen[0].offset", "not a template: unexpected 'end of template'"),
        ({"offset": "1", "length": "{{f}}"}, "gen[0].length", "in template f: 'c' is undefined (i=0, j=5)"),
        ({"url": "{{t}}"}, "gen[0].url", "in template t: 'i' is undefined (i=0, j=5)"),
    ],
)
def test_errors_of_rendering_name_field_and_combination(item: dict[str, Any], entry: str, rule: str) -> None:
    whole = {**GOOD, "dimensions": {"i": [0, 1], "j": [5, 6]}, **item}
    with pytest.raises(TemplateError) as caught:
        rows(whole, f="{{c}}", t="{{i}}")
    assert (caught.value.entry, caught.value.rule) == (entry, rule)

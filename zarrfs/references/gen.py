"""The parser of `gen` in a reference set, which checks its items; templates.py renders them.

Source: the fsspec reference set specification. This module is separate from templates.py, so that a set without
templates can be read without jinja2.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from zarrfs.errors import ZarrfsError

RENDERED_MAX = 64 << 10  # characters of one rendered text
ENTRIES_MAX = 50_000_000  # entries that the items of a document may expand to
_SHOWN = 60  # most digits of a number of entries in a message
_FIELDS: tuple[str, ...] = ("key", "url", "offset", "length")


class TemplateError(ZarrfsError):
    """An error in a template or an item of `gen`: it breaks `rule`; `entry` is the faulty member, if known."""

    def __init__(self, rule: str, entry: str | None = None) -> None:
        self.rule, self.entry = rule, entry
        super().__init__(rule if entry is None else f"{entry}: {rule}")


@dataclasses.dataclass(frozen=True)
class Gen:
    """One checked item of `gen`. `where` is its path in the document, such as "gen[0]"; `fields` are its templates."""

    where: str
    fields: Mapping[str, str]  # key, url and, unless the targets are whole, offset and length
    dimensions: dict[str, Sequence[int]]
    count: int  # number of combinations: the product of the sizes of the dimensions

    def combination(self, number: int) -> dict[str, int]:
        """Return the values of the dimensions in the `number`th combination; the last dimension varies fastest."""
        values = {}
        for name in reversed(self.dimensions):
            dimension = self.dimensions[name]
            number, at = divmod(number, len(dimension))
            values[name] = dimension[at]
        return values


def read_gen(items: object, names: Collection[str]) -> list[Gen]:
    """Check the member `gen` and return its items. `names`: the names of the templates, which no dimension may have.

    The combinations are counted without expanding them. Raise TemplateError.
    """
    if not isinstance(items, list):
        raise TemplateError(f"expected an array, not {json_type(items)}", "gen")
    gens = [_item(item, f"gen[{number}]", names) for number, item in enumerate(items)]
    total = sum(gen.count for gen in gens)
    if total > ENTRIES_MAX:
        many = str(total) if total < 10**_SHOWN else f"over 10^{_SHOWN}"  # Python refuses to write very long numbers
        raise TemplateError(f"expands to {many} entries, more than {ENTRIES_MAX}", "gen")
    return gens


def json_type(value: object) -> str:
    """Return the JSON name of the type of `value`, for messages; for a number or a boolean, include the value."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return f"the number {value!r:.40}"
    names: dict[type, str] = {type(None): "null", str: "a string", list: "an array", dict: "an object"}
    return names.get(type(value), type(value).__name__)


def _item(item: object, where: str, names: Collection[str]) -> Gen:
    members = _members(item, where, {*_FIELDS, "dimensions"})
    for name in ("key", "url", "dimensions"):
        if name not in members:
            raise TemplateError(f"{name} is required", where)
    if ("offset" in members) != ("length" in members):
        raise TemplateError("offset and length are given together or not at all", where)
    fields = {name: members[name] for name in _FIELDS if name in members}
    for name, source in fields.items():
        if not isinstance(source, str):
            raise TemplateError(f"expected a string (a template), not {json_type(source)}", f"{where}.{name}")
    dimensions = members["dimensions"]
    if not isinstance(dimensions, dict) or not dimensions:
        raise TemplateError("expected an object with one dimension or more", f"{where}.dimensions")
    count = 1
    read: dict[str, Sequence[int]] = {}
    for name, value in dimensions.items():
        place = f"{where}.dimensions.{name}"
        if name in names:
            raise TemplateError("a dimension named like a template", place)
        read[name], size = _dimension(value, place)
        count *= size
    return Gen(where, fields, read, count)


def _dimension(value: object, where: str) -> tuple[Sequence[int], int]:
    """Return (values, number of values) of a dimension: an array of integers, or the arguments of range()."""
    if isinstance(value, list):
        for number, item in enumerate(value):
            _check_whole(item, f"{where}[{number}]")
        return value, len(value)
    bounds = _members(value, where, {"start", "stop", "step"})
    if "stop" not in bounds:
        raise TemplateError("stop is required", where)
    for name, number in bounds.items():
        _check_whole(number, f"{where}.{name}")
    start, stop, step = bounds.get("start", 0), bounds["stop"], bounds.get("step", 1)
    if step == 0:
        raise TemplateError("a step of 0", where)
    return range(start, stop, step), max(0, -((start - stop) // step))


def _check_whole(value: object, where: str) -> None:
    if type(value) is not int:
        raise TemplateError(f"expected a whole number, not {json_type(value)}", where)


def _members(value: object, where: str, known: set[str]) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise TemplateError(f"expected an object, not {json_type(value)}", where)
    for name in value:
        if name not in known:
            raise TemplateError(f"unknown member {name!r:.80}", where)
    return value

"""The parser of `gen` in a reference set, which checks its items; templates.py renders them.

Source: the fsspec reference set specification. This module is separate from templates.py, so that a set without
templates can be read without jinja2.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from zarrfs.errors import ZarrfsError

if TYPE_CHECKING:
    from jinja2 import nodes

RENDERED_MAX = 64 << 10  # characters of one rendered text
_SHOWN = 60  # most digits of a number of entries in a message
_FIELDS: tuple[str, ...] = ("key", "url", "offset", "length")  # of an item of gen, as in RenderedBatch


class TemplateError(ZarrfsError):
    """An error in a template or an item of `gen`: it breaks `rule`; `entry` is the faulty member, if known."""

    def __init__(self, rule: str, entry: str | None = None) -> None:
        self.rule, self.entry = rule, entry
        super().__init__(rule if entry is None else f"{entry}: {rule}")


class RenderedBatch(NamedTuple):
    """The rendered fields of consecutive combinations, one list element for each.

    Offsets are all int or all str, and so are lengths. They are int only if each text is str() of its int.
    """

    keys: list[str]
    urls: list[str]
    offsets: list[int] | list[str] | None  # None if the item has none
    lengths: list[int] | list[str] | None


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

    def block(self, number: int, rows: int) -> dict[str, Sequence[int]]:
        """Return the values of each dimension in a block of at most `rows` combinations that starts at the `number`th.

        The combinations of the block are the product of the returned values.
        """
        found: dict[str, Sequence[int]] = {}
        size, whole = 1, True  # whole: the block has all values of all later dimensions
        for name in reversed(self.dimensions):
            dimension = self.dimensions[name]
            number, at = divmod(number, len(dimension))
            found[name] = dimension[at : at + (rows // size if whole else 1)]
            size *= len(found[name])
            whole = whole and len(found[name]) == len(dimension)
        return dict(reversed(found.items()))


def _refuse(rule: str, entry: str) -> None:
    raise TemplateError(rule, entry)


def read_gen(
    items: object, names: Collection[str], limit: int, fault: Callable[[str, str], None] = _refuse
) -> list[Gen]:
    """Check the member `gen` and return its items. `names`: the names of the templates, which no dimension may have.

    More than `limit` combinations in total are a fault; they are counted without expanding them. `fault(rule, entry)`
    reports a fault. By default it raises TemplateError; if it returns, the faulty item is left out, or all items if
    the fault concerns the whole member.
    """
    if not isinstance(items, list):
        fault(f"expected an array, not {json_type(items)}", "gen")
        return []
    read = [_Item(f"gen[{number}]", fault).read(item, names) for number, item in enumerate(items)]
    gens = [gen for gen in read if gen is not None]
    total = sum(gen.count for gen in gens)
    if total > limit:
        many = str(total) if total < 10**_SHOWN else f"over 10^{_SHOWN}"  # Python refuses to write very long numbers
        fault(f"expands to {many} entries, more than {limit} (-o gen_limit=)", "gen")
        return []
    return gens


def json_type(value: object) -> str:
    """Return the JSON name of the type of `value`, for messages; for a number or a boolean, include the value."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return f"the number {value!r:.40}"
    names: dict[type, str] = {type(None): "null", str: "a string", list: "an array", dict: "an object"}
    return names.get(type(value), type(value).__name__)


class _Item:
    """The checker of one item of `gen`."""

    def __init__(self, where: str, fault: Callable[[str, str], None]) -> None:
        self._where, self._fault = where, fault
        self._sound = True

    def read(self, item: object, names: Collection[str]) -> Gen | None:
        """Check the item; return None if it has a fault."""
        members = self._members(item, self._where, {*_FIELDS, "dimensions"})
        if members is None:
            return None
        for name in ("key", "url", "dimensions"):
            if name not in members:
                self._bad(f"{name} is required", self._where)
        if ("offset" in members) != ("length" in members):
            self._bad("offset and length are given together or not at all", self._where)
        fields = {name: members[name] for name in _FIELDS if name in members}
        for name, source in fields.items():
            if not isinstance(source, str):
                self._bad(f"expected a string (a template), not {json_type(source)}", f"{self._where}.{name}")
        dimensions = members.get("dimensions", {"": []})
        if not isinstance(dimensions, dict) or not dimensions:
            self._bad("expected an object with one dimension or more", f"{self._where}.dimensions")
            return None
        count = 1
        read: dict[str, Sequence[int]] = {}
        for name, value in dimensions.items():
            place = f"{self._where}.dimensions.{name}"
            if name in names:
                self._bad("a dimension named like a template", place)
            read[name], size = self._dimension(value, place)
            count *= size
        return Gen(self._where, fields, read, count) if self._sound else None

    def _bad(self, rule: str, entry: str) -> None:
        self._sound = False
        self._fault(rule, entry)

    def _dimension(self, value: object, where: str) -> tuple[Sequence[int], int]:
        """Return (values, number of values) of a dimension: an array of integers, or the arguments of range()."""
        if isinstance(value, list):
            for number, item in enumerate(value):
                if type(item) is not int:
                    self._bad(f"expected a whole number, not {json_type(item)}", f"{where}[{number}]")
            return value, len(value)
        bounds = self._members(value, where, {"start", "stop", "step"})
        if bounds is None:
            return (), 0
        if "stop" not in bounds:
            self._bad("stop is required", where)
        for name, number in bounds.items():
            if type(number) is not int:
                self._bad(f"expected a whole number, not {json_type(number)}", f"{where}.{name}")
        if bounds.get("step", 1) == 0:
            self._bad("a step of 0", where)
        if not self._sound:
            return (), 0
        start, stop, step = bounds.get("start", 0), bounds["stop"], bounds.get("step", 1)
        return range(start, stop, step), max(0, -((start - stop) // step))

    def _members(self, value: object, where: str, known: set[str]) -> dict[str, Any] | None:
        if not isinstance(value, dict):
            self._bad(f"expected an object, not {json_type(value)}", where)
            return None
        for name in value:
            if name not in known:
                self._bad(f"unknown member {name!r:.80}", where)
        return {name: item for name, item in value.items() if name in known}


def names_in(body: Iterable[nodes.Node]) -> set[str]:
    """Return the names that occur in the nodes of a template."""
    from jinja2 import nodes  # imported here: a set without templates needs no jinja2

    return {name.name for node in body for name in nodes.Output([node]).find_all(nodes.Name)}

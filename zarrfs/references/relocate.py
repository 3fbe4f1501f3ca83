"""Other beginnings for the target URLs of a reference set."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

from zarrfs.config.redaction import without_secrets
from zarrfs.errors import ReadError, UsageError
from zarrfs.references.streams import absolute

_KNOWN = 65_536  # URLs whose new form is remembered


class Rule(NamedTuple):
    """URLs that begin with the text `old` begin with `new` instead."""

    old: str
    new: str


class Relocation:
    """Rewrites URLs by the first of `rules` in length that fits, and counts.

    A rule sees a URL as it stands in the set; a relative one that no rule fits, as it is meant from `base` on.
    What no rule fits becomes `usual(url)`. UsageError for two rules of the same beginning.
    """

    def __init__(self, rules: Sequence[Rule], base: str, usual: Callable[[str], str]) -> None:
        if len({rule.old for rule in rules}) < len(rules):
            raise UsageError("--from: the same beginning twice")
        self.rules = tuple(rules)
        self.counts = [0] * len(rules)  # references that each rule has changed
        self.unchanged = 0
        self._order = sorted(range(len(rules)), key=lambda number: -len(rules[number].old))
        self._base, self._usual = base, usual
        self._find = functools.lru_cache(_KNOWN)(self._find_anew)

    def __call__(self, url: str) -> str:
        """The new form of `url`, counted."""
        changed, number = self._find(url)
        if number is None:
            self.unchanged += 1
        else:
            self.counts[number] += 1
        return changed

    def unused(self) -> list[Rule]:
        """The rules that have changed nothing."""
        return [rule for rule, count in zip(self.rules, self.counts, strict=True) if not count]

    def _find_anew(self, url: str) -> tuple[str, int | None]:
        for form in self._forms(url):
            for number in self._order:
                old, new = self.rules[number]
                if form.startswith(old):
                    return new + form[len(old) :], number
        return self._usual(url), None

    def _forms(self, url: str) -> tuple[str, ...]:
        try:
            meant = absolute(url, self._base)
        except ReadError:  # relative to nothing that has a directory
            return (url,)
        return (url,) if meant == url else (url, meant)


def check_used(relocation: Relocation) -> None:
    """UsageError naming the rules that fit no URL."""
    unused = ", ".join(without_secrets(rule.old) for rule in relocation.unused())
    if unused:
        raise UsageError(f"--from {unused}: no target begins so (see --allow-unused)")

"""Rewrite the target URLs of a reference set that is written elsewhere: make them absolute, or replace prefixes."""

from __future__ import annotations

import functools
import os
from collections.abc import AsyncIterator, Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from zarrfs.config import urls
from zarrfs.config.redaction import without_secrets
from zarrfs.errors import ReadError, UsageError
from zarrfs.store.api import Reference
from zarrfs.store.destination import is_utf8

if TYPE_CHECKING:
    from zarrfs.documents.plan import Plan
    from zarrfs.references.output import Output

NOT_UTF8 = "its path is not UTF-8, which a URL cannot hold"
_KNOWN = 65_536  # URLs whose new form is cached


class Rule(NamedTuple):
    """A rule that replaces the prefix `old` of a URL with `new`."""

    old: str
    new: str


class Relocation:
    """A function that rewrites a URL by the matching rule with the longest prefix, and counts the uses of each rule.

    Rules are matched with the URL as written in the set and, if none matches a relative URL, with that URL resolved
    against `base`. A URL that no rule matches becomes `usual(url)`. Raise UsageError if two rules have the same
    prefix, if `new` of a rule is not UTF-8, or (in a call) if nothing would remain of a URL.
    """

    def __init__(self, rules: Sequence[Rule], base: str, usual: Callable[[str], str]) -> None:
        if len({rule.old for rule in rules}) < len(rules):
            raise UsageError("--from: the same beginning twice")
        for rule in rules:
            if not is_utf8(rule.new):
                raise UsageError(f"--to {rule.new}: is not UTF-8, which a URL must be")
        self.rules = tuple(rules)
        self.counts = [0] * len(rules)  # number of references that each rule has changed
        self.unchanged = 0
        self._order = sorted(range(len(rules)), key=lambda number: -len(rules[number].old))
        self._base, self._usual = base, usual
        self._find = functools.lru_cache(_KNOWN)(self._find_anew)

    def __call__(self, url: str) -> str:
        """Return the rewritten `url` and count the reference."""
        changed, number = self._find(url)
        if number is None:
            self.unchanged += 1
        else:
            self.counts[number] += 1
        return changed

    def unused(self) -> list[Rule]:
        """Return the rules that have matched nothing."""
        return [rule for rule, count in zip(self.rules, self.counts, strict=True) if not count]

    def _find_anew(self, url: str) -> tuple[str, int | None]:
        for form in self._forms(url):
            for number in self._order:
                old, new = self.rules[number]
                if form.startswith(old):
                    if not new and form == old:
                        raise UsageError(f"--from {without_secrets(old)}: nothing would be left of the URL")
                    return new + form[len(old) :], number
        return self._usual(url), None

    def _forms(self, url: str) -> tuple[str, ...]:
        try:
            meant = absolute(url, self._base)
        except ReadError:  # the base has no directory to resolve it against
            return (url,)
        return (url,) if meant == url else (url, meant)


def check_used(relocation: Relocation) -> None:
    """Raise UsageError if a rule has matched no URL."""
    unused = ", ".join(without_secrets(rule.old) for rule in relocation.unused())
    if unused:
        raise UsageError(f"--from {unused}: no target begins so (see --allow-unused)")


def written_urls(plan: Plan, output: Output, alone: bool = True) -> Callable[[str], str]:
    """Return the function that rewrites the URLs of a set for `output`; `alone`: the output holds no other set.

    Relative URLs stay as they are if they mean the same place in the output; otherwise they become absolute.
    """
    if output.format == "index" and alone:  # an index notes the base of its URLs
        return lambda url: url
    if output.base is not None and _same_place(plan.base, output.base):
        return lambda url: url
    return functools.lru_cache(_KNOWN)(lambda url: absolute(url, plan.base))


async def rewritten(references: AsyncIterator[Reference], change: Callable[[str], str]) -> AsyncIterator[Reference]:
    """Yield `references` with `change` applied to every URL."""
    async for reference in references:
        if reference.data is None:
            url = change(reference.url)
            if url is not reference.url:
                reference = reference._replace(url=url)
        yield reference


def absolute(url: str, base: str) -> str:
    """Return `url` resolved against `base` as store.targets.Targets resolves it, without the credentials of `base`.

    Raise ReadError if `base` is a chain of URLs without a directory, or is not UTF-8.
    """
    relative = urls.relative_end(url)
    if relative is None:
        return url
    before, path = relative
    directory = local_path(base)
    if directory is not None:
        joined = os.path.join(directory, path)
        if not is_utf8(joined):
            raise ReadError(url, f"a relative target in {directory}: {NOT_UTF8}")
        return f"{before}file://{joined}" if urls.protocols(url) else joined
    remote = urls.join(without_secrets(base), path)
    if remote is None:
        raise ReadError(url, f"a relative target in {without_secrets(base)}: give its base with --base")
    return before + remote


def local_path(name: str) -> str | None:
    """Return the absolute local path of a source or base; None if it is a URL of another kind."""
    found = urls.protocols(name)
    if found and found not in (["file"], ["local"]):
        return None
    return os.path.abspath(urls.file_path(name) if found else name)


def _same_place(base: str, directory: str) -> bool:
    found = local_path(base)
    return found is not None and os.path.realpath(found) == os.path.realpath(directory)

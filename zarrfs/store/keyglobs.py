"""Selection of keys by globs."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable


class Globs:
    """Globs of keys; a directory that matches includes everything below it.

    A glob without "/" matches names at any depth, one with "/" whole keys, in which "*" also matches "/". A leading
    "/" or "./" makes a glob match whole keys; trailing slashes do not matter.
    """

    def __init__(self, globs: Iterable[str]) -> None:
        self._names: dict[str, re.Pattern[str]] = {}
        self._keys: dict[str, re.Pattern[str]] = {}
        for glob in globs:
            bare = glob.rstrip("/")
            while bare.startswith("./"):
                bare = bare[2:]
            bare = bare.lstrip("/")
            compiled = re.compile(fnmatch.translate("*" if bare == "." else bare))
            (self._keys if "/" in glob.rstrip("/") else self._names)[glob] = compiled
        self._unused = dict.fromkeys((*self._names, *self._keys))

    def __bool__(self) -> bool:
        return bool(self._names or self._keys)

    def match(self, key: str) -> bool:
        """Return whether a glob matches `key` itself; the caller, which walks the tree, tracks matching parents."""
        found = False
        for globs, text in ((self._names, key.rpartition("/")[2]), (self._keys, key)):
            for glob, pattern in globs.items():
                if pattern.match(text):
                    found = True
                    self._unused.pop(glob, None)
        return found

    def unused(self) -> list[str]:
        """Return the globs that have matched no key so far."""
        return list(self._unused)


class Picking:
    """A selection of keys: those that `include` matches (all if it is empty), without those that `exclude` matches."""

    def __init__(self, include: Iterable[str], exclude: Iterable[str]) -> None:
        self._include, self._exclude = Globs(include), Globs(exclude)
        self.everything = not self._include and not self._exclude
        self.root = not self._include  # whether the root itself is selected

    def picked(self, key: str, above: bool) -> bool | None:
        """Return whether `key` is selected; None if it is excluded with everything below it.

        `above`: whether its directory is selected.
        """
        if self._exclude and self._exclude.match(key):
            return None
        # call match() even if `above` is True, because it records which globs have matched
        return self._include.match(key) or above if self._include else True

    def has(self, key: str) -> bool:
        """Return whether `key` is selected, by itself or with a directory above it."""
        found, ends = self.root, [at for at, character in enumerate(key) if character == "/"]
        for end in (*ends, len(key)):
            if (picked := self.picked(key[:end], found)) is None:
                return False
            found = picked
        return found

    def unused(self) -> list[str]:
        """Return the globs of `include` that have matched no key so far."""
        return self._include.unused()

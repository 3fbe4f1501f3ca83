"""Which keys a user has asked for, by globs."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable


class Globs:
    """Globs over whole keys: "*" and "?" stand for "/", too, and what is below a directory belongs to it.

    A "./" before a glob, and slashes at its end, do not matter.
    """

    def __init__(self, globs: Iterable[str]) -> None:
        self._globs = {glob: re.compile(fnmatch.translate(_bare(glob))) for glob in globs}
        self._unused = dict.fromkeys(self._globs)

    def __bool__(self) -> bool:
        return bool(self._globs)

    def match(self, key: str) -> bool:
        """Whether a glob matches `key` itself; who goes through a tree knows about what is above it."""
        found = False
        for glob, pattern in self._globs.items():
            if pattern.match(key):
                found = True
                self._unused.pop(glob, None)
        return found

    def unused(self) -> list[str]:
        """The globs that have matched nothing so far."""
        return list(self._unused)


def _bare(glob: str) -> str:
    while glob.startswith("./"):
        glob = glob[2:].lstrip("/")
    return glob.rstrip("/")

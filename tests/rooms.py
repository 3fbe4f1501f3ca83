"""The choice of tests for a room or a change: turns the arguments of scripts/test into arguments of pytest.

A room is a package in zarrfs/: `cache` selects tests/cache and all other tests that import a module of zarrfs/cache.
`--changed` selects the tests that have changed since the branch left main, and the tests of modules, pages and scripts
that have. Modules that most tests import (COMMON) select no tests outside their room.
"""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[1]
COMMON = ("zarrfs.errors", "zarrfs.failures", "zarrfs.config.options", "zarrfs.store.api", "zarrfs.sources")
ALWAYS = "tests/project/test_structure.py"


def rooms() -> list[str]:
    """Return the rooms of the package."""
    return sorted(path.parent.name for path in ROOT.glob("zarrfs/*/__init__.py"))


def tests() -> list[str]:
    """Return all test files."""
    return sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("tests/**/test_*.py"))


@functools.cache
def imported(test: str) -> set[str]:
    """Return the names that a test file imports, such as zarrfs.cache.disk and zarrfs.cache.disk.DiskCache."""
    found: set[str] = set()
    for node in ast.walk(ast.parse((ROOT / test).read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return {name for name in found if name.startswith("zarrfs.")}


def of_module(module: str) -> set[str]:
    """Return the test files of a module or a room: those of its room, and all others that import it."""
    room = module.split(".")[1]
    chosen = {test for test in tests() if test.startswith(f"tests/{room}/") or test == f"tests/test_{room}.py"}
    within = f"{module}."
    for test in tests():
        names = {name for name in imported(test) if not f"{name}.".startswith(tuple(f"{one}." for one in COMMON))}
        if any(f"{name}.".startswith(within) for name in names):
            chosen.add(test)
    return chosen


def of_change(path: str) -> set[str]:
    """Return the test files to run for a changed file."""
    if path.startswith("zarrfs/") and path.endswith(".py"):
        return of_module(path.removesuffix(".py").removesuffix("/__init__").replace("/", "."))
    if path.startswith("tests/") and path.endswith(".py"):
        if path in tests():
            return {path} if (ROOT / path).exists() else set()
        helper = path.removesuffix(".py").replace("/", ".")
        parent, _, name = helper.rpartition(".")
        words = (f"from {helper} import", f"import {helper}", f"from {parent} import {name}")
        return {test for test in tests() if any(word in (ROOT / test).read_text() for word in words)}
    name = path.rpartition("/")[2]
    chosen = {test for test in tests() if f'{name}"' in (ROOT / test).read_text()}
    return chosen | ({"tests/project/test_docs.py", "tests/project/test_pages.py"} if path.endswith(".md") else set())


def changed() -> list[str]:
    """Return the files that differ from the branch point on main, committed or not, and untracked files."""

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
        return done.stdout.strip() if done.returncode == 0 else ""

    base = git("merge-base", "HEAD", "main") or git("merge-base", "HEAD", "origin/main") or "HEAD"
    found = [*git("diff", "--name-only", base).splitlines(), *git("ls-files", "-o", "--exclude-standard").splitlines()]
    return [path for path in found if (ROOT / path).exists()]


def chosen(arguments: Iterable[str]) -> list[str]:
    """Return the arguments of pytest, with rooms and --changed replaced by test files."""
    found, files = [], set[str]()
    for argument in arguments:
        if argument == "--changed":
            files |= {ALWAYS}.union(*map(of_change, changed()))
        elif argument in rooms():
            files |= {ALWAYS} | of_module(f"zarrfs.{argument}")
        else:
            found.append(argument)
    return [*found, *sorted(files)]


if __name__ == "__main__":
    print("\n".join(chosen(sys.argv[1:])))

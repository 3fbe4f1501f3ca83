"""Dependencies: docs/design.md lists each, the package imports each required one, and imports no others."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
MODULES = {"google-crc32c": "google_crc32c"}
OTHERS = {"outcome", "_flux", "imagecodecs"}  # from trio; from Flux; optional codecs
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def names(requirements: list[str]) -> set[str]:
    return {re.split(r"[^A-Za-z0-9_.-]", one)[0] for one in requirements}


def imported() -> set[str]:
    """Return the top-level names of all modules outside the standard library that the package imports."""
    found = set()
    for path in (ROOT / "zarrfs").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                found.add(node.module.partition(".")[0])
    return found - set(sys.stdlib_module_names) - {"zarrfs"}


def test_design_md_lists_each_dependency_and_extra() -> None:
    text = (ROOT / "docs/design.md").read_text().partition("\n## Dependencies\n")[2].partition("\n## ")[0]
    needed, extras = (re.findall(r"^\| ([a-z`].*?) \|", part, re.M) for part in text.split("| extra |"))
    assert needed[0] == "package"
    assert set(needed[1:]) == names(PROJECT["dependencies"])
    listed = {name for cell in extras for name in re.findall(r"`(\w+)`", cell)}
    assert listed == set(PROJECT["optional-dependencies"]) - {"fast", "test"}


def test_imports_match_the_declared_dependencies() -> None:
    needed = {MODULES.get(name, name) for name in names(PROJECT["dependencies"])}
    extras = [names(listed) for extra, listed in PROJECT["optional-dependencies"].items() if extra != "test"]
    assert needed <= imported()
    assert imported() <= needed.union(OTHERS, *extras)

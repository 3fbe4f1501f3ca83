"""docs/security.md: each row names tests, and these tests exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
PAGE = (TESTS.parent / "docs/security.md").read_text().partition("## Attacks, and what stops them")[2]
HEADS = "| attack |", "| mistake |", "| ---"
ROWS = [line for line in PAGE.splitlines() if line.startswith("| ") and not line.startswith(HEADS)]
NAMED = sorted(set(re.findall(r"`([a-z/_]+\.py)::(test_\w+)`", PAGE)))


def names_in(path: Path) -> set[str]:
    """Return the names of the functions in a file."""
    return {node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("row", ROWS, ids=[row.split("|")[1].strip()[:40] for row in ROWS])
def test_every_row_names_a_test(row: str) -> None:
    attack, defence, tests = (cell.strip() for cell in row.strip("|").split("|"))
    assert attack
    assert defence
    assert re.fullmatch(r"`[a-z/_]+\.py::test_\w+`(, `[a-z/_]+\.py::test_\w+`)*", tests), tests


@pytest.mark.parametrize(("file", "name"), NAMED)
def test_every_test_that_is_named_exists(file: str, name: str) -> None:
    assert name in names_in(TESTS / file)

"""The structure of the package: which way imports point, and where errno is known."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import zarrfs

ROOT = Path(zarrfs.__file__).parent
MODULES = {
    ".".join(("zarrfs", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__"): path
    for path in sorted(ROOT.rglob("*.py"))
}
TREES = {name: ast.parse(path.read_text()) for name, path in MODULES.items()}

# cli -> jobs -> daemon -> fuse, stage -> sources -> views -> store, zarr -> monitoring -> mountpoints -> transfer
LAYERS = [
    {"errors", "failures", "options", "optionvalues", "redaction", "signals"}, {"transfer"}, {"mountpoints"},
    {"monitoring"}, {"store", "zarr"}, {"views"}, {"sources"}, {"fuse", "stage"}, {"daemon"}, {"jobs"},
    {"configfile"}, {"configuration"}, {"cli"},
]  # fmt: skip
RANK = {part: rank for rank, parts in enumerate(LAYERS) for part in parts}
# Where system calls are made, and where a FUSE reply is: elsewhere an error has a type of its own.
KNOW_ERRNO = (
    "zarrfs.errors", "zarrfs.transfer.", "zarrfs.store.", "zarrfs.fuse.", "zarrfs.sources.blobfiles",
    "zarrfs.sources.flux", "zarrfs.mountpoints.", "zarrfs.monitoring.", "zarrfs.daemon.",
)  # fmt: skip


def imports(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, module) of every import, also those within functions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: a relative import"
            if node.module == "zarrfs":
                yield from ((node.lineno, f"zarrfs.{alias.name}") for alias in node.names)
            else:
                yield node.lineno, node.module or ""


def part_of(module: str) -> str:
    """The part of the house that a module belongs to: its package, or itself at the top."""
    return module.split(".")[1] if "." in module else ""


@pytest.mark.parametrize("name", [name for name in MODULES if part_of(name) in RANK])
def test_imports_point_one_way(name: str) -> None:
    here = part_of(name)
    for line, module in imports(TREES[name]):
        there = part_of(module)
        if module.startswith("zarrfs.") and there != here and not {here, there} <= LAYERS[0]:
            assert there in RANK, f"{name}:{line}: imports {module}, which has no place in LAYERS"
            assert RANK[there] < RANK[here], f"{name}:{line}: imports {module}"


def test_every_part_has_a_place() -> None:
    parts = {part_of(name) for name in MODULES} - {"", "__main__"}
    assert parts <= RANK.keys()


@pytest.mark.parametrize("name", [name for name in MODULES if not name.startswith(KNOW_ERRNO)])
def test_error_numbers_stay_where_system_calls_are(name: str) -> None:
    assert "errno" not in {module for _line, module in imports(TREES[name])}


def test_a_failure_reaches_fuse_through_to_errno_alone() -> None:
    """In an except clause of the handlers, FUSEError is made of to_errno(...) and nothing else."""
    made = []
    for name, tree in TREES.items():
        for handler in (node for node in ast.walk(tree) if isinstance(node, ast.ExceptHandler)):
            for call in (node for node in ast.walk(handler) if isinstance(node, ast.Call)):
                if ast.unparse(call.func).endswith("FUSEError"):
                    made.append(name)
                    assert ast.unparse(call.args[0]).startswith("to_errno("), f"{name}:{call.lineno}"
    assert set(made) == {"zarrfs.fuse.shown"}

"""The structure of the package: which way imports point, where errno is known, and that tests mirror the rooms."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

import zarrfs

ROOT = Path(zarrfs.__file__).parent
MODULES = {
    ".".join(("zarrfs", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__"): path
    for path in sorted(ROOT.rglob("*.py"))
}

# From the ground up: a room imports from itself and from rooms above it in this list, never from one below.
ROOMS = (
    "failures", "errors", "config", "concurrency", "system", "metrics", "net", "cache", "zarr", "store", "prefetch",
    "views", "documents", "references", "icechunk", "archives", "sources", "copying", "fuse", "daemon", "jobs",
    "python", "cli",
)  # fmt: skip
RANK = {room: rank for rank, room in enumerate(ROOMS)}
# Rooms that make system calls or answer FUSE; everywhere else an error has a type of its own.
KNOW_ERRNO = (
    "zarrfs.errors", "zarrfs.system.", "zarrfs.metrics.", "zarrfs.net.", "zarrfs.cache.", "zarrfs.store.",
    "zarrfs.copying.destination_", "zarrfs.fuse.", "zarrfs.archives.blob_files",
    "zarrfs.archives.blob_cache", "zarrfs.archives.flux_",
    "zarrfs.daemon.", "zarrfs.python.filesystem",
)  # fmt: skip
TESTS = Path(__file__).parents[1]
OTHER_TESTS = ("flux", "mounts", "project", "slurm", "soak")  # directories of tests that belong to no room
EVERY_STORE = "store/test_contract.py"


@functools.cache
def tree(name: str) -> ast.Module:
    """Parse a module, once; not on import, as every worker of xdist imports this file."""
    return ast.parse(MODULES[name].read_text())


def imports(name: str) -> Iterator[tuple[int, str]]:
    """(line, module) of every import of a module, also those within functions."""
    for node in ast.walk(tree(name)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}:{node.lineno}: a relative import"
            if node.module == "zarrfs":
                yield from ((node.lineno, f"zarrfs.{alias.name}") for alias in node.names)
            else:
                yield node.lineno, node.module or ""


def room_of(module: str) -> str:
    """Return the room of a module: its package, or its own name at the top."""
    return module.split(".")[1] if "." in module else ""


def imported_modules(name: str) -> set[str]:
    """Return the modules of the package that a module imports, also lazily or for its types alone."""
    found = set()
    for node in ast.walk(tree(name)):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names} & MODULES.keys() or {node.module}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return (found & MODULES.keys()) - {name}


def test_imports_point_to_the_ground() -> None:
    wrong = []
    for name in (name for name in MODULES if room_of(name) in RANK):
        for line, module in imports(name):
            here, there = room_of(name), room_of(module)
            if module.startswith("zarrfs.") and there != here and RANK.get(there, len(RANK)) >= RANK[here]:
                why = "" if there in RANK else ", which has no place in ROOMS"
                wrong.append(f"{name}:{line}: imports {module}{why}")
    assert not wrong, "\n".join(wrong)


def test_every_module_has_a_room() -> None:
    assert {room_of(name) for name in MODULES} - {"", "__main__"} == set(ROOMS)


def test_a_test_file_is_named_after_a_module_of_its_room() -> None:
    """test_MODULE.py, or test_MODULE_TOPIC.py where the tests of one module are several files."""
    for path in TESTS.glob("*/test_*.py"):
        room = path.parent.name
        if room in OTHER_TESTS or path == TESTS / EVERY_STORE:
            continue
        names = {room, *(module.split(".")[2] for module in MODULES if module.startswith(f"zarrfs.{room}."))}
        assert any(f"{path.stem}_".startswith(f"test_{name}_") for name in names), f"{path}: no such module"


def test_no_modules_import_each_other_in_a_circle() -> None:
    """Types and lazy imports count, too: a circle is two modules that cannot be understood apart."""
    left = {name: imported_modules(name) - {"zarrfs"} for name in MODULES}
    while free := [name for name, needs in left.items() if not needs & left.keys()]:
        for name in free:
            del left[name]
    in_circles = {name for name, needs in left.items() if any(name in left[needed] for needed in needs & left.keys())}
    assert not left, f"circles among {sorted(in_circles or left)}"


def test_error_numbers_stay_where_system_calls_are() -> None:
    others = [name for name in MODULES if not name.startswith(KNOW_ERRNO)]
    assert [name for name in others if "errno" in {module for _line, module in imports(name)}] == []


def test_a_failure_reaches_fuse_through_to_errno_alone() -> None:
    """In an except clause of the handlers, FUSEError is made of to_errno(...) and nothing else."""
    made = []
    for name in MODULES:
        for handler in (node for node in ast.walk(tree(name)) if isinstance(node, ast.ExceptHandler)):
            for call in (node for node in ast.walk(handler) if isinstance(node, ast.Call)):
                if ast.unparse(call.func).endswith("FUSEError"):
                    made.append(name)
                    assert ast.unparse(call.args[0]).startswith("to_errno("), f"{name}:{call.lineno}"
    assert set(made) == {"zarrfs.fuse.operations"}

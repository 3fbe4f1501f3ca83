"""The structure of the package: the direction of imports, where errno is used, and the names of test files."""

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

# Rooms: the packages and modules directly below zarrfs. A room imports only from itself and earlier ones of this list.
ROOMS = (
    "failures", "errors", "config", "concurrency", "system", "metrics", "net", "cache", "zarr", "store", "prefetch",
    "views", "documents", "references", "icechunk", "archives", "sources", "copying", "fuse", "daemon", "jobs",
    "python", "cli",
)  # fmt: skip
RANK = {room: rank for rank, room in enumerate(ROOMS)}
# Prefixes of modules that make system calls or answer FUSE; all other modules raise exceptions of their own types.
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
    """Parse a module, once; not when this file is imported, as every worker of xdist does that."""
    return ast.parse(MODULES[name].read_text())


def imports(name: str) -> Iterator[tuple[int, str]]:
    """Yield (line, module) for every import of a module, also within functions."""
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
    """Return the modules of the package that a module imports, also lazily or only for types."""
    found = set()
    for node in ast.walk(tree(name)):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names} & MODULES.keys() or {node.module}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return (found & MODULES.keys()) - {name}


def test_a_room_imports_only_from_lower_rooms() -> None:
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


def test_there_are_no_circular_imports() -> None:
    """Lazy imports and those for types count, too: modules of a circle cannot be understood separately."""
    left = {name: imported_modules(name) - {"zarrfs"} for name in MODULES}
    while free := [name for name, needs in left.items() if not needs & left.keys()]:
        for name in free:
            del left[name]
    in_circles = {name for name, needs in left.items() if any(name in left[needed] for needed in needs & left.keys())}
    assert not left, f"circles among {sorted(in_circles or left)}"


def test_only_modules_with_system_calls_import_errno() -> None:
    others = [name for name in MODULES if not name.startswith(KNOW_ERRNO)]
    assert [name for name in others if "errno" in {module for _line, module in imports(name)}] == []


def test_failures_reach_fuse_only_through_to_errno() -> None:
    """Except clauses create FUSEError only from to_errno(...), and only in zarrfs.fuse.operations."""
    made = []
    for name in MODULES:
        for handler in (node for node in ast.walk(tree(name)) if isinstance(node, ast.ExceptHandler)):
            for call in (node for node in ast.walk(handler) if isinstance(node, ast.Call)):
                if ast.unparse(call.func).endswith("FUSEError"):
                    made.append(name)
                    assert ast.unparse(call.args[0]).startswith("to_errno("), f"{name}:{call.lineno}"
    assert set(made) == {"zarrfs.fuse.operations"}

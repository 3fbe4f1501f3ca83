"""A script that writes pytest's rewritten test modules into __pycache__, before several workers would each do so.

Rewriting all of them takes one process 14 s. With PYTHONDONTWRITEBYTECODE pytest itself would save nothing, and would
rewrite the modules at every run.
"""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from _pytest.assertion import rewrite

TESTS = Path(__file__).parent
_OF_PYTEST = ("get_cache_dir", "PYC_TAIL", "_read_pyc", "_rewrite_test", "_write_pyc")  # used here; most are private


def write(path: Path) -> bool:
    """Write the rewritten module of `path` unless it is up to date; return whether it was written."""
    directory = rewrite.get_cache_dir(path)
    cached = directory / (path.stem + rewrite.PYC_TAIL)
    if rewrite._read_pyc(path, cached) is not None:
        return False
    directory.mkdir(parents=True, exist_ok=True)
    told: Any = SimpleNamespace(trace=print)
    found, code = rewrite._rewrite_test(path, None)
    return rewrite._write_pyc(told, code, found, cached)


def main() -> None:
    missing = [name for name in _OF_PYTEST if not hasattr(rewrite, name)]
    if missing:  # of another release: its workers rewrite the modules
        print(f"tests.rewritten: this pytest has no {', '.join(missing)}: nothing is written beforehand")
        return
    with multiprocessing.Pool(len(os.sched_getaffinity(0))) as pool:
        pool.map(write, [*TESTS.rglob("test_*.py"), *TESTS.rglob("conftest.py")], chunksize=4)


if __name__ == "__main__":
    main()

"""Helpers for the tests of Zarr stores on servers."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import trio

from tests.conftest import DATA
from tests.servers import Faulty, Web
from tests.store.contract import Tree
from zarrfs.config.options import Options
from zarrfs.sources import open_plan
from zarrfs.sources.zarrstore import plan_remote

OPTIONS = Options(retries=0)
# one store for each kind of document and of chunk names; tests/views/test_arrays.py reads every array of all stores
SAMPLES = [
    "v0_int16_12", "v1_int16_12", "v2_odd", "v3_draft", "v3_hier",
]  # fmt: skip


def tree_of(path: Path) -> Tree:
    """Return the files below a directory with their bytes."""
    return {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}


def put(web: Web, name: str) -> str:
    """Copy a sample to a server and return its URL."""
    shutil.copytree(DATA / "zarr" / name, web.root / name, dirs_exist_ok=True)
    return f"{web.url}/{name}"


def put_exact(server: Faulty, name: str, tree: Tree) -> str:
    """Put a store on a server that knows only exact names, without listings and redirects; return its URL."""
    for key, value in tree.items():
        server.put(f"/{name}/{key}", value)
    server.put(f"/{name}/", b"<h1>No listing here</h1>", forever="html")
    return f"{server.url}/{name}"


def with_store(url: str, check: Any, options: Options = OPTIONS) -> Any:
    """Open the store at `url` and return the result of `check(store, plan)`."""
    plan = plan_remote(url, options)

    async def main() -> Any:
        store = open_plan(plan, options)
        try:
            return await check(store, plan)
        finally:
            await store.aclose()

    return trio.run(main)

"""NetCDF-4 views of stores for tests; headers are made in a thread instead of a child process."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import trio

from zarrfs.store.directory import FileSystemStore
from zarrfs.views.netcdf import NetCDFView
from zarrfs.views.netcdf_header import write


async def build_here(description: bytes, key: str) -> bytes:
    """Make a header in a thread, without a child process."""
    return await trio.to_thread.run_sync(write, description)


@contextlib.asynccontextmanager
async def netcdf_view(path: Path, **more: Any) -> AsyncIterator[NetCDFView]:
    """Open a NetCDF view of a directory; its file at the root is x.nc."""
    view = NetCDFView(FileSystemStore(str(path)), "x", 1 << 20, **({"build": build_here} | more))
    try:
        yield view
    finally:
        await view.aclose()


def converted(path: Path, into: Path, key: str = "x.nc", **more: Any) -> dict[str, str]:
    """Copy a file of the NetCDF view of `path` to `into`, 9973 bytes at a time; return the nodes left out, and why."""

    async def main() -> dict[str, str]:
        async with netcdf_view(path, **more) as view:
            value = await view.open(key)
            with into.open("wb") as file:
                for at in range(0, value.size, 9973):
                    file.write(await value.read(at, 9973))
            assert into.stat().st_size == value.size == (await view.info(key)).size
            return await view.left_out(key)

    return trio.run(main)

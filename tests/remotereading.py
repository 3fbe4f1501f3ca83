"""A RemoteFiles that is open while a check runs."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import trio

from zarrfs.config.options import Options
from zarrfs.store.remotefiles import RemoteFiles


def using(check: Callable[[RemoteFiles], Awaitable[Any]], options: Options) -> Any:
    """Run `check` with a RemoteFiles, which is closed afterwards; return the result of `check`."""

    async def main() -> Any:
        files = RemoteFiles(options)
        try:
            return await check(files)
        finally:
            await files.aclose()

    return trio.run(main)

"""A daemon that fails after it has mounted, before it answers requests: broken_start.py SOURCE MOUNTPOINT."""

from __future__ import annotations

import sys
from typing import Any

from zarrfs.cli.common import report_errors
from zarrfs.config.options import parse
from zarrfs.daemon import serve, session


async def broken(*args: Any) -> None:
    raise RuntimeError("a fault of the test")


if __name__ == "__main__":
    serve._main = broken
    with report_errors():
        session.mount(sys.argv[1], sys.argv[2], parse([]))

"""A daemon that fails after mount(2), before its event loop starts: broken_opening.py SOURCE MOUNTPOINT OPTIONS."""

from __future__ import annotations

import sys
from typing import Any

from zarrfs.cli.common import report_errors
from zarrfs.config.options import parse
from zarrfs.daemon import serve, session


def broken(*args: Any) -> None:
    raise RuntimeError("a fault of the test")


if __name__ == "__main__":
    serve.Refresher = broken
    with report_errors():
        session.mount(sys.argv[1], sys.argv[2], parse(sys.argv[3].split(",")))

"""A daemon that fails after mount(2): broken_start.py NAME SOURCE MOUNTPOINT [OPTIONS].

It fails where daemon/serve.py uses NAME: Refresher before its event loop starts, _main before it answers requests.
"""

from __future__ import annotations

import sys
from typing import Any

from zarrfs.cli.common import report_errors
from zarrfs.config.options import parse
from zarrfs.daemon import serve, session


def broken(*args: Any) -> None:
    raise RuntimeError("a fault of the test")


async def broken_task(*args: Any) -> None:
    broken()


if __name__ == "__main__":
    setattr(serve, sys.argv[1], broken_task if sys.argv[1] == "_main" else broken)
    with report_errors():
        session.mount(sys.argv[2], sys.argv[3], parse(sys.argv[4:]))

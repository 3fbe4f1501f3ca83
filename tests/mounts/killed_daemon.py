"""A daemon that kills itself: killed_daemon.py CALL NUMBER SOURCE MOUNTPOINT OPTIONS.

It does so before system call NUMBER (from 0) of the kind CALL that changes an entry of a directory.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

from zarrfs.config.options import parse
from zarrfs.daemon import session

if __name__ == "__main__":
    call, number, source, mountpoint, options = sys.argv[1:]
    original, left = getattr(os, call), [None] * int(number)

    def last(path: Any, *given: Any, **named: Any) -> Any:
        if "dir_fd" in named and path != b".":
            if not left:
                os.kill(os.getpid(), signal.SIGKILL)
            left.pop()
        return original(path, *given, **named)

    setattr(os, call, last)
    session.mount(source, mountpoint, parse(options.split(",")))

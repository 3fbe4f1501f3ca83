"""A daemon that is not permitted to raise the kernel's read-ahead: unraised_daemon.py SOURCE MOUNTPOINT LOG."""

from __future__ import annotations

import sys

from zarrfs.config.options import parse
from zarrfs.daemon import session
from zarrfs.fuse import pagecache


async def refused(mountpoint: str) -> bool:
    return False


if __name__ == "__main__":
    pagecache.raise_read_ahead = refused
    session.mount(sys.argv[1], sys.argv[2], parse([f"log_file={sys.argv[3]}"]))

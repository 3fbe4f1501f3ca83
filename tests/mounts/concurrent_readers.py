"""Processes that read one file: concurrent_readers.py PATH COUNT LENGTH [direct].

Each reads LENGTH bytes from the start on, with O_DIRECT if so asked: then the kernel sends every read(2) to the file
system, and otherwise only one for each page. A line "NUMBER PID" tells that a process is about to read; at the end
there is a line "NUMBER SHA256" or "NUMBER errno N" of each.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import sys


def one(number: int, path: str, length: int, flags: int) -> None:
    """Read with one process."""
    memory = mmap.mmap(-1, length)
    descriptor = os.open(path, os.O_RDONLY | flags)
    os.write(1, f"{number} {os.getpid()}\n".encode())
    try:
        count = os.preadv(descriptor, [memory], 0)
        found = hashlib.sha256(memory[:count]).hexdigest()
    except OSError as exc:
        found = f"errno {exc.errno}"
    os.write(1, f"{number} {found}\n".encode())


def main() -> None:
    path, count, length = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    flags = os.O_DIRECT if sys.argv[4:] else 0
    children = []
    for number in range(count):
        child = os.fork()
        if not child:
            one(number, path, length, flags)
            os._exit(0)
        children.append(child)
    for child in children:
        os.waitpid(child, 0)


if __name__ == "__main__":
    main()

"""COUNT processes that read one file concurrently: concurrent_readers.py PATH COUNT LENGTH [direct].

Each process reads the first LENGTH bytes. With `direct` (O_DIRECT) the kernel sends every read(2) to the file system;
without it, the kernel requests each page only once. A process prints "NUMBER PID" just before it reads, and then
"NUMBER SHA256" or "NUMBER errno N".
"""

from __future__ import annotations

import hashlib
import mmap
import os
import sys


def one(number: int, path: str, length: int, flags: int) -> None:
    """Read in this process, and print the result."""
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

"""Read many pieces at once, in threads, and print how long that took.

Standard input is a JSON list of threads, each a list of [place, start, length], where a place is a path or an http(s)
URL. Standard output is {"seconds": S, "digests": [[hex, ...], ...]}: the time from the start to the last byte of any
thread, and the SHA-256 of each piece, computed after that. A thread has one connection for all its URLs. Everything is
read into memory that was touched before.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import mmap
import os
import sys
import threading
import time
import urllib.parse

Piece = tuple[str, int, int]  # path or URL, start, length
PIECE = 1 << 20  # bytes of one read(2)


def read_file(path: str, start: int, view: memoryview) -> None:
    """Fill `view` from a file; raise EOFError if the file ends too early."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        done = 0
        while done < len(view):
            count = os.preadv(descriptor, [view[done : done + PIECE]], start + done)
            if not count:
                raise EOFError(f"{path}: {start + done} bytes, not {start + len(view)}")
            done += count
    finally:
        os.close(descriptor)


class Connection:
    """One HTTP connection."""

    def __init__(self) -> None:
        self._connection: http.client.HTTPConnection | None = None

    def read(self, url: str, start: int, view: memoryview) -> None:
        """Fill `view` with one range request."""
        parts = urllib.parse.urlsplit(url)
        if self._connection is None:
            kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
            self._connection = kind(parts.netloc)
        headers = {"Range": f"bytes={start}-{start + len(view) - 1}"}
        self._connection.request("GET", parts.path, headers=headers)
        response = self._connection.getresponse()
        if response.status != 206 or response.length != len(view):
            raise OSError(f"{url}: status {response.status}, {response.length} bytes")
        done = 0
        while done < len(view):
            count = response.readinto(view[done:])
            if not count:
                raise EOFError(f"{url}: {done} bytes, not {len(view)}")
            done += count
        response.read()  # it is empty, but this completes the response


def read_all(pieces: list[Piece], views: list[memoryview], go: threading.Barrier, failures: list[str]) -> None:
    """Read the pieces in one thread."""
    connection = Connection()
    go.wait()
    try:
        for (place, start, _), view in zip(pieces, views, strict=True):
            (connection.read if "://" in place else read_file)(place, start, view)
    except (OSError, EOFError, http.client.HTTPException) as exc:
        failures.append(f"{exc!r} at {place}")


def main() -> None:
    threads = json.load(sys.stdin)
    total = sum(length for pieces in threads for _, _, length in pieces)
    memory = memoryview(mmap.mmap(-1, total, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE))
    views, at = [], 0
    for pieces in threads:
        views.append([])
        for _, _, length in pieces:
            views[-1].append(memory[at : at + length])
            at += length
    go, failures = threading.Barrier(len(threads) + 1), []
    running = [
        threading.Thread(target=read_all, args=(pieces, view, go, failures))
        for pieces, view in zip(threads, views, strict=True)
    ]
    for thread in running:
        thread.start()
    began = time.monotonic()
    go.wait()
    for thread in running:
        thread.join()
    seconds = time.monotonic() - began
    if failures:
        sys.exit(f"{len(failures)} readers failed; the first: {failures[0]}")
    digests = [[hashlib.sha256(view).hexdigest() for view in of_thread] for of_thread in views]
    print(json.dumps({"seconds": seconds, "digests": digests}))


if __name__ == "__main__":
    main()

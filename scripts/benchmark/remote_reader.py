"""Read many pieces at once, in processes of threads, and print how long that took.

Standard input is a JSON list of processes, each a list of threads, each a list of [place, start, length], where a
place is a path or an http(s) URL. Standard output is {"seconds": S, "digests": [[[hex, ...], ...], ...]}: the time
from the start to the last byte of any thread, and the SHA-256 of each piece, computed after that.
A thread has one connection for all its URLs. Everything is read into memory that was touched before.
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
from typing import Any

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


def read_all(pieces: list[Piece], view: memoryview, go: threading.Barrier, failures: list[str]) -> None:
    """Read the pieces into `view` in one thread."""
    connection = Connection()
    at = 0
    go.wait()
    try:
        for place, start, length in pieces:
            reader = connection.read if "://" in place else read_file
            reader(place, start, view[at : at + length])
            at += length
    except (OSError, EOFError, http.client.HTTPException) as exc:
        failures.append(f"{exc!r} at {place}")


def one_process(threads: list[list[Piece]], answer: int, go: int, digest: int) -> dict[str, Any]:
    """Run one process: wait for `go`, then read in threads; wait for `digest`, then compute the digests.

    Before each wait it writes a byte to `answer`.
    """
    total = sum(length for pieces in threads for _, _, length in pieces)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE
    memory = memoryview(mmap.mmap(-1, max(total, 1), flags=flags))
    failures: list[str] = []
    barrier = threading.Barrier(len(threads) + 1)
    running, views, at = [], [], 0
    for pieces in threads:
        view = memory[at : at + sum(length for _, _, length in pieces)]
        at += len(view)
        views.append(view)
        running.append(threading.Thread(target=read_all, args=(pieces, view, barrier, failures)))
        running[-1].start()
    os.write(answer, b"r")
    os.read(go, 1)
    barrier.wait()
    for thread in running:
        thread.join()
    end = time.monotonic()
    os.write(answer, b"r")
    os.read(digest, 1)  # other processes may still read
    digests = []
    for pieces, view in zip(threads, views, strict=True):
        digests.append([])
        at = 0
        for _, _, length in pieces:
            digests[-1].append(hashlib.sha256(view[at : at + length]).hexdigest())
            at += length
    return {"end": end, "failures": failures, "digests": digests}


def wait_for_all(answers: list[int]) -> None:
    """Wait until every process has written a byte."""
    for answer in answers:
        if not os.read(answer, 1):
            sys.exit("a reader has died")


def main() -> None:
    jobs = json.load(sys.stdin)
    go, digest = os.pipe(), os.pipe()
    answers = []
    for threads in jobs:
        answer, write = os.pipe()
        if os.fork() == 0:
            os.close(go[1])
            os.close(digest[1])  # so that the exit of the parent is seen as the end of the pipes
            found = json.dumps(one_process(threads, write, go[0], digest[0])).encode()
            with open(write, "wb") as file:
                file.write(found)
            os._exit(0)
        os.close(write)
        answers.append(answer)
    wait_for_all(answers)
    began = time.monotonic()
    os.write(go[1], b"g" * len(jobs))
    wait_for_all(answers)
    os.write(digest[1], b"d" * len(jobs))
    found = []
    for answer in answers:
        with open(answer, "rb") as file:
            found.append(json.loads(file.read()))
    failures = [failure for one in found for failure in one["failures"]]
    if failures:
        sys.exit(f"{len(failures)} readers failed; the first: {failures[0]}")
    seconds = max(one["end"] for one in found) - began
    print(json.dumps({"seconds": seconds, "digests": [one["digests"] for one in found]}))


if __name__ == "__main__":
    main()

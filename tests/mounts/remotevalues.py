"""Values on a web server for tests of mounts: helpers that write them, read them with many threads and check them."""

from __future__ import annotations

import concurrent.futures
import errno
import json
import os
import random
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from tests.mounts.mounting import daemon_pid, until

DEAD = (errno.ENOTCONN, errno.ECONNABORTED, errno.ENODEV)  # errors of a mount whose daemon was killed


class Value(NamedTuple):
    """A key of a reference set, and the bytes [start, stop) of `data` that it refers to."""

    key: str
    data: bytes
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


def publish(root: Path, name: str, size: int, seed: int = 0) -> bytes:
    """Write a file of `size` random bytes below the root of a web server, and return the bytes."""
    data = random.Random(f"{name} {seed}").randbytes(size)
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    # a different time for each version of the file: nginx makes the ETag from the time, in seconds, and the size
    os.utime(path, (1_000_000_000 + seed, 1_000_000_000 + seed))
    return data


def cut(data: bytes, prefix: str, length: int, gap: int = 0) -> list[Value]:
    """Cut `data` into values of `length` bytes with `gap` bytes between them; a shorter rest is left out."""
    starts = range(0, len(data) - length + 1, length + gap)
    return [Value(f"{prefix}/{number}", data, at, at + length) for number, at in enumerate(starts)]


def document(path: Path, targets: dict[str, Sequence[Value]]) -> Path:
    """Write a reference set of the values; `targets` maps the URL of a file to the values in it."""
    refs = {value.key: [url, value.start, len(value)] for url, values in targets.items() for value in values}
    path.write_text(json.dumps({"version": 1, "refs": refs}))
    return path


class Outcome:
    """The number of reads that were right, and the numbers of reads that failed, by errno."""

    def __init__(self) -> None:
        self.right = 0
        self.failed: dict[int, int] = {}
        self._lock = threading.Lock()

    def count(self, code: int | None) -> None:
        """Count one read, with the errno it failed with, or None."""
        with self._lock:
            if code is None:
                self.right += 1
            else:
                self.failed[code] = self.failed.get(code, 0) + 1


def read(root: Path, value: Value, start: int, length: int, outcome: Outcome) -> None:
    """Read part of a value, check the bytes and count the outcome.

    Either all bytes are right, or the read fails and the bytes before the failure are right. No page stays in the page
    cache.
    """
    expected = value.data[value.start + start : min(value.start + start + length, value.stop)]
    found, failed = b"", None
    try:
        descriptor = os.open(root / value.key, os.O_RDONLY)
    except OSError as exc:
        return outcome.count(exc.errno)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
        while len(found) < len(expected) and (more := os.pread(descriptor, length - len(found), start + len(found))):
            found += more  # a failure after the first page makes pread return fewer bytes; the next call raises
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    except OSError as exc:
        failed = exc.errno
    finally:
        os.close(descriptor)
    right = found == expected if failed is None else expected.startswith(found)
    assert right, f"{value.key} from {start} on: {len(found)} bytes, not {len(expected)} right ones"
    return outcome.count(failed)


Read = tuple[Value, int, int]  # value, start, length


def whole(values: Sequence[Value]) -> list[Read]:
    """Return one read of each value, from its start to its end."""
    return [(value, 0, len(value)) for value in values]


def read_all(root: Path, reads: Sequence[Read], threads: int, until: Callable[[], bool] | None = None) -> Outcome:
    """Do the reads in order with `threads` threads; start no more of them once `until()` is true."""
    outcome = Outcome()

    def one(one: Read) -> None:
        if until is None or not until():
            read(root, *one, outcome)

    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        for done in [pool.submit(one, one_read) for one_read in reads]:
            done.result()
    return outcome


# -- the daemon


def holdings(root: Path) -> tuple[int, int]:
    """Return the numbers of open descriptors and of threads of the daemon of a mount."""
    pid = daemon_pid(root)
    status = Path(f"/proc/{pid}/status").read_text()
    return len(os.listdir(f"/proc/{pid}/fd")), int(status.split("Threads:")[1].split()[0])


def wait_for(what: Callable[[], bool], seconds: float = 60) -> None:
    """Wait until `what()` is true; fail after `seconds`."""
    until(what, seconds)

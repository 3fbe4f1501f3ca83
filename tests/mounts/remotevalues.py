"""Values behind a web server for tests of mounts: made, read by many threads, and compared with what they must be."""

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

DEAD = (errno.ENOTCONN, errno.ECONNABORTED, errno.ENODEV)  # of a mount whose daemon was killed


class Value(NamedTuple):
    """A key of a set, and the bytes [start, stop) of `data` that it refers to."""

    key: str
    data: bytes
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


def publish(root: Path, name: str, size: int, seed: int = 0) -> bytes:
    """A file of `size` random bytes below the root of a web server."""
    data = random.Random(f"{name} {seed}").randbytes(size)
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    # a time that no other version of the file has: nginx makes its ETag from that, in seconds
    os.utime(path, (1_000_000_000 + seed, 1_000_000_000 + seed))
    return data


def cut(data: bytes, prefix: str, length: int, gap: int = 0) -> list[Value]:
    """`data` in values of `length` bytes with `gap` bytes between them; what is left at the end is in none."""
    starts = range(0, len(data) - length + 1, length + gap)
    return [Value(f"{prefix}/{number}", data, at, at + length) for number, at in enumerate(starts)]


def document(path: Path, targets: dict[str, Sequence[Value]]) -> Path:
    """A reference set of values in targets (by URL)."""
    refs = {value.key: [url, value.start, len(value)] for url, values in targets.items() for value in values}
    path.write_text(json.dumps({"version": 1, "refs": refs}))
    return path


class Outcome:
    """Numbers of reads that were right, and of reads that failed, by errno."""

    def __init__(self) -> None:
        self.right = 0
        self.failed: dict[int, int] = {}
        self._lock = threading.Lock()

    def count(self, code: int | None) -> None:
        """One more."""
        with self._lock:
            if code is None:
                self.right += 1
            else:
                self.failed[code] = self.failed.get(code, 0) + 1


def read(root: Path, value: Value, start: int, length: int, outcome: Outcome) -> None:
    """One read; all its bytes are right, or it fails and those before are right. The kernel keeps nothing of it."""
    expected = value.data[value.start + start : min(value.start + start + length, value.stop)]
    found, failed = b"", None
    try:
        descriptor = os.open(root / value.key, os.O_RDONLY)
    except OSError as exc:
        return outcome.count(exc.errno)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
        while len(found) < len(expected) and (more := os.pread(descriptor, length - len(found), start + len(found))):
            found += more  # a failure after the first page ends a read early; the next one tells of it
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    except OSError as exc:
        failed = exc.errno
    finally:
        os.close(descriptor)
    right = found == expected if failed is None else expected.startswith(found)
    assert right, f"{value.key} from {start} on: {len(found)} bytes, not {len(expected)} right ones"
    return outcome.count(failed)


Read = tuple[Value, int, int]  # what, start, length


def whole(values: Sequence[Value]) -> list[Read]:
    """A read of each, from its start to its end."""
    return [(value, 0, len(value)) for value in values]


def read_all(root: Path, reads: Sequence[Read], threads: int, until: Callable[[], bool] | None = None) -> Outcome:
    """Do all reads in this order, so many at a time; no more of them once `until` is true."""
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
    """(descriptors, threads) of the daemon of a mount."""
    pid = daemon_pid(root)
    status = Path(f"/proc/{pid}/status").read_text()
    return len(os.listdir(f"/proc/{pid}/fd")), int(status.split("Threads:")[1].split()[0])


def wait_for(what: Callable[[], bool], seconds: float = 60) -> None:
    """Until `what` is true; a failure if it is not within `seconds`."""
    until(what, seconds)

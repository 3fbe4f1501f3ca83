"""Counts of a soak: operations, bytes, expected errors, and violations."""

from __future__ import annotations

import collections
import errno
import threading
import time

VIOLATIONS_MAX = 20  # number of violations that ends a soak early


class Tally:
    """Counters that all workers share. A violation is printed immediately, with the time since the start."""

    def __init__(self) -> None:
        self.operations: collections.Counter[str] = collections.Counter()
        self.bytes: collections.Counter[str] = collections.Counter()
        self.errors: collections.Counter[tuple[str, str]] = collections.Counter()  # (operation, errno)
        self.violations: list[str] = []
        self._lock = threading.Lock()
        self._began = time.monotonic()

    def done(self, operation: str, size: int = 0) -> None:
        """Count a successful operation that transferred `size` right bytes."""
        with self._lock:
            self.operations[operation] += 1
            self.bytes[operation] += size

    def excused(self, operation: str, code: int | None) -> None:
        """Count an operation whose failure a disturbance of its mount explains."""
        with self._lock:
            self.operations[operation] += 1
            self.errors[operation, errno.errorcode.get(code or 0, str(code))] += 1

    def violation(self, text: str) -> None:
        """Record and print something that must not happen."""
        line = f"[{time.monotonic() - self._began:.1f} s] {text}"
        with self._lock:
            self.violations.append(line)
        print(f"soak: VIOLATION {line}", flush=True)

    @property
    def over(self) -> bool:
        """Return whether the soak should end early, as there are enough violations."""
        return len(self.violations) >= VIOLATIONS_MAX

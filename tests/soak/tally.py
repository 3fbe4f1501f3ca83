"""Counts of a soak: operations, bytes, expected errors, and violations."""

from __future__ import annotations

import collections
import errno
import threading
import time

VIOLATIONS_MAX = 20  # a soak ends early at so many


class Tally:
    """Counters that all workers share. A violation is printed at once, with the time since the start."""

    def __init__(self) -> None:
        self.operations: collections.Counter[str] = collections.Counter()
        self.bytes: collections.Counter[str] = collections.Counter()
        self.errors: collections.Counter[tuple[str, str]] = collections.Counter()  # (operation, errno)
        self.violations: list[str] = []
        self._lock = threading.Lock()
        self._began = time.monotonic()

    def done(self, operation: str, size: int = 0) -> None:
        """One operation that went as it should, with so many right bytes."""
        with self._lock:
            self.operations[operation] += 1
            self.bytes[operation] += size

    def excused(self, operation: str, code: int | None) -> None:
        """One operation that failed, as it may with what was done to its mount."""
        with self._lock:
            self.operations[operation] += 1
            self.errors[operation, errno.errorcode.get(code or 0, str(code))] += 1

    def violation(self, text: str) -> None:
        """Something that must not happen."""
        line = f"[{time.monotonic() - self._began:.1f} s] {text}"
        with self._lock:
            self.violations.append(line)
        print(f"soak: VIOLATION {line}", flush=True)

    @property
    def over(self) -> bool:
        """Return whether more operations would show nothing new."""
        return len(self.violations) >= VIOLATIONS_MAX

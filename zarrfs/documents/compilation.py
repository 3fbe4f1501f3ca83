"""What compiling a document has in common, whatever its kind."""

from __future__ import annotations

import os
import sys
import time

from zarrfs.config.options import Options
from zarrfs.errors import SourceError
from zarrfs.store.indexfile import IndexWriter

_QUIET_FOR = 1.0  # seconds before anything is shown,
_EVERY = 0.2  # and between one line and the next
_SHOWN = 20  # problems told one by one; all of them are in the index


class Compilation:
    """One document on its way into an index: the writer, the options, and what was wrong with it."""

    thorough = False  # whether what is not used is checked, too
    place = ""  # the part of the document that entries are from

    def __init__(self, source: str, writer: IndexWriter, options: Options) -> None:
        self.source, self.writer, self.options = source, writer, options
        self.warnings: list[str] = []
        self.problems = 0

    def refuse(self, rule: str, entry: str | None = None) -> SourceError:
        """The error that refuses the whole document: `raise compilation.refuse(...)`."""
        return SourceError(self.source, rule, entry)

    def fault(self, rule: str, entry: str | None = None) -> None:
        """The whole document is refused because of `rule`; whoever collects faults returns, to go on without it."""
        raise self.refuse(rule, entry)

    def entry(self, key: str) -> str:
        """What messages call the entry `key`."""
        return key

    def skip(self, entry: str, rule: str) -> None:
        """`entry` is left out because of `rule`; with -o strict the document is refused."""
        if self.options.strict:
            raise self.refuse(rule, entry)
        self.problems += 1
        self.writer.problem(entry, rule)
        if self.problems <= _SHOWN:
            self.warnings.append(f"{entry}: {rule}: left out")

    def warn(self, text: str) -> None:
        """Something odd that takes nothing away."""
        self.warnings.append(text)

    def told(self) -> tuple[str, ...]:
        """The warnings, with a count of those not told one by one."""
        if self.problems > _SHOWN:
            return (*self.warnings, f"{self.problems - _SHOWN} more entries left out: see zarrfs check")
        return tuple(self.warnings)


class Validation(Compilation):
    """A compilation that goes on where it can: every fault is a problem in the index, with its place."""

    thorough = True

    def fault(self, rule: str, entry: str | None = None) -> None:
        """Note it, and go on."""
        self.writer.problem(entry or "", rule)

    def entry(self, key: str) -> str:
        """Such as refs["x/0"]."""
        escaped = key.replace('"', '\\"')
        return f'{self.place}["{escaped}"]'

    def skip(self, entry: str, rule: str) -> None:
        """Note it, and go on."""
        self.writer.problem(entry, rule)


class ReadingProgress:
    """A line on standard error, if that is a terminal, for what takes longer than a second.

    A context manager, which takes the line away; called with the position (bytes of `total`) now and then.
    """

    def __init__(self, source: str, total: int, quiet: bool) -> None:
        self._name, self._total = os.path.basename(source) or source, total
        self._began = time.monotonic()
        self._next = float("inf") if quiet or not sys.stderr.isatty() else self._began + _QUIET_FOR
        self._shown = False

    def __enter__(self) -> ReadingProgress:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._shown:
            sys.stderr.write("\r\033[K")
            sys.stderr.flush()

    def __call__(self, position: int) -> None:
        """Show it, if it is time."""
        now = time.monotonic()
        if now < self._next:
            return
        self._next, self._shown = now + _EVERY, True
        part = min(position / self._total, 1.0) if self._total else 1.0
        left = f", {(now - self._began) * (1 - part) / part:.0f} s left" if 0.02 < part < 1 else ""
        bar = "#" * int(part * 30)
        sys.stderr.write(f"\r\033[Kzarrfs: reading {self._name} [{bar:30}] {part:4.0%} of {self._total:,} bytes{left}")
        sys.stderr.flush()

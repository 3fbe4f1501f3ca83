"""The parts of compiling a document to an index that all kinds of documents share."""

from __future__ import annotations

from zarrfs.config.options import Options
from zarrfs.errors import SourceError
from zarrfs.store.indexfile import IndexWriter

_REPORTED_MAX = 20  # problems with a warning each; all of them are recorded in the index


class Compilation:
    """One document being compiled into an index: the index writer, the options and the problems found."""

    def __init__(self, source: str, writer: IndexWriter, options: Options) -> None:
        self.source, self.writer, self.options = source, writer, options
        self.warnings: list[str] = []
        self.problems = 0

    def refuse(self, rule: str, entry: str | None = None) -> SourceError:
        """Return the error that refuses the whole document: `raise compilation.refuse(...)`."""
        return SourceError(self.source, rule, entry)

    def skip(self, entry: str, rule: str) -> None:
        """Leave `entry` out, whose key cannot be a path because of `rule`."""
        self.writer.problem(entry, rule)
        self._report(f"{entry}: {rule}: left out")

    def broken(self, key: str, entry: str, rule: str) -> None:
        """Add `entry`, whose key is valid, as a file that cannot be read because of `rule`."""
        self.writer.broken(key, rule)
        self._report(f"{entry}: {rule}: it cannot be read")

    def warn(self, text: str) -> None:
        """Add a warning about something that leaves nothing out."""
        self.warnings.append(text)

    def reported_warnings(self) -> tuple[str, ...]:
        """Return the warnings, with a count of the problems that are not listed."""
        if self.problems > _REPORTED_MAX:
            return (*self.warnings, f"{self.problems - _REPORTED_MAX} more bad entries: see zarrfs check")
        return tuple(self.warnings)

    def _report(self, text: str) -> None:
        self.problems += 1
        if self.problems <= _REPORTED_MAX:
            self.warnings.append(text)

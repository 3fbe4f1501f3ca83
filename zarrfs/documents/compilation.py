"""What compiling a document has in common, whatever its kind."""

from __future__ import annotations

from zarrfs.config.options import Options
from zarrfs.errors import SourceError
from zarrfs.store.indexfile import IndexWriter

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

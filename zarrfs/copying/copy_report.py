"""The options, progress and report of a copy: plain data, without the imports of copy.py."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

from zarrfs.config.shares import Share
from zarrfs.copying.check_report import Bad
from zarrfs.store.api import Kind


@dataclasses.dataclass(frozen=True)
class CopyOptions:
    """The options of a copy."""

    # for existing entries: or overwrite, keep, update (the newer one wins), differs (same size, mode and mtime stay)
    existing: str = "refuse"
    advice: str = ""  # what can be done about one that stays, for its error
    include: tuple[str, ...] = ()  # globs; a directory includes all entries below it; (): everything
    exclude: tuple[str, ...] = ()
    jobs: int | None = None  # processes or threads that write; None: one a processor, at most 4
    keep_going: bool = False  # collect failures instead of ending at the first one
    mark: str = ""  # names this version of the source: a run with the same mark resumes an interrupted one
    sync: bool = False  # sync all of it to disk at the end
    sums: bool = False  # report the SHA-256 of files
    set_ids: bool = False  # keep set-user-ID and set-group-ID bits of files
    root: bool = False  # also give an existing, empty destination the mode and time of the root
    share: Share | None = None  # of the selected entries; other processes copy the others to the same directory
    unfinished: bool = False  # keep the journal: a later run may resume this one, until destination_journal.forget()


class CopiedEntry(NamedTuple):
    """An entry that is in place."""

    key: str
    kind: Kind
    size: int  # bytes
    mtime_ns: int | None
    sha256: str | None  # hexadecimal, of a file, with CopyOptions.sums
    how: str  # copied, linked, kept or resumed


@dataclasses.dataclass
class CopyReport:
    """The counts of a copy, updated while it runs."""

    files: int = 0  # written, without links and directories
    bytes: int = 0  # of these files, without holes
    directories: int = 0
    links: int = 0
    kept: int = 0  # entries that existed before
    resumed: int = 0  # entries that an earlier run had written
    expected_files: int | None = None
    expected_bytes: int | None = None
    unfinished: dict[str, int] = dataclasses.field(default_factory=dict)  # bytes so far of large files, by key
    bad: int = 0  # entries that failed; the first of them:
    failed: list[Bad] = dataclasses.field(default_factory=list)
    unmatched: list[str] = dataclasses.field(default_factory=list)  # globs of `include` without a match

    def as_json(self) -> dict[str, Any]:
        """Return the report, ready for JSON."""
        about = {**dataclasses.asdict(self), "failed": [bad._asdict() for bad in self.failed]}
        del about["unfinished"]
        return about

    def written(self) -> int:
        """Return `bytes`, and those of files that are not finished. From any thread."""
        return self.bytes + sum(list(self.unfinished.values()))

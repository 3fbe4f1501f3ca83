"""What copy_store() is asked for, and what has become of that; without what it takes to do it."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

from zarrfs.copying.check_report import Bad
from zarrfs.store.api import Kind


@dataclasses.dataclass(frozen=True)
class CopyOptions:
    """What is written, and how."""

    # of what is there: or overwrite, keep, update (the newer one wins), differs (the same size, mode and mtime stay)
    existing: str = "refuse"
    include: tuple[str, ...] = ()  # globs over whole keys; what is below a directory belongs to it; (): everything
    exclude: tuple[str, ...] = ()
    jobs: int | None = None  # processes or threads that write; None: as many as there are processors, at most 4
    keep_going: bool = False  # failures are collected; else the first one ends the run
    mark: str = ""  # names this version of the source: with the same one a run that was broken off is taken up
    sync: bool = False  # have all of it on the disk at the end
    sums: bool = False  # tell the SHA-256 of files
    set_ids: bool = False  # set-user-ID and set-group-ID bits of files, too
    root: bool = False  # an empty directory that was there gets the mode and time of the root, too
    unfinished: bool = False  # keep the journal: a later run may resume this one, until destination_journal.forget()


class CopiedEntry(NamedTuple):
    """An entry that is there now."""

    key: str
    kind: Kind
    size: int  # bytes
    mtime_ns: int | None
    sha256: str | None  # hexadecimal, of a file, where sums were asked for
    how: str  # copied, linked, kept or resumed


@dataclasses.dataclass
class CopyReport:
    """What has been written so far; it grows while a run goes on."""

    files: int = 0  # written, links and directories apart
    bytes: int = 0  # of them, holes apart
    directories: int = 0
    links: int = 0
    kept: int = 0  # entries that were there
    resumed: int = 0  # entries that an earlier run has written
    expected_files: int | None = None
    expected_bytes: int | None = None
    bad: int = 0  # entries that failed; the first of them:
    failed: list[Bad] = dataclasses.field(default_factory=list)
    unmatched: list[str] = dataclasses.field(default_factory=list)  # globs of `include` that match nothing

    def as_json(self) -> dict[str, Any]:
        """The report, ready for JSON."""
        return {**dataclasses.asdict(self), "failed": [bad._asdict() for bad in self.failed]}

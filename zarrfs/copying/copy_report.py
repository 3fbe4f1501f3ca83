"""The options, progress and report of a copy: plain data, so that the imports of copy.py are not needed."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

from zarrfs.config.shares import Share
from zarrfs.copying.check_report import Bad
from zarrfs.store.api import Kind


@dataclasses.dataclass(frozen=True)
class CopyOptions:
    """The options of a copy."""

    # The treatment of existing entries: "refuse", "overwrite", "keep", "update" (replace an entry that is older than
    # the source's) or "differs" (replace an entry whose size, mode or mtime differs).
    existing: str = "refuse"
    advice: str = ""  # appended to the error about an existing entry: what the user can do about it
    include: tuple[str, ...] = ()  # globs; a directory includes all entries below it; (): everything
    exclude: tuple[str, ...] = ()  # globs
    jobs: int | None = None  # number of writing processes or threads; None: one per processor, at most 4
    keep_going: bool = False  # collect failures instead of ending at the first one
    mark: str = ""  # identifies this version of the source: a run with the same mark resumes an interrupted run
    sync: bool = False  # sync the whole copy to disk at the end
    sums: bool = False  # report the SHA-256 of files
    set_ids: bool = False  # keep set-user-ID and set-group-ID bits of files
    root: bool = False  # also give an existing, empty destination the mode and time of the root
    share: Share | None = None  # copy only this share; other processes copy the others to the same directory
    unfinished: bool = False  # keep the journal: a later run may resume this one, until destination_journal.forget()


class CopiedEntry(NamedTuple):
    """An entry that is in place at the destination."""

    key: str
    kind: Kind
    size: int  # bytes
    mtime_ns: int | None
    sha256: str | None  # hexadecimal; only of files, with CopyOptions.sums
    how: str  # copied, linked, kept or resumed


@dataclasses.dataclass
class CopyReport:
    """The counts of a copy, updated while it runs."""

    files: int = 0  # written files, without links and directories
    bytes: int = 0  # bytes of these files, without holes
    directories: int = 0
    links: int = 0
    kept: int = 0  # entries that existed before
    resumed: int = 0  # entries that an earlier run had written
    expected_files: int | None = None
    expected_bytes: int | None = None
    unfinished: dict[str, int] = dataclasses.field(default_factory=dict)  # bytes written of large files, by key
    bad: int = 0  # entries that failed
    failed: list[Bad] = dataclasses.field(default_factory=list)  # the first entries that failed
    unmatched: list[str] = dataclasses.field(default_factory=list)  # globs of `include` without a match

    def as_json(self) -> dict[str, Any]:
        """Return the report, ready for JSON."""
        about = {**dataclasses.asdict(self), "failed": [bad._asdict() for bad in self.failed]}
        del about["unfinished"]
        return about

    def written(self) -> int:
        """Return `bytes` plus the bytes written of unfinished files. May be called in any thread."""
        return self.bytes + sum(list(self.unfinished.values()))

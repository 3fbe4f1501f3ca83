"""The report of a check: entries that cannot be read, or contradict Zarr metadata."""

from __future__ import annotations

import bisect
import collections
import dataclasses
from typing import Any, NamedTuple

from zarrfs.errors import NotFound, ReadError, ZarrfsError
from zarrfs.store.division import Listing

# as ReadError.kind and Unsound.kind
BAD_KINDS = (
    "missing", "unreadable", "wrong hash", "out of range", "changed", "bad metadata", "undecodable",
    "outside grid",
)  # fmt: skip


class Unsound(ZarrfsError):
    """A file that can be read but contradicts Zarr metadata; `kind` is one of BAD_KINDS."""

    def __init__(self, kind: str, reason: str) -> None:
        self.kind = kind
        super().__init__(reason)


class Bad(NamedTuple):
    """An entry that cannot be read."""

    key: str
    kind: str  # one of BAD_KINDS
    url: str | None  # of the bytes
    reason: str


@dataclasses.dataclass
class CheckReport:
    """The counts and failures of a check, updated while it runs."""

    keep: int = 20  # length limit of each list
    ok: int = 0
    read: int = 0  # bytes
    counts: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)  # of bad ones
    bad: list[Bad] = dataclasses.field(default_factory=list)  # in key order
    links: int = 0  # symbolic links
    dangling: int = 0  # links that lead nowhere within the tree: no error
    left_out: int = 0  # entries that the document's compiler refused
    problems: list[tuple[str, str]] = dataclasses.field(default_factory=list)  # (entry, rule) of those
    absent_records: int = 0  # record files of a Parquet set that stand for absent chunks: not an error
    expected_files: int | None = None
    expected_bytes: int | None = None
    common: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)  # of `counts`: see add()
    listing: Listing | None = None  # of a share: what was divided

    @property
    def files(self) -> int:
        """The number of files that have been checked."""
        return self.ok + self.counts.total()

    @property
    def clean(self) -> bool:
        """True if the check found no fault."""
        return not self.counts and not self.left_out

    def add(self, key: str, exc: BaseException, url: str | None = None, common: bool = False) -> None:
        """Count an entry that cannot be read; `common`: every share of a check finds this one."""
        bad = bad_entry(key, exc, url)
        self.counts[bad.kind] += 1
        self.common[bad.kind] += common
        self.name(bad)

    def name(self, bad: Bad) -> None:
        """Put an entry into the list, which holds the first in key order, whatever the order they are found in."""
        bisect.insort(self.bad, bad, key=lambda one: (one.key, one.kind, one.reason))
        del self.bad[self.keep :]

    def as_json(self) -> dict[str, Any]:
        """Return the report, ready for JSON."""
        return {
            "clean": self.clean,
            "ok": self.ok,
            **{kind.replace(" ", "_"): self.counts[kind] for kind in BAD_KINDS},
            "left_out": self.left_out,
            "absent_records": self.absent_records,
            "bytes_read": self.read,
            "links": self.links,
            "links_dangling": self.dangling,
            "bad": [bad._asdict() for bad in self.bad],
            "problems": [{"entry": entry, "rule": rule} for entry, rule in self.problems],
        }


def bad_entry(key: str, exc: BaseException, url: str | None = None) -> Bad:
    """Describe an entry that cannot be read; `url`: of its bytes, if the exception does not name it."""
    if isinstance(exc, ReadError):
        return Bad(key, exc.kind, exc.where, exc.reason)
    if isinstance(exc, Unsound):
        return Bad(key, exc.kind, url, str(exc))
    if isinstance(exc, NotFound):
        return Bad(key, "missing", url, exc.reason or "is listed, but not there")
    return Bad(key, "unreadable", url, str(exc) or type(exc).__name__)

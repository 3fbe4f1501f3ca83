"""The report of a check: entries that cannot be read, or that contradict Zarr metadata."""

from __future__ import annotations

import bisect
import collections
import dataclasses
from typing import TYPE_CHECKING, Any, NamedTuple

from zarrfs.errors import NotFound, ReadError, ZarrfsError

if TYPE_CHECKING:
    from zarrfs.zarr.codecs import Sharding
    from zarrfs.zarr.model import ArrayMetadata

BAD_METADATA, UNDECODED, OUTSIDE = "bad metadata", "undecodable", "outside grid"
# the values of ReadError.kind and Unsound.kind
BAD_KINDS = ("missing", "unreadable", "wrong hash", "out of range", "changed", BAD_METADATA, UNDECODED, OUTSIDE)


class Unsound(ZarrfsError):
    """A file that can be read but contradicts Zarr metadata; `kind` is one of BAD_KINDS."""

    def __init__(self, kind: str, reason: str) -> None:
        self.kind = kind
        super().__init__(reason)


class Bad(NamedTuple):
    """An entry that cannot be read, or that contradicts Zarr metadata."""

    key: str
    kind: str  # one of BAD_KINDS
    url: str | None  # where the bytes should be
    reason: str


@dataclasses.dataclass
class ArrayCheck:
    """The findings in one array."""

    path: str
    array: ArrayMetadata | None  # None: its metadata is invalid
    chunks: int = 0  # files of chunks of the grid that were checked, also those that could not be read
    decoded: int = 0  # chunks that were decoded
    bad: int = 0  # all faults: of the metadata, of chunks, and files outside the grid
    note: str | None = None  # why chunks are not decoded
    decodes: bool = False  # whether its chunks are decoded
    sharding: Sharding | None = None

    def index(self, rest: str) -> tuple[int, ...] | None:
        """Return the grid index of the chunk with a key relative to the array; None if there is none."""
        return None if self.array is None else self.array.keys.index(rest, self.array.grid)

    @property
    def total(self) -> int:
        """The number of chunks of the grid."""
        return 0 if self.array is None else self.array.grid.size

    def as_json(self) -> dict[str, Any]:
        """Return the array as JSON."""
        return {
            "path": self.path, "chunks_total": self.total, "chunks": self.chunks, "decoded": self.decoded,
            "bad": self.bad, "note": self.note,
        }  # fmt: skip


@dataclasses.dataclass
class CheckReport:
    """The counts and failures of a check, updated while it runs."""

    keep: int = 20  # maximum length of each list
    ok: int = 0  # files without a fault
    bytes: int = 0  # that were read
    counts: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)  # bad entries, by kind
    bad: list[Bad] = dataclasses.field(default_factory=list)  # in key order
    arrays: list[ArrayCheck] = dataclasses.field(default_factory=list)
    links: int = 0  # symbolic links
    dangling: int = 0  # dangling links: not an error
    left_out: int = 0  # entries that the document's compiler refused
    problems: list[tuple[str, str]] = dataclasses.field(default_factory=list)  # (entry, rule) of entries left out
    absent_records: int = 0  # absent record files of a Parquet set, whose chunks are absent: not an error
    expected_files: int | None = None
    expected_bytes: int | None = None

    @property
    def files(self) -> int:
        """The number of files that have been checked."""
        return self.ok + self.counts.total()

    @property
    def clean(self) -> bool:
        """True if the check found no fault."""
        return not self.counts and not self.left_out

    def add(self, key: str, exc: BaseException, url: str | None = None) -> None:
        """Count a bad entry, whose bytes should be at `url`, unless the exception names that place."""
        kind = exc.kind if isinstance(exc, ReadError | Unsound) else "unreadable"
        reason = str(exc) or type(exc).__name__
        if isinstance(exc, ReadError):
            url, reason = exc.where, exc.reason
        elif isinstance(exc, NotFound):
            kind, reason = "missing", exc.reason or "is listed, but not there"
        bad = Bad(key, kind, url, reason)
        self.counts[bad.kind] += 1
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
            "bytes_read": self.bytes,
            "links": self.links,
            "links_dangling": self.dangling,
            "bad": [bad._asdict() for bad in self.bad],
            "problems": [{"entry": entry, "rule": rule} for entry, rule in self.problems],
            **({"arrays": [array.as_json() for array in self.arrays]} if self.arrays else {}),
        }

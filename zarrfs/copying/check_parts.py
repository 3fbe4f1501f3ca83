"""The parts of a check that several processes share (--shard): the report of each part, and the merged report."""

from __future__ import annotations

import dataclasses
import json
import os
import stat
from collections.abc import Iterable, Sequence
from typing import Any

from zarrfs.config.shares import Share, share_of
from zarrfs.copying.array_check import ArrayCheck
from zarrfs.copying.check_report import BAD_KINDS, Bad, CheckReport
from zarrfs.errors import SourceError, UsageError, reason_of
from zarrfs.store.division import Listing, listing_of

_VERSION = 1
_LARGEST = 256 << 20  # limit of the report of a part, in bytes: each array takes about 150
_COUNTS = "ok", "bytes_read", "links", "links_dangling", "left_out", "absent_records"
_DAMAGED = ValueError, TypeError, KeyError, AttributeError, RecursionError


@dataclasses.dataclass(frozen=True)
class PartOf:
    """The check that a part belongs to; equal for all parts that can be merged."""

    source: str  # as shown in messages
    version: str  # sources.fingerprint(): the version of a document; "": not known
    base: str  # this field and the next two are those of sources.variant()
    view: str
    upperdir: str
    key: str
    decode: bool
    twice: bool


@dataclasses.dataclass
class MergedReport:
    """The merged report of all parts."""

    report: CheckReport
    arrays: list[ArrayCheck]
    count: int  # number of shares
    missing: list[Share]  # shares without a part

    def as_json(self) -> dict[str, Any]:
        """Return the additional JSON fields of a merged report."""
        return {"parts": self.count, "missing_parts": [str(share) for share in self.missing]}


def part_json(of: PartOf, share: Share, report: CheckReport, arrays: Sequence[ArrayCheck]) -> dict[str, Any]:
    """Return the JSON fields that the report of a part has in addition to those of a check."""
    assert report.listing is not None
    return {
        "part": {
            "zarrfs_check_part": _VERSION, "share": str(share), **dataclasses.asdict(of),
            "listing": report.listing._asdict(), "common": dict(report.common),
            "broken": {array.path: array.broken for array in arrays if array.broken},
        }
    }  # fmt: skip


@dataclasses.dataclass
class _Part:
    path: str
    of: PartOf
    share: Share
    listing: Listing
    counts: dict[str, int]
    kinds: dict[str, int]
    common: dict[str, int]
    bad: list[Bad]
    problems: list[tuple[str, str]]
    arrays: list[ArrayCheck]


def merge(paths: Iterable[str], keep: int) -> MergedReport:
    """Merge the reports of parts in the files `paths`; name at most `keep` bad entries.

    Only one part is read at a time. Raise SourceError for a damaged part, and for parts that do not belong together,
    and UsageError if there are no paths.
    """
    merged: MergedReport | None = None
    first: _Part | None = None
    seen: dict[int, str] = {}
    common: dict[str, int] = {}
    places: dict[str, ArrayCheck] = {}
    known: set[Bad] = set()
    for path in paths:
        part = _read(path)
        if merged is None or first is None:
            first, merged = part, MergedReport(CheckReport(keep=keep), [], part.share.count, [])
        _fits(part, first, seen)
        seen[part.share.index] = path
        report = merged.report
        report.ok += part.counts["ok"]
        report.read += part.counts["bytes_read"]
        report.links += part.counts["links"]
        report.dangling += part.counts["links_dangling"]
        report.absent_records += part.counts["absent_records"]
        report.left_out = max(report.left_out, part.counts["left_out"])  # every part counts all of them
        for kind, count in part.kinds.items():
            report.counts[kind] += count - part.common.get(kind, 0)
            common[kind] = max(common.get(kind, 0), part.common.get(kind, 0))
        for bad in part.bad:
            if bad not in known:
                known.add(bad)
                report.name(bad)
        for problem in part.problems:
            if len(report.problems) < keep and problem not in report.problems:
                report.problems.append(problem)
        for array in part.arrays:
            _add(array, places)
    if merged is None:
        raise UsageError("--merge: name the reports of the parts")
    for kind, count in common.items():
        merged.report.counts[kind] += count
    merged.report.counts += type(merged.report.counts)()  # removes kinds with a count of 0
    merged.arrays = list(places.values())
    merged.missing = [Share(index, merged.count) for index in range(merged.count) if index not in seen]
    return merged


def _fits(part: _Part, first: _Part, seen: dict[int, str]) -> None:
    """Raise SourceError for a share that was `seen`, or a part of another check than the `first` part."""
    before = seen.get(part.share.index)
    if before is not None:
        raise SourceError(part.path, f"is of the share {part.share}, as {before} is")
    pairs = (
        ("the number of shares", part.share.count, first.share.count), ("the source", part.of.source, first.of.source),
        ("the version of the source", part.of.version, first.of.version),
        ("base=", part.of.base, first.of.base), ("view=", part.of.view, first.of.view),
        ("upperdir=", part.of.upperdir, first.of.upperdir), ("KEY", part.of.key, first.of.key),
        ("decoding of chunks", part.of.decode, first.of.decode), ("--twice", part.of.twice, first.of.twice),
    )  # fmt: skip
    for what, here, there in pairs:
        if here != there:
            raise SourceError(part.path, f"{what} is {_shown(here)}, and {_shown(there)} in {first.path}")
    if part.listing != first.listing:
        one, other = ("{:,} entries of {:,} bytes".format(*found.listing[:2]) for found in (part, first))
        raise SourceError(
            part.path, f"saw other names or sizes ({one}) than {first.path} ({other}): the source has changed, or a "
            "directory could not be listed; check both shares again",
        )  # fmt: skip


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return str(value) or "none"


def _add(array: ArrayCheck, places: dict[str, ArrayCheck]) -> None:
    found = places.setdefault(array.path, array)
    if found is not array:
        found.total = max(found.total, array.total)
        found.chunks += array.chunks
        found.decoded += array.decoded
        found.bad_files += array.bad_files
        found.broken = max(found.broken, array.broken)
        found.note = found.note or array.note


def _read(path: str) -> _Part:
    """Read the report of a part. Raise SourceError if that fails."""
    try:
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode) or status.st_size > _LARGEST:
                raise SourceError(path, "is no report of a part of a check")
            text = file.read()
    except OSError as exc:
        raise SourceError(path, reason_of(exc)) from exc
    try:
        about = json.loads(text)
        part = about["part"]
        version = part["zarrfs_check_part"]
    except _DAMAGED:
        what = "is empty" if not text else "is damaged, or no report of a part of a check"
        raise SourceError(path, f"{what}: run `zarrfs check --shard I/N --report FILE` again for this share") from None
    if version != _VERSION:
        raise SourceError(path, f"is a part of version {version}; this program reads {_VERSION}")
    try:
        return _part(path, about, part)
    except (*_DAMAGED, UsageError) as exc:
        raise SourceError(path, f"is a damaged part of a check ({exc}): run its share again") from None


def _part(path: str, about: dict[str, Any], part: dict[str, Any]) -> _Part:
    of = PartOf(*(_typed(part, name, str) for name in ("source", "version", "base", "view", "upperdir", "key")),
                *(_typed(part, name, bool) for name in ("decode", "twice")))  # fmt: skip
    text = _typed(part, "share", str)
    share = share_of(text, {})
    if share is None or text == "auto":
        raise ValueError("share")
    kinds = {kind: _count(about, kind.replace(" ", "_")) for kind in BAD_KINDS}
    common = {kind: _count(part["common"], kind) for kind in part["common"]}
    if any(count > kinds.get(kind, 0) for kind, count in common.items()):
        raise ValueError("common")
    broken = {key: _count(part["broken"], key) for key in part["broken"]}
    arrays = [_array(array, broken) for array in about.get("arrays", ())]
    bad = [Bad(_typed(one, "key", str), _kind(one["kind"]), one["url"] and str(one["url"]), str(one["reason"]))
           for one in about["bad"]]  # fmt: skip
    problems = [(str(one["entry"]), str(one["rule"])) for one in about["problems"]]
    counts = {name: _count(about, name) for name in _COUNTS}
    return _Part(path, of, share, listing_of(part["listing"]), counts, kinds, common, bad, problems, arrays)


def _array(about: dict[str, Any], broken: dict[str, int]) -> ArrayCheck:
    path, note = _typed(about, "path", str), about["note"]
    own = broken.get(path, 0)
    bad = _count(about, "bad") - own
    if bad < 0 or not isinstance(note, str | None):
        raise ValueError("arrays")
    total, chunks, decoded = (_count(about, name) for name in ("chunks_total", "chunks", "decoded"))
    return ArrayCheck(path, None, total, chunks, decoded, bad, own, note)


def _count(about: dict[str, Any], name: str) -> int:
    count = about[name]
    if type(count) is not int or count < 0:
        raise ValueError(name)
    return count


def _kind(kind: object) -> str:
    if kind not in BAD_KINDS:
        raise ValueError("kind")
    return str(kind)


def _typed(about: dict[str, Any], name: str, kind: type) -> Any:
    value = about[name]
    if type(value) is not kind:
        raise ValueError(name)
    return value

"""zarrfs refs stats: count the entries, targets and bytes of a reference set."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

import click

from zarrfs.cli import common
from zarrfs.cli.refs import running
from zarrfs.config.options import Parsed
from zarrfs.config.values import human
from zarrfs.errors import printable

if TYPE_CHECKING:
    from zarrfs.documents.plan import Plan
    from zarrfs.references.stats import Sized, Stats, TargetCounts
    from zarrfs.store.api import Store

EPILOG = """\b
Examples:
  zarrfs refs stats combined.json
  zarrfs refs stats --json s3://bucket/combined.parq | jq .arrays
\b
Targets are counted by their URLs as the set has them; nothing of them is fetched. Holes are bytes between the
first and the last byte of a target that are in no reference, overlaps bytes that are in several. The chunks of an
array are counted where its metadata is inline."""


@click.command(context_settings=common.SETTINGS, epilog=EPILOG)
@click.argument("source", metavar="SRC")
@click.option("--json", "as_json", is_flag=True, help="Write one JSON object.")
@click.option(
    "-n", "--top", type=click.IntRange(0), default=10, metavar="N", show_default=True,
    help="List the N largest targets.",
)  # fmt: skip
@common.source_options("source", "fetch", log_level="warning")
def stats(source: str, as_json: bool, top: int, parsed: Parsed) -> None:
    """Count the entries, targets and bytes of the reference set SRC, holes and overlaps, and chunks of arrays."""
    from zarrfs.references.stats import statistics

    async def body(store: Store, plan: Plan) -> Stats:
        return await statistics(store, top, lambda references: running.progress(references, parsed))

    found = running.run_on_set(source, parsed, body)
    if as_json:
        sys.stdout.write(json.dumps(found.as_json()) + "\n")
    else:
        _table(found)


def _table(found: Stats) -> None:
    for name, count, size in (
        ("files", found.files, None),
        ("directories", found.directories, None),
        ("inline", found.inline, found.inline_bytes),
        ("references", found.ranges, found.range_bytes),
        ("whole targets", found.whole, None),
        ("targets", found.targets, None),
    ):
        told = "" if size is None else f"  {human(size)}"
        sys.stdout.write(f"{name:14}{count:>14,}{told}\n")
    for name, size in ("holes", found.holes), ("overlaps", found.overlaps):
        sys.stdout.write(f"{name:14}{size:>14,}  bytes\n")
    _sized("largest", found.largest)
    _sized("smallest", found.smallest)
    _targets("targets by bytes", found.top_by_bytes)
    _targets("targets by references", found.top_by_references)
    if found.arrays:
        sys.stdout.write(f"\n{'chunks':>14} {'present':>14} {'missing':>14}  array\n")
    for array in found.arrays:
        counts = f"{array.grid.size:>14,} {array.present:>14,} {array.missing:>14,}"
        sys.stdout.write(f"{counts}  {printable(array.key or '/')}\n")


def _sized(name: str, found: Sized | None) -> None:
    if found is not None:
        sys.stdout.write(f"{name:14}{found.length:>14,}  {printable(found.key)}\n")


def _targets(title: str, found: list[TargetCounts]) -> None:
    if found:
        sys.stdout.write(f"\n{'bytes':>20} {'references':>12}  {title}\n")
    for target in found:
        sys.stdout.write(f"{target.bytes:>20,} {target.references:>12,}  {printable(target.url)}\n")

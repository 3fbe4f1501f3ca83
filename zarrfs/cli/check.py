"""zarrfs check: read everything and report what cannot be read."""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from zarrfs.cli import common, meter
from zarrfs.config.options import Parsed
from zarrfs.config.shares import Share
from zarrfs.config.values import human
from zarrfs.errors import printable

if TYPE_CHECKING:
    from zarrfs.copying.check_report import ArrayCheck, CheckReport

EPILOG = """\b
Examples:
  zarrfs check refs.json
  zarrfs check archive.json etc --blobs /srv/blobs
  zarrfs check --no-decode store.zarr     bytes and metadata, without decoding chunks
  zarrfs check -q --json s3://bucket/refs.json > report.json
  zarrfs check --shard 0/2 refs.json      half of the files, as another process checks 1/2
"""


@click.command(context_settings=common.SETTINGS, epilog=EPILOG)
@click.argument("source")
@click.argument("key", default="")
@click.option("--json", "as_json", is_flag=True, help="Write one JSON object.")
@click.option(
    "-n", "--first", type=click.IntRange(0), default=20, metavar="N", show_default=True,
    help="Name the first N bad entries, in key order.",
)  # fmt: skip
@click.option("--no-decode", is_flag=True, help="Read chunks of arrays, but do not decode them.")
@common.shard_option
@common.source_options(log_level="warning")
def check(
    source: str, key: str, as_json: bool, first: int, no_decode: bool, share: Share, parsed: Parsed
) -> None:
    """Read all of SOURCE, or below KEY, and report what cannot be read or contradicts its Zarr metadata.

    Every byte that an entry refers to is fetched once, in bounded memory; blobs are compared with their
    hash. Where there are arrays of Zarr, every chunk is decoded, and files outside the grid of their array
    are found. The exit status is 1 if anything is bad or was left out of SOURCE, else 0. A symbolic link that
    leads nowhere is bad where links are followed; otherwise it is only counted.

    With --shard several processes divide the files. Every share examines the metadata of arrays.
    """
    from zarrfs.copying.check import check
    from zarrfs.copying.check_report import CheckReport
    from zarrfs.documents.plan import Plan
    from zarrfs.store.api import Store
    from zarrfs.system.memory import memory_limit

    found, below = CheckReport(keep=first), common.clean_key(key)
    memory = memory_limit(parsed.options) // 2

    # a target that is cached may have been replaced or removed
    parsed.options = dataclasses.replace(parsed.options, asked_since=time.time())

    async def body(store: Store, plan: Plan) -> None:
        with meter.displayed(found, parsed.options.log_level == "error"):
            await check(store, below, found, memory, not no_decode, share)

    common.run_on_store(source, parsed, body)
    if as_json:
        sys.stdout.write(json.dumps(found.as_json()) + "\n")
    else:
        _write_arrays(found.arrays, first)
        _write_text(found)
    sys.exit(0 if found.clean else 1)


def _write_arrays(arrays: Sequence[ArrayCheck], keep: int) -> None:
    """Write a table of the faulty arrays and of the first `keep` sound ones."""
    if not arrays:
        return
    sound = [array for array in arrays if not array.bad and not array.note]
    left_out = {array.path for array in sound[keep:]}
    rows = [("array", "chunks", "decoded", "bad")]
    for array in arrays:
        if array.path not in left_out:
            chunks = "?" if array.array is None else f"{array.chunks:,} of {array.total:,}"
            rows.append((printable(array.path or "/"), chunks, f"{array.decoded:,}", f"{array.bad:,}"))
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    for name, *cells in rows:
        line = "  ".join([f"{name:{widths[0]}}", *map(str.rjust, cells, widths[1:])])
        sys.stdout.write(line + "\n")
    if left_out:
        sys.stdout.write(f"and {len(left_out):,} more arrays with nothing wrong\n")
    for array in arrays:
        if array.note and not array.bad:
            sys.stdout.write(printable(f"{array.path or '/'}: {array.note}") + "\n")
    sys.stdout.write("\n")


def _write_text(report: CheckReport) -> None:
    from zarrfs.copying.check_report import BAD_KINDS

    out = sys.stdout.write
    out(f"{'ok':14}{report.ok:>12,}  {human(report.bytes)} read\n")
    for kind in BAD_KINDS:
        if report.counts[kind]:
            out(f"{kind:14}{report.counts[kind]:>12,}\n")
    if report.left_out:
        out(f"{'left out':14}{report.left_out:>12,}\n")
    if report.absent_records:
        out(f"{'absent records':14}{report.absent_records:>12,}  not in the set: their chunks count as absent\n")
    if report.links:
        out(f"{'links':14}{report.links:>12,}  {report.dangling:,} lead nowhere\n")
    for bad in report.bad:
        where = f"{bad.url}: " if bad.url not in (None, bad.key) else ""
        out(printable(f"{bad.kind}: {bad.key or '/'}: {where}{bad.reason}") + "\n")
    for entry, rule in report.problems:
        out(printable(f"left out: {entry}: {rule}") + "\n")
    more = report.counts.total() - len(report.bad) + report.left_out - len(report.problems)
    if more:
        out(f"and {more:,} more\n")

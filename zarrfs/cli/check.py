"""zarrfs check: read everything, report what cannot be read."""

from __future__ import annotations

import json
import sys
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import click

from zarrfs.cli import common, meter, show
from zarrfs.options import Parsed

if TYPE_CHECKING:
    from zarrfs.stage.check import Report

EPILOG = """\b
Examples:
  zarrfs check refs.json
  zarrfs check archive.json etc --blobs /srv/blobs
  zarrfs check -q --json s3://bucket/refs.json > report.json
"""


@click.command(context_settings=common.SETTINGS, epilog=EPILOG)
@click.argument("source")
@click.argument("key", default="")
@click.option("--json", "as_json", is_flag=True, help="Write one JSON object.")
@click.option(
    "-n", "--first", type=click.IntRange(0), default=20, metavar="N", show_default=True,
    help="Name the first N bad entries.",
)  # fmt: skip
@common.source_options("source", "fetch", log_level="warning")
def check(source: str, key: str, as_json: bool, first: int, parsed: Parsed) -> None:
    """Read everything in SOURCE, or below KEY, and report what cannot be read.

    Every byte that an entry refers to is fetched once, in bounded memory; blobs are compared with their
    hash. The exit status is 1 if anything is bad or was left out of SOURCE, else 0. A symbolic link that
    leads nowhere is counted, but is not bad.
    """
    from zarrfs.sources import Plan
    from zarrfs.stage.check import Report, check
    from zarrfs.store.api import Store
    from zarrfs.transfer.memory import memory_limit

    report = Report(keep=first)

    async def body(store: Store, plan: Plan) -> None:
        await check(store, common.clean_key(key), report, memory_limit(parsed.options))

    with watched(report, parsed.options.log_level == "error"):
        common.run_on_store(source, parsed, body)
    sys.exit(told(report, as_json))


def watched(report: Report, quiet: bool) -> AbstractContextManager[None]:
    """Tell meanwhile how far a check is."""
    return meter.shown(
        lambda: meter.Counts(report.files, report.read, report.expected_files, report.expected_bytes), quiet
    )


def told(report: Report, as_json: bool) -> int:
    """The exit status, once a report was written."""
    if as_json:
        sys.stdout.write(json.dumps(report.as_json()) + "\n")
    else:
        _tell(report)
    return 0 if report.clean else 1


def _tell(report: Report) -> None:
    """Write a report for people to read."""
    from zarrfs.stage.check import BAD_KINDS

    out = sys.stdout.write
    out(f"{'ok':14}{report.ok:>12,}  {show.human(report.read)} read\n")
    for kind in BAD_KINDS:
        if report.counts[kind]:
            out(f"{kind:14}{report.counts[kind]:>12,}\n")
    if report.left_out:
        out(f"{'left out':14}{report.left_out:>12,}\n")
    if report.links:
        out(f"{'links':14}{report.links:>12,}  {report.dangling:,} lead nowhere\n")
    for bad in report.bad:
        out(show.shown(f"{bad.kind}: {bad.key}: {f'{bad.url}: ' if bad.url else ''}{bad.reason}") + "\n")
    for entry, rule in report.problems:
        out(show.shown(f"left out: {entry}: {rule}") + "\n")
    more = report.counts.total() - len(report.bad) + report.left_out - len(report.problems)
    if more:
        out(f"and {more:,} more\n")

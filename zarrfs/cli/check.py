"""zarrfs check: read everything, report what cannot be read."""

from __future__ import annotations

import json
import shutil
import sys
import time
from typing import TYPE_CHECKING

import click

from zarrfs.cli import common, show
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
    import trio

    from zarrfs.sources import Plan
    from zarrfs.stage.check import Report, check
    from zarrfs.store.api import Store
    from zarrfs.transfer.memory import memory_limit

    report = Report(keep=first)

    async def body(store: Store, plan: Plan) -> None:
        async with trio.open_nursery() as nursery:
            if sys.stderr.isatty() and parsed.options.log_level != "error":
                nursery.start_soon(_progress, report)
            await check(store, common.clean_key(key), report, memory_limit(parsed.options))
            nursery.cancel_scope.cancel()

    common.run_on_store(source, parsed, body)
    if as_json:
        sys.stdout.write(json.dumps(report.as_json()) + "\n")
    else:
        _table(report)
    sys.exit(0 if report.clean else 1)


def _table(report: Report) -> None:
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


async def _progress(report: Report) -> None:
    """Keep one line on the terminal up to date until cancelled."""
    import trio

    began = time.monotonic()
    try:
        while True:
            line = progress_line(report, time.monotonic() - began)
            sys.stderr.write(f"\r\x1b[K{line[: shutil.get_terminal_size().columns - 1]}")
            sys.stderr.flush()
            await trio.sleep(0.2)
    finally:
        sys.stderr.write("\r\x1b[K")


def progress_line(report: Report, elapsed: float) -> str:
    """Such as: [#####-----] 500 of 1,000 files, 1.0 of 2.0 GiB, 85.3 MiB/s, 0:12 left."""
    rate = report.read / elapsed if elapsed else 0.0
    files, data = f"{report.files:,}", show.human(report.read)
    if report.expected_files is None or report.expected_bytes is None:
        return f"{files} files, {data}, {show.human(rate)}/s"
    line = f"{files} of {report.expected_files:,} files, {data} of {show.human(report.expected_bytes)}"
    done = report.read / report.expected_bytes if report.expected_bytes else 1.0
    filled = min(20, int(20 * done))
    left = ""
    if 0 < done < 1:
        minutes, seconds = divmod(int(elapsed / done - elapsed), 60)
        left = f", {minutes}:{seconds:02} left"
    return f"[{'#' * filled}{'-' * (20 - filled)}] {line}, {show.human(rate)}/s{left}"

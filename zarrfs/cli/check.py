"""zarrfs check: read everything and report what cannot be read."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import click

from zarrfs.cli import common, meter
from zarrfs.config.options import Parsed
from zarrfs.config.values import human
from zarrfs.errors import UsageError, printable
from zarrfs.system.signals import orderly_end

if TYPE_CHECKING:
    from zarrfs.copying.array_check import ArrayCheck
    from zarrfs.copying.check_digests import FirstPass
    from zarrfs.copying.check_parts import PartOf
    from zarrfs.copying.check_report import CheckReport

_MISSING_SHOWN = 20
_NOTHING: Mapping[str, Any] = MappingProxyType({})
EPILOG = """\b
Examples:
  zarrfs check refs.json
  zarrfs check archive.json etc --blobs /srv/blobs
  zarrfs check --no-decode store.zarr     bytes and metadata, without decoding chunks
  zarrfs check --twice store.zarr         and what changes while it is read
  zarrfs check -q --json s3://bucket/refs.json > report.json
  zarrfs check --shard 0/2 --report part-0.json refs.json
  zarrfs check --merge part-0.json part-1.json
"""


@click.command(context_settings=common.SETTINGS, epilog=EPILOG)
@click.argument("source")
@click.argument("key", default="")
@click.argument("more", nargs=-1, metavar="")
@click.option("--json", "as_json", is_flag=True, help="Write one JSON object.")
@click.option(
    "-n", "--first", type=click.IntRange(0), default=20, metavar="N", show_default=True,
    help="Name the first N bad entries, in key order.",
)  # fmt: skip
@click.option("--no-decode", is_flag=True, help="Read chunks of arrays, but do not decode them.")
@click.option("--twice", is_flag=True, help="Read everything a second time, and report values that differ.")
@click.option("--report", metavar="FILE", help="Write the report to FILE as JSON; it appears when it is complete.")
@common.shard_option
@click.option("--merge", is_flag=True, help="Make one report of those of all shares: `zarrfs check --merge PART...`.")
@common.source_options("source", "fetch", log_level="warning")
def check(
    source: str, key: str, more: tuple[str, ...], as_json: bool, first: int, no_decode: bool, twice: bool,
    report: str | None, shard: str | None, merge: bool, parsed: Parsed,
) -> None:  # fmt: skip
    """Read all of SOURCE, or below KEY, and report what cannot be read or contradicts its Zarr metadata.

    Every byte that an entry refers to is fetched once, in bounded memory; blobs are compared with their
    hash. Where there are arrays of Zarr, every chunk is decoded, files outside the grid of their array are
    found, and metadata is compared with consolidated metadata. The exit status is 1 if anything is bad or
    was left out of SOURCE, else 0. A symbolic link that leads nowhere is bad where links are followed;
    otherwise it is only counted.

    With --twice SOURCE is opened again and read a second time without caches. Values whose bytes differ are reported
    as changed, also from servers without ETag and Last-Modified.

    With --shard several processes divide the files, each with a --report FILE of its own; --merge makes one report,
    and one exit status, of these files: 1 also if a share is missing.
    """
    from zarrfs.copying.array_check import ArrayChecks
    from zarrfs.copying.check import check, check_again
    from zarrfs.copying.check_parts import PartOf, part_json
    from zarrfs.copying.check_report import CheckReport
    from zarrfs.documents.plan import Plan
    from zarrfs.jobs import reports
    from zarrfs.sources import discard, fingerprint, open_plan, plan_source, variant
    from zarrfs.store.api import Store
    from zarrfs.system.memory import memory_limit

    to, share, found = reports.place(report), common.share(shard), CheckReport(keep=first)
    writing = contextlib.nullcontext() if to in (None, "-") else orderly_end()
    if merge:
        if share is not None or no_decode or twice:
            raise UsageError("--merge reads reports of parts: --shard, --no-decode and --twice are for making them")
        with writing:
            sys.exit(_merge([source, *([key] if key else []), *more], first, as_json, to))
    if more:
        raise UsageError(f"{more[0]}: a check is of one SOURCE, and at or below one KEY")
    below = common.clean_key(key)
    if twice:  # the second read must not come from blocks on disk
        parsed = dataclasses.replace(parsed, options=dataclasses.replace(parsed.options, cache_dir=None))
    options = parsed.options

    async def again(digests: FirstPass, memory: int) -> None:
        import trio

        plan = await trio.to_thread.run_sync(plan_source, source, options)
        store = open_plan(plan, options)
        try:
            await check_again(store, below, found, digests, memory, share)
        finally:
            with trio.CancelScope(shield=True):
                await store.aclose()
            discard(plan)

    async def body(store: Store, plan: Plan) -> tuple[list[ArrayCheck], PartOf]:
        memory = memory_limit(options) // 2
        arrays = ArrayChecks(store, not no_decode, memory)
        digests = None
        if twice:
            from zarrfs.copying.check_digests import Digests

            digests = Digests()
        with watched(found, options.log_level == "error"):
            await check(store, below, found, memory, arrays, digests, share)
            if digests is not None:
                found.expected_bytes = found.expected_bytes and 2 * found.expected_bytes
                await again(digests.first(), memory)
        of = PartOf(plan.source, fingerprint(plan), *variant(plan, options), below, not no_decode, twice)
        return arrays.arrays, of

    with writing:
        arrays, of = common.run_on_store(source, parsed, body)
        sys.exit(write_report(found, as_json, arrays, part_json(of, share, found, arrays) if share else {}, to))


def _merge(paths: list[str], first: int, as_json: bool, to: str | None) -> int:
    """Merge the reports of shares and write the result; return the exit status."""
    from zarrfs.copying.check_parts import merge

    merged = merge(paths, first)
    status = write_report(merged.report, as_json, merged.arrays, merged.as_json(), to)
    if merged.missing:
        shown = ", ".join(map(str, merged.missing[:_MISSING_SHOWN]))
        more = len(merged.missing) - _MISSING_SHOWN
        common.say(f"missing parts: {shown}{f' and {more:,} more' if more > 0 else ''}: these have not been checked")
    return 1 if merged.missing else status


def watched(report: CheckReport, quiet: bool) -> AbstractContextManager[None]:
    """Show the progress of a check on the terminal during the body."""
    return meter.displayed(
        lambda: meter.Counts(report.files, report.read, report.expected_files, report.expected_bytes), quiet
    )


def write_report(
    report: CheckReport, as_json: bool, arrays: Sequence[ArrayCheck] = (), more: Mapping[str, Any] = _NOTHING,
    to: str | None = None,
) -> int:  # fmt: skip
    """Write the report, with `arrays` in a table, to standard output; return the exit status.

    JSON includes the fields of `more`. If `to` is a path, the report is written there as JSON, too.
    """
    from zarrfs.jobs import reports

    about = report.as_json() | ({"arrays": [array.as_json() for array in arrays]} if arrays else {}) | dict(more)
    reports.write(to, about)
    if as_json:
        sys.stdout.write(json.dumps(about) + "\n")
    else:
        _write_arrays(arrays, report.keep)
        _write_text(report)
    return 0 if report.clean else 1


def _write_arrays(arrays: Sequence[ArrayCheck], keep: int) -> None:
    """Write a table of the faulty arrays and of the first `keep` sound ones."""
    if not arrays:
        return
    sound = [array for array in arrays if not array.bad and not array.note]
    left_out = {array.path for array in sound[keep:]}
    rows = [("array", "chunks", "decoded", "bad")]
    for array in arrays:
        if array.path not in left_out:
            chunks = "?" if array.broken and not array.total else f"{array.chunks:,} of {array.total:,}"
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
    out(f"{'ok':14}{report.ok:>12,}  {human(report.read)} read\n")
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

"""zarrfs archive extract: extract an archive to a directory."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

from zarrfs.cli import common, meter
from zarrfs.cli.archive import opening
from zarrfs.config.options import Parsed
from zarrfs.errors import UsageError, printable

if TYPE_CHECKING:
    from zarrfs.copying.copy_report import CopiedEntry, CopyReport
    from zarrfs.documents.plan import Plan
    from zarrfs.store.api import Store

EPILOG = """\b
Examples:
  zarrfs archive extract job.json -C /scratch --blobs /srv/blobs
  zarrfs archive extract job.json 'input/*.nc' config.toml -C /scratch --blobs /srv/blobs
  zarrfs archive extract -C /scratch --keep --exclude '*.tmp' job.json
  curl -s https://example.org/job.json | zarrfs archive extract - -C /scratch
  zarrfs archive extract --shard 0/4 job.json -C /scratch/new --blobs /srv/blobs
\b
A PATTERN without "/" is compared with names at any depth, one with "/" with whole paths, in which "*" stands for "/"
as well; with a directory comes all below it. A file appears when it is complete, with its mode and time; nothing is
ever written outside DIR. The same command resumes an interrupted run. With -v names are written as files appear."""


@click.command(context_settings=common.SETTINGS, epilog=EPILOG)
@click.argument("archive")
@click.argument("patterns", nargs=-1, metavar="[PATTERN]...")
@click.option(
    "-C", "--directory", default=".", metavar="DIR",
    help="Extract to DIR, which is created if needed (default: the working directory).",
)  # fmt: skip
@click.option("--exclude", multiple=True, metavar="PATTERN", help="Leave out what matches PATTERN, and all below it.")
@click.option("--overwrite", is_flag=True, help="Replace files that exist; without this, one is an error.")
@click.option("--keep", is_flag=True, help="Skip files that exist.")
@click.option("--update", is_flag=True, help="Replace files that are older than those in ARCHIVE.")
@click.option(
    "--jobs", type=click.IntRange(1), metavar="N", help="Processes, or threads, that write (default: CPUs, up to 4)."
)
@click.option("--sync", is_flag=True, help="Sync all files to the disk before the command ends.")
@click.option(
    "--set-id/--no-set-id", default=True,
    help="Keep set-user-ID and set-group-ID bits of files (the default), or leave them out: a program with such a bit "
    "acts as its owner, which is you.",
)
@common.shard_option
@click.option("--keep-going", is_flag=True, help="Skip entries that cannot be read, and report them all.")
@common.source_options("source", "fetch", log_level="warning")
def extract(
    archive: str, patterns: tuple[str, ...], directory: str, exclude: tuple[str, ...], overwrite: bool, keep: bool,
    update: bool, jobs: int | None, sync: bool, set_id: bool, shard: str | None, keep_going: bool, parsed: Parsed,
) -> None:  # fmt: skip
    """Write the files, directories and symbolic links of ARCHIVE to DIR: all of them, or what matches a PATTERN.

    Every blob is compared with its hash. An archive that breaks a rule is refused, and nothing is written. A file that
    cannot be read ends the run; --keep-going skips it, and the exit status is 1. Files that are complete stay.
    """
    from zarrfs.copying.copy_report import CopyOptions, CopyReport

    asked = [name for name, given in (("overwrite", overwrite), ("keep", keep), ("update", update)) if given]
    if len(asked) > 1:
        raise UsageError(f"--{asked[0]} and --{asked[1]} exclude each other")
    share = common.share(shard)
    report, verbose = CopyReport(), parsed.options.log_level in ("info", "debug")

    def done(found: CopiedEntry) -> None:
        if found.how != "kept":
            sys.stdout.write(printable(found.key) + "\n")

    async def body(store: Store, plan: Plan) -> None:
        from zarrfs.copying.copy import copy_store

        if archive == opening.STDIN:  # it is the time of a temporary file, and differs when the run is resumed
            store.hide_document_time()
        # a run with --no-set-id must not resume one without it, whose files keep set-ID bits, and the reverse
        mark = f"archive {plan.digest}{'' if set_id else ' without set-IDs'}" if plan.digest else ""
        existing = asked[0] if asked else "refuse"
        named = (await store.info("")).mode is not None  # an archive that has an entry for the directory itself
        advice = "" if asked else ": see --overwrite, --keep and --update"
        choice = CopyOptions(
            existing, advice, patterns, exclude, jobs, keep_going, mark, sync, set_ids=set_id, root=named, share=share
        )
        with meter.displayed(counts, parsed.options.log_level == "error"):
            await copy_store(store, directory, choice, report, done if verbose else None)

    def counts() -> meter.Counts:
        files = report.files + report.kept + report.resumed
        return meter.Counts(files, report.written(), report.expected_files, report.expected_bytes)

    opening.run_on_archive(archive, parsed, body, takes=("zarrfs.copying.copy",))
    sys.exit(_report_failures(archive, report))


def _report_failures(archive: str, report: CopyReport) -> int:
    """Write all failures to standard error; return the exit status."""
    for bad in report.failed:
        common.say(printable(f"{bad.key or '/'}: {f'{bad.url}: ' if bad.url else ''}{bad.reason}"))
    if report.bad > len(report.failed):
        common.say(f"and {report.bad - len(report.failed):,} more")
    for pattern in report.unmatched:
        common.say(f"{archive}: nothing in it matches {printable(pattern)}")
    return 1 if report.bad or report.unmatched else 0

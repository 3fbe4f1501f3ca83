"""zarrfs stage-out: save the files that a job has written."""

from __future__ import annotations

import dataclasses
import os
import sys
import time
from typing import TYPE_CHECKING, Any

import click

from zarrfs.cli import common, meter
from zarrfs.config.options import Parsed
from zarrfs.errors import UsageError, first_cause, printable
from zarrfs.system.signals import orderly_end

if TYPE_CHECKING:
    from zarrfs.jobs.stageout import StageOutReport, Tree

EPILOG = """\b
Examples:
  zarrfs stage-out work -O results.json --blobs /project/blobs
  zarrfs stage-out --upperdir changes --to s3://bucket/results --option s3.endpoint_url=http://...
  zarrfs stage-out work --merged --to /project/results
\b
Deletions are listed on standard error and in the report, and are not applied anywhere. Names that mean something
in an upper directory are left out (docs/writes.md). The directory must not be in use by a mount that writes to it,
unless that mount was staged: what it holds in memory is then written first, and the job should have come to rest.
\b
--to a directory copies all that there is, with modes, times, links and empty directories; existing files of the
same size, mode and time stay. --to a URL sends many files at once and compares size, and MD5 if the server sends
one, with what is there. A file that was sent before, did not change and is there with its size is skipped: the same
command resumes an interrupted one.
\b
The exit status is 0 if everything was kept, 2 for a wrong command line, else 1."""


@click.command(context_settings=common.SETTINGS, epilog=EPILOG)
@click.argument("dest", required=False, callback=common.local_path)
@click.option("--to", metavar="URL", help="Copy the files to URL (s3://..., a directory, any fsspec URL).")
@click.option("--merged", is_flag=True, help="Save all that the mount shows, not only the changes.")
@click.option("--inline", is_flag=True, help="Store all data in the archive itself, none in blobs.")
@click.option("--force", is_flag=True, help="Replace the archive if it exists.")
@click.option("--skip-unsupported", is_flag=True, help="Skip what an archive cannot hold, with a warning.")
@click.option("--keep-going", is_flag=True, help="With --to: skip what cannot be sent, and report it.")
@click.option("--report", metavar="FILE", help="Write what was done as JSON; - is standard output.")
@click.option("--jobs", type=click.IntRange(1), metavar="N", help="Number of files sent at a time.")
@common.source_options("blobs", "upperdir", "fetch", output="Write an archive (zarrfs archive) to FILE.",
                       log_level="warning")  # fmt: skip
def stage_out(dest: str | None, output: str | None, parsed: Parsed, **given: Any) -> None:
    """Save what a job has written at DEST, a staged mount, or in --upperdir: as an archive, or copied to a URL."""
    from zarrfs.jobs import reports, stageout

    upper = parsed.options.upperdir
    if (dest is None) == (upper is None):
        raise UsageError("nothing to keep: give DEST, where it is staged, or --upperdir DIR")
    if (output is None) == (given["to"] is None):
        raise UsageError("no destination: give --output ARCHIVE or --to URL")
    if given["to"] == "":  # would mean the working directory
        raise UsageError("--to: expected a URL or a directory")
    to = reports.place(given["report"])
    kept, began, error = stageout.StageOutReport(), time.monotonic(), None
    try:
        with orderly_end(), stageout.opened(dest, upper, given["merged"]) as tree:
            if not given["merged"]:
                kept.deleted = stageout.deleted(tree.upper, given["to"] is not None and given["keep_going"])
            _write(tree, output, parsed, given, kept)
    except BaseException as exc:
        error = str(first_cause(exc)) or type(exc).__name__
        raise
    finally:
        seconds = round(time.monotonic() - began, 3)
        about = {"dest": dest and os.path.abspath(dest), "upper": upper, "error": error, "seconds": seconds}
        reports.write(to, about | dataclasses.asdict(kept))
    _tell(kept, parsed)
    sys.exit(1 if kept.failed else 0)


def _write(tree: Tree, output: str | None, parsed: Parsed, given: dict[str, Any], kept: StageOutReport) -> None:
    from zarrfs.archives.pack_tree import CreateOptions, Progress
    from zarrfs.cli.archive.create import blob_directory
    from zarrfs.jobs import stageout, upload

    quiet = parsed.options.log_level == "error"
    if output is None:
        how = upload.UploadOptions(given["to"], given["jobs"], given["keep_going"], given["skip_unsupported"])
        with meter.displayed(meter.of(kept), quiet):
            upload.send(tree, how, parsed.options, kept)
        return
    progress = Progress()
    making = CreateOptions(
        parsed.options.blobs[0] if parsed.options.blobs else None, all_inline=given["inline"],
        skip_unsupported=given["skip_unsupported"], sync=True,
    )  # fmt: skip
    with blob_directory(making.blobs), meter.displayed(meter.of(progress), quiet):

        def left_out(text: str) -> None:
            kept.left_out.append(text.removesuffix(": left out"))

        stageout.archive(tree, output, making, given["force"], progress, left_out)
    kept.files, kept.bytes = progress.files, progress.bytes


def _tell(kept: StageOutReport, parsed: Parsed) -> None:
    for bad in kept.failed:
        common.say(printable(f"{bad['key']}: {bad['reason']}"))
    if parsed.options.log_level == "error":
        return
    for text in kept.left_out:
        common.say(printable(f"warning: left out: {text}"))
    if kept.empty_directories:
        first, *more = kept.empty_directories
        what = f"{first}{f' and {len(more):,} more' if more else ''}"
        common.say(printable(f"warning: left out: {what}: no URL has empty directories"))
    for key in kept.deleted:
        common.say(printable(f"deleted: {key}"))

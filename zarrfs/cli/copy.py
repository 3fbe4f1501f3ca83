"""zarrfs copy SOURCE DEST: copy a source to a directory."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from typing import TYPE_CHECKING

import click

from zarrfs.cli import common, meter
from zarrfs.config.options import Parsed
from zarrfs.config.shares import Share
from zarrfs.errors import SourceError, UsageError, printable, reason_of

if TYPE_CHECKING:
    from zarrfs.documents.plan import Plan
    from zarrfs.store.api import Store

STDIN = "-"
_MANY = 20  # failures after which their number is printed, too

EPILOG = """\b
Examples:
  zarrfs copy s3://bucket/store.zarr /scratch/store.zarr
  zarrfs copy refs.json /scratch/air --include air --exclude '*.tmp'
  zarrfs copy job.json /scratch/job --blobs /srv/blobs
  zarrfs copy --shard 0/4 refs.json /scratch/set      a quarter of the files, as other processes copy the others
\b
A GLOB without "/" is compared with names at any depth, one with "/" with whole keys, in which "*" stands for "/" as
well; with a directory comes all below it. A file appears when it is complete, with its mode and time. What has the
same kind, size and time is not copied again: the same command resumes an interrupted copy."""


@click.command(context_settings=common.SETTINGS, epilog=EPILOG)
@click.argument("source")
@click.argument("dest", callback=common.local_path)
@click.option("--include", multiple=True, metavar="GLOB", help="Copy only what matches, or is below it. Repeatable.")
@click.option("--exclude", multiple=True, metavar="GLOB", help="Leave out what matches, and all below. Repeatable.")
@click.option("--overwrite", is_flag=True, help="Replace files that differ; without this, one is an error.")
@common.shard_option
@click.option("--sync", is_flag=True, help="Sync the copy to the disk before the command ends.")
@common.source_options(log_level="warning")
def copy(
    source: str, dest: str, include: tuple[str, ...], exclude: tuple[str, ...], overwrite: bool, share: Share,
    sync: bool, parsed: Parsed,
) -> None:  # fmt: skip
    """Copy the files, directories, links and FIFOs of SOURCE to the directory DEST, which is made if needed.

    An entry that cannot be read, or that differs from one at DEST, is reported; the rest is copied, and the exit
    status is 1. Times, modes and holes are kept, owners and set-user-ID bits are not. Nothing at DEST is removed.
    """
    from zarrfs.copying.copy import CopyReport, copy_store
    from zarrfs.store.index import IndexStore
    from zarrfs.store.uri import path_of_uri

    report = CopyReport()
    place = path_of_uri(source)
    if place is not None and os.path.isdir(place):
        tree = os.path.realpath(place)
        if os.path.commonpath([tree, os.path.realpath(dest)]) == tree:
            raise UsageError(f"{dest}: lies in {source}: name a directory outside of it")

    async def body(store: Store, _plan: Plan) -> None:
        if source == STDIN and isinstance(store, IndexStore):  # the time of a temporary file: another one next time
            store.mtime_ns = None
        with meter.displayed(report, parsed.options.log_level == "error"):
            await copy_store(store, dest, report, warn, include, exclude, overwrite, share, sync)

    def warn(line: str) -> None:
        with contextlib.suppress(OSError):  # standard error is a file on a full disk: copy the rest
            meter.say(line)

    with _given(source) as path:
        common.run_on_store(path, parsed, body)
    if report.bad > _MANY:
        common.say(f"{report.bad:,} entries were not copied")
    for glob in report.unmatched:
        common.say(f"nothing in {source} matches {printable(glob)}")
    sys.exit(1 if report.bad or report.unmatched else 0)


@contextlib.contextmanager
def _given(source: str) -> Iterator[str]:
    """Yield `source`; for "-", the path of a file without a name, which has the content of standard input."""
    if source != STDIN:
        yield source
        return
    with tempfile.TemporaryFile() as file:
        try:
            shutil.copyfileobj(sys.stdin.buffer, file)
            file.flush()
        except OSError as exc:
            raise SourceError("standard input", f"cannot be kept in a temporary file: {reason_of(exc)}") from exc
        path = f"/proc/{os.getpid()}/fd/{file.fileno()}"  # another process reads it
        try:
            yield path
        except SourceError as exc:
            if exc.source != path:
                raise
            raise SourceError("standard input", exc.rule, exc.entry) from exc

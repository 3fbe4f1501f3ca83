"""zarrfs index: compile a document ahead of its first use."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

import click

from zarrfs.cli import common
from zarrfs.cli.option_help import OPTION
from zarrfs.config.options import Parsed
from zarrfs.system.signals import orderly_end

if TYPE_CHECKING:
    from zarrfs.documents.plan import Plan

EPILOG = """\b
Examples:
  zarrfs index refs.json                         into the cache directory: the next mount is fast
  zarrfs index s3://bucket/refs.json.zst -O refs.index
  zarrfs mount refs.index /mnt/data              an index is itself a source
"""


@click.command(context_settings=common.SETTINGS, epilog=EPILOG)
@click.argument("source")
@click.option("--force", is_flag=True, help="Replace FILE if it exists.")
@common.source_options("source", "fetch", output="Write the index to FILE, which can be mounted itself.")
def index(source: str, output: str | None, force: bool, parsed: Parsed) -> None:
    """Compile the reference set or archive SOURCE into its index, and print where that is.

    A mount does the same when it first sees a document; compile large ones ahead.
    An index written with --output names the same targets as SOURCE, wherever it is moved.
    """
    from zarrfs.errors import SourceError, UsageError
    from zarrfs.sources import discard, plan_source
    from zarrfs.store.destination import check_destination

    if output is not None:
        if _names_changes():
            raise UsageError("--upperdir: an index is of SOURCE alone; zarrfs commit -O NEW.index writes the changes")
        check_destination(output, "index", force)  # before compiling, which may take long
    with orderly_end():
        plan = plan_source(source, parsed.options, forks=True)
        for warning in () if parsed.options.log_level == "error" else plan.warnings:
            common.say(f"warning: {warning}")
        try:
            if plan.index is None:
                raise SourceError(plan.source, "is read in place: only JSON documents have an index")
            if output is not None:
                _write(plan, output, force)
            elif plan.temporary:
                raise SourceError(plan.source, "its index cannot be kept: no cache directory (see -o index_dir=)")
        finally:
            discard(plan)
    sys.stdout.buffer.write(os.fsencode(f"{output or plan.index}\n"))
    sys.stdout.buffer.flush()


def _names_changes() -> bool:
    """Return whether the command line names an upper directory. One in zarrfs.toml is for mounts and ignored."""
    from zarrfs.config.options import read

    given = click.get_current_context().params
    return bool(given[f"{OPTION}upperdir"]) or "upperdir" in read(common.option_words(given["items"], True)).values


def _write(plan: Plan, output: str, force: bool) -> None:
    from zarrfs.errors import UsageError
    from zarrfs.references.relocate import local_path
    from zarrfs.sources.index_sources import copy_index
    from zarrfs.store.destination import placed

    source = local_path(plan.source)
    if source is not None and os.path.exists(output) and os.path.samefile(source, output):
        raise UsageError(f"{output}: is the source itself")
    with placed(output, "index", force) as place:
        copy_index(plan, place.new)

"""zarrfs index: compile a document ahead of its first use."""

from __future__ import annotations

import sys

import click

from zarrfs.cli import common
from zarrfs.options import Parsed

EPILOG = """\b
Examples:
  zarrfs index refs.json                         into the cache directory: the next mount is immediate
  zarrfs index s3://bucket/refs.json.zst -o refs.index
  zarrfs mount refs.index /mnt/data              an index is itself a source
"""


@click.command(context_settings=common.SETTINGS, epilog=EPILOG)
@click.argument("source")
@common.source_options("source", "fetch", output="Write the index to FILE, which is a source of its own.")
def index(source: str, output: str | None, parsed: Parsed) -> None:
    """Compile the reference set or archive SOURCE into its index, and print where that is.

    Mounting does this by itself, once for each version of a document; a large one is better done ahead.
    An index written with -o names the same targets as SOURCE, wherever it is moved.
    """
    from zarrfs.errors import SourceError
    from zarrfs.sources import discard, plan_source
    from zarrfs.sources.indexfiles import write_index

    plan = plan_source(source, parsed.options)
    common.tell_warnings(plan, parsed.options)
    try:
        if plan.index is None:
            raise SourceError(plan.source, "is read in place: only JSON documents have an index")
        if output is not None:
            write_index(plan, output)
        elif plan.temporary:
            raise SourceError(plan.source, "its index cannot be kept: no cache directory (see -o index_dir=)")
    finally:
        discard(plan)
    sys.stdout.write(f"{output or plan.index}\n")

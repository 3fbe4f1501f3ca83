"""zarrfs cache: what is kept of documents, and getting rid of it."""

from __future__ import annotations

import json
import sys

import click

from zarrfs.cli import common, show
from zarrfs.options import Parsed, seconds, size

EPILOG = """\b
Examples:
  zarrfs cache ls
  zarrfs cache prune                        damaged, unfinished, or unused for 30 days
  zarrfs cache prune --older-than 0s        everything
  zarrfs cache prune --max-size 10GiB --dry-run
"""


@click.group(context_settings=common.SETTINGS, epilog=EPILOG)
def cache() -> None:
    """List and remove what is kept of documents: their indexes in the cache directory."""


@cache.command(context_settings=common.SETTINGS)
@click.option("--json", "as_json", is_flag=True, help="Write one JSON object a line.")
@common.source_options("index_dir")
def ls(as_json: bool, parsed: Parsed) -> None:
    """List the indexes that are kept, the one last used first."""
    from zarrfs.sources.kept import kept

    for one in kept(parsed.options):
        if as_json:
            sys.stdout.write(json.dumps(vars(one)) + "\n")
        else:
            about = one.problem or f"{one.kind} {one.source}"
            when = show.when(int(one.used * 1e9))
            sys.stdout.write(f"{show.human(one.size):>9}  {when}  {show.shown(about)}\n")


@cache.command(context_settings=common.SETTINGS)
@click.option("--older-than", default="30d", metavar="TIME", help="Remove what was not used for TIME (default: 30d).")
@click.option("--max-size", metavar="SIZE", help="Keep no more than SIZE, of what was used last.")
@click.option("--dry-run", is_flag=True, help="Only say what would be removed.")
@common.source_options("index_dir")
def prune(older_than: str, max_size: str | None, dry_run: bool, parsed: Parsed) -> None:
    """Remove indexes that are damaged, of another version, unfinished for a day, or not used for long.

    An index is made anew when it is needed again; one that a mount uses stays until that ends.
    """
    from zarrfs.sources.kept import prune as remove

    limits = _limits(older_than, max_size)
    gone = remove(parsed.options, *limits, dry_run)
    for one in gone:
        sys.stdout.write(f"{show.human(one.size):>9}  {show.shown(one.problem or one.source)}\n")
    total = show.human(sum(one.size for one in gone))
    common.say(f"{'would remove' if dry_run else 'removed'} {len(gone)} files, {total}")


def _limits(older_than: str, max_size: str | None) -> tuple[float, int | None]:
    try:
        return seconds(older_than), None if max_size is None else size(max_size)
    except ValueError as exc:
        raise click.UsageError(f"expected {exc}") from None

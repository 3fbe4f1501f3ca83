"""zarrfs archive diff: compare an archive with a directory, or with another archive."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from typing import TYPE_CHECKING

import click

from zarrfs.cli import common, show
from zarrfs.cli.archive import opening
from zarrfs.config.options import Parsed
from zarrfs.errors import UsageError, printable
from zarrfs.system.signals import orderly_end

if TYPE_CHECKING:
    from zarrfs.copying.diff import Difference
    from zarrfs.documents.plan import Plan
    from zarrfs.store.api import Store

EPILOG = """\b
Examples:
  zarrfs archive diff job.json /scratch/job --blobs /srv/blobs
  zarrfs archive diff -l old.json new.json --blobs /srv/blobs
  zarrfs archive diff --exit-code job.json /scratch/job --blobs /srv/blobs && echo nothing has changed
\b
A line for each entry that is in OTHER alone (A), that differs (M), or is in ARCHIVE alone (D). Bytes are always
compared, times in whole seconds. Times of directories are not compared, nor what only one of the two records."""


@click.command(context_settings=common.SETTINGS, epilog=EPILOG)
@click.argument("archive")
@click.argument("other")
@click.option(
    "-l", "--long", "detailed", is_flag=True, help="Show what differs: bytes, size, mode, mtime, kind, target."
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Write one JSON array, an object for each difference.")
@click.option("--exit-code", is_flag=True, help="End with status 1 if there is a difference, 2 for errors.")
@common.source_options("source", "fetch", log_level="warning")
def diff(archive: str, other: str, detailed: bool, as_json: bool, exit_code: bool, parsed: Parsed) -> None:
    """List the differences between ARCHIVE and OTHER, a directory or another archive.

    The content of a deleted directory is not listed. A directory replaced by something else is listed as deleted, then
    added.
    """
    from zarrfs.copying.changes import LETTERS
    from zarrfs.copying.diff import as_json as json_of
    from zarrfs.copying.diff import differences

    if archive == opening.STDIN == other:
        raise UsageError("-: only one of the two archives can be read from standard input")

    def line(found: Difference) -> str:
        text = f"{LETTERS[found.kind]} {printable(found.key)}"
        return f"{text}: {_what(found)}" if detailed and found.what else text

    async def body(opened: list[tuple[Store, Plan]]) -> int:
        from zarrfs.store.directory import FileSystemStore

        stores: list[Store] = []
        for store, plan in opened:
            found = opening.archive(store, plan)
            found.hide_document_time()
            stores.append(found)
        directory = FileSystemStore(other) if len(stores) == 1 else None
        if directory is not None:
            stores.append(directory)
        count, first = 0, "["
        try:
            async for one in differences(*stores):
                sys.stdout.write(f"{first}{json.dumps(json_of(one))}" if as_json else line(one) + "\n")
                count, first = count + 1, ",\n "
        finally:
            if directory is not None:
                await directory.aclose()
        if as_json:
            sys.stdout.write("]\n" if count else "[]\n")
        return count

    with common.comparison_errors(exit_code), orderly_end(), contextlib.ExitStack() as stack:
        named = [archive] if os.path.isdir(other) else [archive, other]
        paths = [stack.enter_context(opening.given(one)) for one in named]
        count = common.run_on_stores(paths, parsed, body, opening.in_child)
    sys.exit(1 if count and exit_code else 0)


def _what(found: Difference) -> str:
    """Format the fields that differ, as in "size 3 -> 5, mode 0644 -> 0600"."""
    parts = []
    for name, before, after in found.what:
        if name == "mtime":
            before, after = show.when(int(before) * 10**9), show.when(int(after) * 10**9)
        parts.append(f"{name} {before} -> {after}" if before or after else name)
    return printable(", ".join(parts))

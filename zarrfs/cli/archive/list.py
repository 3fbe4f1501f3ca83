"""zarrfs archive list: list the content of an archive."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

import click

from zarrfs.cli import common, show
from zarrfs.cli.archive import opening
from zarrfs.config.options import Parsed
from zarrfs.errors import printable

if TYPE_CHECKING:
    from zarrfs.documents.plan import Plan
    from zarrfs.store.api import Store

EPILOG = """\b
Examples:
  zarrfs archive list job.json
  zarrfs archive list -l job.json 'input/*.nc'
  zarrfs archive list --null job.json | xargs -0 -n1 echo
  zarrfs archive list --json job.json | jq -r 'select(.kind == "file") | .key'
\b
PATTERNs are those of `zarrfs archive extract`. Names come in order, each after its directory; control characters in
them are shown as escapes, but with --null and --json."""


@click.command(context_settings=common.SETTINGS, epilog=EPILOG)
@click.argument("archive")
@click.argument("patterns", nargs=-1, metavar="[PATTERN]...")
@click.option("-l", "--long", "detailed", is_flag=True, help="Show mode, size, time and link target.")
@click.option("--exclude", multiple=True, metavar="PATTERN", help="Leave out what matches PATTERN, and all below it.")
@click.option("-0", "--null", is_flag=True, help="Write a NUL after each name, and the name as it is.")
@click.option("--json", "as_json", is_flag=True, help="Write a JSON object for each entry.")
@common.source_options("source", "fetch", log_level="warning")
def list(
    archive: str, patterns: tuple[str, ...], detailed: bool, exclude: tuple[str, ...], null: bool, as_json: bool,
    parsed: Parsed,
) -> None:  # fmt: skip
    """List the content of ARCHIVE, or what matches a PATTERN. Blobs are not read."""
    from zarrfs.store.api import Info
    from zarrfs.store.keyglobs import Globs, chosen

    def line(key: str, info: Info) -> str:
        if as_json:
            return json.dumps(show.entry_json(key, info))
        name = key if null else printable(key)
        return show.long_line(name, info) if detailed else name

    async def body(store: Store, plan: Plan) -> int:
        include, end = Globs(patterns), "\0" if null else "\n"
        async for key, info in chosen(store, include, Globs(exclude)):
            sys.stdout.write(line(key, info) + end)
        for pattern in include.unused():
            common.say(f"{archive}: nothing in it matches {printable(pattern)}")
        return 1 if include.unused() else 0

    sys.exit(opening.run_on_archive(archive, parsed, body, reads=False))

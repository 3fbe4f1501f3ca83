"""zarrfs ls: list a directory of a source, without a mount."""

from __future__ import annotations

import json
import sys

import click

from zarrfs.cli import common, show
from zarrfs.config.options import Parsed
from zarrfs.errors import printable

EPILOG = """\b
Examples:
  zarrfs ls refs.json                 names in the root
  zarrfs ls -l refs.json air          with mode, size and time
  zarrfs ls -R --json store.zarr      everything, one JSON object a line
"""
_AT_ONCE = 64  # concurrent requests for sizes


@click.command(context_settings=common.SETTINGS, epilog=EPILOG)
@click.argument("source")
@click.argument("key", default="")
@click.option("-l", "--long", "detailed", is_flag=True, help="Show mode, size, time and link target.")
@click.option("-R", "--recursive", is_flag=True, help="List everything below, by its whole key.")
@click.option("--json", "as_json", is_flag=True, help="Write a JSON object for each entry.")
@common.source_options(log_level="warning")
def ls(source: str, key: str, detailed: bool, recursive: bool, as_json: bool, parsed: Parsed) -> None:
    """List the directory KEY of SOURCE, or its root.

    Sizes that cost a request are shown with -l only; without -l they are null in JSON.
    """
    from zarrfs.documents.plan import Plan
    from zarrfs.store.api import Info, Store
    from zarrfs.store.traversal import entries, with_sizes

    def line(at: str, info: Info) -> str:
        if as_json:
            return json.dumps(show.entry_json(at, info))
        name = printable(at if recursive or at == start else info.name)
        return show.long_line(name, info) if detailed else name

    async def body(store: Store, plan: Plan) -> int:
        failures: list[Exception] = []
        found = entries(store, start, recursive)
        if detailed:
            found = with_sizes(store, found, _AT_ONCE, lambda at, exc: failures.append(exc))
        async for at, info in found:
            sys.stdout.write(line(at, info) + "\n")
        for exc in failures:
            common.say(str(exc))
        return 1 if failures else 0

    start = common.clean_key(key)
    sys.exit(common.run_on_store(source, parsed, body, reads=False))

"""zarrfs diff: list the changes that an upper directory makes to its source."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

import click

from zarrfs.cli import common
from zarrfs.config.options import Parsed
from zarrfs.errors import UsageError, printable

if TYPE_CHECKING:
    from zarrfs.documents.plan import Plan
    from zarrfs.store.api import Store

EPILOG = """\b
Examples:
  zarrfs diff refs.json --upperdir changes
  zarrfs diff refs.json --upperdir changes --json | jq '.[].key'
"""


@click.command(context_settings=common.SETTINGS, epilog=EPILOG)
@click.argument("source")
@click.option("--json", "as_json", is_flag=True, help="Write one JSON array, an object for each change.")
@click.option("--exit-code", is_flag=True, help="End with status 1 if there is a difference, 2 for errors.")
@common.source_options(log_level="warning")
def diff(source: str, as_json: bool, exit_code: bool, parsed: Parsed) -> None:
    """List what the changes in --upperdir add to SOURCE (A), change in it (M) and delete from it (D).

    A directory is listed if it is new, deleted, or has another mode; its changed entries are listed themselves, those
    of a deleted directory are not. A directory replaced by something else is listed as deleted, then added.
    """
    from zarrfs.copying import changes as difference
    from zarrfs.store.overlay import Overlay

    if parsed.options.upperdir is None:
        raise UsageError("--upperdir: required: the directory that holds the changes")

    async def body(store: Store, plan: Plan) -> int:
        assert isinstance(store, Overlay)
        if store.upper.plain:
            raise UsageError(f"{store.upper.path}: is the source itself: its earlier content was not kept")
        found, first = 0, "["
        async for change in store.changes():
            if as_json:
                sys.stdout.write(f"{first}{json.dumps(difference.as_json(change))}")
            else:
                sys.stdout.write(f"{difference.LETTERS[change.kind]} {printable(change.key)}\n")
            found, first = found + 1, ",\n "
        if as_json:
            sys.stdout.write("]\n" if found else "[]\n")
        return found

    with common.report_errors(common.verbosity() == "debug", 2 if exit_code else 1):  # as diff(1)
        found = common.run_on_store(source, parsed, body)
    sys.exit(1 if found and exit_code else 0)

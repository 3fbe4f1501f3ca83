"""zarrfs refs expand: write a reference set as JSON of version 0."""

from __future__ import annotations

import click

from zarrfs.cli import common
from zarrfs.cli.refs import running
from zarrfs.config.options import Parsed
from zarrfs.errors import UsageError

EPILOG = """\b
Examples:
  zarrfs refs expand set.json | jq keys
  zarrfs refs expand combined.parq -O combined.json.gz
\b
Templates are rendered and gen entries expanded. Version 0 cannot hold a key named "version"; zarrfs refs convert
writes version 1, which holds any key."""


@click.command(context_settings=common.SETTINGS, epilog=EPILOG)
@click.argument("source", metavar="SRC")
@click.option("--force", is_flag=True, help="Replace FILE if it exists.")
@common.source_options(
    "source", "fetch", output="Write to FILE, compressed as its name says (default: standard output).",
    log_level="warning",
)  # fmt: skip
def expand(source: str, output: str | None, force: bool, parsed: Parsed) -> None:
    """Write the reference set SRC as JSON of version 0."""
    written = {"said": None, "record_size": None, "replace": force}
    to = running.output(output, written, usual="json", version=0)
    if not to.format.startswith("json"):
        raise UsageError(f"{output}: version 0 is JSON; zarrfs refs convert writes {to.format}")
    running.write_set(source, parsed, to)

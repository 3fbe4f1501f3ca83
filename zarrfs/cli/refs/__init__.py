"""zarrfs refs: the group of commands for reference sets; one module per command, imported when it runs."""

from __future__ import annotations

import click

from zarrfs.cli import LazyGroup
from zarrfs.cli.common import SETTINGS, process_options

# name: (module, its help in a line); the function has the command's name, with "_" for "-"
COMMANDS = {
    "convert": ("zarrfs.cli.refs.convert", "Write SRC in another form: JSON, Parquet or an index."),
    "expand": ("zarrfs.cli.refs.expand", "Write SRC as JSON of version 0: no templates, no gen."),
    "merge": ("zarrfs.cli.refs.merge", "Merge several sets, each under a prefix of its own."),
    "relocate": ("zarrfs.cli.refs.relocate", "Replace the beginnings of target URLs in SRC."),
    "from-store": ("zarrfs.cli.refs.from_store", "Make a set of a Zarr store, or of any tree of files."),
    "stats": ("zarrfs.cli.refs.stats", "Count entries, targets and bytes of SRC, holes and overlaps."),
}

EPILOG = """\b
Examples:
  zarrfs refs convert combined.json combined.parq
  zarrfs refs relocate combined.json --from /data/ --to s3://bucket/data/ -O moved.json
  zarrfs refs merge 2023=a.json 2024=b.json -O both.json
\b
SRC is whatever `zarrfs mount` takes as a reference set: JSON of version 0 or 1, compressed or not, a Parquet
directory or an index; a path or an fsspec URL. In commands that write a file, --output (-O) names it."""


@click.group(cls=LazyGroup, table=COMMANDS, context_settings=SETTINGS, epilog=EPILOG)
@process_options
def refs() -> None:
    """Work with reference sets: convert, check, count, merge, and make them."""

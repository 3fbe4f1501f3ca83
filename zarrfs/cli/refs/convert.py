"""zarrfs refs convert: write a reference set in another format."""

from __future__ import annotations

from typing import Any

import click

from zarrfs.cli import common
from zarrfs.cli.refs import running
from zarrfs.config.options import Parsed

EPILOG = """\b
Examples:
  zarrfs refs convert combined.json combined.json.zst
  zarrfs refs convert s3://bucket/combined.json combined.parq
  zarrfs refs convert combined.parq combined.index
  zarrfs refs convert combined.parq - | jq .refs
\b
The name of DEST decides its form: .json, .json.gz, .json.zst, .json.xz, .json.bz2; .parq, .parquet, a name that ends
in "/" or an empty directory for Parquet; .index. JSON is version 1. Relative URLs are made absolute unless DEST
lies beside SRC. DEST appears once it is complete."""


@click.command(context_settings=common.SETTINGS, epilog=EPILOG)
@click.argument("source", metavar="SRC")
@click.argument("dest")
@running.written_options()
@common.source_options("source", "fetch", log_level="warning")
def convert(source: str, dest: str, written: dict[str, Any], parsed: Parsed) -> None:
    """Write the reference set SRC to DEST ("-" is standard output), as JSON, Parquet or an index."""
    running.write_set(source, parsed, running.output(dest, written))

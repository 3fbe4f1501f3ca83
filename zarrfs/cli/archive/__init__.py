"""zarrfs archive: the group of commands for file archives; one module per command, imported when it runs."""

from __future__ import annotations

import click

from zarrfs.cli import LazyGroup
from zarrfs.cli.common import SETTINGS, process_options

# name: (module, its help in a line); the function has the command's name
COMMANDS = {
    "create": ("zarrfs.cli.archive.create", "Write files and directories to an archive."),
}

EPILOG = """\b
Examples:
  zarrfs archive create -C /data -O job.json --blobs /srv/blobs input config.toml
\b
ARCHIVE is a file archive (RFC 37) or a jobspec that carries one: a path, an fsspec URL, "-" for standard input, or
what `zarrfs mount` takes as one."""


@click.group(cls=LazyGroup, table=COMMANDS, context_settings=SETTINGS, epilog=EPILOG)
@process_options
def archive() -> None:
    """Create file archives."""

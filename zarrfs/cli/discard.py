"""zarrfs discard: delete the changes in an upper directory."""

from __future__ import annotations

import sys

import click

from zarrfs.cli import common
from zarrfs.config.options import Parsed
from zarrfs.errors import UsageError

EPILOG = """\b
Examples:
  zarrfs discard --upperdir changes
  zarrfs discard --upperdir changes --yes
"""


@click.command(context_settings=common.SETTINGS, epilog=EPILOG)
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@common.source_options("upperdir", log_level="warning")
def discard(yes: bool, parsed: Parsed) -> None:
    """Delete all changes in --upperdir, which is left empty.

    Directories that zarrfs did not make as upper directories, and those in use by a mount, are refused.
    """
    from zarrfs.copying.changes import discard as empty

    path = parsed.options.upperdir
    if path is None:
        raise UsageError("--upperdir: required: the directory that holds the changes")

    def agreed(count: int) -> bool:
        if yes:
            return True
        if not sys.stdin.isatty():
            raise UsageError(f"{path}: no terminal to confirm at; --yes deletes without asking")
        return click.confirm(f"Delete the {count} entries of {path}, and all below them?", err=True)

    if not empty(path, agreed):
        sys.exit(1)

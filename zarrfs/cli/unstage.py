"""Not there yet."""

from __future__ import annotations

import click

from zarrfs.cli.common import SETTINGS
from zarrfs.errors import UsageError


@click.command(context_settings=SETTINGS, epilog="Examples: zarrfs unstage ...")
def unstage() -> None:
    """Say that this is not there yet."""
    raise UsageError("not there yet")

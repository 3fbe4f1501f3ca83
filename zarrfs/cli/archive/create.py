"""Not there yet."""

from __future__ import annotations

import click

from zarrfs.errors import UsageError


@click.command()
def create() -> None:
    """Say that this is not there yet."""
    raise UsageError("not there yet")

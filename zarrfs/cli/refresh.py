"""zarrfs refresh MNT: make a mount show the present content of its source."""

from __future__ import annotations

import json
import os
import sys

import click

from zarrfs.cli.common import SETTINGS, report_errors

EPILOG = """\b
Examples:
  zarrfs refresh /mnt/data
\b
Files that are open keep their content; files that are opened later have the new one. With exit status 1 nothing has
changed, and the last line says why."""


@click.command(context_settings=SETTINGS, epilog=EPILOG)
@click.argument("mountpoint", metavar="MNT")
@click.option("--force", is_flag=True, help="Open an unchanged document again, because its targets changed.")
@click.option("--json", "as_json", is_flag=True, help="Write one JSON object.")
def refresh(mountpoint: str, force: bool, as_json: bool) -> None:
    """Make the mount that contains MNT show the present content of its source."""
    from zarrfs.daemon import control_client
    from zarrfs.metrics.statistics import mount_of

    with report_errors():
        at = mount_of(mountpoint)
        answer = control_client.refresh(at, force)
        said = f"{at}: {answer['result']} in {answer['seconds']:g} s"
        text = json.dumps({"mount": at, **answer}) if as_json else said
        sys.stdout.buffer.write(os.fsencode(text + "\n"))

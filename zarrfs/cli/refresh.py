"""zarrfs refresh MNT: a running mount shows what its source is now; --set changes its bounds."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import click

from zarrfs.cli.common import SETTINGS, report_errors
from zarrfs.config.options import split_commas

EPILOG = """\b
Examples:
  zarrfs refresh /mnt/data
  zarrfs refresh --set cache_size=20GiB,memory_limit=2GiB /mnt/data
\b
Who has a file open goes on reading what it was; whoever opens one from then on gets what it is. Exit status 1: nothing
was changed, and the last line says why. docs/running-changes.md tells more."""


@click.command(context_settings=SETTINGS, epilog=EPILOG)
@click.argument("mountpoint", metavar="MNT")
@click.option("--force", is_flag=True, help="Open a document anew although it is what it was: its targets are not.")
@click.option(
    "--set", "items", metavar="NAME=VALUE,...", multiple=True,
    help="Change options of the mount, and do not refresh: bounds, retries, log_level, idle_timeout.",
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Write one JSON object.")
def refresh(mountpoint: str, force: bool, items: tuple[str, ...], as_json: bool) -> None:
    """Let the mount at MNT, or around it, show what its source is now: all of it, as its parts belong together."""
    from zarrfs.daemon import control_client
    from zarrfs.metrics.statistics import mount_of

    with report_errors():
        at = mount_of(mountpoint)
        said = [item for text in items for item in split_commas(text)]
        answer = control_client.change(at, said) if items else control_client.refresh(at, force)
        text = json.dumps({"mount": at, **answer}) if as_json else f"{at}: {_said(answer)}"
        sys.stdout.buffer.write(os.fsencode(text + "\n"))
        sys.stdout.flush()


def _said(answer: dict[str, Any]) -> str:
    if "changed" not in answer:
        return f"{answer['result']} in {answer['seconds']:g} s"
    changed = ", ".join(f"{name}={value}" for name, value in answer["changed"].items())
    return f"changed {changed}" if changed else "nothing to change"

"""zarrfs refresh MNT: make a mount show the present content of its source; --set changes options of the mount."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import click

from zarrfs.cli.common import SETTINGS, report_errors
from zarrfs.config.options import KERNEL_FLAGS, split_commas
from zarrfs.errors import UsageError

EPILOG = """\b
Examples:
  zarrfs refresh /mnt/data
  zarrfs refresh --set cache_size=20GiB,memory_limit=2GiB /mnt/data
\b
Files that are open keep their content; files that are opened later have the new one. With exit status 1 nothing has
changed, and the last line says why."""


@click.command(context_settings=SETTINGS, epilog=EPILOG)
@click.argument("mountpoint", metavar="MNT")
@click.option("--force", is_flag=True, help="Open an unchanged document again, because its targets changed.")
@click.option(
    "--set", "items", metavar="NAME=VALUE,...", multiple=True,
    help="Change options of the mount instead: limits, retries, log_level, idle_timeout.",
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Write one JSON object.")
def refresh(mountpoint: str, force: bool, items: tuple[str, ...], as_json: bool) -> None:
    """Make the mount that contains MNT show the present content of its source."""
    from zarrfs.daemon import control_client
    from zarrfs.metrics.statistics import mount_of

    with report_errors():
        said = [item for text in items for item in split_commas(text)]
        for name in KERNEL_FLAGS | {"ro", "rw"}:
            if name in said:
                raise UsageError(f"option {name}: is a flag of the kernel: mount -o remount,{name}")
        at = mount_of(mountpoint)
        answer = control_client.change(at, said) if items else control_client.refresh(at, force)
        text = json.dumps({"mount": at, **answer}) if as_json else f"{at}: {_said(answer)}"
        sys.stdout.buffer.write(os.fsencode(text + "\n"))


def _said(answer: dict[str, Any]) -> str:
    if "changed" not in answer:
        return f"{answer['result']} in {answer['seconds']:g} s"
    changed = ", ".join(f"{name}={value}" for name, value in answer["changed"].items())
    return f"changed {changed}" if changed else "nothing to change"

"""zarrfs umount MOUNTPOINT...: unmount, or name the processes that use the mount."""

from __future__ import annotations

import sys

import click

from zarrfs.cli.common import SETTINGS, report_errors, say

EPILOG = """\b
Examples:
  zarrfs umount /mnt/data
  zarrfs umount --lazy /mnt/data     (detach now; open files stay usable)
\b
A mount that is in use is not unmounted, and its users are listed: Zarr readers that lose a store
return fill values without an error. --lazy unmounts all the same."""


@click.command(epilog=EPILOG, context_settings=SETTINGS)
@click.argument("mountpoint", nargs=-1, required=True)
@click.option("-l", "--lazy", is_flag=True, help="Detach even while the mount is in use.")
def umount(mountpoint: tuple[str, ...], lazy: bool) -> None:
    """Unmount each MOUNTPOINT and wait until its daemon has ended."""
    from zarrfs.errors import MountError
    from zarrfs.system import mounts

    failed = False
    with report_errors():
        for one in mountpoint:
            try:
                mounts.unmount_and_wait(one, lazy)
            except MountError as exc:
                failed = True
                say(f"{exc}{_staged(one)}")
    sys.exit(1 if failed else 0)


def _staged(mountpoint: str) -> str:
    """Return advice, to append to an error message, if zarrfs stage has staged something at `mountpoint`; else ""."""
    import shlex

    from zarrfs.errors import ZarrfsError
    from zarrfs.jobs import records
    from zarrfs.jobs.unstage import at

    try:
        if all(record.how == "run" for record in at(mountpoint, records.found([]))):
            return ""
    except (ZarrfsError, OSError):  # the failure to unmount is what matters
        return ""
    return f"; zarrfs stage has put it there: zarrfs unstage {shlex.quote(mountpoint)}"

"""zarrfs umount MOUNTPOINT."""

from __future__ import annotations

import click

from zarrfs.cli.common import SETTINGS, report_errors

EPILOG = """\b
Examples:
  zarrfs umount /mnt/data
  zarrfs umount --lazy /mnt/data     (detach now; who has files open keeps them)
\b
A Zarr reader that finds a store gone reads fill values without an error, so a mount in use is not
unmounted: its users are named instead. --lazy does it all the same."""


@click.command(epilog=EPILOG, context_settings=SETTINGS)
@click.argument("mountpoint")
@click.option("-l", "--lazy", is_flag=True, help="Detach even while the mount is in use.")
def umount(mountpoint: str, lazy: bool) -> None:
    """Unmount MOUNTPOINT and wait until its daemon has ended."""
    from zarrfs.system import mounts

    with report_errors():
        mounts.end(mountpoint, lazy)

"""zarrfs umount MOUNTPOINT."""

from __future__ import annotations

import click

from zarrfs.cli.common import SETTINGS, report_errors

EPILOG = """\b
Examples:
  zarrfs umount /mnt/data
  zarrfs umount --lazy /mnt/data     (detach now; open files stay usable)
\b
A mount that is in use is not unmounted, and its users are listed: Zarr readers that lose a store
return fill values without an error. --lazy unmounts all the same."""


@click.command(epilog=EPILOG, context_settings=SETTINGS)
@click.argument("mountpoint")
@click.option("-l", "--lazy", is_flag=True, help="Detach even while the mount is in use.")
def umount(mountpoint: str, lazy: bool) -> None:
    """Unmount MOUNTPOINT and wait until its daemon has ended."""
    from zarrfs.system import mounts

    with report_errors():
        mounts.end(mountpoint, lazy)

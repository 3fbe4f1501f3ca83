"""zarrfs umount MOUNTPOINT...: unmount, or name the processes that use the mount."""

from __future__ import annotations

import sys

import click

from zarrfs.cli.common import SETTINGS, report_errors, say
from zarrfs.errors import MountError, UsageError

EPILOG = """\b
Examples:
  zarrfs umount /mnt/data
  zarrfs umount --lazy /mnt/data                  (detach now; open files stay usable)
  zarrfs umount --below /run/zarrfs-jobs/4711     (all mounts there, as at the end of a job)
\b
A mount that is in use is not unmounted, and its users are listed: Zarr readers that lose a store
return fill values without an error. --lazy unmounts all the same. A mount with -o hold is no longer
held then: it is unmounted when it is no longer in use."""


@click.command(epilog=EPILOG, context_settings=SETTINGS)
@click.argument("mountpoint", nargs=-1)
@click.option("-l", "--lazy", is_flag=True, help="Detach even while the mount is in use.")
@click.option("--below", metavar="DIR", help="Unmount all mounts at or below DIR that are yours, innermost first.")
@click.option("--dead", is_flag=True, help="With --below, only those whose daemon has died.")
def umount(mountpoint: tuple[str, ...], lazy: bool, below: str | None, dead: bool) -> None:
    """Unmount each MOUNTPOINT and wait until its daemon has ended."""
    from zarrfs.system import mounts

    failed = False
    with report_errors():
        if bool(mountpoint) == (below is not None) or (dead and below is None):
            raise UsageError("umount: give mount points, or --below DIR, to which --dead may be added")
        for one in mountpoint or mounts.below(below or "", dead):
            try:
                mounts.unmount_and_wait(one, lazy)
            except MountError as exc:
                failed = True
                say(str(exc))
    sys.exit(1 if failed else 0)

"""zarrfs mount SOURCE MOUNTPOINT."""

from __future__ import annotations

import click

from zarrfs.cli.common import SETTINGS, say, source_options
from zarrfs.config.options import Parsed

EPILOG = """\b
Examples:
  zarrfs mount combined.json /mnt/data
  zarrfs mount job.json /mnt/job -o blobs=/srv/blobs
  zarrfs mount s3://bucket/store.zarr /mnt/store -o s3.anon=true
  zarrfs mount --foreground refs.json /mnt/data     (Ctrl-C unmounts)
\b
Returns when the mount answers; a problem with SOURCE is told before anything is mounted.
Every long option is an -o option too, as in fstab: --blobs DIR is -o blobs=DIR."""


@click.command(epilog=EPILOG, context_settings=SETTINGS)
@click.argument("source")
@click.argument("mountpoint")
@source_options()
def mount(parsed: Parsed, source: str, mountpoint: str) -> None:
    """Mount SOURCE on the directory MOUNTPOINT.

    SOURCE is a reference set (kerchunk), a JSON file archive (Flux), a jobspec, or a Zarr store: a path or an
    fsspec URL. What it is, is found out by its content; -o type= says it.
    """
    from zarrfs.daemon import session

    quiet = parsed.options.log_level == "error"
    session.mount(source, mountpoint, parsed, lambda text: None if quiet else say(text))

"""zarrfs mount SOURCE MOUNTPOINT: mount a source on a directory."""

from __future__ import annotations

import sys

import click

from zarrfs.cli.common import OWN, SETTINGS, say, source_options
from zarrfs.config.options import TABLE, Parsed, help_text, spelled

EPILOG = """\b
Examples:
  zarrfs mount combined.json /mnt/data
  zarrfs mount job.json /mnt/job -o blobs=/srv/blobs
  zarrfs mount s3://bucket/store.zarr /mnt/store -o s3.anon=true
  zarrfs mount -f refs.json /mnt/data     (Ctrl-C unmounts)
\b
Returns once the mount answers. If SOURCE cannot be opened, prints why, and mounts nothing."""


class _Mount(click.Command):
    """A command whose help has the whole table of options."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        super().format_options(ctx, formatter)
        common = [name for name, opt in TABLE.items() if opt.common]
        others = [name for name in TABLE if name not in (*common, "foreground", "config")]
        for title, names in (("Common options of -o", common), ("Other options of -o", others)):
            with formatter.section(title):
                formatter.write_dl([(spelled(name), help_text(name)) for name in names])


@click.command(cls=_Mount, epilog=EPILOG, context_settings=SETTINGS)
@click.argument("source")
@click.argument("mountpoint")
@click.option("-f", "--foreground", OWN + "foreground", is_flag=True, help=help_text("foreground"))
@source_options()
def mount(parsed: Parsed, source: str, mountpoint: str) -> None:
    """Mount SOURCE on the directory MOUNTPOINT.

    SOURCE is the path or URL (fsspec) of a reference set (kerchunk), a JSON file archive or jobspec (Flux), a Zarr
    store, or an Icechunk repository.
    """
    from zarrfs.daemon import session
    from zarrfs.metrics import logs
    from zarrfs.system.signals import orderly_end

    quiet = parsed.options.log_level == "error"
    with orderly_end():
        session.mount(source, mountpoint, parsed, lambda text: None if quiet else say(text))
    options = parsed.options
    if not (quiet or options.foreground or logs.destination(options)) and sys.stderr.isatty():
        say(f"{mountpoint}: no log: no journal and no {logs.SYSLOG}: set log_file=FILE to see why reads fail")

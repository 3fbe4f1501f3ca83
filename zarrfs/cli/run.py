"""zarrfs run SOURCE -- COMMAND: run a command while a source is mounted for it."""

from __future__ import annotations

import sys

import click

from zarrfs.cli import common
from zarrfs.config.options import Parsed
from zarrfs.errors import UsageError
from zarrfs.system.signals import orderly_end

EPILOG = """\b
Examples:
  zarrfs run refs.json -- python analyse.py {}/air
  zarrfs run s3://bucket/store.zarr -o s3.anon=true -- sh -c 'ls "$ZARRFS_MOUNT"'
  zarrfs run archive.json -o upperdir=changes --at work -- make -C work
\b
The exit status is that of COMMAND; 128 + N if signal N has ended it, 127 if there is no such command, 126 if it
cannot be run, 125 if SOURCE cannot be mounted, or if COMMAND has left something behind that uses it."""


@click.command(context_settings=common.SETTINGS, epilog=EPILOG)
@click.argument("source")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
@click.option(
    "--at", callback=common.local_path, metavar="DIR", help="Mount on DIR (default: a private directory on this node)."
)
@click.option(
    "--wait", callback=common.time_given, default="10s", show_default=True, metavar="TIME",
    help="Wait TIME for processes that COMMAND leaves behind.",
)  # fmt: skip
@common.source_options()
def run(source: str, command: tuple[str, ...], at: str | None, wait: float, parsed: Parsed) -> None:
    """Mount SOURCE, run COMMAND, unmount, and exit as COMMAND did.

    {} in the words of COMMAND, and ZARRFS_MOUNT in its environment, stand for the directory where SOURCE is mounted,
    which no other user can enter. COMMAND has the terminal, and gets the signals that zarrfs gets. If it leaves
    processes that use the mount, zarrfs waits for them up to --wait; then the mount stays until they have ended.
    """
    from zarrfs.errors import ZarrfsError
    from zarrfs.jobs.running import FAILED, Command
    from zarrfs.jobs.running import run as run_it

    quiet = parsed.options.log_level == "error"
    if parsed.options.foreground:
        raise UsageError("option foreground: not for run, whose COMMAND runs in the foreground")
    what = Command(source, command, at, wait)
    try:
        with orderly_end():
            status = run_it(what, parsed, lambda text: None if quiet else common.say(text))
    except ZarrfsError as exc:
        common.say(str(exc))
        status = FAILED
    sys.exit(status)

"""zarrfs unstage: take away what was staged."""

from __future__ import annotations

import os
import sys

import click

from zarrfs.cli import common
from zarrfs.errors import MountError, UsageError, ZarrfsError

EPILOG = """\b
Examples:
  zarrfs unstage /scratch/job/input
  zarrfs unstage --job $SLURM_JOB_ID --timeout 30s     (in an epilog)
  zarrfs unstage --stale                               (any time: what killed jobs have left)
"""


@click.command(context_settings=common.SETTINGS, epilog=EPILOG)
@click.argument("dest", required=False)
@click.option("--job", metavar="ID", help="All that was staged for this job.")
@click.option("--stale", is_flag=True, help="All that nobody needs any more.")
@click.option("--all", "everything", is_flag=True, help="All that you have staged on this node.")
@click.option("--record", hidden=True, help="The record with this id: what a keeper says.")
@click.option("--timeout", callback=common.time_given, metavar="TIME", help="Wait so long for who uses a mount.")
@click.option("-l", "--lazy", is_flag=True, help="Detach mounts even while they are in use.")
@common.process_options
def unstage(
    dest: str | None, job: str | None, stale: bool, everything: bool, record: str | None, timeout: float | None,
    lazy: bool,
) -> None:  # fmt: skip
    """Take away what was staged."""
    from zarrfs.jobs import records
    from zarrfs.jobs.unstage import Taking, why_stale
    from zarrfs.jobs.unstage import unstage as take

    with common.errors_told():
        if sum((dest is not None, job is not None, stale, everything, record is not None)) != 1:
            raise UsageError("say what: DEST, --job ID, --stale or --all")
        found = records.found()
        if dest is not None:
            parent, name = os.path.split(os.path.abspath(dest))
            path = os.path.join(os.path.realpath(parent), name)
            found = [one for one in found if path in (one.dest, one.place)]
            if not found:
                raise MountError(f"{dest}: nothing was staged there")
        elif job is not None:
            found = [one for one in found if one.job == job]
        elif record is not None:
            found = [one for one in found if one.id == record]
        elif stale:
            found = [one for one in found if why_stale(one)]
        failed = False
        for one in found:
            try:
                take(one, Taking(timeout or (3600.0 if record else 0.0), lazy, tell=common.say))
            except (ZarrfsError, OSError) as exc:
                common.say(str(exc))
                failed = True
        sys.exit(1 if failed else 0)

"""zarrfs unstage: remove staged mounts, links, copies and directories."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import click

from zarrfs.cli import common
from zarrfs.errors import MountError, UsageError
from zarrfs.system.signals import orderly_end

EPILOG = """\b
Examples:
  zarrfs unstage /scratch/job/input
  zarrfs unstage --job $SLURM_JOB_ID --timeout 30s     (in an epilog)
  zarrfs unstage --stale                               (any time: what killed jobs have left)
  zarrfs unstage --for $$ /scratch/job/input           (of zarrfs stage --join --for $$)
\b
A mount in use stays, and its users are listed: Zarr readers that lose a store return fill values without an error.
--timeout waits for them; --lazy unmounts all the same.
\b
--stale removes what is left of an earlier boot and of killed commands; mounts that have ended, or whose daemon has
died and that no job may read; and what was for a process (--for) or a job that has ended, according to squeue or flux.
If a mount is still needed but its holder process has died, it gets a new one. Root does this for all users.
\b
--for PID ends the use of a mount by that process. The mount stays while another process shares it (stage --join), and
is removed with the last one.
\b
Copies that stage made at DEST stay, unless --remove-copies says otherwise, which removes what they wrote and nothing
else; those in a directory of the node are removed with it. The exit status is 1 if something is still there that
should have been removed, else 0; with --job, --stale and --all, to find nothing is no error."""

_HOLDER_TIMEOUT = 3600.0  # seconds that the mount holder (--record) waits for processes that still use the mount


@click.command(context_settings=common.SETTINGS, epilog=EPILOG)
@click.argument("dest", required=False, callback=common.local_path)
@click.option("--job", metavar="ID", help="Remove all that was staged for this job.")
@click.option("--stale", is_flag=True, help="Remove all that is no longer needed; as root, of all users.")
@click.option("--all", "everything", is_flag=True, help="Remove all that you have staged on this node.")
@click.option(
    "--for", "owner", type=click.IntRange(1), metavar="PID", help="Only if no other process shares it.",
)  # fmt: skip
@click.option("--record", hidden=True, help="Remove the record with this id (used by the mount holder).")
@click.option(
    "--timeout", callback=common.time_given, default="0s", metavar="TIME",
    help="Wait for the users of a mount (default: do not wait).",
)  # fmt: skip
@click.option("-l", "--lazy", is_flag=True, help="Detach mounts even while they are in use.")
@click.option("--remove-copies", is_flag=True, help="Remove what copies wrote, and their manifests, too.")
@click.option(
    "--keep-upper/--remove-upper", "keep_upper", default=True,
    help="Keep the directory with the job's changes (the default), or remove it with them.",
)  # fmt: skip
@click.option("--report", metavar="FILE", help="Write what was done as JSON; - is standard output.")
@common.process_options
def unstage(dest: str | None, **given: Any) -> None:
    """Remove what was staged at DEST: the mount, the link, and the directories made for them."""
    with common.report_errors():
        ways = [dest, given["job"], given["stale"] or None, given["everything"] or None, given["record"]]
        if sum(way is not None for way in ways) != 1:
            raise UsageError("nothing to take away: give DEST, --job ID, --stale or --all")
        if given["job"] == "":
            raise UsageError("--job: expected the id of a job")
        if given["owner"] and (given["stale"] or given["record"]):
            raise UsageError("--for: is for DEST, --job and --all")
        with orderly_end():  # when interrupted, start the mount holder again
            status = _unstage(dest, given)
        sys.exit(status)


def _unstage(dest: str | None, given: dict[str, Any]) -> int:
    from zarrfs.jobs import records, reports, unstage
    from zarrfs.jobs.unstage import UnstageOptions, at
    from zarrfs.system import mounts

    began = time.monotonic()
    timeout = _HOLDER_TIMEOUT if given["record"] else given["timeout"]
    shown, dest = dest, None if dest is None else mounts.resolved(dest)
    report = reports.place(given["report"])
    os.chdir("/")  # a working directory in the mount would make it busy
    how = UnstageOptions(
        timeout, given["lazy"], given["remove_copies"], not given["keep_upper"], common.say,
        unless_owned=bool(given["owner"] or given["record"]), leaving=given["owner"],
    )  # fmt: skip
    if given["stale"]:
        results = unstage.unstage_stale(how)
    else:
        damaged: list[MountError] = []
        found = records.found(damaged)
        if dest is not None:
            chosen = at(dest, found)
            nothing = damaged[:1] or [MountError(f"{shown}: nothing is staged there")]
            damaged = [] if chosen else nothing  # a damaged record may be that of DEST
        elif given["everything"]:
            chosen = found
        else:
            chosen = [one for one in found if given["record"] == one.id or (given["job"] and given["job"] == one.job)]
        results = unstage.unstage_all([(one, "asked for") for one in chosen], how) + unstage.damaged_results(damaged)
        for exc in damaged:
            common.say(str(exc))
    failed = [result for result in results if result["error"]]
    done = [result for result in results if not result["error"]]
    seconds = round(time.monotonic() - began, 3)
    reports.write(report, {"unstaged": done, "failed": failed, "seconds": seconds})
    return 1 if failed else 0

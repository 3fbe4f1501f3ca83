"""zarrfs stage SOURCE DEST: provide a source to a job, mounted, copied or linked."""

from __future__ import annotations

import os
import sys
import time
from typing import TYPE_CHECKING, Any

import click

from zarrfs.cli import common, meter
from zarrfs.config.options import Parsed
from zarrfs.errors import TimedOut, UsageError, first_cause, printable
from zarrfs.system.signals import orderly_end

if TYPE_CHECKING:
    from zarrfs.documents.plan import Plan
    from zarrfs.jobs.deadline import Deadline
    from zarrfs.jobs.stagein import StageRequest
    from zarrfs.store.api import Store

TIMED_OUT = 124  # as timeout(1)
EPILOG = """\b
Examples:
  zarrfs stage refs.json /scratch/job/input
  zarrfs stage s3://bucket/refs.json input --node-local -o s3.anon=true
  zarrfs stage archive.json work -o upperdir=changes --for $$
  zarrfs stage --copy --include 'air/*' s3://bucket/store.zarr /local/input --report -
  zarrfs stage --link refs.json input
  zarrfs stage --copy --shard 0/4 s3://bucket/refs.json /scratch/job/input
\b
A small process keeps a mount in use, so that it is not unmounted while the job reads it, until `zarrfs unstage` or the
end of the process --for. The node keeps a record, so that `zarrfs unstage` also removes what a killed job has left.
An interrupted copy is resumed by the same command; each of its files is complete or absent.
With --shard the tasks of a job copy to one DEST, each its share of the bytes; a share that is run again copies what
is missing.
\b
With --join, processes of one job on one node share a mount, each with a --for of its own: the first makes it, the
others wait for it, and it is unstaged when the last of them has ended (`zarrfs unstage --for PID`, or its death).
\b
--node-local without DIR takes the first of these that is a directory of a local file system in which we may write:
SLURM_TMPDIR, FLUX_JOB_TMPDIR (not for mounts, which Flux would empty), TMPDIR, /tmp, /var/tmp, XDG_RUNTIME_DIR. The
same is done where fusermount3 refuses to mount on the file system of DEST. --node-local=DIR names one.
\b
The exit status is 0 if all is there; 124 after --timeout; 2 for a wrong command line; else 1, also with --keep-going
if something could not be copied, and if an --include matches nothing."""


class _Command(click.Command):
    """A command whose --node-local takes a value after "=", and never the next word."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the arguments after renaming --node-local=DIR to an option with a value."""
        end = args.index("--") if "--" in args else len(args)
        own = [word.replace("--node-local=", "--node-local-in=", 1) if word.startswith("--node-local=") else word
               for word in args[:end]]  # fmt: skip
        return super().parse_args(ctx, own + args[end:])


@click.command(cls=_Command, context_settings=common.SETTINGS, epilog=EPILOG)
@click.argument("source")
@click.argument("dest", callback=common.local_path)
@click.option("--mount", "how", flag_value="mount", default=True, help="Mount SOURCE; data is fetched when read.")
@click.option("--copy", "how", flag_value="copy", help="Copy SOURCE, or what --include and --exclude select.")
@click.option("--link", "how", flag_value="link", help="Like --copy, but link to files that are on this node.")
@click.option("--include", multiple=True, metavar="GLOB", help="Copy only what matches, or is below it. Repeatable.")
@click.option("--exclude", multiple=True, metavar="GLOB", help="Do not copy what matches. Repeatable.")
@click.option(
    "--node-local", "found", is_flag=True,
    help="Put it in a directory of this node (--node-local=DIR: in DIR), and a link to that at DEST.",
)  # fmt: skip
@click.option("--node-local-in", "directory", hidden=True)
@common.shard_option
@click.option("--timeout", callback=common.time_given, metavar="TIME", help="Stop after TIME (default: never).")
@click.option("--keep-going", is_flag=True, help="Skip what cannot be copied, and report it.")
@click.option("--manifest", metavar="FILE", help="Of a copy: sizes, times, SHA-256 (default: DEST.manifest.jsonl).")
@click.option("--no-manifest", is_flag=True, help="Write none, and do not hash.")
@click.option("--sync", is_flag=True, help="Sync copies to the disk before the command ends.")
@click.option("--report", metavar="FILE", help="Write what was done as JSON; - is standard output.")
@click.option("--jobs", type=click.IntRange(1), metavar="N", help="Processes, or threads, that write copies.")
@click.option("--job", metavar="ID", help="The job that it is for (default: as the environment says).")
@click.option("--for", "owner", type=click.IntRange(1), metavar="PID", help="Unstage it when this process ends.")
@click.option(
    "--join", is_flag=True,
    help="Use the mount that this job has at DEST already, or wait until another process of it has made it.",
)  # fmt: skip
@common.source_options()
def stage(source: str, dest: str, how: str, parsed: Parsed, **given: Any) -> None:
    """Mount, copy or link SOURCE at DEST, for a job.

    DEST is created if needed; --mount needs an empty directory. With -o upperdir=DIR the mount can be written
    to; DIR is made, too. A manifest has a line of JSON for each file: key, size, mtime_ns, sha256; one whose name ends
    in .sha256 is one for `sha256sum -c`, from within DEST.
    """
    from zarrfs.config.redaction import without_secrets
    from zarrfs.jobs import reports
    from zarrfs.jobs.deadline import Deadline
    from zarrfs.jobs.stagein import StageRequest

    if how == "mount" and (given["include"] or given["exclude"] or given["manifest"]):
        raise UsageError("--include, --exclude and --manifest are for --copy and --link")
    if given["join"] and (how != "mount" or given["owner"] is None):
        raise UsageError("--join: is for mounts with --for PID: the last of these processes ends the mount")
    if given["directory"] == "":
        raise UsageError("--node-local=: expected a directory")
    share = common.share(given["shard"])
    if share is not None and how != "copy":
        raise UsageError("--shard is for --copy")
    if share is not None and (given["directory"] or given["found"]):
        raise UsageError("--shard: all shares copy to one DEST, and none of it is --node-local")
    node_local = given["directory"] or ("" if given["found"] else None)
    request = StageRequest(source, dest, how, node_local, given["job"], given["owner"], share, given["join"])
    shown = without_secrets(source)
    report: dict[str, Any] = {"how": how, "source": shown, "dest": os.path.abspath(dest), "error": None}
    if share is not None:
        report["share"] = str(share)
    to, began = reports.place(given["report"]), time.monotonic()
    status, deadline = 1, Deadline(given["timeout"])
    try:
        with orderly_end(), deadline.armed():
            status = (_mount if how == "mount" else _copy)(request, parsed, given, report, deadline)
    except TimedOut as exc:
        common.say(f"{dest}: {exc}")
        report["error"], status = str(exc), TIMED_OUT
    except BaseException as exc:
        report["error"] = str(first_cause(exc)) or type(exc).__name__
        raise
    finally:
        report["seconds"] = round(time.monotonic() - began, 3)
        reports.write(to, report)
    sys.exit(status)


def _mount(
    request: StageRequest, parsed: Parsed, given: dict[str, Any], report: dict[str, Any], deadline: Deadline
) -> int:
    from zarrfs.jobs import stagein

    quiet = parsed.options.log_level == "error"
    record, _ = stagein.mount(request, parsed, lambda text: None if quiet else common.say(text))
    report |= stagein.about(record)
    return 0


def _copy(
    request: StageRequest, parsed: Parsed, given: dict[str, Any], report: dict[str, Any], deadline: Deadline
) -> int:
    from zarrfs.copying.copy_report import CopyReport
    from zarrfs.jobs import staged_copy, stagein

    progress, linked = CopyReport(), 0
    part = "" if request.share is None else f"-{request.share.index}-of-{request.share.count}"
    usual = f"{os.path.abspath(request.dest)}.manifest{part}.jsonl"  # beside DEST, even if DEST is "."
    manifest = None if given["no_manifest"] else given["manifest"] or usual
    said = {name: given[name] for name in ("include", "exclude", "jobs", "keep_going", "sync")}
    how = staged_copy.StageCopyOptions(manifest=manifest, **said)
    quiet = parsed.options.log_level == "error"

    def counts() -> meter.Counts:
        return meter.Counts(progress.files, progress.written(), progress.expected_files, progress.expected_bytes)

    async def body(store: Store, plan: Plan) -> int:
        with deadline.on_trio(), meter.displayed(counts, quiet):
            return await staged_copy.write(record, store, plan, how, parsed.options, progress, request.share)
        raise AssertionError("not reached")

    try:
        with staged_copy.staged(request, parsed, lambda text: None if quiet else common.say(text), progress) as record:
            linked = common.run_on_store(request.source, parsed, body, takes=staged_copy.TAKES)
        report |= stagein.about(record)
    finally:
        report |= {**progress.as_json(), "linked": linked}
    for bad in progress.failed:
        common.say(f"{bad.key}: {bad.reason}")
    if request.how == "link" and not quiet:
        common.say(f"{linked:,} files are links, {progress.files:,} were copied")
    for glob in progress.unmatched:
        common.say(f"{report['source']}: nothing in it matches {printable(glob)}")
    return 1 if progress.bad or progress.unmatched else 0

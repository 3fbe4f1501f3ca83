"""zarrfs stage SOURCE DEST."""

from __future__ import annotations

import click

from zarrfs.cli import common
from zarrfs.cli.refs import running
from zarrfs.options import Parsed

EPILOG = """\b
Examples:
  zarrfs stage refs.json /scratch/job/input
  zarrfs stage s3://bucket/refs.json input --node-local -o s3.anon=true
  zarrfs stage archive.json work -o upperdir=$SLURM_TMPDIR/changes
"""


@click.command(context_settings=common.SETTINGS, epilog=EPILOG)
@click.argument("source")
@click.argument("dest")
@click.option("--mount", "how", flag_value="mount", default=True, help="Mount it: nothing is copied until it is read.")
@click.option(
    "--node-local", is_flag=False, flag_value="", metavar="[DIR]",
    help="Put it in a directory of this node (in DIR), and a link to that at DEST.",
)  # fmt: skip
@click.option("--job", metavar="ID", help="The job that it is for (default: as the environment says).")
@click.option("--for", "owner", type=click.IntRange(1), metavar="PID", help="Unstage when this process ends.")
@common.source_options()
def stage(
    source: str, dest: str, how: str, node_local: str | None, job: str | None, owner: int | None, parsed: Parsed
) -> None:
    """Put SOURCE at DEST, where a job wants it."""
    from zarrfs.jobs import stagein

    quiet = parsed.options.log_level == "error"
    wish = stagein.Wish(source, dest, how, node_local, job, owner)
    with running.orderly_end():
        stagein.mount(wish, parsed, lambda text: None if quiet else common.say(text))

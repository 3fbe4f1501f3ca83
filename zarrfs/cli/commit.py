"""zarrfs commit: write a source with the changes of an upper directory to a new source."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

from zarrfs.cli import common, meter
from zarrfs.config.options import Parsed
from zarrfs.errors import UsageError

if TYPE_CHECKING:
    from zarrfs.documents.plan import Plan
    from zarrfs.store.api import Store

FORMATS = ("references", "archive")  # those of copying.commit
EPILOG = """\b
Examples:
  zarrfs commit refs.json --upperdir changes -O new.json        and new.json.data, if it takes one
  zarrfs commit refs.json --upperdir changes -O new.json.zst --in-place
  zarrfs commit archive.json --upperdir changes --blobs /srv/blobs -O new.json
\b
The name of NEW decides its form: .json, .json.gz, .json.zst, .json.xz and .json.bz2 are reference sets (of an archive
they are archives). NEW appears when it is complete. `zarrfs copy SOURCE DIR -o upperdir=changes` writes a directory.
What NEW cannot hold, and --skip-unsupported left out, is named, and the status is 1."""


@click.command(context_settings=common.SETTINGS, epilog=EPILOG)
@click.argument("source")
@click.option("--format", "form", type=click.Choice(FORMATS), help="Form of NEW (default: by its name).")
@click.option(
    "--inline-threshold", "inline", callback=common.size, default="1KiB", show_default=True, metavar="SIZE",
    help="References and archives: store files of up to SIZE in the document itself.",
)  # fmt: skip
@click.option("--in-place", is_flag=True, help="References: point to larger changed files where they are.")
@click.option("--relative", is_flag=True, help="References: name the data file relative to NEW.")
@click.option("--skip-unsupported", is_flag=True, help="Leave out what NEW cannot hold, with a warning.")
@click.option("--force", is_flag=True, help="Replace NEW if it exists.")
@common.source_options(output="Write to NEW.", log_level="warning")
def commit(
    source: str, output: str | None, form: str | None, inline: int, in_place: bool, relative: bool,
    skip_unsupported: bool, force: bool, parsed: Parsed,
) -> None:  # fmt: skip
    """Write SOURCE with the changes in --upperdir to NEW: a reference set or an archive.

    In a reference set what is unchanged keeps its references, and what changed is inline or, if larger, in one
    file beside NEW, NEW.data. Larger files of an archive go to blobs in --blobs (the first one). Neither SOURCE
    nor the changes are touched; a mount that writes to --upperdir must be ended first.
    """
    from zarrfs.archives.source_kinds import directory_of
    from zarrfs.copying.commit import commit as write
    from zarrfs.copying.commit import new_format
    from zarrfs.copying.commit_writers import NewSource
    from zarrfs.store.overlay import Overlay

    if parsed.options.upperdir is None:
        raise UsageError("--upperdir: required: the directory that holds the changes")
    if output is None:
        raise UsageError("--output: required: the file to write")
    blobs = parsed.options.blobs[0] if parsed.options.blobs else None

    left_out = False

    def warn(text: str) -> None:
        nonlocal left_out
        left_out = True
        if parsed.options.log_level != "error":
            meter.say(f"warning: {text}")

    async def body(store: Store, plan: Plan) -> None:
        assert isinstance(store, Overlay)
        to = new_format(output, form, plan.kind)
        put = directory_of(blobs) if blobs is not None and to == "archive" else None
        new = NewSource(output, to, force, inline, in_place, relative, put)
        quiet = parsed.options.log_level == "error"
        await write(
            store, plan, new, warn, skip_unsupported,
            lambda tree: meter.displayed(tree, quiet),
        )  # fmt: skip

    common.run_on_store(source, parsed, body)
    sys.exit(1 if left_out else 0)

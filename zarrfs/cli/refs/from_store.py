"""zarrfs refs from-store: make a reference set of a tree of files."""

from __future__ import annotations

import dataclasses
import os
from typing import TYPE_CHECKING, Any

import click

from zarrfs.cli import common
from zarrfs.cli.refs import running
from zarrfs.config.options import Parsed
from zarrfs.errors import UsageError

if TYPE_CHECKING:
    from zarrfs.documents.plan import Plan
    from zarrfs.store.api import Store

EPILOG = """\b
Examples:
  zarrfs refs from-store /data/store.zarr -O store.json
  zarrfs refs from-store s3://bucket/store.zarr --option s3.anon=true -O store.parq
  zarrfs refs from-store run42 --relative --inline 1KiB -O run42.json
  zarrfs refs from-store --view v3 /data/2016.zarr -O as-v3.json
\b
Zarr metadata and empty files are inline, everything else is a reference to the whole file with its size.
Symbolic links, names that are not UTF-8 and what cannot be read are errors."""


@click.command("from-store", context_settings=common.SETTINGS, epilog=EPILOG)
@click.argument("place")
@click.option(
    "--inline", callback=common.size, default="0", show_default=True, metavar="SIZE",
    help="Inline files of up to SIZE.",
)
@click.option("--relative", is_flag=True, help="Write URLs relative to the directory of FILE.")
@running.written_options()
@common.source_options(
    "source", "fetch", output="Write to FILE (default: JSON on standard output).", log_level="warning"
)
def from_store(
    place: str, output: str | None, inline: int, relative: bool, written: dict[str, Any], parsed: Parsed
) -> None:
    """Make a reference set of all files in the directory PLACE, a path or an fsspec URL."""
    from zarrfs.references.from_store import check_tree, references_of
    from zarrfs.references.output import notes_of_many

    to = running.output(output, written)
    options = parsed.options
    kind = options.type or (None if options.view else "zarr")  # PLACE may be a reference set if a view is given
    # a reference cannot point to transcoded bytes, so arrays that the view would have to transcode are left out
    parsed = dataclasses.replace(parsed, options=dataclasses.replace(options, type=kind, transcode="off"))
    if relative and to.base is None:
        raise UsageError("--relative needs --output: targets become relative to that file")

    async def body(store: Store, plan: Plan) -> None:
        check_tree(plan, parsed.options.view)
        if relative and (plan.path is None or plan.kind != "zarr"):
            raise UsageError("--relative needs a PLACE on this machine that is a directory of files or a Zarr store")
        base = os.path.realpath(to.base or "") if relative else None
        found = references_of(store, plan, inline, base, writer.own)
        async for reference in running.progress(found, parsed, "files"):
            add(reference)
        writer.notes |= notes_of_many([plan], to)

    with running.opened(to) as writer:
        add = writer.add
        common.run_on_store(place, parsed, body)

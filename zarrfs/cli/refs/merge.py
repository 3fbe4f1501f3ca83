"""zarrfs refs merge: write several reference sets as one."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

import click

from zarrfs.cli import common
from zarrfs.cli.refs import running
from zarrfs.config.options import Parsed

if TYPE_CHECKING:
    from zarrfs.documents.plan import Plan
    from zarrfs.store.api import Reference, Store

EPILOG = """\b
Examples:
  zarrfs refs merge 2023=a.json 2024=b.json -O both.json
  zarrfs refs merge air=air.parq sea=s3://bucket/sea.json -O model.parq
  zarrfs refs merge base.json fixes.json --duplicates last -O fixed.json
\b
What stands before the first "=" is a prefix if it could be the key of a directory; write "=a=b.json" for a file
of the name a=b.json. Where all sets are Zarr v2, the root and the directories above a prefix get a .zgroup if
no set has one. An existing .zmetadata is not updated."""


@click.command(context_settings=common.SETTINGS, epilog=EPILOG)
@click.argument("sources", metavar="[PREFIX=]SRC...", nargs=-1, required=True)
@click.option(
    "--duplicates", type=common.Choice(("error", "first", "last")), default="error", show_default=True,
    help="Which set to take a key from that differs between sets.",
)  # fmt: skip
@click.option("--no-group", is_flag=True, help="Do not add .zgroup.")
@running.written_options()
@common.source_options(
    "source", "fetch", output="Write to FILE (default: JSON on standard output).", log_level="warning"
)
def merge(
    sources: tuple[str, ...], output: str | None, duplicates: str, no_group: bool, written: dict[str, Any],
    parsed: Parsed,
) -> None:  # fmt: skip
    """Merge the reference sets SRC..., each under its PREFIX."""
    from zarrfs.references.merge import MergePart, groups, merged, sorted_by_name, split_prefix
    from zarrfs.references.output import entries, notes_of_many, reference_set
    from zarrfs.references.relocate import rewritten, written_urls

    to = running.output(output, written)
    split = [split_prefix(text) for text in sources]

    async def body(opened: list[tuple[Store, Plan]]) -> None:
        parts = []
        for (prefix, name), (store, plan) in zip(split, opened, strict=True):
            found = reference_set(store, plan)
            change = written_urls(plan, to, alone=False)
            inside = [other for other, _source in split if not prefix or f"{other}/".startswith(f"{prefix}/")]
            references = rewritten(entries(found, plan, alone=len(inside) == 1), change)
            parts.append(MergePart(name, prefix, found, sorted_by_name(references, plan)))
        if not no_group:
            made = await groups(parts)
            parts.append(MergePart("the group made for them", "", parts[0].store, _each(made)))
        async for reference in running.progress(merged(parts, duplicates), parsed):
            add(reference)
        writer.notes |= notes_of_many([plan for _store, plan in opened], to)

    with running.opened(to) as writer:
        add = writer.add
        common.run_on_stores([source for _prefix, source in split], parsed, body)


async def _each(references: list[Reference]) -> AsyncIterator[Reference]:
    for reference in references:
        yield reference

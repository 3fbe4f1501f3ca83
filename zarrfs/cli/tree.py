"""zarrfs tree: print a source as a tree."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator

import click

from zarrfs.cli import common
from zarrfs.config.options import Parsed
from zarrfs.config.redaction import without_secrets
from zarrfs.errors import NotDirectory, printable
from zarrfs.store.api import Info, Kind, Store, join_key

EPILOG = """\b
Examples:
  zarrfs tree refs.json
  zarrfs tree -L 2 s3://bucket/store.zarr
  zarrfs tree archive.json etc
"""


@click.command(context_settings=common.SETTINGS, epilog=EPILOG)
@click.argument("source")
@click.argument("key", default="")
@click.option("-L", "--level", type=click.IntRange(1), metavar="DEPTH", help="Show DEPTH levels only.")
@common.source_options("source", "fetch", log_level="warning")
def tree(source: str, key: str, level: int | None, parsed: Parsed) -> None:
    """Print SOURCE, or its directory KEY, as a tree."""
    from zarrfs.documents.plan import Plan

    async def body(store: Store, plan: Plan) -> None:
        if (await store.info(start)).kind is not Kind.DIRECTORY:
            raise NotDirectory(start)
        counts = dict.fromkeys(Kind, 0)
        shown = without_secrets(source)
        sys.stdout.write(printable(f"{shown.rstrip('/')}/{start}" if start else shown) + "\n")
        async for indent, info in _lines(store, start, level):
            counts[info.kind] += 1
            arrow = f" -> {printable(info.target or '')}" if info.kind is Kind.SYMLINK else ""
            sys.stdout.write(f"{indent}{printable(info.name)}{arrow}\n")
        directories, files = counts[Kind.DIRECTORY], counts[Kind.FILE] + counts[Kind.SYMLINK]
        sys.stdout.write(
            f"\n{directories:,} director{'y' if directories == 1 else 'ies'}, "
            f"{files:,} file{'' if files == 1 else 's'}\n"
        )

    start = common.clean_key(key)
    common.run_on_store(source, parsed, body, reads=False)


async def _lines(store: Store, top: str, level: int | None) -> AsyncIterator[tuple[str, Info]]:
    """Yield (indent, entry) of each line. Read one entry ahead, as the last of a directory is drawn differently."""
    listing = store.list_dir(top)
    open_ = [(top, "", listing, await anext(listing, None))]
    while open_:
        directory, indent, listing, info = open_.pop()
        if info is None:
            continue
        following = await anext(listing, None)
        open_.append((directory, indent, listing, following))
        yield indent + ("├── " if following else "└── "), info
        if info.kind is Kind.DIRECTORY and (level is None or len(open_) < level):
            key = join_key(directory, info.name)
            below = store.list_dir(key)
            open_.append((key, indent + ("│   " if following else "    "), below, await anext(below, None)))

"""zarrfs cat: write files of a source to standard output, without a mount."""

from __future__ import annotations

import re
import sys

import click

from zarrfs.cli import common
from zarrfs.config.options import Parsed

EPILOG = """\b
Examples:
  zarrfs cat refs.json .zgroup
  zarrfs cat archive.json etc/hosts etc/passwd
  zarrfs cat --range 0:4096 refs.json air/0.0.0 | xxd
"""


def _range(ctx: click.Context, param: click.Parameter, value: str) -> tuple[int, int | None]:
    """Parse START:LENGTH into (start, length); a length of None is the rest of the file."""
    match = re.fullmatch(r"(\d{1,18}):(\d{1,18})?", value)
    if match is None:
        raise click.BadParameter(f"{value!r} is not START:LENGTH, such as 0:4096, or START:", ctx, param)
    return int(match[1]), None if match[2] is None else int(match[2])


@click.command(context_settings=common.SETTINGS, epilog=EPILOG)
@click.argument("source")
@click.argument("keys", metavar="KEY...", nargs=-1, required=True)
@click.option(
    "--range", "extent", callback=_range, default="0:", metavar="START:LENGTH",
    help="Write LENGTH bytes of each file, from byte START on.",
)  # fmt: skip
@common.source_options(log_level="warning")
def cat(source: str, keys: tuple[str, ...], extent: tuple[int, int | None], parsed: Parsed) -> None:
    """Write the files KEY... of SOURCE to standard output, one after the other.

    Symbolic links within SOURCE are followed. It stops at the first key that cannot be read, with exit status 1.
    """
    from zarrfs.documents.plan import Plan
    from zarrfs.store.api import Store
    from zarrfs.store.traversal import pieces

    async def body(store: Store, plan: Plan) -> None:
        for key in cleaned:
            async for piece in pieces(store, key, *extent):
                sys.stdout.buffer.write(piece)

    cleaned = [common.clean_key(key) for key in keys]
    common.run_on_store(source, parsed, body)

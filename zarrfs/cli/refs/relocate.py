"""zarrfs refs relocate: replace the beginnings of target URLs in a reference set, after targets have moved."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from zarrfs.cli import common
from zarrfs.cli.refs import running
from zarrfs.config.options import Parsed
from zarrfs.errors import UsageError, printable

if TYPE_CHECKING:
    from zarrfs.documents.plan import Plan
    from zarrfs.references.relocate import Relocation
    from zarrfs.store.api import Store

EPILOG = """\b
Examples:
  zarrfs refs relocate set.json --from /data/ --to s3://bucket/data/ -O moved.json
  zarrfs refs relocate set.parq --from s3://old/ --to s3://new/ --from /tmp/ --to /data/ -O new.parq
  zarrfs refs relocate set.json --from /data/ --to /mnt/ --dry-run
\b
OLD is the beginning of a URL, character by character, so end it with "/" where a directory is meant. The longest
OLD that fits wins, and a URL is changed once. A relative URL is tried as it stands, then as the absolute one
that it means."""


@click.command(context_settings=common.SETTINGS, epilog=EPILOG)
@click.argument("source", metavar="SRC")
@click.option("--from", "olds", multiple=True, required=True, metavar="OLD", help="Change URLs that begin with OLD.")
@click.option("--to", "news", multiple=True, required=True, metavar="NEW", help="Write NEW instead; one for each OLD.")
@click.option("--dry-run", is_flag=True, help="Only print how many references each pair changes.")
@click.option("--allow-unused", is_flag=True, help="Accept an OLD that fits no target.")
@running.written_options("--format")
@common.source_options(
    "source", "fetch", output="Write to FILE (default: JSON on standard output).", log_level="warning"
)
def relocate(
    source: str, output: str | None, olds: tuple[str, ...], news: tuple[str, ...], dry_run: bool, allow_unused: bool,
    written: dict[str, Any], parsed: Parsed,
) -> None:  # fmt: skip
    """Write the reference set SRC with the beginnings of its target URLs replaced."""
    from zarrfs.references.relocate import Relocation, Rule, check_used

    if len(olds) != len(news):
        raise UsageError(f"{len(olds)} --from and {len(news)} --to: give one --to for each --from")
    rules = [Rule(*pair) for pair in zip(olds, news, strict=True)]
    to = running.output(output, written)
    made: list[Relocation] = []

    def change(usual: Callable[[str], str], plan: Plan) -> Callable[[str], str]:
        made.append(Relocation(rules, plan.base, usual))
        return made[0]

    def check() -> None:
        if not allow_unused:
            check_used(made[0])

    if dry_run:
        _count(source, parsed, change)
        _table(made[0])
        check()
    else:
        running.write_set(source, parsed, to, change, check)


def _count(
    source: str, parsed: Parsed, change: Callable[[Callable[[str], str], Plan], Callable[[str], str]]
) -> None:
    async def body(store: Store, plan: Plan) -> None:
        urls = change(lambda url: url, plan)
        async for reference in running.progress(store.references(), parsed):
            if reference.data is None:
                urls(reference.url)

    running.run_on_set(source, parsed, body)


def _table(relocation: Relocation) -> None:
    for rule, count in zip(relocation.rules, relocation.counts, strict=True):
        sys.stdout.write(printable(f"{count:>12,}  {rule.old} -> {rule.new}") + "\n")
    sys.stdout.write(f"{relocation.unchanged:>12,}  unchanged\n")

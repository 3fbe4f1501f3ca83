"""zarrfs info: describe a source, or an entry of it and the location of its bytes."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import click

from zarrfs.cli import common, meter, nodetext, show
from zarrfs.config.options import Parsed
from zarrfs.config.redaction import without_secrets
from zarrfs.config.values import human
from zarrfs.errors import printable

if TYPE_CHECKING:
    from zarrfs.store.api import Store

EPILOG = """\b
Examples:
  zarrfs info refs.json               what it is: entries, bytes, index, groups and arrays, what was left out
  zarrfs info refs.json air           the arrays below air
  zarrfs info refs.json air/0.0.0     size, mode, and the URL and range of its bytes
  zarrfs info --json archive.json
  zarrfs info --html page.html s3://bucket/store.zarr
"""
_SHOWN = 20


@click.command(context_settings=common.SETTINGS, epilog=EPILOG)
@click.argument("source")
@click.argument("key", required=False)
@click.option("--json", "as_json", is_flag=True, help="Write one JSON object.")
@click.option("--html", "page", metavar="FILE", help="Write an HTML page to FILE, with a map of each array's chunks.")
@click.option("--force", is_flag=True, help="Replace FILE if it exists.")
@click.option("--no-count", is_flag=True, help="Do not count chunks.")
@common.source_options(log_level="warning")
def info(
    source: str, key: str | None, as_json: bool, page: str | None, force: bool, no_count: bool, parsed: Parsed
) -> None:
    """Describe SOURCE with its groups and arrays; with KEY, describe that entry.

    Chunks are counted by listing them, which costs a request for each if the server lists without sizes; --no-count
    avoids that.
    """
    from zarrfs.copying.array_survey import Survey, survey
    from zarrfs.documents.plan import Plan
    from zarrfs.errors import UsageError
    from zarrfs.net.versions import unversioned
    from zarrfs.store.api import Kind
    from zarrfs.store.destination import check_destination

    if page is not None:
        if no_count:
            raise UsageError("--html cannot be combined with --no-count: it shows which chunks exist")
        check_destination(page, "html", force)
    found = Survey()

    async def body(store: Store, plan: Plan) -> dict[str, Any]:
        start = common.clean_key(key or "")
        about = await (_of_source(store, plan) if key is None else _of_entry(store, start))
        if (plan.kind != "archive" or key is not None) and about.get("kind") != Kind.FILE.name.lower():
            with meter.displayed(found, parsed.options.log_level == "error"):
                await survey(store, found, start, not no_count, page is not None)
        if reasons := await store.left_out(start):
            about["left_out"] = [f"{path or '/'}: {reason}" for path, reason in reasons.items()]
        if key is None:
            about["unversioned"] = unversioned()
            about |= await _absent_records(store, not no_count)
        return about

    about = common.run_on_store(source, parsed, body)
    if found.nodes:
        about["nodes"] = [facts.as_json() for facts in found.nodes]
    if page is not None:
        _write_page(page, force, source, about)
        return
    if as_json:
        sys.stdout.write(json.dumps(about) + "\n")
    else:
        for name, value in about.items():
            if name != "nodes":
                _show(name, value)
        for line in ["", *nodetext.table(about["nodes"])] if found.nodes else ():
            sys.stdout.write(printable(line) + "\n")


async def _of_source(store: Store, plan: Any) -> dict[str, Any]:
    about: dict[str, Any] = {
        "source": plan.source,
        "kind": plan.kind,
        "where": plan.path or (plan.url and without_secrets(plan.url)),
        "base": without_secrets(plan.base) or None,
        "index": None if plan.temporary else plan.index,
        "warnings": list(plan.warnings),
    }
    return about | dict(plan.about) | await store.about()


async def _absent_records(store: Store, ask: bool) -> dict[str, int]:
    """Return the numbers of all record files and of absent ones of a Parquet set, if they can be counted."""
    from zarrfs.references.parquet import ParquetStore

    found = await store.absences(ask=ask) if isinstance(store, ParquetStore) else None
    return {} if found is None else {"record_files": found.record_files, "absent_records": found.absent}


async def _of_entry(store: Any, key: str) -> dict[str, Any]:
    from zarrfs.store.api import Kind

    found = await store.info(key)
    about = show.entry_json(key, found) | {"allocated": found.allocated, "links": found.links}
    if found.kind is not Kind.DIRECTORY:
        about |= await store.locate(key)
    return about


def _write_page(path: str, force: bool, source: str, about: dict[str, Any]) -> None:
    from zarrfs.cli.infopage import page
    from zarrfs.errors import SourceError
    from zarrfs.store.destination import placed

    if "nodes" not in about:
        raise SourceError(without_secrets(source), "contains no Zarr groups or arrays")
    with placed(path, "html", force) as file:
        file.write(page(about).encode("utf-8", "replace"))


def _show(name: str, value: Any) -> None:
    """Write one line for a value; for a list, write also a line for each of the first _SHOWN items."""
    if value is None or value == [] or ((name.startswith("links_") or name == "broken") and not value):
        return
    if name in ("bytes", "size", "allocated", "inline", "hole"):
        text = f"{value:,} ({human(value)})"
    elif name == "mtime_ns":
        name, text = "mtime", show.when(value)
    elif isinstance(value, list):
        lines = [_region(item) if isinstance(item, dict) else printable(str(item)) for item in value]
        more = [f"and {len(lines) - _SHOWN:,} more (--json shows all)"] if len(lines) > _SHOWN else []
        text = f"{len(lines):,}" + "".join(f"\n  {line}" for line in [*lines[:_SHOWN], *more])
    else:
        text = f"{value:,}" if isinstance(value, int) else printable(str(value))
    sys.stdout.write(f"{name + ':':10} {text}\n")


def _region(part: dict[str, Any]) -> str:
    """Format one region of a file and the location of its bytes."""
    return printable(f"{part['length']:,} bytes at {part['start']:,}: {part['url']} from {part['offset']:,}")

"""zarrfs info: what a source is, and where the bytes of one file are."""

from __future__ import annotations

import json
import sys
from typing import Any

import click

from zarrfs.cli import common, show
from zarrfs.options import Parsed

EPILOG = """\b
Examples:
  zarrfs info refs.json               kind, entries, bytes, index, what was left out
  zarrfs info refs.json air/0.0.0     size, mode, and the URL and range of its bytes
  zarrfs info --json archive.json
"""
_SHOWN = 20


@click.command(context_settings=common.SETTINGS, epilog=EPILOG)
@click.argument("source")
@click.argument("key", required=False)
@click.option("--json", "as_json", is_flag=True, help="Write one JSON object.")
@common.source_options("source", "fetch", log_level="warning")
def info(source: str, key: str | None, as_json: bool, parsed: Parsed) -> None:
    """Tell what SOURCE is; with KEY, all that is known of that entry and where its bytes are."""
    from zarrfs.sources import Plan
    from zarrfs.store.api import Store

    async def body(store: Store, plan: Plan) -> dict[str, Any]:
        return await _of_source(store, plan) if key is None else await _of_entry(store, common.clean_key(key))

    about = common.run_on_store(source, parsed, body)
    if as_json:
        sys.stdout.write(json.dumps(about) + "\n")
    else:
        for name, value in about.items():
            _show(name, value)


async def _of_source(store: Any, plan: Any) -> dict[str, Any]:
    from zarrfs.sources.parquet import ParquetStore
    from zarrfs.store.index import IndexStore

    about = {
        "source": plan.source,
        "kind": plan.kind,
        "where": plan.path or plan.url,
        "base": plan.base or None,
        "index": None if plan.temporary else plan.index,
        "warnings": list(plan.warnings),
    }
    if isinstance(store, IndexStore):
        usage = await store.usage()
        about |= {"files": usage.files, "bytes": usage.bytes}
    if isinstance(store, ParquetStore):
        found = await store.opened()
        about |= {"arrays": len(found.grids), "record_size": found.record_size}
    if isinstance(store, IndexStore | ParquetStore):
        about["problems"] = [f"{entry}: {rule}" for entry, rule in store.problems()]
    return about


async def _of_entry(store: Any, key: str) -> dict[str, Any]:
    from zarrfs.store.api import Kind

    found = await store.info(key)
    about = show.entry_json(key, found) | {"allocated": found.allocated, "links": found.links}
    if found.kind is not Kind.DIRECTORY:
        about |= await store.locate(key)
    return about


def _show(name: str, value: Any) -> None:
    """One line for a value; a list has a line an item, the first few of them."""
    if value is None or value == []:
        return
    if name in ("bytes", "size", "allocated", "inline", "hole"):
        text = f"{value:,} ({show.human(value)})"
    elif name == "mtime_ns":
        name, text = "mtime", show.when(value)
    elif isinstance(value, list):
        lines = [_region(item) if isinstance(item, dict) else show.shown(str(item)) for item in value]
        more = [f"and {len(lines) - _SHOWN:,} more (--json shows all)"] if len(lines) > _SHOWN else []
        text = f"{len(lines):,}" + "".join(f"\n  {line}" for line in [*lines[:_SHOWN], *more])
    else:
        text = f"{value:,}" if isinstance(value, int) else show.shown(str(value))
    sys.stdout.write(f"{name + ':':10} {text}\n")


def _region(part: dict[str, Any]) -> str:
    """One region of a file: which of its bytes are where."""
    return show.shown(f"{part['length']:,} bytes at {part['start']:,}: {part['url']} from {part['offset']:,}")

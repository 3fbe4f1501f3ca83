"""zarrfs cache: list, verify and remove cached indexes of documents and cached blocks of remote targets."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from typing import TYPE_CHECKING

import click

from zarrfs.cli import common, meter, show
from zarrfs.config.options import Options, Parsed
from zarrfs.config.values import human, seconds, size
from zarrfs.errors import printable

if TYPE_CHECKING:
    from zarrfs.cache.diskadmin import Target
    from zarrfs.sources.index_cache import CachedFile

EPILOG = """\b
Examples:
  zarrfs cache ls
  zarrfs cache prune                        damaged, unfinished, or unused for 30 days
  zarrfs cache prune --max-size 10GiB --dry-run
  zarrfs cache verify --cache-dir /scratch/zarrfs
  zarrfs cache clear --cache-dir /scratch/zarrfs
\b
Every command covers the indexes of documents, and with --cache-dir (or -o cache_dir=) blocks of remote targets."""


@click.group(context_settings=common.SETTINGS, epilog=EPILOG)
def cache() -> None:
    """List, verify and remove cached data: indexes of documents, and blocks of remote targets in --cache-dir."""


@cache.command(context_settings=common.SETTINGS, short_help="List what is cached, the most recently used first.")
@click.option("--json", "as_json", is_flag=True, help="Write one JSON object a line.")
@common.source_options("index_dir", "cache_dir")
def ls(as_json: bool, parsed: Parsed) -> None:
    """List indexes, and targets with cached blocks, the most recently used first."""
    from zarrfs.cache.diskadmin import targets
    from zarrfs.sources.index_cache import cached_files

    directory = parsed.options.cache_dir
    blocks = [] if directory is None else targets(directory)
    _write(cached_files(parsed.options), blocks, as_json, times=True)


@cache.command(context_settings=common.SETTINGS, short_help="Remove what is damaged or has not been used for long.")
@click.option("--older-than", default="30d", metavar="TIME", help="Remove what was not used for TIME (default: 30d).")
@click.option("--max-size", metavar="SIZE", help="Keep at most SIZE of the most recently used, indexes before blocks.")
@click.option("--dry-run", is_flag=True, help="List what would be removed.")
@click.option("--json", "as_json", is_flag=True, help="Write one JSON object a line.")
@common.source_options("index_dir", "cache_dir")
def prune(older_than: str, max_size: str | None, dry_run: bool, as_json: bool, parsed: Parsed) -> None:
    """Remove what has not been used for long, and indexes that are damaged, of other versions, or unfinished.

    Indexes are compiled and blocks fetched again when they are needed. An index that a mount uses stays until the
    mount ends.
    """
    from zarrfs.cache.diskadmin import prune as prune_blocks
    from zarrfs.sources.index_cache import prune as prune_indexes

    age, limit = _limits(older_than, max_size)
    indexes, left = prune_indexes(parsed.options, age, limit, dry_run)
    blocks: list[Target] = []
    if parsed.options.cache_dir is not None:
        room = None if limit is None else max(0, limit - left)
        blocks = prune_blocks(parsed.options.cache_dir, age, room, dry_run)
    _write(indexes, blocks, as_json)
    _write_summary("would remove" if dry_run else "removed", indexes, blocks)


@cache.command(context_settings=common.SETTINGS)
@click.option("--json", "as_json", is_flag=True, help="Write one JSON object a line.")
@common.source_options("index_dir", "cache_dir")
def clear(as_json: bool, parsed: Parsed) -> None:
    """Remove all indexes, and all blocks in --cache-dir. Mounts that use them keep working."""
    from zarrfs.cache.diskadmin import clear as clear_blocks
    from zarrfs.sources.index_cache import prune as prune_indexes

    directory = parsed.options.cache_dir
    blocks = [] if directory is None else clear_blocks(directory)
    indexes, _left = prune_indexes(parsed.options, -math.inf, None, dry_run=False)
    _write(indexes, blocks, as_json)
    _write_summary("removed", indexes, blocks)


@cache.command(context_settings=common.SETTINGS, short_help="Read all cached data, and remove what is damaged.")
@click.option("--json", "as_json", is_flag=True, help="Write one JSON object.")
@common.source_options("index_dir", "cache_dir")
def verify(as_json: bool, parsed: Parsed) -> None:
    """Read all cached data and remove what is damaged; exit status 1 if anything was."""
    found = _verify(parsed.options)
    if as_json:
        sys.stdout.write(json.dumps(found) + "\n")
    else:
        sys.stdout.write("".join(f"{name.replace('_', ' '):<17} {count:>12,}\n" for name, count in found.items()))
    if found["bad_indexes"] or found.get("bad_blocks") or found.get("unreadable_blocks"):
        raise SystemExit(1)


def _verify(options: Options) -> dict[str, int]:
    from zarrfs.cache.diskadmin import Verified
    from zarrfs.cache.diskadmin import verify as verify_blocks
    from zarrfs.sources.index_cache import verify as verify_indexes

    blocks = None if options.cache_dir is None else Verified()
    if options.cache_dir is not None and blocks is not None:
        with meter.displayed(lambda: meter.Counts(blocks.checked, blocks.bytes), options.log_level == "error"):
            verify_blocks(options.cache_dir, blocks)
    indexes, bad = verify_indexes(options)
    found = {"indexes": indexes, "bad_indexes": len(bad)}
    if blocks is not None:
        found |= {"blocks": blocks.checked, "bad_blocks": blocks.bad, "unreadable_blocks": blocks.unreadable}
        found["block_bytes"] = blocks.bytes
    return found


def _write(indexes: list[CachedFile], blocks: list[Target], as_json: bool, times: bool = False) -> None:
    """Write a line for each index and for each target."""
    for one in indexes:
        if as_json:
            sys.stdout.write(json.dumps(vars(one)) + "\n")
        else:
            about = one.problem or (f"{one.kind} {one.source}".rstrip() if times else one.source or one.kind)
            _line(one.size, one.used if times else None, about)
    for target in blocks:
        if as_json:
            sys.stdout.write(json.dumps({"kind": "blocks", **dataclasses.asdict(target)}) + "\n")
        else:
            used = max(target.used, target.seen) if times else None
            _line(target.size, used, f"{target.blocks:,} blocks of {target.source}")


def _line(count: int, used: float | None, about: str) -> None:
    when = "" if used is None else f"{show.when(int(used * 1e9))}  "
    sys.stdout.write(f"{human(count):>9}  {when}{printable(about)}\n")


def _write_summary(verb: str, indexes: list[CachedFile], blocks: list[Target]) -> None:
    total = human(sum(one.size for one in indexes) + sum(one.size for one in blocks))
    also = f" and {sum(one.blocks for one in blocks):,} blocks" if blocks else ""
    common.say(f"{verb} {len(indexes)} files{also}, {total}")


def _limits(older_than: str, max_size: str | None) -> tuple[float, int | None]:
    option, value = "--older-than", older_than
    try:
        age = seconds(older_than)
        option, value = "--max-size", max_size or ""
        return age, None if max_size is None else size(max_size)
    except ValueError as exc:
        raise click.UsageError(f"{option} {value}: expected {exc}") from None

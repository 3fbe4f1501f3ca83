"""zarrfs warm: fetch the keys of a recording into the cache on disk."""

from __future__ import annotations

import dataclasses
import json
import sys

import click

from zarrfs.cli import common, meter
from zarrfs.config.options import Parsed
from zarrfs.config.values import human
from zarrfs.errors import UsageError

EPILOG = """\b
Examples:
  zarrfs mount -o record=job.reads https://example.org/refs.json /mnt/data
  zarrfs warm -o cache_dir=/scratch/blocks https://example.org/refs.json job.reads
  zarrfs warm --shard 0/4 -o cache_dir=/scratch/blocks https://example.org/refs.json job.reads
"""


@click.command(context_settings=common.SETTINGS, epilog=EPILOG)
@click.argument("source")
@click.argument("file")
@click.option("--json", "as_json", is_flag=True, help="Write one JSON object.")
@common.shard_option
@common.source_options("source", "fetch", log_level="warning")
def warm(source: str, file: str, as_json: bool, shard: str | None, parsed: Parsed) -> None:
    """Fetch the keys in FILE from SOURCE into the cache on disk (-o cache_dir=).

    FILE was written by a mount with -o record=. Keys that SOURCE no longer has are skipped; the exit status is 1 if
    others cannot be read, or if the cache has no room for a block or its disk fails.
    """
    from zarrfs.documents.plan import Plan
    from zarrfs.prefetch.recording import Warmed, read_record, settle, warm
    from zarrfs.store.api import Store

    share = common.share(shard)
    if parsed.options.cache_dir is None or parsed.options.cache == "none":
        raise UsageError("needs a cache on disk: give -o cache_dir=DIR")
    records, done = read_record(file), Warmed()
    parsed = dataclasses.replace(parsed, options=dataclasses.replace(parsed.options, fills=True))

    async def body(store: Store, plan: Plan) -> None:
        with meter.displayed(lambda: meter.Counts(done.found, done.bytes), parsed.options.log_level == "error"):
            await warm(store, records, done, share)
            await settle(store, done)
        if as_json:
            sys.stdout.write(json.dumps(dataclasses.asdict(done)) + "\n")
        else:
            sys.stdout.write(
                f"{done.found:,} read, {human(done.bytes)}; {done.absent:,} absent, {done.failed:,} failed\n"
            )
        if done.dropped:
            count = f"{done.dropped:,} block{'s' * (done.dropped > 1)}"
            rule = "the cache has no room, or its disk fails (-o cache_size=, cache_min_free=)"
            common.say(f"{parsed.options.cache_dir}: {count} not kept: {rule}")
        if done.failed or done.dropped:
            raise SystemExit(1)

    common.run_on_store(source, parsed, body)

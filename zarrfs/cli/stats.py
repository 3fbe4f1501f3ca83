"""zarrfs stats MNT: the counters of a mount."""

from __future__ import annotations

import json
import sys

import click

from zarrfs.cli.common import SETTINGS, report_errors, say
from zarrfs.errors import UsageError

EPILOG = """\b
Examples:
  zarrfs stats /mnt/data
  zarrfs stats --json /mnt/data | jq .remote.cache
  zarrfs stats --prometheus > /var/lib/node_exporter/zarrfs.prom     all mounts of this machine
\b
Counting begins with the mount. docs/monitoring.md explains each number."""


@click.command(context_settings=SETTINGS, epilog=EPILOG)
@click.argument("mountpoint", metavar="[MNT]", required=False)
@click.option("--json", "form", flag_value="json", help="Write one JSON object.")
@click.option(
    "--prometheus", "form", flag_value="prometheus", help="Write metrics for Prometheus; without MNT, of all mounts."
)
def stats(mountpoint: str | None, form: str | None) -> None:
    """Print statistics of the mount that contains MNT: reads, cache hits, requests, bytes of each tier."""
    from zarrfs.metrics.statistics import statistics, statistics_of_all

    with report_errors():
        if form == "prometheus":
            from zarrfs.metrics.exposition import exposition

            found, failed = statistics_of_all() if mountpoint is None else ([statistics(mountpoint)], {})
            for reason in failed.values():
                say(reason)
            sys.stdout.buffer.write(exposition(found, failed).encode("utf-8", "surrogateescape"))
            return
        if mountpoint is None:
            raise UsageError("MNT is missing: only --prometheus reports all mounts")
        counted = statistics(mountpoint)
        if form == "json":
            about = {"mount": counted.mountpoint, "source": counted.source, "kind": counted.kind, "pid": counted.pid}
            text = json.dumps({**about, **counted.counters}) + "\n"
        else:
            from zarrfs.cli.stats_text import table

            text = "".join(f"{line}\n" for line in table(counted))
        sys.stdout.buffer.write(text.encode("utf-8", "surrogateescape"))

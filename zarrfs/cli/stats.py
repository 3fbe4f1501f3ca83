"""zarrfs stats MNT: the figures of a mount."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import click

from zarrfs.cli.common import SETTINGS, report_errors, say, seconds
from zarrfs.errors import UsageError, printable

if TYPE_CHECKING:
    from zarrfs.metrics.statistics import Statistics

    _Sample = tuple[float, Statistics]  # the time and the figures

EPILOG = """\b
Examples:
  zarrfs stats /mnt/data
  zarrfs stats --every 10s /mnt/data     with rates, until Ctrl-C
  zarrfs stats --json /mnt/data | jq .requests_total
  zarrfs stats --prometheus > /var/lib/node_exporter/zarrfs.prom     all mounts of this machine
\b
Counting begins with the mount."""


@click.command(context_settings=SETTINGS, epilog=EPILOG)
@click.argument("mountpoint", metavar="[MNT]", required=False)
@click.option("--json", "form", flag_value="json", help="Write one JSON object.")
@click.option(
    "--prometheus", "form", flag_value="prometheus", help="Write metrics for Prometheus; without MNT, of all mounts."
)
@click.option("--every", callback=seconds, metavar="TIME", help="Print again every TIME, with the rates since then.")
def stats(mountpoint: str | None, form: str | None, every: float | None) -> None:
    """Print statistics of the mount that contains MNT: reads, errors, requests, cache hits, memory."""
    with report_errors():
        before = None
        while True:
            before = _print(mountpoint, form, before)
            if not every:
                return
            time.sleep(every)


def _print(mountpoint: str | None, form: str | None, before: _Sample | None) -> _Sample | None:
    """Print the figures in a form. Return those of a table, from which the next table gets its rates."""
    from zarrfs.metrics.statistics import statistics, statistics_of_all

    now = None
    if form == "prometheus":
        from zarrfs.metrics.exposition import exposition

        found, failed = statistics_of_all() if mountpoint is None else ([statistics(mountpoint)], {})
        for reason in failed.values():
            say(reason)
        text = exposition(found, failed)
    elif mountpoint is None:
        raise UsageError("MNT is missing: only --prometheus reports all mounts")
    else:
        counted = statistics(mountpoint)
        about = {"mount": counted.mountpoint, "source": counted.source, "kind": counted.kind, "pid": counted.pid}
        now = time.monotonic(), counted
        lines = [json.dumps({**about, **counted.counters})] if form == "json" else _table(now, before)
        text = "".join(f"{line}\n" for line in lines)
    sys.stdout.buffer.write(text.encode("utf-8", "surrogateescape"))
    sys.stdout.flush()
    return now


def _table(now: _Sample, before: _Sample | None) -> Iterator[str]:
    """Yield a line for each figure that is not zero, with the rate of a counter since `before`."""
    from zarrfs.config.values import human
    from zarrfs.metrics.counters import METRICS

    at, counted = now
    found = counted.counters
    yield f"{printable(counted.mountpoint)}: {printable(counted.source)} ({counted.kind}, pid {counted.pid})"
    for metric in METRICS:
        if value := found.get(metric.name):
            show = human if "bytes" in metric.name else "{:,.10g}".format
            rate = ""
            if before and before[1].pid == counted.pid:
                change = (value - before[1].counters[metric.name]) / (at - before[0])
                rate = f"{show(round(change, 1))}/s" if metric.name.endswith("_total") else ""
                rate = f"{rate:>13}"
            name = metric.name.removesuffix("_total").removeprefix("process_")
            yield f"{name:22} {show(value):>11}{rate}  {metric.help}"
    for errno, count in found["errors"].items():
        if count:
            yield f"{'errors':22} {count:>11,}  {errno}"
    if found["latency"]:
        quantiles = ", ".join(f"{name} {seconds * 1000:,.3g}" for name, seconds in found["latency"].items())
        yield f"{'request_duration':22} {'':11}  {quantiles} ms"
    for host, out in found["outages"].items():
        since = time.strftime("%H:%M:%S", time.localtime(out["since"]))
        what = f"out since {since}, {out['waiting']:,} waiting: {printable(out['reason'])}"
        yield f"{'outage':22} {out['seconds']:>9,.0f} s  {printable(host)}: {what}"

"""The counters of this process, which serves one mount, and the table of all figures that a mount reports."""

from __future__ import annotations

import functools
import itertools
import os
from collections import Counter
from typing import Any, NamedTuple
from weakref import WeakSet

from zarrfs.failures import FAILURES
from zarrfs.metrics import logs
from zarrfs.metrics.latency import Latency


class Metric(NamedTuple):
    """A figure. If its name ends in _total, it is a counter, which never decreases; "zarrfs_" goes before it."""

    name: str
    help: str


METRICS = (
    Metric("reads_total", "Reads that were answered."),
    Metric("read_bytes_total", "Bytes served to the kernel."),
    Metric("opens_total", "Files that were opened."),
    Metric("inodes", "Files and directories that the kernel knows."),
    Metric("open_files", "Files and directories that are open."),
    Metric("process_resident_memory_bytes", "Memory that the daemon has."),
    Metric("log_lines_lost_total", "Lines of the log that could not be written."),
    Metric("requests_total", "Requests to servers, repetitions included."),
    Metric("requests_repeated_total", "Requests that repeated a failed one."),
    Metric("requests_failed_total", "Requests that failed, after all retries."),
    Metric("requests_in_flight", "Requests that wait for their answer."),
    Metric("requests_waiting", "Requests that wait to be sent."),
    Metric("network_bytes_total", "Bytes fetched from servers."),
    Metric("memory_hits_total", "Blocks, and decoded chunks of views, that were in memory or on their way to it."),
    Metric("memory_misses_total", "Blocks, and decoded chunks of views, that were not in memory."),
    Metric("memory_kept_bytes", "Bytes of blocks and decoded chunks in memory."),
    Metric("memory_limit_bytes", "Bytes of them that memory may hold."),
    Metric("chunks_decoded_total", "Chunks decoded, with a view."),
    Metric("disk_hits_total", "Blocks that were in cache_dir."),
    Metric("disk_errors_total", "Failures of cache_dir."),
)
# the value in the statistics is a dict by errno
ERRORS = Metric("errors_total", "Requests of the kernel that failed, by their errno.")
LATENCY = Metric("request_duration_seconds", "How long requests took, each repetition by itself. A histogram.")
# always 1, because the information is in the labels
MOUNT = Metric("mount_info", "The version of the daemon and the kind of the source; always 1.")
UP = Metric("up", "Whether the mount reports its figures.")
ALL = (*METRICS, ERRORS, LATENCY, MOUNT, UP)


_NAMED = 32  # outages that are reported: an extended attribute has at most 64 KiB
COUNTS: Counter[str] = Counter()
LATENCIES = Latency()
CACHES: WeakSet[Any] = WeakSet()  # each has gauges(): figures of now, which are added up
QUEUES: WeakSet[Any] = WeakSet()  # queues of requests, with gauges() and outages(): facts by server


def counters() -> dict[str, Any]:
    """Return the figures of all parts of the daemon but the FUSE adapter."""
    totals: Counter[str] = Counter({metric.name: COUNTS[metric.name] for metric in METRICS})
    for each in [*CACHES, *QUEUES]:
        totals.update(each.gauges())
    waiting, lost = logs.waiting_and_lost()
    try:
        resident, version = _resident(), _version()
    except (OSError, ImportError):  # out of descriptors
        resident, version = 0, "unknown"
    outages = {host: facts for queue in QUEUES for host, facts in queue.outages().items()}
    return {
        **totals,
        "errors": {"EIO": 0, **FAILURES.counts},  # 0 at first, so that Prometheus sees the first EIO as an increase
        "log_lines_waiting": waiting, "log_lines_lost_total": lost, "process_resident_memory_bytes": resident,
        "version": version, "outages": dict(itertools.islice(outages.items(), _NAMED)),
        "latency": {f"p{percent}": LATENCIES.quantile(percent / 100) for percent in (50, 90, 99) if LATENCIES.count},
        "histogram": LATENCIES.histogram(), "latency_sum": LATENCIES.total, "latency_count": LATENCIES.count,
    }  # fmt: skip


def _resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@functools.cache
def _version() -> str:
    from importlib import metadata

    return metadata.version("zarrfs")

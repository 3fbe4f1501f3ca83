"""Reports of a daemon about itself: the figures of a mount, and a summary at its end."""

from __future__ import annotations

import functools
import os
from typing import Any

from zarrfs.config.values import human
from zarrfs.failures import FAILURES
from zarrfs.metrics import logs
from zarrfs.metrics.counters import counters


def stats() -> dict[str, Any]:
    """Return the figures of this process. Takes microseconds, but the first call reads the version from disk."""
    waiting, lost = logs.waiting_and_lost()
    return {
        **counters(),
        "errors": {"EIO": 0, **FAILURES.counts},  # 0 at first, so that Prometheus sees the first EIO as an increase
        "log_lines_waiting": waiting, "log_lines_lost_total": lost, "process_resident_memory_bytes": resident(),
        "version": _version(),
    }  # fmt: skip


def resident() -> int:
    """Return the resident memory of this process in bytes; 0 without /proc."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return 0


def _version() -> str:
    try:
        return _installed()
    except (ImportError, OSError):  # PackageNotFoundError, or no free descriptor; the next call tries again
        return "unknown"


@functools.cache
def _installed() -> str:
    from importlib import metadata

    return metadata.version("zarrfs")


def summary(mountpoint: str, seconds: float, found: dict[str, Any], unsynced: int | None) -> str:
    """Return the summary of a mount in one line.

    `seconds` is how long it was mounted, and `unsynced` the number of files written without an fsync; None for a
    read-only mount.
    """
    parts = [f"{human(found['read_bytes_total'])} served in {found['reads_total']} reads"]
    if blocks := found["memory_hits_total"] + found["memory_misses_total"]:
        near = min(found["memory_hits_total"] + found["disk_hits_total"], blocks)
        parts.append(f"{100 * near / blocks:.1f} % of {blocks} blocks from caches")
    if found["requests_total"]:
        repeated, failed = found["requests_repeated_total"], found["requests_failed_total"]
        parts.append(f"{found['requests_total']} requests ({repeated} repeated, {failed} failed)")
    parts.append(f"{sum(found['errors'].values())} errors")
    if unsynced is not None:
        parts.append(f"{unsynced} files written and not synced")
    return f"{mountpoint}: unmounted after {_duration(seconds)}: {', '.join(parts)}"


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes = int(seconds // 60)
    days, hours = divmod(minutes // 60, 24)
    said = [f"{days} d" if days else "", f"{hours} h" if days or hours else "", f"{minutes % 60} min"]
    return " ".join(filter(None, said))

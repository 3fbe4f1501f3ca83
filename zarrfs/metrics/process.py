"""Reports of a daemon about itself: counters of its process, a summary at the end of the mount, and the task tree."""

from __future__ import annotations

import functools
import os
from collections import Counter
from collections.abc import Iterator
from typing import Any

import trio

from zarrfs.config.values import human
from zarrfs.failures import FAILURES
from zarrfs.metrics import logs
from zarrfs.metrics.counters import counters

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_LINES = 200  # lines of a task tree at most


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


def task_lines() -> list[str]:
    """Return the tree of trio tasks: a line per task, with its name and where it waits. Equal subtrees are merged."""
    root = trio.lowlevel.current_root_task()
    lines = list(_tree(root, 0)) if root is not None else []
    if len(lines) > _LINES:
        lines[_LINES:] = [f"... and {len(lines) - _LINES} more lines"]
    return lines


def _tree(task: trio.lowlevel.Task, depth: int) -> Iterator[str]:
    alike: Counter[tuple[str, ...]] = Counter()
    for nursery in task.child_nurseries:
        for child in nursery.child_tasks:
            alike[tuple(_tree(child, depth + 1))] += 1
    yield f"{'  ' * depth}{_short(task.name)} {_position(task)}"
    for lines, count in alike.items():
        yield lines[0] + (f" ({count} tasks)" if count > 1 else "")
        yield from lines[1:]


def _position(task: trio.lowlevel.Task) -> str:
    """Return where a task waits: its innermost frame in zarrfs, and its innermost frame if that is another one."""
    try:
        frames = [(frame.f_code, line) for frame, line in task.iter_await_frames()]
    except Exception:  # the task is running, or has frames that are not Python
        frames = []
    if not frames:
        return "runs"
    ours = [(code, line) for code, line in frames if code.co_filename.startswith(_PACKAGE)]
    said = [f"{_file(code.co_filename)}:{line} {code.co_qualname}" for code, line in ours[-1:]]
    code, line = frames[-1]
    if not ours or ours[-1][0] is not code:
        said.append(f"{_file(code.co_filename)}:{line} {code.co_name}")
    return "in " + ", ".join(said)


def _file(path: str) -> str:
    return os.path.relpath(path, _PACKAGE) if path.startswith(_PACKAGE) else "/".join(path.split(os.sep)[-2:])


def _short(name: str) -> str:
    return name.rpartition(".")[2] if "<locals>" not in name else name.partition(".<locals>")[0].rpartition(".")[2]


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes = int(seconds // 60)
    days, hours = divmod(minutes // 60, 24)
    said = [f"{days} d" if days else "", f"{hours} h" if days or hours else "", f"{minutes % 60} min"]
    return " ".join(filter(None, said))

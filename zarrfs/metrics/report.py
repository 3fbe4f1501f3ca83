"""What a daemon says of itself for support: a line when a mount ends, and what its tasks wait for."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from typing import Any

import trio

from zarrfs.config.values import human

_HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_LINES = 200  # of a tree of tasks


def ending(mountpoint: str, seconds: float, counters: dict[str, Any], unsynced: int | None) -> str:
    """One line at the end of a mount. `unsynced`: files of a writable mount that nobody has told to be synced."""
    remote = counters.get("remote", {})
    memory, disk = remote.get("cache", {}), remote.get("disk", {})
    parts = [f"{human(counters.get('bytes', 0))} served in {counters.get('read', 0)} reads"]
    asked = sum(memory.get(name, 0) for name in ("hits", "misses", "joins"))
    if asked:
        near = asked - memory.get("misses", 0) + disk.get("hits", 0)
        parts.append(f"{100 * min(near, asked) / asked:.1f} % of {asked} blocks from caches")
    if remote:
        repeated, failed = remote.get("repeated", 0), remote.get("failed", 0)
        parts.append(f"{remote.get('requests', 0)} requests ({repeated} repeated, {failed} failed)")
    parts.append(f"{sum(counters.get('errors', {}).values())} errors")
    if unsynced is not None:
        parts.append(f"{unsynced} files written and not synced")
    return f"{mountpoint}: unmounted after {_time(seconds)}: {', '.join(parts)}"


def task_lines() -> list[str]:
    """The tree of trio's tasks, a line each: its name and where it waits; those that are alike share one."""
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
    yield f"{'  ' * depth}{_short(task.name)} {_place(task)}"
    for lines, count in alike.items():
        yield lines[0] + (f" ({count} tasks)" if count > 1 else "")
        yield from lines[1:]


def _place(task: trio.lowlevel.Task) -> str:
    """Where a task waits: the innermost frame, and the innermost of ours."""
    try:
        frames = [(frame.f_code, line) for frame, line in task.iter_await_frames()]
    except Exception:  # of the task that runs, or of code that is no Python
        frames = []
    if not frames:
        return "runs"
    ours = [(code, line) for code, line in frames if code.co_filename.startswith(_HERE)]
    said = [f"{_file(code.co_filename)}:{line} {code.co_qualname}" for code, line in ours[-1:]]
    code, line = frames[-1]
    if not ours or ours[-1][0] is not code:
        said.append(f"{_file(code.co_filename)}:{line} {code.co_name}")
    return "in " + ", ".join(said)


def _file(path: str) -> str:
    return os.path.relpath(path, _HERE) if path.startswith(_HERE) else "/".join(path.split(os.sep)[-2:])


def _short(name: str) -> str:
    return name.rpartition(".")[2] if "<locals>" not in name else name.partition(".<locals>")[0].rpartition(".")[2]


def _time(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes = int(seconds // 60)
    days, hours = divmod(minutes // 60, 24)
    said = [f"{days} d" if days else "", f"{hours} h" if days or hours else "", f"{minutes % 60} min"]
    return " ".join(filter(None, said))

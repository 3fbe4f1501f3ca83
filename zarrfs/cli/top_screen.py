"""One frame of zarrfs top: the changes between snapshots of a mount's counters, as lines for a terminal."""

from __future__ import annotations

import sys
import unicodedata
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from zarrfs.cli import stats_text
from zarrfs.config.values import human
from zarrfs.errors import printable
from zarrfs.metrics.statistics import Statistics, timed

HISTORY = 40  # intervals that are shown
_LEVELS, _LEVELS_ASCII = "▁▂▃▄▅▆▇█", "_.-=+*#@"
_COLUMNS = 80  # the assumed width for bars if lines are not cut
_TITLE, _RATE, _GAP, _GAUGE = 12, 14, "  ", 20  # columns
_STYLES = {"bold": "1", "red": "31", "cyan": "36"}  # SGR of ECMA-48

Line = Sequence[tuple[str, str]]  # parts of text, each with the name of a style or ""


class RateRow(NamedTuple):
    """A counter whose rate is shown."""

    title: str
    path: tuple[str, ...]
    bytes: bool = False


ROWS = (
    RateRow("reads", ("read",)),
    RateRow("served", ("bytes",), True),
    RateRow("from memory", ("remote", "cache", "hit_bytes"), True),
    RateRow("from disk", ("remote", "disk", "bytes_read"), True),
    RateRow("from network", ("remote", "bytes"), True),
    RateRow("requests", ("remote", "requests")),
    RateRow("repeated", ("remote", "repeated")),
    RateRow("failed", ("remote", "failed")),
)


def rates(history: Sequence[Statistics], *path: str) -> list[float]:
    """Return the rates per second of a counter between consecutive snapshots; an absent counter counts as 0."""
    found = []
    for before, after in pairwise(history):
        grown = (after.number(*path) or 0) - (before.number(*path) or 0)
        found.append(max(0.0, grown) / max(after.taken - before.taken, 1e-9))
    return found


def since(history: Sequence[Statistics], new: Statistics) -> list[Statistics]:
    """Return the last HISTORY + 1 snapshots including `new`, without those of another daemon."""
    return [*(old for old in history if old.pid == new.pid), new][-HISTORY - 1 :]


def frame(
    history: Sequence[Statistics], width: int | None, ascii_only: bool = False, colours: bool = False
) -> list[str]:
    """Return the lines of a frame of `width` columns: rates over the last interval, their history, open requests.

    With a `width` of None, lines are not cut. `history` has at least two snapshots.
    """
    now = history[-1]
    title = [(f"{printable(now.mountpoint)}  {printable(now.source)}", "bold")]
    left = max((width or _COLUMNS) - _TITLE - _RATE - 2 * len(_GAP), 1)
    lines = [title, *_rates(history, left, ascii_only), *_states(history), *_hosts(history)]
    return [_cropped(line, width or sys.maxsize, colours) for line in lines]


def _cropped(line: Line, width: int, colours: bool) -> str:
    """Return the text of a line, cut at `width` columns. A wide character takes two columns, a combining one none."""
    out = []
    for text, style in line:
        taken = []
        for char in text:
            width -= 0 if unicodedata.combining(char) else 2 if unicodedata.east_asian_width(char) in "WF" else 1
            if width < 0:
                break
            taken.append(char)
        shown = "".join(taken)
        out.append(f"\x1b[{_STYLES[style]}m{shown}\x1b[0m" if colours and style and shown else shown)
    return "".join(out).rstrip()


def bars(values: Sequence[float], ascii_only: bool = False) -> str:
    """Render values as a row of bars, scaled so that the largest one fills the line."""
    levels = _LEVELS_ASCII if ascii_only else _LEVELS
    most = max(values, default=0.0) or 1.0
    return "".join(levels[round(value / most * (len(levels) - 1))] for value in values)


def _rates(history: Sequence[Statistics], width: int, ascii_only: bool) -> Iterator[Line]:
    for row in ROWS:
        if history[-1].number(*row.path) is not None:
            course = rates(history, *row.path)
            rate = f"{course[-1] / 1e6:,.1f} MB/s" if row.bytes else f"{course[-1]:,.1f} /s"
            style = "red" if row.title == "failed" and course[-1] else ""
            yield [
                (f"{row.title:{_TITLE}}{_GAP}", ""), (f"{rate:>{_RATE}}", style), (_GAP, ""),
                (bars(course[-width:], ascii_only), "cyan"),
            ]  # fmt: skip


def _states(history: Sequence[Statistics]) -> Iterator[Line]:
    for name, text in _state_lines(history):
        yield [(f"{name:{_TITLE}}{_GAP}{text}", "")]


def _state_lines(history: Sequence[Statistics]) -> Iterator[tuple[str, str]]:
    before, now = history[-2:]
    flying, size = now.number("remote", "in_flight"), now.number("remote", "in_flight_bytes")
    if flying is not None:
        yield "in flight", f"{flying:,.0f} requests, {human(size or 0)}"
    if spent := stats_text.latency(now):
        number = (timed(now) or 0) - (timed(before) or 0)
        grown = (now.number("remote", "latency_sum") or 0) - (before.number("remote", "latency_sum") or 0)
        if number > 0:
            yield "latency", f"{stats_text.milliseconds(grown / number)} ms on average"
        yield "since mount", spent
    kept, limit = (now.number("remote", "cache", name) for name in ("kept", "limit"))
    if kept is not None and limit:
        full = round(min(kept / limit, 1.0) * _GAUGE)
        yield "memory", f"[{'#' * full}{'.' * (_GAUGE - full)}] {stats_text.memory(now)}"
    ratio = stats_text.hit_ratio(now, "remote", "cache")
    if ratio is not None:
        yield "hits", f"{ratio:.1%} of blocks were in memory"


def _hosts(history: Sequence[Statistics]) -> Iterator[Line]:
    """Yield a line for each of the servers with the highest rates."""
    last = history[-2:]
    known = stats_text.hosts(last[0])  # the daemon lists only the busiest servers: a server new to the list is not new
    found = [
        (rates(last, "remote", "hosts", host, "requests")[0] if host in known else 0.0, host)
        for host in stats_text.hosts(last[-1])
    ]
    for rate, host in sorted(found, key=lambda one: -one[0])[: stats_text.HOSTS]:
        flying = last[-1].number("remote", "hosts", host, "in_flight") or 0
        shown = f"{rate:,.1f} /s"
        yield [(f"{'host':{_TITLE}}  {shown:>{_RATE}}  {flying:,.0f} in flight  {printable(host)}", "")]

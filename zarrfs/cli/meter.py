"""A progress line on the terminal, erased at the end."""

from __future__ import annotations

import contextlib
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol

from zarrfs.config.values import human
from zarrfs.system.terminal import replace_line, shows_progress

_QUIET_FOR = 0.5  # seconds before the line appears
_EVERY = 0.2  # seconds between updates
_BAR = 20  # characters


class Counts(NamedTuple):
    """The progress of a task; the totals may be unknown."""

    files: int
    bytes: int
    expected_files: int | None = None
    expected_bytes: int | None = None


class HasCounts(Protocol):
    """An object with the counters of a task in progress."""

    files: int
    bytes: int
    expected_files: int | None
    expected_bytes: int | None


def of(progress: HasCounts) -> Callable[[], Counts]:
    """Return a function that reads the present counts of `progress`."""
    return lambda: Counts(progress.files, progress.bytes, progress.expected_files, progress.expected_bytes)


@contextlib.contextmanager
def displayed(counts: Callable[[], Counts], quiet: bool) -> Iterator[None]:
    """Show a line with `counts()` during the body, unless `quiet` or standard error shows no progress.

    `counts` is called in another thread.
    """
    if quiet or not shows_progress():
        yield
        return
    ended = threading.Event()
    thread = threading.Thread(target=_show, args=(counts, ended), daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _show(counts: Callable[[], Counts], ended: threading.Event) -> None:
    began = time.monotonic()
    if ended.wait(_QUIET_FOR):
        return
    while True:
        text = line(counts(), time.monotonic() - began)
        replace_line(text[: shutil.get_terminal_size().columns - 1])
        if ended.wait(_EVERY):
            break
    replace_line()


def line(counts: Counts, elapsed: float) -> str:
    """Format a line: [#####-----] 500 of 1,000 files, 1.0 of 2.0 GiB, 85.3 MiB/s, 0:12 left. `elapsed` in seconds."""
    rate = counts.bytes / elapsed if elapsed else 0.0
    files, data = f"{counts.files:,}", human(counts.bytes)
    if counts.expected_files is None or counts.expected_bytes is None:
        return f"{files} files, {data}, {human(rate)}/s"
    text = f"{files} of {counts.expected_files:,} files, {data} of {human(counts.expected_bytes)}"
    done = counts.bytes / counts.expected_bytes if counts.expected_bytes else 1.0
    filled = min(_BAR, int(_BAR * done))
    left = ""
    if 0 < done < 1:
        minutes, seconds = divmod(int(elapsed / done - elapsed), 60)
        left = f", {minutes}:{seconds:02} left"
    return f"[{'#' * filled}{'-' * (_BAR - filled)}] {text}, {human(rate)}/s{left}"

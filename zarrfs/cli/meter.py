"""A progress line on the terminal, erased at the end."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

from zarrfs.cli import common
from zarrfs.config.values import human
from zarrfs.errors import printable

_QUIET_FOR = 0.5  # seconds before the line appears
_EVERY = 0.2  # seconds between updates
_BAR = 20  # characters


@contextlib.contextmanager
def displayed(progress: Any, quiet: bool) -> Iterator[None]:
    """Show `progress` in a line during the body, unless `quiet` or standard error is no terminal that erases lines.

    `progress` has the attributes `files` and `bytes`, and may have `expected_files` and `expected_bytes`, which are
    None while they are unknown. Another thread reads them.
    """
    if quiet or not _can_erase():
        yield
        return
    ended = threading.Event()
    thread = threading.Thread(target=_show, args=(progress, ended), daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def say(text: str) -> None:
    """Print a line of text in place of the line of progress, which appears again below it."""
    if _can_erase():
        _replace_line("")
    common.say(printable(text))


def _can_erase() -> bool:
    return sys.stderr.isatty() and os.environ.get("TERM") != "dumb"


def _show(progress: Any, ended: threading.Event) -> None:
    began, wait = time.monotonic(), _QUIET_FOR
    while not ended.wait(wait):
        text, wait = line(progress, time.monotonic() - began), _EVERY
        _replace_line(text[: shutil.get_terminal_size().columns - 1])
    if wait == _EVERY:
        _replace_line("")


def _replace_line(text: str) -> None:
    sys.stderr.write(f"\r\x1b[K{text}")
    sys.stderr.flush()


def line(progress: Any, elapsed: float) -> str:
    """Format a line: [#####-----] 500 of 1,000 files, 1.0 of 2.0 GiB, 85.3 MiB/s, 0:12 left. `elapsed` in seconds."""
    files, data = f"{progress.files:,}", human(progress.bytes)
    rate = f"{human(progress.bytes / elapsed if elapsed else 0.0)}/s"
    all_files, all_bytes = (getattr(progress, name, None) for name in ("expected_files", "expected_bytes"))
    if all_files is None or all_bytes is None:
        return f"{files} files, {data}, {rate}"
    done = progress.bytes / all_bytes if all_bytes else 1.0
    filled, left = min(_BAR, int(_BAR * done)), ""
    if 0 < done < 1:
        minutes, seconds = divmod(int(elapsed / done - elapsed), 60)
        left = f", {minutes}:{seconds:02} left"
    bar = f"[{'#' * filled}{'-' * (_BAR - filled)}]"
    return f"{bar} {files} of {all_files:,} files, {data} of {human(all_bytes)}, {rate}{left}"

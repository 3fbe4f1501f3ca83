"""zarrfs top MNT: live rates of a mount."""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence

import click

from zarrfs.cli.common import SETTINGS, report_errors, say
from zarrfs.config.values import seconds

EPILOG = """\b
Examples:
  zarrfs top /mnt/data
  zarrfs top --once --interval 5s /mnt/data      (what happens in five seconds, as text)
\b
q or Ctrl-C ends it, and so does the end of the mount. docs/monitoring.md explains each number."""
_SHORTEST = 0.1  # seconds: the shortest interval
_BEGIN, _END = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"  # alternate screen without cursor; back (xterm)


@click.command(context_settings=SETTINGS, epilog=EPILOG)
@click.argument("mountpoint", metavar="MNT")
@click.option("--interval", default="1s", metavar="TIME", show_default=True, help="Time between updates.")
@click.option("--once", is_flag=True, help="Print one frame, after one interval, and exit.")
def top(mountpoint: str, interval: str, once: bool) -> None:
    """Show the activity of the mount that contains MNT: rates, bytes of each tier, requests, latency.

    If standard output is no terminal, frames are written one after another.
    """
    with report_errors(), contextlib.suppress(KeyboardInterrupt):  # Ctrl-C is the usual way to end it
        _watch(mountpoint, _interval(interval), once)


def _interval(text: str) -> float:
    try:
        return max(seconds(text), _SHORTEST)
    except ValueError as exc:
        raise click.UsageError(f"--interval: expected {exc}") from None


def _watch(path: str, interval: float, once: bool) -> None:
    from zarrfs.cli.top_screen import frame, since
    from zarrfs.errors import MountError
    from zarrfs.metrics.statistics import is_mounted, statistics

    first = statistics(path)
    history = [first]
    terminal = sys.stdout.isatty() and os.environ.get("TERM") not in (None, "", "dumb")
    colours = terminal and not os.environ.get("NO_COLOR")
    ascii_only = "utf" not in (sys.stdout.encoding or "").lower()
    with _shown(terminal and not once) as (show, wait):
        while not wait(interval):
            try:
                history = since(history, statistics(first.mountpoint))
            except MountError:
                if is_mounted(first.mountpoint):
                    raise
                break
            if len(history) > 1:
                show(frame(history, _width(), ascii_only, colours))
                if once:
                    return
        else:
            return
    say(f"{first.mountpoint}: no longer mounted")
    if once:  # the mount ended before the frame was printed
        raise SystemExit(1)


def _width() -> int | None:
    """Return the width of the terminal; None if standard output is no terminal, so that lines are not cut."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


@contextlib.contextmanager
def _shown(live: bool) -> Iterator[tuple[Callable[[Sequence[str]], None], Callable[[float], bool]]]:
    """Yield two functions: one shows the lines of a frame, the other waits some seconds and returns True to quit."""
    if not live:
        yield lambda lines: click.echo("\n".join(lines)), _sleep
        return

    def draw(lines: Sequence[str]) -> None:
        shown = lines[: max(shutil.get_terminal_size().lines - 1, 1)]
        sys.stdout.write("\x1b[H" + "".join(f"{line}\x1b[K\n" for line in shown) + "\x1b[J")
        sys.stdout.flush()

    with _keys() as wait:
        try:
            sys.stdout.write(_BEGIN)
            yield draw, wait
        finally:
            sys.stdout.write(_END)
            sys.stdout.flush()


def _sleep(duration: float) -> bool:
    sys.stdout.flush()  # the reader of a pipe gets each frame immediately
    time.sleep(duration)
    return False


@contextlib.contextmanager
def _keys() -> Iterator[Callable[[float], bool]]:
    """Yield a function that waits some seconds and returns True if q is pressed.

    The terminal is in cbreak mode during the body.
    """
    if not sys.stdin.isatty():
        yield _sleep
        return
    import termios
    import tty

    number = sys.stdin.fileno()
    before = termios.tcgetattr(number)

    def wait(duration: float) -> bool:
        deadline = time.monotonic() + duration
        while (left := deadline - time.monotonic()) > 0:
            if select.select([number], [], [], left)[0]:
                keys = os.read(number, 64)
                if not keys or keys.lower().count(b"q"):  # empty: the terminal was closed
                    return True
        return False

    try:
        tty.setcbreak(number)
        yield wait
    finally:
        termios.tcsetattr(number, termios.TCSADRAIN, before)

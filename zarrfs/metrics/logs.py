"""The log of a daemon: to log_file=, else stderr (foreground), else the journal or syslog. It waits for none of them.

Lines go through a bounded queue to a thread: a disk that hangs, a pipe that nobody reads, or a syslog that does not
keep up cost lines, which are counted and told, but no reader's time.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
import time

from zarrfs.config.options import Options
from zarrfs.metrics import logplaces

log = logging.getLogger("zarrfs")

_QUEUED = 2000  # lines
_PATIENCE = 1.0  # seconds for lines that are queued when all ends


class Queued(logging.Handler):
    """Sends records to a place, by a thread that the first one starts."""

    def __init__(self, place: logplaces.Place) -> None:
        super().__init__()
        self.place = place
        self.lost = 0  # lines
        self._told = 0  # of those
        self._lines: queue.Queue[bytes | None] = queue.Queue(_QUEUED)
        self._thread: threading.Thread | None = None

    def emit(self, record: logging.LogRecord) -> None:
        """Queue a record; under the lock of handle()."""
        try:
            self._lines.put_nowait(self.place.line(record))
        except queue.Full:
            self.lost += 1
        except Exception:  # a record that no line can be made of must not fail who writes it
            self.lost += 1
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="zarrfs-log", daemon=True)
            with contextlib.suppress(RuntimeError):  # no more threads are to be had: the next line tries again
                thread.start()
                self._thread = thread

    @property
    def waiting(self) -> int:
        """Lines that are not written yet."""
        return self._lines.unfinished_tasks

    def finish(self) -> None:
        """Wait a little until all lines are written."""
        until = time.monotonic() + _PATIENCE
        if self._thread is not None:
            with contextlib.suppress(queue.Full):
                self._lines.put(None, timeout=_PATIENCE)
                self._thread.join(max(0.0, until - time.monotonic()))
            self._thread = None

    def _run(self) -> None:
        while (line := self._lines.get()) is not None:
            try:
                self.place.send(line)
                lost = self.lost
                if lost != self._told:
                    self.place.send(self.place.line(_lost(lost - self._told)))
                    self._told = lost
            except OSError:
                with self.lock or contextlib.nullcontext():
                    self.lost += 1
            self._lines.task_done()
        self._lines.task_done()


def configure(options: Options, foreground: bool, mountpoint: str = "", source: str = "") -> None:
    """Send the log of this process to its place. `source` without credentials."""
    about = {name: text for name, text in (("mountpoint", mountpoint), ("source", source)) if text}
    place = _place(options, foreground, about)
    log.handlers[:] = [logging.NullHandler() if place is None else Queued(place)]
    log.propagate = False
    log.setLevel(options.log_level.upper())


def _place(options: Options, foreground: bool, about: dict[str, str]) -> logplaces.Place | None:
    as_json, journal = options.log_format == "json", os.path.exists(logplaces.JOURNAL)
    if options.log_file is not None:
        return logplaces.File(options.log_file, about, as_json)
    to_journal = logplaces.stderr_is_the_journal()
    if journal and (to_journal or not foreground):
        return logplaces.Journal(logplaces.JOURNAL, about, as_json)
    if foreground:
        return logplaces.Stderr(about, as_json, levels=to_journal)
    if os.path.exists(logplaces.SYSLOG):
        return logplaces.Syslog(logplaces.SYSLOG, about, as_json)
    return None


def reopen() -> None:
    """Open a log file anew with the next line: logrotate has moved it."""
    for handler in log.handlers:
        if isinstance(handler, Queued):
            handler.place.reopen()


def finish() -> None:
    """Wait a little until all that was logged is written: what follows is the end of the process."""
    for handler in log.handlers:
        if isinstance(handler, Queued):
            handler.finish()


def counters() -> dict[str, int]:
    """Lines that no place has taken, and lines that wait to be written."""
    handlers = [handler for handler in log.handlers if isinstance(handler, Queued)]
    return {"lost": sum(one.lost for one in handlers), "waiting": sum(one.waiting for one in handlers)}


def _lost(number: int) -> logging.LogRecord:
    return logging.makeLogRecord({
        "name": "zarrfs", "levelno": logging.WARNING, "levelname": "WARNING",
        "msg": f"{number:,} lines of the log are lost: they could not be written", "facts": {"lost": number},
    })  # fmt: skip

"""The log of a daemon: written to log_file=, else to stderr (foreground), else to syslog or the journal (/dev/log).

Records go through a bounded queue to a thread, so that code that logs never waits for a hanging disk, a full pipe or a
slow syslog. Lines that do not fit into the queue or cannot be written are lost; their number is counted and logged. A
line is text for users, without secrets and control characters.

Sources: sd-daemon(3) for levels on stderr, systemd.exec(5) for $JOURNAL_STREAM, syslog(3).
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
import traceback
from logging.handlers import QueueHandler, SysLogHandler, WatchedFileHandler

from zarrfs.config.options import Options
from zarrfs.config.redaction import redact_text
from zarrfs.errors import message_line, message_lines

log = logging.getLogger("zarrfs")  # the parent of the loggers of all modules

SYSLOG = "/dev/log"  # the journal listens there, too
_LONGEST_MESSAGE = 8000  # characters, which every syslog accepts
_QUEUED = 2000  # lines
_PATIENCE = 1.0  # seconds to write queued lines at the end of the process


class _Message(logging.Formatter):
    """The message of a record as one line without secrets, followed by its traceback, if any, on further lines."""

    def format(self, record: logging.LogRecord) -> str:
        text = message_line(redact_text(record.getMessage()))
        if len(text) > _LONGEST_MESSAGE:
            text = text[:_LONGEST_MESSAGE] + " ..."
        if record.exc_info and record.exc_info[0] is not None:
            lines = "".join(traceback.format_exception(*record.exc_info))
            text += "\n" + message_lines(redact_text(lines).rstrip("\n"))
        return text


class _Levels(logging.Formatter):
    """Lines for a service manager: each begins with its level of syslog(3)."""

    def format(self, record: logging.LogRecord) -> str:
        level = next((number for least, number in ((50, 2), (40, 3), (30, 4), (20, 6)) if record.levelno >= least), 7)
        return "\n".join(f"<{level}>{line}" for line in super().format(record).split("\n"))


class _LogFile(WatchedFileHandler):
    """A log file, which is created again after it was moved away. What does not fit on the disk is lost."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self.reopenIfNeeded()
            data = memoryview(f"{self.format(record)}\n".encode(errors="backslashreplace"))
            while data and self.stream is not None:
                data = data[os.write(self.stream.fileno(), data) :]
        except Exception:
            self.handleError(record)


class _Queue(QueueHandler):
    """A handler that queues records for a thread. The first record starts the thread, because a daemon forks first."""

    def __init__(self, target: logging.Handler) -> None:
        self._records: queue.Queue[logging.LogRecord | None] = queue.Queue(_QUEUED)
        super().__init__(self._records)
        self.setFormatter(_Message())
        self._target = target
        self._thread: threading.Thread | None = None
        self.lost = 0  # lines
        target.handleError = self.handleError  # type: ignore[method-assign]

    def enqueue(self, record: logging.LogRecord) -> None:
        """Queue a record. The module logging calls this with the handler's lock held."""
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="zarrfs-log", daemon=True)
            with contextlib.suppress(RuntimeError):  # no more threads allowed: the next record tries again
                thread.start()
                self._thread = thread
        self._records.put_nowait(record)

    def handleError(self, record: logging.LogRecord) -> None:
        """Count a line that cannot be formatted, queued or written."""
        with self.lock or contextlib.nullcontext():
            self.lost += 1

    @property
    def waiting(self) -> int:
        """The number of lines not written yet."""
        return self._records.unfinished_tasks

    def finish(self) -> None:
        """Wait up to a second until all lines are written."""
        if self._thread is not None:
            with contextlib.suppress(queue.Full):
                self._records.put(None, timeout=_PATIENCE)
                self._thread.join(_PATIENCE)
            self._thread = None

    def _run(self) -> None:
        reported = 0  # lost lines that the log tells of
        while (record := self._records.get()) is not None:
            lost = self.lost
            self._target.handle(record)
            if lost == self.lost != reported:
                text = f"{lost - reported:,} lines of the log are lost: they could not be written"
                self._target.handle(logging.makeLogRecord(
                    {"levelno": logging.WARNING, "levelname": "WARNING", "msg": text}))  # fmt: skip
                reported = lost
            self._records.task_done()
        self._records.task_done()


def configure(options: Options, foreground: bool, mountpoint: str) -> None:
    """Direct the log of this process to the destination that the options select. Raise OSError for a log file."""
    target: logging.Handler = logging.NullHandler()
    line = "zarrfs[%(process)d]: %(levelname)s: %(message)s"
    if options.log_file is not None:
        target = _LogFile(options.log_file)
        target.setFormatter(logging.Formatter(f"%(asctime)s {line}"))
    elif foreground:
        target = logging.StreamHandler()
        target.setFormatter(_Levels(line) if _stderr_is_the_journal() else logging.Formatter(line))
    elif os.path.exists(SYSLOG):
        target = SysLogHandler(SYSLOG, SysLogHandler.LOG_DAEMON)
        # several mounts share the log of the machine
        about = mountpoint.replace("%", "%%")
        target.setFormatter(logging.Formatter(f"zarrfs[%(process)d]: {about}: %(levelname)s: %(message)s"))
    log.handlers[:] = [_Queue(target)]
    log.propagate = False
    log.setLevel(options.log_level.upper())


def _stderr_is_the_journal() -> bool:
    """Return whether descriptor 2 is the stream to the journal that $JOURNAL_STREAM names (systemd.exec(5))."""
    try:
        status = os.fstat(2)
    except OSError:
        return False
    return os.environ.get("JOURNAL_STREAM") == f"{status.st_dev}:{status.st_ino}"


def destination(options: Options) -> str:
    """Return the destination of the log of a background mount, for messages; "" if there is none."""
    if options.log_file is not None:
        return os.path.abspath(options.log_file)
    if not os.path.exists(SYSLOG):
        return ""
    return "the journal" if os.path.exists("/run/systemd/journal/socket") else f"syslog ({SYSLOG})"


def finish() -> None:
    """Wait up to a second until all lines are written. Call this before the process ends."""
    for handler in log.handlers:
        if isinstance(handler, _Queue):
            handler.finish()


def waiting_and_lost() -> tuple[int, int]:
    """Return the numbers of lines waiting to be written and of lost ones."""
    handlers = [handler for handler in log.handlers if isinstance(handler, _Queue)]
    return sum(one.waiting for one in handlers), sum(one.lost for one in handlers)

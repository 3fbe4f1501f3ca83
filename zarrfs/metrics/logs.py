"""The log of a daemon: written to log_file=, else to stderr (foreground), else to the journal or syslog.

Lines go through a bounded queue to a thread, so that code that logs never waits for a hanging disk, a full pipe or a
slow syslog. Lines that do not fit into the queue or cannot be written are lost; their number is counted and logged. A
line is text for users, without secrets and control characters.

Sources: systemd's "Native Journal Protocol", sd-daemon(3) for levels on stderr, syslog(3) and RFC 3164.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import queue
import select
import socket
import threading
import time
import traceback
from collections.abc import Mapping
from typing import Any

from zarrfs.config.options import Options
from zarrfs.config.redaction import redact_text
from zarrfs.errors import message_line

log = logging.getLogger("zarrfs")  # the parent of the loggers of all modules

NAME = "zarrfs"
_LONGEST_MESSAGE = 8000  # characters of a message, which every syslog accepts
JOURNAL, SYSLOG = "/run/systemd/journal/socket", "/dev/log"
_DAEMON = 3 << 3  # the facility of system daemons, syslog(3)
_LONGEST_FIELD = 100_000  # bytes of a field for the journal, less than the default limit of a datagram
_QUEUED = 2000  # lines
_PATIENCE = 1.0  # seconds to write queued lines at the end of the process


def message(record: logging.LogRecord) -> str:
    """Return the message of a record as one line without secrets, cut to a length that syslog accepts."""
    text = message_line(redact_text(record.getMessage()))
    return text if len(text) <= _LONGEST_MESSAGE else text[:_LONGEST_MESSAGE] + " ..."


def facts(record: logging.LogRecord) -> dict[str, Any]:
    """Return the fields of a failure: operation, key, url, offset, length, errno, attempt, kind, more."""
    found: Mapping[str, Any] = getattr(record, "facts", {})
    return {name: redact_text(value) if isinstance(value, str) else value for name, value in found.items()}


def text_line(record: logging.LogRecord, stamped: bool = False) -> str:
    """Return a record as text for users, followed by its traceback, if any. With `stamped`, begin with local time."""
    stamp = ""
    if stamped:
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.created))
        stamp = f"{when},{int(record.msecs):03} "
    return f"{stamp}{NAME}[{os.getpid()}]: {record.levelname}: {body(record)}"


def body(record: logging.LogRecord) -> str:
    """Return the message of a record, followed by its traceback, if any, on further lines."""
    return message(record) + _traceback(record)


def _traceback(record: logging.LogRecord) -> str:
    if not record.exc_info or record.exc_info[0] is None:
        return ""
    return "\n" + redact_text("".join(traceback.format_exception(*record.exc_info))).rstrip("\n")


class LogTarget:
    """A destination of log lines.

    Only the thread of QueueingHandler calls send(). Any thread may call the other methods.
    """

    def line(self, record: logging.LogRecord) -> bytes:
        """Return a record as the bytes that send() takes. Must not block."""
        raise NotImplementedError

    def send(self, data: bytes) -> None:
        """Send a formatted line. May block. Raise OSError."""
        raise NotImplementedError

    def reopen(self) -> None:
        """Reopen the log file before the next line; does nothing for other targets."""


class LogFile(LogTarget):
    """A log file, which is created again after it was moved away, for example by logrotate."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._descriptor: int | None = None
        self._moved = self._torn = False

    def line(self, record: logging.LogRecord) -> bytes:
        return text_line(record, stamped=True).encode(errors="backslashreplace") + b"\n"

    def send(self, data: bytes) -> None:
        """Append a line. If a full disk cut the previous line short, end it first."""
        if self._descriptor is not None and self._is_another(self._descriptor):
            moved, self._descriptor = self._descriptor, None
            with contextlib.suppress(OSError):  # such as EDQUOT on NFS; close(2) frees the descriptor even if it fails
                os.close(moved)
        if self._descriptor is None:
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOCTTY
            self._descriptor = os.open(self._path, flags, 0o644)
            self._torn = self._moved = False
        if self._torn:
            data = b"\n" + data
        written = 0
        try:
            while written < len(data):
                written += os.write(self._descriptor, data[written:])
        finally:
            self._torn = self._torn if not written else written < len(data)

    def reopen(self) -> None:
        self._moved = True

    def _is_another(self, descriptor: int) -> bool:
        """Return whether the file must be opened again: its path is not this file now, or reopen() was called."""
        try:
            return self._moved or not os.path.samestat(os.stat(self._path), os.fstat(descriptor))
        except OSError:
            return True


class Stderr(LogTarget):
    """Standard error. With `levels`, for a service manager, lines begin with their level (sd-daemon(3))."""

    def __init__(self, levels: bool) -> None:
        self._levels = levels

    def line(self, record: logging.LogRecord) -> bytes:
        lines = text_line(record).split("\n")
        level = f"<{priority(record)}>" if self._levels else ""
        return "".join(f"{level}{line}\n" for line in lines).encode(errors="backslashreplace")

    def send(self, data: bytes) -> None:
        while data:
            try:
                data = data[os.write(2, data) :]
            except BlockingIOError:  # another process has made the terminal or pipe non-blocking
                select.select([], [2], [])


class Journal(LogTarget):
    """The journal, in its native protocol. The facts of a failure are fields (ZARRFS_KEY, ZARRFS_URL, ...)."""

    def __init__(self, path: str, about: Mapping[str, str]) -> None:
        """`about`: fields about the mount in each entry."""
        self._path, self._about = path, about
        self._socket: socket.socket | None = None

    def line(self, record: logging.LogRecord) -> bytes:
        fields = {"MESSAGE": body(record), "PRIORITY": str(priority(record)), "SYSLOG_IDENTIFIER": NAME}
        for name, value in {**self._about, **facts(record)}.items():
            fields[f"ZARRFS_{name.upper()}"] = str(value)
        return b"".join(_field(name, value) for name, value in fields.items())

    def send(self, data: bytes) -> None:
        if self._socket is None:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        self._socket.sendto(data, self._path)


class Syslog(LogTarget):
    """The socket of syslog(3), with datagrams, or with a stream if it does not accept datagrams."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._socket: socket.socket | None = None
        self._end = b""

    def line(self, record: logging.LogRecord) -> bytes:
        return f"<{_DAEMON | priority(record)}>{text_line(record)}".encode(errors="backslashreplace")

    def send(self, data: bytes) -> None:
        """Send a line. Reconnect if syslog was restarted."""
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.sendall(data + self._end)
                return
            self._socket.close()
            self._socket = None
        self._socket, self._end = self._connect()
        self._socket.sendall(data + self._end)

    def _connect(self) -> tuple[socket.socket, bytes]:
        """Return (a connected socket, the bytes that end a line)."""
        for kind, end in (socket.SOCK_DGRAM, b""), (socket.SOCK_STREAM, b"\0"):
            found = socket.socket(socket.AF_UNIX, kind | socket.SOCK_CLOEXEC)
            try:
                found.connect(self._path)
            except OSError as exc:
                found.close()
                error = exc
            else:
                return found, end
        raise error


def stderr_is_the_journal() -> bool:
    """Return whether descriptor 2 is the stream to the journal that $JOURNAL_STREAM names (systemd.exec(5))."""
    try:
        status = os.fstat(2)
    except OSError:
        return False
    return os.environ.get("JOURNAL_STREAM") == f"{status.st_dev}:{status.st_ino}"


def priority(record: logging.LogRecord) -> int:
    """Return the syslog(3) level of a record."""
    levels = ((logging.CRITICAL, 2), (logging.ERROR, 3), (logging.WARNING, 4), (logging.INFO, 6))
    return next((number for level, number in levels if record.levelno >= level), 7)


def _field(name: str, value: str) -> bytes:
    """Encode a field of a journal entry. A value with line feeds is preceded by its length."""
    data = value.encode(errors="backslashreplace")[:_LONGEST_FIELD]
    if b"\n" not in data:
        return b"%b=%b\n" % (name.encode(), data)
    return b"%b\n%b%b\n" % (name.encode(), len(data).to_bytes(8, "little"), data)


class QueueingHandler(logging.Handler):
    """A logging handler that queues lines for a thread. The first record starts the thread."""

    def __init__(self, target: LogTarget) -> None:
        super().__init__()
        self.target = target
        self.lost = 0  # lines
        self._reported = 0  # lost lines that were reported in the log
        self._lines: queue.Queue[bytes | None] = queue.Queue(_QUEUED)
        self._thread: threading.Thread | None = None
        self._spare: int | None = None  # closed to open the target if the process is out of descriptors
        with contextlib.suppress(OSError):
            self._spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)

    def emit(self, record: logging.LogRecord) -> None:
        """Queue a record. The module logging calls this with the handler's lock held."""
        try:
            self._lines.put_nowait(self.target.line(record))
        except queue.Full:
            self.lost += 1
        except Exception:  # a record that cannot be formatted must not raise in the code that logs
            self.lost += 1
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="zarrfs-log", daemon=True)
            with contextlib.suppress(RuntimeError):  # no more threads allowed: the next record tries again
                thread.start()
                self._thread = thread

    @property
    def waiting(self) -> int:
        """The number of lines not written yet."""
        return self._lines.unfinished_tasks

    def finish(self) -> None:
        """Wait up to a second until all lines are written."""
        until = time.monotonic() + _PATIENCE
        if self._thread is not None:
            with contextlib.suppress(queue.Full):
                self._lines.put(None, timeout=_PATIENCE)
                self._thread.join(max(0.0, until - time.monotonic()))
            self._thread = None

    def _run(self) -> None:
        while (line := self._lines.get()) is not None:
            try:
                self._send(line)
                lost = self.lost
                if lost != self._reported:
                    self.target.send(self.target.line(_lost(lost - self._reported)))
                    self._reported = lost
            except OSError:
                with self.lock or contextlib.nullcontext():
                    self.lost += 1
            self._lines.task_done()
        self._lines.task_done()

    def _send(self, data: bytes) -> None:
        try:
            self.target.send(data)
        except OSError as exc:
            if exc.errno != errno.EMFILE or self._spare is None:
                raise
            os.close(self._spare)
            self._spare = None
            self.target.send(data)


def configure(options: Options, foreground: bool, mountpoint: str = "", source: str = "") -> None:
    """Direct the log of this process to the destination that the options select. `source` must have no credentials."""
    about = {name: text for name, text in (("mountpoint", mountpoint), ("source", source)) if text}
    target = _target(options, foreground, about)
    log.handlers[:] = [logging.NullHandler() if target is None else QueueingHandler(target)]
    log.propagate = False
    log.setLevel(options.log_level.upper())


def destination(options: Options) -> str:
    """Return the destination of the log of a background mount, for messages; "" if there is none."""
    if options.log_file is not None:
        return os.path.abspath(options.log_file)
    return "the journal" if os.path.exists(JOURNAL) else f"syslog ({SYSLOG})" if os.path.exists(SYSLOG) else ""


def note(options: Options) -> str:
    """Return a warning if the log of the mount has no destination, else ""."""
    if options.foreground or destination(options):
        return ""
    return f"no log: there is neither a journal nor {SYSLOG}; log_file=FILE has the reasons of failed reads"


def _target(options: Options, foreground: bool, about: dict[str, str]) -> LogTarget | None:
    if options.log_file is not None:
        return LogFile(options.log_file)
    to_journal = stderr_is_the_journal()
    if os.path.exists(JOURNAL) and (to_journal or not foreground):
        return Journal(JOURNAL, about)
    if foreground:
        return Stderr(levels=to_journal)
    if os.path.exists(SYSLOG):
        return Syslog(SYSLOG)
    return None


def reopen() -> None:
    """Reopen a log file before the next line. Call this after logrotate has moved the file."""
    for handler in log.handlers:
        if isinstance(handler, QueueingHandler):
            handler.target.reopen()


def finish() -> None:
    """Wait up to a second until all lines are written. Call this before the process ends."""
    for handler in log.handlers:
        if isinstance(handler, QueueingHandler):
            handler.finish()


def counters() -> dict[str, int]:
    """Return the numbers of lost lines and of lines waiting to be written."""
    handlers = [handler for handler in log.handlers if isinstance(handler, QueueingHandler)]
    return {"lost": sum(one.lost for one in handlers), "waiting": sum(one.waiting for one in handlers)}


def _lost(number: int) -> logging.LogRecord:
    return logging.makeLogRecord({
        "name": "zarrfs", "levelno": logging.WARNING, "levelname": "WARNING",
        "msg": f"{number:,} lines of the log are lost: they could not be written", "facts": {"lost": number},
    })  # fmt: skip

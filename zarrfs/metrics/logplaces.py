"""Where lines of the log go: a file, stderr, the journal, syslog. send() may block and raise OSError; it has a thread.

Sources: systemd's "Native Journal Protocol", sd-daemon(3) for levels on stderr, syslog(3) and RFC 3164.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
from collections.abc import Mapping
from typing import Protocol

from zarrfs.metrics.loglines import NAME, body, facts, json_line, text_line

JOURNAL, SYSLOG = "/run/systemd/journal/socket", "/dev/log"
_DAEMON = 3 << 3  # the facility of system daemons, syslog(3)
_LONGEST = 100_000  # bytes in a datagram for the journal: the least that a socket takes by default is more


class Place(Protocol):
    """A place for lines of the log."""

    def line(self, record: logging.LogRecord) -> bytes:
        """What is to be sent of a record. Blocks for nothing."""
        ...

    def send(self, data: bytes) -> None:
        """Send a line. OSError where it cannot be had."""
        ...

    def reopen(self) -> None:
        """Open anew with the next line."""
        ...


class _Lines:
    """Lines as text, or as JSON about the mount `about`."""

    def __init__(self, about: Mapping[str, str], as_json: bool, stamped: bool = False) -> None:
        self.about, self._json, self._stamped = about, as_json, stamped

    def text(self, record: logging.LogRecord) -> str:
        """The line, without its end."""
        return json_line(record, self.about) if self._json else text_line(record, self._stamped)

    def reopen(self) -> None:
        """As Place.reopen: nothing is open."""


class File(_Lines):
    """A file; one that was moved away, as logrotate does, is made anew."""

    def __init__(self, path: str, about: Mapping[str, str], as_json: bool) -> None:
        super().__init__(about, as_json, stamped=True)
        self._path = path
        self._descriptor: int | None = None
        self._moved = self._torn = False

    def line(self, record: logging.LogRecord) -> bytes:
        """As Place.line."""
        return self.text(record).encode(errors="backslashreplace") + b"\n"

    def send(self, data: bytes) -> None:
        """As Place.send; what a full disk has cut stays a line."""
        if self._descriptor is not None and self._is_another(self._descriptor):
            os.close(self._descriptor)
            self._descriptor = None
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
        """As Place.reopen."""
        self._moved = True

    def _is_another(self, descriptor: int) -> bool:
        """Whether the path does not lead to the file that is open."""
        try:
            return self._moved or not os.path.samestat(os.stat(self._path), os.fstat(descriptor))
        except OSError:
            return True


class Stderr(_Lines):
    """Descriptor 2; where that leads to a service manager, with the level in front (sd-daemon(3))."""

    def __init__(self, about: Mapping[str, str], as_json: bool, levels: bool) -> None:
        super().__init__(about, as_json)
        self._levels = levels

    def line(self, record: logging.LogRecord) -> bytes:
        """As Place.line."""
        lines = self.text(record).split("\n")
        level = f"<{priority(record)}>" if self._levels else ""
        return "".join(f"{level}{line}\n" for line in lines).encode(errors="backslashreplace")

    def send(self, data: bytes) -> None:
        """As Place.send."""
        while data:
            try:
                data = data[os.write(2, data) :]
            except BlockingIOError:  # a terminal or pipe that others have made non-blocking
                select.select([], [2], [])


class Journal(_Lines):
    """The journal, in its own protocol: what is known of a failure is in fields (ZARRFS_KEY, ZARRFS_URL, ...)."""

    def __init__(self, path: str, about: Mapping[str, str], as_json: bool) -> None:
        super().__init__(about, as_json)
        self._path, self._as_json = path, as_json
        self._socket: socket.socket | None = None

    def line(self, record: logging.LogRecord) -> bytes:
        """As Place.line."""
        text = self.text(record) if self._as_json else body(record)
        fields = {"MESSAGE": text, "PRIORITY": str(priority(record)), "SYSLOG_IDENTIFIER": NAME}
        for name, value in {**self.about, **facts(record)}.items():
            fields[f"ZARRFS_{name.upper()}"] = str(value)
        return b"".join(_field(name, value) for name, value in fields.items())

    def send(self, data: bytes) -> None:
        """As Place.send."""
        if self._socket is None:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        self._socket.sendto(data, self._path)


class Syslog(_Lines):
    """syslog(3) by its socket, of datagrams, or where those are not taken, a stream."""

    def __init__(self, path: str, about: Mapping[str, str], as_json: bool) -> None:
        super().__init__(about, as_json)
        self._path, self._as_json = path, as_json
        self._socket: socket.socket | None = None
        self._end = b""

    def line(self, record: logging.LogRecord) -> bytes:
        """As Place.line."""
        tag = f"{NAME}[{os.getpid()}]: " if self._as_json else ""  # a line of text has it anyway
        return f"<{_DAEMON | priority(record)}>{tag}{self.text(record)}".encode(errors="backslashreplace")

    def send(self, data: bytes) -> None:
        """As Place.send; a syslog that was started anew is connected to again."""
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.sendall(data + self._end)
                return
            self._socket.close()
            self._socket = None
        self._socket, self._end = self._connected()
        self._socket.sendall(data + self._end)

    def _connected(self) -> tuple[socket.socket, bytes]:
        """(a socket, what ends a line in it)."""
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
    """Whether descriptor 2 is what $JOURNAL_STREAM says: a stream to the journal (systemd.exec(5))."""
    try:
        status = os.fstat(2)
    except OSError:
        return False
    return os.environ.get("JOURNAL_STREAM") == f"{status.st_dev}:{status.st_ino}"


def priority(record: logging.LogRecord) -> int:
    """The level of syslog(3) that a record has."""
    levels = ((logging.CRITICAL, 2), (logging.ERROR, 3), (logging.WARNING, 4), (logging.INFO, 6))
    return next((number for level, number in levels if record.levelno >= level), 7)


def _field(name: str, value: str) -> bytes:
    """One field of an entry of the journal; a value of several lines has its length in front."""
    data = value.encode(errors="backslashreplace")[:_LONGEST]
    if b"\n" not in data:
        return b"%b=%b\n" % (name.encode(), data)
    return b"%b\n%b%b\n" % (name.encode(), len(data).to_bytes(8, "little"), data)

"""Export of a running mount's metrics (-o metrics=), over HTTP or to a file, and reports of suppressed failures.

A port or a directory that cannot be used raises an error before anything is mounted.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import socket
import stat
import time
from collections.abc import Callable
from typing import Any

import trio

from zarrfs.concurrency.tasks import CONTROL
from zarrfs.config.values import address
from zarrfs.errors import MountError, reason_of
from zarrfs.failures import FAILURES

log = logging.getLogger(__name__)

Text = Callable[[float | None], str]  # renders the metrics; argument: time of writing a file, in seconds since 1970
_FLUSH_EVERY = 10.0  # seconds between two reports of failures that the log has suppressed
_MARK = b"# HELP zarrfs_"  # the first bytes of every metrics file that zarrfs writes
_EVERY = 15.0  # seconds between two writes of a file
_BACKLOG = 64  # connections
_ABSENT = (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL)  # such as for ::1 of localhost in a container without IPv6


def exporter(where: str | None) -> HTTPExporter | TextfileExporter | None:
    """Return an exporter for metrics=`where`, or None if `where` is None. Call this before the mount is made.

    Raise MountError if the port or the file cannot be used.
    """
    if where is None:
        return None
    return TextfileExporter(where) if where.startswith("/") else HTTPExporter(where)


class Watch:
    """The monitoring tasks of a mount: its exporter, and periodic reports of failures that the log has suppressed."""

    def __init__(
        self, exporter: HTTPExporter | TextfileExporter | None, mountpoint: str, about: dict[str, Any]
    ) -> None:
        """Add the address of the metrics to `about`, the value of user.zarrfs.mount."""
        self._exporter, self._mountpoint, self._about = exporter, mountpoint, about
        if exporter is not None:
            about["metrics"] = exporter.where

    async def run(self, stats: Callable[[], dict[str, Any]]) -> None:
        """Run until cancelled. `stats` returns the current counters."""
        about = self._about

        def text(written: float | None) -> str:
            from zarrfs.metrics.exposition import exposition
            from zarrfs.metrics.statistics import Statistics

            now, who = time.monotonic(), (self._mountpoint, about["source"], about["kind"], about["pid"])
            return exposition(Statistics(*who, now, stats()), written)

        try:
            async with trio.open_nursery() as nursery:
                if self._exporter is not None:
                    nursery.start_soon(self._show, self._exporter, text)
                while True:
                    await trio.sleep(_FLUSH_EVERY)
                    FAILURES.flush()
        finally:
            if self._exporter is not None:
                self._exporter.close()
            FAILURES.flush(end=True)

    async def _show(self, exporter: HTTPExporter | TextfileExporter, text: Text) -> None:
        try:
            await exporter.run(text)
        except Exception as exc:  # the mount continues without metrics
            log.error("metrics: %s: %s; they are no longer served", type(exc).__name__, exc)


class HTTPExporter:
    """Metrics over HTTP, at /metrics."""

    def __init__(self, where: str) -> None:
        found = address(where)
        assert found is not None, where  # the parser of the option has checked this
        host, port = found
        try:
            self._sockets = _listening(host, port)
        except OSError as exc:
            raise MountError(f"metrics={where}: {_why(exc)}") from None
        port = self._sockets[0].getsockname()[1]
        self.where = f"http://{f'[{host}]' if ':' in host else host}:{port}/metrics"  # for users

    async def run(self, text: Text) -> None:
        """Serve metrics until cancelled."""
        from zarrfs.metrics.metricserver import serve

        log.info("metrics at %s", self.where)
        await serve(self._sockets, lambda: text(None).encode())

    def close(self) -> None:
        """Close the sockets, also if run() was never called."""
        for sock in self._sockets:
            sock.close()


class TextfileExporter:
    """Metrics in a file for the textfile collector of the node exporter.

    The file is replaced atomically, and removed when the mount ends.
    """

    def __init__(self, where: str) -> None:
        self.where = where
        self._failed = False
        self._ours: tuple[int, ...] | None = None  # the identity of the file that this exporter wrote last
        rule = _not_replaced(where)
        if rule:
            raise MountError(f"metrics={where}: {rule}")
        try:
            descriptor, path = _temporary(where)
            os.close(descriptor)
            os.unlink(path)
        except OSError as exc:
            raise MountError(f"metrics={where}: {reason_of(exc)}") from None

    async def run(self, text: Text) -> None:
        """Write metrics until cancelled."""
        while True:
            data = text(time.time()).encode()
            try:
                await trio.to_thread.run_sync(self._write, data, limiter=CONTROL)
                if self._failed:
                    log.info("metrics=%s: is written again", self.where)
                self._failed = False
            except OSError as exc:
                if not self._failed:
                    log.warning("metrics=%s: %s; tried again every %g s", self.where, exc.strerror or exc, _EVERY)
                self._failed = True
            await trio.sleep(_EVERY)

    def close(self) -> None:
        """Remove the file, because counters of a mount that has ended would mislead."""
        with contextlib.suppress(OSError):
            if _identity(os.lstat(self.where)) == self._ours:  # otherwise it is another mount's file
                os.unlink(self.where)

    def _write(self, text: bytes) -> None:
        """Replace the file atomically. Runs in a worker thread."""
        descriptor, path = _temporary(self.where)
        try:
            with os.fdopen(descriptor, "wb") as file:
                os.fchmod(descriptor, 0o644)
                file.write(text)
                file.flush()
                status = os.fstat(descriptor)
            os.rename(path, self.where)
            self._ours = _identity(status)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(path)
            raise


def _identity(status: os.stat_result) -> tuple[int, ...]:
    """Return the fields that identify a file. They include the mtime because inode numbers are reused."""
    return status.st_dev, status.st_ino, status.st_mtime_ns


def _not_replaced(where: str) -> str:
    """Return why the existing file `where` must not be replaced by metrics; "" if it may, or does not exist."""
    try:
        status = os.lstat(where)
        if stat.S_ISDIR(status.st_mode):
            return "is a directory"
        if not stat.S_ISREG(status.st_mode):
            return "is there already, and no file"
        with open(where, "rb") as file:
            begun = file.read(len(_MARK))
    except FileNotFoundError:
        return ""
    except OSError as exc:
        return reason_of(exc)
    return "" if begun in (b"", _MARK) else "is there already, and has no metrics of zarrfs"


def _temporary(where: str) -> tuple[int, str]:
    """Create a file in the directory of `where` under a name that the collector ignores; return (descriptor, path)."""
    import tempfile

    directory, name = os.path.split(where)
    return tempfile.mkstemp(prefix=f".{name}.", suffix=".new", dir=directory)


def _listening(host: str, port: int) -> list[socket.socket]:
    """Return listening sockets on one port, for all addresses of `host` that this machine has. Raise OSError."""
    found: list[socket.socket] = []
    absent: OSError | None = None
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, _kind, protocol, _name, at in dict.fromkeys(addresses):
            taken = found[0].getsockname()[1] if found and port == 0 else port
            try:
                found.append(_bound(family, protocol, (at[0], taken, *at[2:])))
            except OSError as exc:
                if exc.errno not in _ABSENT:
                    raise
                absent = exc
        if absent is not None and not found:
            raise absent
    except OSError:
        for sock in found:
            sock.close()
        raise
    return found


def _bound(family: int, protocol: int, at: tuple[Any, ...]) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM, protocol)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.bind(at)
        sock.listen(_BACKLOG)
    except BaseException:
        sock.close()
        raise
    return sock


def _why(exc: OSError) -> str:
    if exc.errno == errno.EADDRINUSE:
        return "the port is in use: each mount has its own"
    return reason_of(exc)

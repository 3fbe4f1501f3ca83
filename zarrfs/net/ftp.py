"""FtpSystem: FTP with fsspec's client, one request at a time, on a new connection after a failure."""

from __future__ import annotations

import ftplib
from collections.abc import Callable
from typing import Any, TypeVar

from zarrfs.config.redaction import without_secrets
from zarrfs.errors import AccessDenied
from zarrfs.net.responses import Transient
from zarrfs.net.systems import ThreadSystem

T = TypeVar("T")


class FtpSystem(ThreadSystem):
    """An FTP server.

    fsspec's FTPFileSystem sends all commands over one connection, without a lock. Two threads would read each other's
    replies, so there is only one thread. The other synchronous file systems of fsspec make a connection for each
    request, or use a library that handles connections (smbprotocol, pyarrow).
    """

    def __init__(self, fs: Any, protocol: str, timeout: float, limit: int) -> None:
        super().__init__(fs, protocol, timeout, limit, threads=1)
        self._connect: Callable[[], None] = fs._connect
        fs._connect = self._reconnect  # fsspec also calls it, after a transfer that has not ended properly
        self._lost = False
        self._watch_replies()

    def shown(self, path: str) -> str:
        return without_secrets(f"{self.host(path)}/{path.lstrip('/')}")

    async def _call(self, path: str, function: Callable[..., T], *args: Any) -> T:
        return await super()._call(path, self._in_order, path, function, *args)

    def _in_order(self, path: str, function: Callable[..., T], *args: Any) -> T:
        """Run `function` in the only thread; connect again first if a failure may have disturbed the connection."""
        try:
            if self._lost:
                self._reconnect()
            return function(*args)
        except FileNotFoundError as exc:
            if isinstance(exc.__cause__, ftplib.error_perm):  # fsspec raises this also for an unreadable file
                raise AccessDenied(self.shown(path), str(exc.__cause__)) from exc
            raise
        except Exception as exc:
            self._lost = True  # the next command might take a leftover reply for its own
            if isinstance(exc, EOFError | ftplib.error_temp):
                raise Transient(str(exc) or "the server has ended the connection") from exc
            if isinstance(exc, ftplib.error_perm):
                raise AccessDenied(self.shown(path), str(exc)) from exc
            raise

    def _reconnect(self) -> None:
        self._lost = True
        self._fs.ftp.close()
        self._connect()
        if self._fs.tls is True:
            self._fs.ftp.prot_p()  # fsspec does this for its first connection only
        self._watch_replies()
        self._lost = False

    def _watch_replies(self) -> None:
        """Replace methods of ftplib so that they raise correct errors for replies that fsspec misinterprets.

        A temporary error such as 421, which fsspec reports as "not found", becomes Transient. A directory that the
        server refuses to list, which fsspec reports as empty, becomes AccessDenied.
        """
        ftp = self._fs.ftp
        receive, list_lines = ftp.getresp, ftp.dir

        def getresp() -> str:
            try:
                reply: str = receive()
            except ftplib.error_perm:
                raise
            except ftplib.Error as exc:
                raise Transient(str(exc)) from exc
            return reply

        def dir_(path: str, *args: Any) -> None:  # fsspec calls it if all else fails
            try:
                list_lines(path, *args)
            except ftplib.error_perm as exc:
                if self._fs.info(path)["type"] != "file":
                    raise AccessDenied(self.shown(path), str(exc)) from exc
                raise

        ftp.getresp, ftp.dir = getresp, dir_

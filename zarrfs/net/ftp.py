"""FtpSystem: FTP by fsspec's client, one request at a time, with a new connection after one that has failed."""

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

    fsspec's FTPFileSystem sends every command over its one connection, without a lock: two threads would read each
    other's replies. So there is one thread. The other classes without coroutines that fsspec has make a connection for
    each request, or leave that to a library (smbprotocol, pyarrow).
    """

    def __init__(self, fs: Any, protocol: str, timeout: float, limit: int) -> None:
        super().__init__(fs, protocol, timeout, limit, threads=1)
        self._connect: Callable[[], None] = fs._connect
        fs._connect = self._reconnect  # fsspec, too, calls it after a transfer that does not end as it should
        self._lost = False
        self._watch_replies()

    def shown(self, path: str) -> str:
        return without_secrets(f"{self.host(path)}/{path.lstrip('/')}")

    async def _call(self, path: str, function: Callable[..., T], *args: Any) -> T:
        return await super()._call(path, self._in_order, path, function, *args)

    def _in_order(self, path: str, function: Callable[..., T], *args: Any) -> T:
        """Run `function` in the one thread, first connecting again if need be."""
        try:
            if self._lost:
                self._reconnect()
            return function(*args)
        except FileNotFoundError as exc:
            if isinstance(exc.__cause__, ftplib.error_perm):  # fsspec's error for a file that it may not read, too
                raise AccessDenied(self.shown(path), str(exc.__cause__)) from exc
            raise
        except Exception as exc:
            self._lost = True  # replies may be left over that the next command would take for its own
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
            self._fs.ftp.prot_p()  # as fsspec does for its first connection alone
        self._watch_replies()
        self._lost = False

    def _watch_replies(self) -> None:
        """Raise the errors that replies stand for where fsspec would make something else of them.

        Transient for a passing error, such as 421, which is "not found" for fsspec; AccessDenied for a directory that
        the server refuses to list, which is an empty one.
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

        def dir_(path: str, *args: Any) -> None:  # fsspec's last resort
            try:
                list_lines(path, *args)
            except ftplib.error_perm as exc:
                if self._fs.info(path)["type"] != "file":
                    raise AccessDenied(self.shown(path), str(exc)) from exc
                raise

        ftp.getresp, ftp.dir = getresp, dir_

"""Sftp: sshfs's file system with verified host keys, ranges, symbolic links, and the exceptions of Python."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
from collections.abc import Iterator
from typing import Any

import asyncssh
from sshfs import SSHFileSystem  # type: ignore[import-untyped]

from zarrfs.errors import ReadError

_LINKS = 64  # symbolic links that are followed at a time
_KNOWN_HOSTS = ("~/.ssh/known_hosts", "/etc/ssh/ssh_known_hosts")  # as in ssh(1)
_KEEPALIVE = 15.0  # seconds; after three without an answer the connection is lost
# The connection, or the channel that sshfs keeps using, is lost.
_LOST = (
    ConnectionError, asyncssh.DisconnectError, asyncssh.ChannelOpenError, asyncssh.SFTPNoConnection,
    asyncssh.SFTPConnectionLost,
)  # fmt: skip


@contextlib.contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except asyncssh.HostKeyNotVerifiable:
        raise
    except (asyncssh.PermissionDenied, asyncssh.SFTPPermissionDenied) as exc:
        raise PermissionError(str(exc)) from exc
    except asyncssh.SFTPNoSuchFile as exc:
        raise FileNotFoundError(errno.ENOENT, "not found") from exc
    except _LOST as exc:
        raise ConnectionError(str(exc)) from exc
    except ValueError as exc:
        if "any SFTP connections" not in str(exc):
            raise
        raise ConnectionError(str(exc)) from exc


class Sftp(SSHFileSystem):  # type: ignore[misc]
    """The file system of one server. Its methods are those of fsspec, which runs them on its loop."""

    def __init__(self, host: str, use_listings_cache: bool = False, **given: Any) -> None:
        """Log in, unless the host key is unknown: sshfs by itself accepts any key."""
        files = [file for file in map(os.path.expanduser, _KNOWN_HOSTS) if os.access(file, os.R_OK)]
        try:
            with _translated():  # b"": accept no key
                super().__init__(host, **{"known_hosts": files or b"", "keepalive_interval": _KEEPALIVE, **given})
        except asyncssh.HostKeyNotVerifiable as exc:
            port, named = given.get("port"), given.get("known_hosts")
            rule = (
                f"its host key is not in {named if isinstance(named, str) and named else ' or '.join(_KNOWN_HOSTS)}: "
                f"if it is the right server, add the key (ssh-keyscan {f'-p {port} ' if port else ''}{host}), "
                "or name a file that has it (-o sftp.known_hosts=FILE)"
            )
            raise ReadError(f"sftp://{host}{f':{port}' if port else ''}", rule) from exc

    async def _cat_file(self, path: str, start: int = 0, end: int | None = None) -> bytes:
        with _translated():
            async with self._pool.get() as channel, channel.open(path, "rb") as file:
                data: bytes = await file.read(-1 if end is None else end - start, start)
                return data

    async def _info(self, path: str) -> dict[str, Any]:
        with _translated():
            try:
                return await super()._info(path)  # type: ignore[no-any-return]
            except FileNotFoundError:
                async with self._pool.get() as channel:
                    await channel.lstat(path)
                raise OSError(errno.ELOOP, "is a symbolic link that leads nowhere") from None

    async def _ls(self, path: str, detail: bool = True) -> list[dict[str, Any]]:
        """List a directory; replace symbolic links by their targets.

        A link to `path` itself or to a directory above it is left out, because a walk would never end. A link that
        cannot be followed is kept as a file of unknown size; its reader gets the error.
        """
        with _translated():
            infos = await super()._ls(path)
            links = [info["name"] for info in infos if info["type"] == "link"]
            if not links:
                return infos  # type: ignore[no-any-return]
            found = [info for info in infos if info["type"] != "link"]
            async with self._pool.get() as channel:
                above = [path[:at] for at, letter in enumerate(path) if letter == "/" and at]
                here = await asyncio.gather(*map(channel.realpath, (path, *above)))
                for at in range(0, len(links), _LINKS):
                    targets = (self._target(channel, here, link) for link in links[at : at + _LINKS])
                    found += filter(None, await asyncio.gather(*targets))
            return found

    async def _target(self, channel: Any, here: list[str], link: str) -> dict[str, Any] | None:
        """Return what a listing shows for a link; None if it leads to one of the directories `here` or above it."""
        try:
            info = self._decode_attributes(await channel.stat(link))
        except _LOST:
            raise
        except asyncssh.Error:
            return {"type": "file", "name": link}
        if info["type"] == "directory":
            there = (await channel.realpath(link)).rstrip("/") + "/"
            if any(f"{one}/".startswith(there) for one in here):
                return None
        return {**info, "name": link}

"""Tune the kernel's page cache for a mount: enlarge its read-ahead window, or store pages ahead of requests.

Whether the cached pages of a file are kept or dropped is decided when it is opened, by open() in operations.py.
"""

from __future__ import annotations

import ctypes
import logging
import os
from typing import cast

import pyfuse3
import trio

from zarrfs.errors import ZarrfsError
from zarrfs.store.api import Value
from zarrfs.system import mounts

log = logging.getLogger(__name__)

READ_AHEAD = 128 << 10  # bytes: the kernel's default read-ahead window of a FUSE mount
_WINDOW = 1 << 20  # bytes of the window that is set
_CONNECTIONS = "/sys/fs/fuse/connections"
_BACKGROUND = 128  # read-ahead requests at a time; the session loop has more tasks, so other requests do not wait
_FSOPEN, _FSCONFIG, _FSMOUNT = 430, 431, 432  # system call numbers, the same on every architecture
_CLOEXEC, _CREATE = 1, 6
PUSHED = 8 << 20  # bytes of the largest value to push


async def raise_read_ahead(mountpoint: str) -> bool:
    """Raise the mount's read-ahead window; return False if that fails, as without root.

    Call it only after the mount is up: the INIT handshake resets the window to 128 KiB.
    """
    mount = mounts.mount_at(mountpoint)
    if mount is None:
        return False
    path = f"/sys/class/bdi/{mount.device}/read_ahead_kb"
    try:
        await trio.to_thread.run_sync(_write, path, str(_WINDOW >> 10))
    except OSError as exc:
        log.debug("%s: %s", path, exc)
        return False
    return True


def raise_background(mountpoint: str) -> None:
    """Raise the limit of background requests. Above it (by default 9) the kernel reads ahead one page at a time.

    The user who mounts may do this if the fusectl file system is mounted; root may do it in any case.
    """
    mount = mounts.mount_at(mountpoint)
    if mount is None:
        return
    connection = mount.device.split(":")[1]
    try:
        directory = _connections(connection)
    except OSError as exc:
        log.debug("%s: %s", _CONNECTIONS, exc)
        return
    try:
        for name in ("max_background", "congestion_threshold"):
            descriptor = os.open(f"{connection}/{name}", os.O_WRONLY | os.O_CLOEXEC, dir_fd=directory)
            with open(descriptor, "w") as file:
                file.write(str(_BACKGROUND))
    except OSError as exc:
        log.debug("%s/%s: %s", _CONNECTIONS, connection, exc)
    finally:
        os.close(directory)


def _connections(connection: str) -> int:
    """Open the fusectl file system. If it is not mounted (containers, virtual machines), mount it detached.

    A detached mount is invisible to other processes and ends when its descriptor is closed. Raise OSError if the user
    may not mount. Source: fsopen(2), Linux 5.2.
    """
    if os.path.exists(f"{_CONNECTIONS}/{connection}"):
        return os.open(_CONNECTIONS, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    libc = ctypes.CDLL(None, use_errno=True)

    def call(number: int, *arguments: object) -> int:
        found = int(libc.syscall(number, *arguments))
        if found < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        return found

    context = call(_FSOPEN, b"fusectl", _CLOEXEC)
    try:
        call(_FSCONFIG, context, _CREATE, None, None, 0)
        return call(_FSMOUNT, context, _CLOEXEC, 0)
    finally:
        os.close(context)


async def push_rest(value: Value, inode: int, start: int) -> None:
    """Store the bytes of a small value from `start` on in the page cache. If that fails, the kernel requests them.

    This is for mounts whose read-ahead window cannot be raised: one notification replaces dozens of requests. Large
    files are left to the kernel's own read-ahead, which a push would only disturb.

    Call it before answering the request for the bytes before `start`, so that the kernel finds the rest cached. Never
    push the pages of that request itself, because the kernel holds their locks until the reply.
    """
    try:
        data = await value.read(start, value.size - start)
        await trio.to_thread.run_sync(pyfuse3.notify_store, pyfuse3.InodeT(inode), start, cast(bytes, data))
    except (OSError, ZarrfsError) as exc:
        log.debug("push: %s", exc)


def _write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)

"""Getting more than 128 KiB a request out of the kernel."""

from __future__ import annotations

import logging

import trio

from zarrfs.fuse import mounts

log = logging.getLogger("zarrfs")


async def raise_read_ahead(mountpoint: str, size: int, started: trio.Event) -> None:
    """Set the mount's read-ahead to `size` bytes, where the process may; a no-op otherwise.

    The kernel's answer to INIT lowers it to 128 KiB, so this comes after that.
    """
    await started.wait()
    mount = mounts.mount_at(mountpoint)
    if mount is None:
        return
    path = f"/sys/class/bdi/{mount.device}/read_ahead_kb"
    try:
        await trio.to_thread.run_sync(_write, path, str(size >> 10))
    except OSError as exc:
        log.debug("%s: %s", path, exc)


def _write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)

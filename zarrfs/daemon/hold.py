"""The hold of a mount: it stays until its owners have ended, or its user unmounts it."""

from __future__ import annotations

import os
from collections.abc import Sequence

import trio

from zarrfs.concurrency.tasks import CONTROL
from zarrfs.errors import MountError
from zarrfs.system import mounts

_AGAIN = 1.0  # seconds between attempts to unmount a busy mount, and between looks for a lazy unmount


class Hold:
    """Keeps a mount busy without a request to it, by a descriptor of its root, and unmounts it at the end.

    The end comes when all owners have ended, or with release(). Then the mount is unmounted as soon as it is not in
    use, and never lazily: a reader that opens files by path would find the directory beneath.
    """

    def __init__(self, mountpoint: str, device: int | None, owners: Sequence[int], hold: bool) -> None:
        """`device` is the st_dev of the mount, `owners` are pidfds."""
        self._mountpoint, self._device, self._owners = mountpoint, device, owners
        # O_PATH sends no request, which nobody would answer yet
        self._root = os.open(mountpoint, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC) if hold else -1
        self._ended = trio.Event()

    @property
    def held(self) -> bool:
        """Return whether the mount is kept busy."""
        return self._root >= 0

    def release(self) -> bool:
        """Let the mount be unmounted; return whether it was held."""
        held = self.held
        if held:
            os.close(self._root)
            self._root = -1
            self._ended.set()
        return held

    async def run(self) -> None:
        """Unmount at the end of the hold; return immediately if there is neither a hold nor an owner."""
        if not (self.held or self._owners):
            return
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._watch_owners)
            nursery.start_soon(self._watch_mount)
            await self._ended.wait()
            nursery.cancel_scope.cancel()
        self.release()
        while True:
            try:
                await trio.to_thread.run_sync(mounts.unmount_own, self._mountpoint, self._device, limiter=CONTROL)
            except MountError:
                await trio.sleep(_AGAIN)
            else:
                return

    async def _watch_owners(self) -> None:
        for owner in self._owners:
            await trio.lowlevel.wait_readable(owner)
        if self._owners:
            self._ended.set()

    async def _watch_mount(self) -> None:
        """End the hold after a lazy unmount, because the kernel keeps a detached mount as long as it is in use."""
        while self.held:
            if os.readlink(f"/proc/self/fd/{self._root}") == "/":
                self.release()
            await trio.sleep(_AGAIN)

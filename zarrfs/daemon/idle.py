"""Unmount of an idle mount after idle_timeout=. With an automount it comes back at its next use."""

from __future__ import annotations

import logging
from collections.abc import Callable

import trio

from zarrfs.errors import MountError
from zarrfs.fuse.operations import Operations
from zarrfs.system import mounts

log = logging.getLogger(__name__)

_LEAST, _MOST = 0.05, 5.0  # seconds between checks


async def unmount_when_idle(
    operations: Operations, mountpoint: str, timeout: Callable[[], float | None], device: int | None
) -> None:
    """Unmount after `timeout()` seconds without an open file and without a request; None and 0: never.

    `device` is the st_dev of the mount. A process that has its working directory in the mount makes it busy; the
    unmount is then retried after another timeout. Requests that the kernel answers from its caches are not seen, and
    statfs and extended attributes, which monitoring reads, do not count as use.
    """
    uses, since = operations.all_uses, trio.current_time()
    while True:
        limit = timeout() or None
        await trio.sleep(_MOST if limit is None else min(max(limit / 8, _LEAST), _MOST))
        now = trio.current_time()
        if operations.open_handles or operations.all_uses != uses:
            uses, since = operations.all_uses, now
        elif limit is not None and now - since >= limit:
            try:
                await trio.to_thread.run_sync(mounts.unmount_own, mountpoint, device)
            except (MountError, RuntimeError) as exc:  # the latter: out of threads
                log.debug("idle for %g s, but %s", now - since, exc)
                since = now
            else:
                log.info("%s: unmounted, idle for %g s (idle_timeout=)", mountpoint, round(now - since, 1))
                return

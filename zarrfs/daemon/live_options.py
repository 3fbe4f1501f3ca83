"""Options of a mount that can change while it runs, by `mount -o remount` or `zarrfs refresh --set`."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import trio

from zarrfs.config.options import IGNORED, KERNEL_FLAGS, REMOUNT_ONLY, TABLE, Options, parse, split_commas
from zarrfs.daemon.refreshing import Refresher
from zarrfs.errors import UsageError
from zarrfs.fuse.operations import Operations
from zarrfs.sources import absolute_options

log = logging.getLogger(__name__)

CHANGEABLE = (
    "memory_limit", "array_cache", "cache_size", "cache_min_free", "metadata_ttl", "prefetch",
    "host_requests", "retries", "read_timeout", "log_level", "idle_timeout",
)  # fmt: skip
_NOT_OURS = KERNEL_FLAGS | IGNORED | REMOUNT_ONLY | {"remount", "rw", "ro"}


class LiveOptions:
    """The current options of one mount."""

    def __init__(self, operations: Operations, refresher: Refresher, options: Options) -> None:
        self.options = options
        self._operations, self._refresher = operations, refresher

    async def apply(self, text: str) -> dict[str, Any]:
        """Apply `text`, options as for -o; return {"changed": {name: value}}, or {"error"} with nothing changed."""
        try:
            # in a thread, because a value may name a file on a disk that hangs
            changes = await trio.to_thread.run_sync(changed, self.options, split_commas(text), abandon_on_cancel=True)
        except UsageError as exc:
            return {"error": str(exc)}
        self.options = dataclasses.replace(self.options, **changes)
        of_store = dataclasses.replace(
            self._refresher.options, memory_limit=self.options.memory_limit, array_cache=self.options.array_cache
        )
        of_store = dataclasses.replace(of_store, **changes)
        self._refresher.options = of_store
        for version in self._operations.versions:
            version.adjust(self._refresher.options)
        if "log_level" in changes:
            logging.getLogger("zarrfs").setLevel(self.options.log_level.upper())
        if changes:
            log.info("changed: %s", ", ".join(f"{name}={value}" for name, value in changes.items()))
        return {"changed": changes}


def changed(options: Options, items: list[str]) -> dict[str, Any]:
    """Return the values that `items` change in `options`.

    Raise UsageError for an option that cannot change while mounted, unless its value is the current one.
    """
    changes: dict[str, Any] = {}
    for item in items:
        name = item.partition("=")[0].strip()
        name = name if "." in name else name.replace("-", "_")
        if name in _NOT_OURS or name.startswith(("x-", "X-", "x_", "X_")):
            continue
        new = absolute_options(parse([item]).options)  # absolute paths, as in the options of a mount
        if name not in TABLE:
            for protocol, values in new.storage.items():  # s3.anon=true
                known = options.storage.get(protocol, {})
                if any(known.get(key) != value for key, value in values.items()):
                    raise UsageError(f"option {name}: cannot change while mounted: unmount, and mount again")
            continue
        value, now = getattr(new, name), getattr(options, name)
        if name in CHANGEABLE:
            changes[name] = value
        elif value != now and not (isinstance(now, tuple) and all(one in now for one in value)):
            raise UsageError(f"option {name}: cannot change while mounted: unmount, and mount again")
    return {name: value for name, value in changes.items() if value != getattr(options, name)}

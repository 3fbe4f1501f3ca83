"""Refresh of a mount: plan the source again, open its present version, and make that the visible one.

Open files keep the version in which they were opened (fuse/operations.py). If the source cannot be opened any more,
nothing changes.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import time
from typing import Any

import trio

from zarrfs.concurrency.tasks import CONTROL
from zarrfs.config.options import Options
from zarrfs.daemon import notify
from zarrfs.daemon.invalidation import invalidate_names
from zarrfs.documents.plan import Plan
from zarrfs.errors import SourceError, ZarrfsError, internal_error
from zarrfs.fuse.operations import Operations
from zarrfs.fuse.versions import StoreVersion
from zarrfs.sources import discard, open_plan, plan_source

log = logging.getLogger(__name__)


class Refresher:
    """The refreshes of one mount, one at a time. `options` are those with which a new version is opened."""

    def __init__(self, operations: Operations, plan: Plan, options: Options, device: int | None) -> None:
        """`device` is the st_dev of the mount."""
        self.options = options
        self._operations, self._plan = operations, plan
        self.device = device
        self._lock = trio.Lock()

    @property
    def pending(self) -> bool:
        """Return whether a refresh is queued, which will read the present state of the source."""
        return self._lock.statistics().tasks_waiting > 0

    @property
    def refusal(self) -> str | None:
        """Why this mount cannot be refreshed; None if it can."""
        if self.options.upperdir is None:
            return None
        return (f"{self._plan.source}: a mount with an upper directory is not refreshed: its changes "
                "are those of one version; unmount it and mount it again, "
                "a changed document with another upperdir=")  # fmt: skip

    async def refresh(self, force: bool = False) -> dict[str, Any]:
        """Refresh the mount; return {"result": "refreshed" or "unchanged", "seconds"}, or {"error"}. Never raise.

        An unchanged document is opened again only with `force`, or if a read has found a changed target.
        """
        refusal = self.refusal
        if refusal is not None:
            return {"error": refusal}
        async with self._lock:
            notify.notify_manager("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}")
            began = time.monotonic()
            try:
                result = "refreshed" if await self._refresh(force) else "unchanged"
            except ZarrfsError as exc:
                log.error("not refreshed; the mount shows what it did: %s", exc)
                return {"error": str(exc)}
            except Exception as exc:
                log.exception("not refreshed; the mount shows what it did")
                return {"error": internal_error(exc)}
            finally:
                notify.notify_manager("READY=1")
            seconds = time.monotonic() - began
            log.info("%s: %s in %.2f s", self._plan.source, result, seconds)
            return {"result": result, "seconds": round(seconds, 3)}

    async def _refresh(self, force: bool) -> bool:
        operations, old = self._operations, self._operations.current
        options = dataclasses.replace(self.options, asked_since=time.time())
        plan = await trio.to_thread.run_sync(self._plan_again, options, abandon_on_cancel=True, limiter=CONTROL)
        try:
            if _same(plan, self._plan) and not (force or old.changed):
                return False
            store = open_plan(plan, options)
            if plan.kind != self._plan.kind or store.immutable != old.store.immutable:
                await store.aclose()
                rule = f"was {self._plan.kind} and is {plan.kind} now: unmount it and mount it again"
                raise SourceError(plan.source, rule)
            for warning in plan.warnings:
                log.warning("%s: %s", plan.source, warning)
            version = StoreVersion(store, options)
            known = operations.inodes.known()
            operations.show(version)
        finally:
            discard(plan)  # the store keeps the removed index open
        discard(self._plan)
        self._plan = plan
        await invalidate_names(operations, known)
        return True

    def _check_place(self, plan: Plan) -> None:
        """Raise SourceError if this mount is mounted over its own source, which it then cannot read again."""
        if plan.path is not None and os.stat(plan.path).st_dev == self.device:
            rule = "is hidden by this mount, which lies over it: unmount it and mount it again"
            raise SourceError(plan.source, rule)

    def _plan_again(self, options: Options) -> Plan:
        """Plan the source as it is now. Runs in a thread."""
        named = self._plan.named or self._plan.source
        plan = dataclasses.replace(plan_source(named, options), named=named)
        try:
            self._check_place(plan)
        except BaseException:
            discard(plan)
            raise
        return plan


def _same(plan: Plan, other: Plan) -> bool:
    """Return whether two plans are known to describe the same version of a document."""
    if not plan.digest or plan.digest != other.digest:
        return False
    return plan == dataclasses.replace(
        other, index=plan.index, mtime_ns=plan.mtime_ns, temporary=plan.temporary, digest=plan.digest,
        warnings=plan.warnings,
    )  # fmt: skip

"""All faults of a reference set: by the compiler's rules, and of every record file and row."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator

from zarrfs.config.options import Options
from zarrfs.config.shares import WHOLE, Share
from zarrfs.documents.plan import Plan
from zarrfs.errors import SourceError
from zarrfs.store.api import Fault, Store


def validating(options: Options) -> Options:
    """Return the options under which a source is opened for validation."""
    return dataclasses.replace(options, type=options.type or "references", strict=False, collect=True)


async def faults(store: Store, plan: Plan, share: Share = WHOLE) -> AsyncIterator[Fault]:
    """Yield all faults of a set that was opened with validating(), or a share. SourceError for another source."""
    if not store.is_reference_set or plan.kind == "archive":
        raise SourceError(plan.source, "is no reference set")
    async for fault in store.faults(share):
        yield fault
    if plan.index is not None and not share.index:  # the warnings of a Parquet set are among its faults
        for warning in plan.warnings:
            yield Fault("", warning, True)

"""All faults of a reference set: by the compiler's rules, and of every record file and row."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator
from typing import NamedTuple

from zarrfs.config.options import Options
from zarrfs.documents.plan import Plan
from zarrfs.errors import SourceError
from zarrfs.references.parquet import ParquetStore
from zarrfs.store.api import Store
from zarrfs.store.index import IndexStore


class Fault(NamedTuple):
    """One fault; a warning leaves nothing out of the set."""

    entry: str  # its place: refs["x/0"], gen[2].url, x/refs.0.parq; "" for the whole set
    rule: str
    warning: bool = False


def validating(options: Options) -> Options:
    """Return the options under which a source is opened for validation."""
    return dataclasses.replace(options, type=options.type or "references", strict=False, collect=True)


async def faults(store: Store, plan: Plan) -> AsyncIterator[Fault]:
    """Yield all faults of a set that was opened with validating(). SourceError if it is no reference set."""
    count = len(plan.warnings)
    if isinstance(store, ParquetStore):
        count = 0  # the faults contain them
        async for entry, rule in store.faults():
            yield Fault(entry, rule)
        absences = await store.absences()
        if absences is not None and absences.absent:
            many = f"absent record files: {absences.absent:,} of {absences.record_files:,}"
            yield Fault(absences.first, f"is not there ({many}): its chunks count as absent", True)
    elif isinstance(store, IndexStore) and plan.kind == "references":
        is_document = "validated" in store.meta
        for entry, rule in store.problems():
            yield Fault(entry, rule) if is_document else Fault(entry, f"{rule}: left out of the index", True)
        if not is_document:
            for entry, rule in store.faults():
                yield Fault(entry, rule)
    else:
        raise SourceError(plan.source, "is no reference set")
    for warning in plan.warnings[:count]:
        yield Fault("", warning, True)

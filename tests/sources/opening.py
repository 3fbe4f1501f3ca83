"""Open a source in one call."""

from __future__ import annotations

from zarrfs.config.options import Options
from zarrfs.sources import open_plan, plan_source
from zarrfs.store.api import Store


def open_source(source: str, options: Options, child: bool = True) -> Store:
    """Plan a source and open it."""
    return open_plan(plan_source(source, options, child), options)

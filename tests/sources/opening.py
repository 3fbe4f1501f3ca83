"""Open a source in one call."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from zarrfs.config.options import Options
from zarrfs.sources import open_plan, plan_source
from zarrfs.store.api import Store


def open_source(source: str, options: Options, child: bool = True) -> Store:
    """Plan a source, in a thread, as planning may run trio itself, and open it."""
    with ThreadPoolExecutor(1) as thread:
        plan = thread.submit(plan_source, source, options, child).result()
    return open_plan(plan, options)

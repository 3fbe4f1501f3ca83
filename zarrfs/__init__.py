"""zarrfs: reference sets, JSON file archives and Zarr stores as directories, and as Stores in Python.

    store = zarrfs.open_store("combined.json")
    trio.run(store.get, "t2m/0.0.0")
"""

from __future__ import annotations

from typing import Any

from zarrfs.store.api import Info as Info
from zarrfs.store.api import Kind as Kind
from zarrfs.store.api import Store as Store


def open_store(source: str, **options: Any) -> Store:
    """Open a reference set, an archive or a Zarr store: a path or an fsspec URL.

    Keyword arguments are options by name, with Python values: type="archive", blobs=("/srv/blobs",),
    storage={"s3": {"anon": True}}. Raises SourceError or UsageError. The store's methods run on trio.
    """
    from zarrfs.options import Options
    from zarrfs.sources import open_source

    chosen: Options = Options(**options)
    return open_source(source, chosen)

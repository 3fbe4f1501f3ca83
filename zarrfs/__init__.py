"""zarrfs: reference sets, JSON file archives and Zarr stores as directories, and as Stores in Python.

    store = zarrfs.open_store("combined.json")
    trio.run(store.get, "t2m/0.0.0")
    array = zarrfs.read_array("2016.zarr", "t2m")
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from zarrfs.store.api import Info as Info
from zarrfs.store.api import Kind as Kind
from zarrfs.store.api import Store as Store

if TYPE_CHECKING:
    import numpy as np


def open_store(source: str, **options: Any) -> Store:
    """Open a reference set, an archive or a Zarr store: a path or an fsspec URL.

    Keyword arguments are options by name, with Python values: type="archive", blobs=("/srv/blobs",),
    storage={"s3": {"anon": True}}. Raises SourceError or UsageError. The store's methods run on trio.
    """
    from zarrfs.config.options import Options, check_bounds
    from zarrfs.sources import open_source

    chosen: Options = Options(**options)
    for name, value in options.items():
        check_bounds(name, value, value)
    return open_source(source, chosen)


def read_array(source: str, path: str = "", **options: Any) -> np.ndarray[Any, Any]:
    """Read an array of any Zarr generation into memory: that at `path` in a source; "" where the source is the array.

    Options as of open_store(). A chunk that is not there is the fill value. Raises SourceError or UsageError; NotFound
    where there is no such array; ReadError where its documents are wrong, or a chunk cannot be read or decoded. Code
    that runs on trio awaits zarrfs.views.reading.read_array(store, path) instead.
    """
    import trio

    from zarrfs.views import reading

    async def read() -> np.ndarray[Any, Any]:
        store = open_store(source, **options)
        try:
            return await reading.read_array(store, path)
        finally:
            await store.aclose()

    return trio.run(read)

"""The functions of `import zarrfs` that open a source; keyword arguments are the options of the command line."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from zarrfs.config.effective import settings
from zarrfs.config.keywords import as_items
from zarrfs.python.handle import StoreHandle
from zarrfs.sources import open_source
from zarrfs.store.api import Store

if TYPE_CHECKING:
    import numpy as np

    from zarrfs.python.zarr_store import ZarrStore
    from zarrfs.views.reading import Selection


def open_store(source: str | os.PathLike[str], **options: Any) -> StoreHandle:
    """Open a reference set, an archive or a Zarr store: a path, an fsspec URL, or a name of zarrfs.toml.

    Options are those of `-o`, with the same defaults, files and variables (docs/configuration.md). A value is text as
    on the command line, or a number, a boolean or a list; dotted options are written as
    storage_options={"s3": {"anon": True}}. The returned handle is a context manager that closes the source at the end
    of the block. Raise SourceError or UsageError.
    """
    return StoreHandle(source, options)


def read_array(
    source: str | os.PathLike[str], name: str = "", selection: Selection = (), **options: Any
) -> np.ndarray[Any, Any]:
    """Read an array of any Zarr generation into memory.

    `name` is the path of the array in the source, or "" if the source itself is the array. `selection` is a basic
    index of numpy (numpy.s_[0, 10:20]); only the chunks that it touches are read. Options are those of open_store().
    A missing chunk reads as the fill value. Raise SourceError or UsageError if the source cannot be opened, NotFound
    if it has no such array, ReadError if the array's metadata is invalid or a chunk cannot be read or decoded, and
    IndexError for a selection that is invalid, or outside the array.
    """
    with StoreHandle(source, options) as handle:
        return handle.read_array(name, selection)


def zarr_store(source: str | os.PathLike[str], **options: Any) -> ZarrStore:
    """Open a source as a store of zarr-python 3, for zarr.open() and xarray.open_zarr(), as open_store() does."""
    from zarrfs.python.zarr_store import ZarrStore

    return ZarrStore(StoreHandle(source, options))


def open_trio_store(source: str | os.PathLike[str], **options: Any) -> Store:
    """Open a source as a Store, for a program that runs on trio and awaits its methods.

    Options and errors are those of open_store(). Blocks while the source is opened. The caller closes the store with
    `await store.aclose()`.
    """
    found = settings(as_items(options), [os.fspath(source)])
    return open_source(found.sources[0], found.parsed.options)

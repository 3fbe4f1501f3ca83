"""The functions of `import zarrfs` that open a source; options are those of the command line, by name."""

from __future__ import annotations

import dataclasses
import os
import time
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

    Options are those of `-o`, with their defaults, and the same files and variables are read (docs/configuration.md):
    text as there, or numbers, booleans and lists; dotted ones as storage_options={"s3": {"anon": True}}. The handle
    is a context manager, and closes the source at its end. Raises SourceError or UsageError.
    """
    return StoreHandle(source, options)


def read_array(
    source: str | os.PathLike[str], name: str = "", selection: Selection = (), **options: Any
) -> np.ndarray[Any, Any]:
    """Read an array of any Zarr generation into memory: that at `name` in a source; "" where the source is the array.

    `selection` is a basic index of numpy (numpy.s_[0, 10:20]); only the chunks that it touches are read. Options as of
    open_store(). A chunk that is not there is the fill value. Raises SourceError or UsageError; NotFound where there
    is no such array; ReadError where its documents are wrong, or a chunk cannot be read or decoded.
    """
    with StoreHandle(source, options) as handle:
        return handle.read_array(name, selection)


def zarr_store(source: str | os.PathLike[str], **options: Any) -> ZarrStore:
    """Open a source as a store of zarr-python 3, for zarr.open() and xarray.open_zarr(), as open_store() does."""
    from zarrfs.python.zarr_store import ZarrStore

    return ZarrStore(StoreHandle(source, options))


def open_trio_store(source: str | os.PathLike[str], **options: Any) -> Store:
    """Open a source for a program that runs on trio: the Store itself, whose methods are awaited.

    Options and errors as of open_store(). Blocks while the source is read; await store.aclose() at the end.
    """
    found = settings(as_items(options), [os.fspath(source)])
    return open_source(found.sources[0], dataclasses.replace(found.parsed.options, names_since=time.time()))

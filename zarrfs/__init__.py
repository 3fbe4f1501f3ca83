"""zarrfs: reference sets, JSON file archives and Zarr stores as directories, and in Python without a mount.

    with zarrfs.open_store("combined.json") as store:
        store.get("t2m/0.0.0")
    array = zarrfs.read_array("2016.zarr", "t2m")
    dataset = xarray.open_zarr(zarrfs.zarr_store("combined.json"))
    with zarrfs.mounted("combined.json") as path:
        os.listdir(path)

Keyword arguments are the options of the command line: open_store(source, retries=8, memory_limit="64MiB"). Modules
are imported when a name is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zarrfs.errors import MountError as MountError
    from zarrfs.errors import NotFound as NotFound
    from zarrfs.errors import ReadError as ReadError
    from zarrfs.errors import SourceError as SourceError
    from zarrfs.errors import StoreError as StoreError
    from zarrfs.errors import UsageError as UsageError
    from zarrfs.errors import ZarrfsError as ZarrfsError
    from zarrfs.python.api import open_store as open_store
    from zarrfs.python.api import open_trio_store as open_trio_store
    from zarrfs.python.api import read_array as read_array
    from zarrfs.python.api import zarr_store as zarr_store
    from zarrfs.python.handle import StoreHandle as StoreHandle
    from zarrfs.python.mounting import mounted as mounted
    from zarrfs.store.api import Info as Info
    from zarrfs.store.api import Kind as Kind
    from zarrfs.store.api import Store as Store

_HOMES = {
    "zarrfs.errors": (
        "MountError", "NotFound", "ReadError", "SourceError", "StoreError", "UsageError", "ZarrfsError",
    ),
    "zarrfs.python.api": ("open_store", "open_trio_store", "read_array", "zarr_store"),
    "zarrfs.python.handle": ("StoreHandle",),
    "zarrfs.python.mounting": ("mounted",),
    "zarrfs.store.api": ("Info", "Kind", "Store"),
}  # fmt: skip
_MODULES = {name: module for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'zarrfs' has no attribute {name!r}")
    found = globals()[name] = getattr(import_module(_MODULES[name]), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})

"""zarrfs: reference sets, JSON file archives and Zarr stores as directories, and in Python without a mount.

    dataset = xarray.open_zarr("zarrfs://::combined.json")
    files = fsspec.filesystem("zarrfs", source="combined.json", retries=8)
    with zarrfs.mounted("combined.json") as path:
        os.listdir(path)

Keyword arguments are the options of the command line. Modules are imported when a name is first used.
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
    from zarrfs.python.mounting import mounted as mounted

_HOMES = {
    "zarrfs.errors": (
        "MountError", "NotFound", "ReadError", "SourceError", "StoreError", "UsageError", "ZarrfsError",
    ),
    "zarrfs.python.mounting": ("mounted",),
}  # fmt: skip
_MODULES = {name: module for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'zarrfs' has no attribute {name!r}")
    found = globals()[name] = getattr(import_module(_MODULES[name]), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})

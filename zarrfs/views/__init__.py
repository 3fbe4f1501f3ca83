"""Views: stores that show the Zarr hierarchy of another store in another form.

A view uses Store and the Zarr formats. It must not depend on where its store keeps the bytes.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

from zarrfs.errors import UsageError

if TYPE_CHECKING:
    from zarrfs.config.options import Options
    from zarrfs.store.api import Store

DECODED = 256 << 20  # bytes of decoded chunks to keep in memory


def open_view(store: Store, options: Options, source: str = "") -> Store:
    """Return the view of `store` that options.view names; closing the view closes the store.

    With view=netcdf, `source` determines the name of the file. Raise UsageError if a package is missing.
    """
    if options.view == "arrays":
        from zarrfs.views.arrays import ArraysView

        return ArraysView(store, DECODED)
    if options.view == "netcdf":
        from zarrfs.views.netcdf import NetCDFView, name_of

        if find_spec("h5py") is None:
            raise UsageError(
                "option view=netcdf: needs the package h5py: it comes with the extra netcdf (docs/install.md)"
            )
        return NetCDFView(store, name_of(source), DECODED)
    from zarrfs.views.translated import TranslatedView

    return TranslatedView(store, 2 if options.view == "v2" else 3)

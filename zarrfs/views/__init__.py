"""Views: stores that show the Zarr hierarchy of another store in another form.

A view knows Store and the Zarr formats. It must not know where the bytes of its store lie.
"""

from __future__ import annotations

from zarrfs.config.options import Options
from zarrfs.store.api import Store


def open_view(store: Store, options: Options) -> Store:
    """Return the view of `store` that options.view names; closing the view closes the store."""
    if options.view == "arrays":
        from zarrfs.views.arrays import ArraysView

        return ArraysView(store, options.arrays == "raw", options.array_cache, options.strict)
    from zarrfs.views.translated import open_translated

    return open_translated(store, 2 if options.view == "v2" else 3, options.strict)

"""Views: Stores that show another Store's Zarr hierarchy in another form. open_view() is what sources call."""

from __future__ import annotations

from zarrfs.config.options import Options
from zarrfs.store.api import Store


def open_view(store: Store, options: Options) -> Store:
    """The view of `store` that options.view asks for, which closes it."""
    if options.view == "arrays":
        from zarrfs.views.arrays import ArraysView

        return ArraysView(store, options.arrays == "raw", options.array_cache, options.strict)
    from zarrfs.views.translated import open_translated

    return open_translated(store, 2 if options.view == "v2" else 3, options.strict)

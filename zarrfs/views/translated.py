"""-o view=v2 and view=v3: a hierarchy of any generation as one of that version, by other documents and chunk names."""

from __future__ import annotations

from typing import Literal

from zarrfs.store.api import Store


def open_translated(store: Store, version: Literal[2, 3], strict: bool) -> Store:
    """The hierarchy in `store` as one of `version`."""
    raise NotImplementedError

"""Warn about changed Zarr metadata of which consolidated metadata holds a copy: readers would still see the old copy.

Source: `.zmetadata` of Zarr v2 (consolidated metadata, version 1), and `consolidated_metadata` in a group's zarr.json.
"""

from __future__ import annotations

import json
import logging

from zarrfs.store.api import join_key, split_key
from zarrfs.store.overlay import Overlay

log = logging.getLogger(__name__)

_V2, _V3 = (".zarray", ".zattrs", ".zgroup"), "zarr.json"
_CONSOLIDATED = ".zmetadata"
_MOST = 64 << 20  # bytes of the largest document to read


def is_metadata(key: str) -> bool:
    """Return whether `key` is a metadata document, of which consolidated metadata may hold a copy."""
    return key.endswith((*_V2, _V3)) and split_key(key)[1] in (*_V2, _V3)


async def warn_of_stale(overlay: Overlay, key: str, reported: set[str]) -> None:
    """Warn once about each consolidated document above the changed `key`. `reported` holds those already logged."""
    directory, name = split_key(key)
    while True:
        document = join_key(directory, _V3 if name == _V3 else _CONSOLIDATED)
        if document != key and document not in reported and await _consolidates(overlay, document):
            reported.add(document)
            log.warning("%s: no longer matches the metadata of its nodes (%s): consolidate it again", document, key)
        if not directory:
            return
        directory = split_key(directory)[0]


async def _consolidates(overlay: Overlay, document: str) -> bool:
    """Return whether `document` exists and holds copies of the metadata below it."""
    try:
        size = (await overlay.info(document)).size
        if document.endswith(_CONSOLIDATED):
            return True
        found = json.loads(bytes(await overlay.get(document))) if size is not None and size < _MOST else {}
        return bool(found["consolidated_metadata"])
    except Exception:  # nothing waits for this check, and it must not end the mount: RecursionError of json, say
        return False

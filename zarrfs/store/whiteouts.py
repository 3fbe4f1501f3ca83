"""Names by which an upper directory says what of its lower store is gone.

Source: OCI image layer specification, "Whiteouts": `.wh.NAME` hides the lower entry NAME and nothing of its own
layer; `.wh..wh..opq` in a directory hides everything that the lower one has.
"""

from __future__ import annotations

from zarrfs.store.staging import RESERVED

PREFIX = ".wh."
OPAQUE = ".wh..wh..opq"
RECORD = ".zarrfs-upper"  # in the root of an upper: what it was made over; locked by who mounts it


def whiteout_name(name: str) -> str:
    """The name of the file that hides `name`."""
    return PREFIX + name


def hidden_name(name: str) -> str | None:
    """What the whiteout `name` hides; None for what is no whiteout, or the opaque marker."""
    return name[len(PREFIX) :] if name.startswith(PREFIX) and name != OPAQUE else None


def reserved(name: str) -> bool:
    """Whether `name` means something in an upper, and so cannot be a name in the merged tree."""
    return name.startswith((PREFIX, RECORD, RESERVED))

"""The plan of a source: how to open it, as plain values that a child process can pass to its parent."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True)
class Plan:
    """The plan of a source: everything needed to open it, as values that JSON can hold."""

    source: str  # its name in messages, without credentials
    kind: str  # references, archive, zarr or icechunk
    path: str | None = None  # a local directory
    url: str | None = None  # an fsspec URL
    index: str | None = None  # an index file
    temporary: bool = False  # the index is for one command or mount: open_plan() unlinks it
    origin: str = ""  # URL of a document from the network, which limits the targets it may reach; "" for a local one
    base: str = ""  # the base of relative target URLs, with a trailing "/"
    mtime_ns: int | None = None  # of the document
    lists: bool = True  # whether the server behind `url` can list
    warnings: tuple[str, ...] = ()
    digest: str = ""  # identifies the version of a document or snapshot; "" for a source without one: a directory
    blobs: tuple[str, ...] = ()  # sources of blobs, unless -o blobs= names others
    about: Mapping[str, str] = dataclasses.field(default_factory=dict)  # of a repository: facts for `zarrfs info`
    named: str = ""  # of a mount: the source as the user named it, to plan it again from any directory; never printed


def discard(plan: Plan) -> None:
    """Unlink the index of a plan if it is temporary; open descriptors stay valid."""
    if plan.temporary and plan.index is not None:
        with contextlib.suppress(OSError):
            os.unlink(plan.index)
            os.rmdir(os.path.dirname(plan.index))

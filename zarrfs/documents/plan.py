"""The plan of a source: how it is opened, as plain values that a child process can hand over."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Plan:
    """How to open a source; plain values, ready for JSON."""

    source: str  # as it is shown: without credentials
    kind: str  # references, archive or zarr
    path: str | None = None  # a local directory
    url: str | None = None  # an fsspec URL
    index: str | None = None  # an index file
    temporary: bool = False  # the index is ours alone: open, then unlink
    origin: str = ""  # the URL of a document from the network, which decides what it may reach; "" for a local one
    private: bool = False  # whether that document's server has an address that is not public
    base: str = ""  # what relative target URLs are relative to, with a trailing "/"
    mtime_ns: int | None = None  # of the document
    lists: bool = True  # whether the server behind `url` can list
    warnings: tuple[str, ...] = ()
    digest: str = ""  # SHA-256 of the document, hexadecimal, where its index notes it
    blobs: tuple[str, ...] = ()  # where blobs lie if -o blobs= does not say
    named: str = ""  # of a mount: as the user has named it, to be planned again from any directory; never shown

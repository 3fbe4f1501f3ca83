"""Blobrefs and the places of blobs, without reading any: what compiling an archive needs.

Source: RFC 10 (blobrefs). Apart from blobs.py, so that the child that compiles imports no event loop.
"""

from __future__ import annotations

import enum
import os
import re
import stat
from collections.abc import Iterable

from zarrfs.documents.compressed import is_compressed, is_tar
from zarrfs.errors import UsageError
from zarrfs.store.uri import path_of_uri

_BLOBREF = re.compile(r"sha1-[0-9a-f]{40}|sha256-[0-9a-f]{64}")
_PEEK = 512  # bytes that tell what a file is
_SQLITE = b"SQLite format 3\0"
DUMP = "dump:"  # begins a URL that is a dump tar, whatever its name
NO_BLOBS = "blobs; none given: -o blobs=DIR"  # ends the warning that files cannot be read
FLUX = "flux:"  # begins the names of what a running Flux instance has


class PlaceKind(enum.StrEnum):
    """What a place of blobs is."""

    DIRECTORY = "directory"
    URL = "url"
    DATABASE = "database"  # the content.sqlite of a stopped Flux instance
    DUMP = "dump"  # a tar that flux dump has written
    FLUX = "flux"  # the running Flux instance


def canonical(text: str) -> str | None:
    """The blobref `text` in lower case, or None: nothing else ever becomes part of a path."""
    text = text.lower()
    return text if _BLOBREF.fullmatch(text) else None


def sized(blobref: str, length: int) -> str:
    """The url of a blob that must be `length` bytes long, as indexes hold it and BlobReader takes it."""
    return f"{blobref}:{length}"


def is_flux(text: str) -> bool:
    """Whether a source is asked of the running Flux instance: flux:NAME, flux:job/ID."""
    return text.startswith(FLUX)


def is_remote_dump(place: str) -> bool:
    """Whether a place of blobs is a dump tar behind a URL, said to be one: dump:URL."""
    return place.startswith(DUMP) and "://" in place


def absolute(place: str) -> str:
    """A place of blobs as it is named from any directory."""
    path = None if is_flux(place) or is_remote_dump(place) else path_of_uri(place)
    return place if path is None else os.path.abspath(path)


def place_kind(place: str) -> PlaceKind:
    """What the place of blobs `place` is, as far as its first bytes tell; asks no server.

    UsageError, one line, for what is none, or cannot be read now.
    """
    if place == FLUX:
        return PlaceKind.FLUX
    if is_flux(place):
        raise _unusable(place, "the running Flux instance is flux: and nothing else")
    if is_remote_dump(place):
        return PlaceKind.DUMP
    path = path_of_uri(place)
    if path is None:
        return PlaceKind.URL
    try:
        status = os.stat(path)
        if stat.S_ISDIR(status.st_mode):
            return PlaceKind.DIRECTORY
        if stat.S_ISREG(status.st_mode):
            return _file_kind(place, path)
    except OSError as exc:
        raise _unusable(place, (exc.strerror or str(exc)).lower()) from None
    raise _unusable(place, "not a directory")


def check_places(places: Iterable[str]) -> None:
    """Raise UsageError for a place of blobs that is none."""
    for place in places:
        place_kind(place)


def _file_kind(place: str, path: str) -> PlaceKind:
    with open(path, "rb") as file:
        head = file.read(_PEEK)
    if head.startswith(_SQLITE):
        from zarrfs.archives.contentdb import fault_of

        fault = fault_of(path)
        if fault:
            raise _unusable(place, fault)
        return PlaceKind.DATABASE
    if is_tar(head):
        return PlaceKind.DUMP
    if is_compressed(head):
        raise _unusable(place, "is compressed: a dump tar is read in pieces, so decompress it first")
    raise _unusable(place, "not a directory, nor a content.sqlite of Flux, nor a tar of flux dump")


def _unusable(place: str, why: str) -> UsageError:
    return UsageError(f"option blobs={place}: {why}")

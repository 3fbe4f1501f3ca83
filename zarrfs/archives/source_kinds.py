"""Kinds of blob sources (-o blobs=), recognised by their names before any blob is read.

This module does not import trio, because the child process that compiles archives imports it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

from zarrfs.config.redaction import without_secrets
from zarrfs.errors import UsageError, reason_of
from zarrfs.store.uri import path_of_uri

NO_BLOBS = "blobs; none given: -o blobs=DIR"  # the end of the warning that files cannot be read
FLUX = "flux:"  # prefix of documents of the running Flux instance; alone, that instance as a source of blobs


def is_flux(text: str) -> bool:
    """Return whether a source is the running Flux instance or a document in it: flux:, flux:NAME or flux:job/ID."""
    return text.startswith(FLUX)


def absolute(source: str) -> str:
    """Return the name of a blob source in a form that does not depend on the working directory."""
    path = None if is_flux(source) else path_of_uri(source)
    return source if path is None else os.path.abspath(path)


def check_sources(sources: Iterable[str]) -> None:
    """Raise UsageError for the first name that is not a blob source. No server is contacted."""
    for source in sources:
        if is_flux(source) and source != FLUX:
            raise UsageError(f"option blobs={source}: the running Flux instance is named flux: alone")
        path = None if source == FLUX else path_of_uri(source)
        try:
            if path is not None:
                os.stat(os.path.join(path, ""))  # fails unless it is a directory
        except OSError as exc:
            raise UsageError(f"option blobs={source}: {reason_of(exc)}") from None


def directory_of(source: str) -> str:
    """Return the path of the directory that blobs are written to. Raise UsageError for a source that is read-only."""
    path = None if is_flux(source) else path_of_uri(source)
    if path is None:
        shown = without_secrets(source)
        raise UsageError(f"--blobs {shown}: blobs are written to a directory of this machine; copy them there later")
    return path

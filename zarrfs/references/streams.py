"""Sources as streams of references, with relative URLs made absolute where they are to be read elsewhere."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import AsyncIterator, Callable, Sequence
from typing import TYPE_CHECKING

from zarrfs.config import urls
from zarrfs.config.redaction import without_secrets
from zarrfs.errors import ReadError, SourceError
from zarrfs.store.api import Reference, Store
from zarrfs.store.destination import is_utf8

if TYPE_CHECKING:
    from zarrfs.documents.plan import Plan
    from zarrfs.references.output import Output

NOT_UTF8 = "its path is not UTF-8, which a URL cannot hold"
_KNOWN = 65_536  # URLs whose absolute form is remembered


def reference_set(store: Store, plan: Plan) -> Store:
    """`store` itself, if it is a reference set. SourceError otherwise."""
    if plan.kind == "archive":
        raise SourceError(plan.source, "is a file archive, not a reference set")
    if not store.is_reference_set:
        raise SourceError(plan.source, "is no reference set; zarrfs refs from-store makes one of a Zarr store")
    return store


async def entries(store: Store, plan: Plan) -> AsyncIterator[Reference]:
    """The references of a set as other forms have them: without what makes its `.zmetadata` a set in Parquet."""
    parquet = plan.index is None
    async for reference in store.references():
        if parquet and reference.key == ".zmetadata" and reference.data is not None:
            document = json.loads(bytes(reference.data))
            document.pop("record_size", None)
            reference = reference._replace(data=json.dumps(document).encode())
        yield reference


def written_urls(plan: Plan, output: Output, alone: bool = True) -> Callable[[str], str]:
    """What becomes of the URLs of a set that is written to `output`, `alone` or with others.

    A relative one stays relative where the copy takes it from the same place, else it is made absolute.
    """
    if output.format == "index" and alone:  # which remembers what its URLs are relative to
        return lambda url: url
    if output.base is not None and _same_place(plan.base, output.base):
        return lambda url: url
    return functools.lru_cache(_KNOWN)(lambda url: absolute(url, plan.base))


async def rewritten(references: AsyncIterator[Reference], change: Callable[[str], str]) -> AsyncIterator[Reference]:
    """`references` with every URL changed."""
    async for reference in references:
        if reference.data is None:
            url = change(reference.url)
            if url is not reference.url:
                reference = reference._replace(url=url)
        yield reference


def absolute(url: str, base: str) -> str:
    """`url` as it is meant in a set whose relative URLs are taken from `base`; no credentials of `base` in it.

    As transfer.targets.Targets takes them. ReadError where `base` is a chain of URLs and has no directory, or is
    not UTF-8.
    """
    protocols = urls.protocols(url)
    if protocols and protocols not in (["file"], ["local"]):
        return url
    path = urls.file_path(url) if protocols else url
    if path.startswith("/"):
        return url
    directory = local_path(base)
    if directory is not None:
        joined = os.path.join(directory, path)
        if not is_utf8(joined):
            raise ReadError(url, f"a relative target in {directory}: {NOT_UTF8}")
        return f"file://{joined}" if protocols else joined
    remote = urls.join(without_secrets(base), path)
    if remote is None:
        raise ReadError(url, f"a relative target in {without_secrets(base)}: say --base")
    return remote


def notes(plan: Plan) -> dict[str, str]:
    """What an index says of a set that was written as one: as sources.prepare notes it."""
    return _notes(plan.source, without_secrets(plan.base), plan.mtime_ns, plan.origin)


def notes_of_many(plans: Sequence[Plan], output: Output) -> dict[str, str]:
    """notes() of a set made of several, whose URLs are absolute."""
    times = [plan.mtime_ns for plan in plans if plan.mtime_ns is not None]
    origins = {plan.origin for plan in plans}
    origin = origins.pop() if len(origins) == 1 else ""  # who puts them together answers for all of them
    return _notes(os.path.abspath(output.path), output.base or "", max(times, default=None), origin)


def _notes(source: str, base: str, mtime_ns: int | None, origin: str) -> dict[str, str]:
    return {
        "kind": "references",
        "source": source,
        "warnings": "[]",  # they were told when it was written
        "base": base,
        "mtime_ns": "" if mtime_ns is None else str(mtime_ns),
        "origin": origin,
    }


def _same_place(base: str, directory: str) -> bool:
    found = local_path(base)
    return found is not None and os.path.realpath(found) == os.path.realpath(directory)


def local_path(name: str) -> str | None:
    """The absolute local path that a source, or a base, is; None where it is a URL of another kind."""
    found = urls.protocols(name)
    if found and found not in (["file"], ["local"]):
        return None
    return os.path.abspath(urls.file_path(name) if found else name)

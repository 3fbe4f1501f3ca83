"""Commit: write a source with the changes of an upper directory as a new source, whole or not at all."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from zarrfs.copying.commit_tree import MergedTree
from zarrfs.errors import SourceError, UsageError
from zarrfs.references.output import STDOUT, archive_form, compressor, form_of_name
from zarrfs.references.writer import local_path
from zarrfs.store.destination import placed
from zarrfs.store.overlay import Overlay

if TYPE_CHECKING:
    from zarrfs.copying.commit_writers import NewSource
    from zarrfs.documents.plan import Plan

FORMATS = ("references", "archive")


def new_format(path: str, said: str | None, kind: str) -> str:
    """Return the format of a new source `path`: `said` (--format), or if that is None the format its name implies.

    `kind` is the kind of the old source: a JSON document becomes an archive if the old source is one, else a reference
    set. Raise UsageError if the name implies no format.
    """
    if path == STDOUT:
        raise UsageError("--output -: standard output cannot hold what is committed; name a file or directory")
    if said is not None:
        return said
    name = path.rstrip("/")
    if name.lower().endswith((".zip", ".zarr")) or name != path or os.path.isdir(path):
        raise UsageError(f"{path}: commit writes a document; `zarrfs copy SOURCE DIR -o upperdir=` writes a directory")
    if form_of_name(name) is None:
        raise UsageError(f"{path}: its name has no known ending; give --format {'|'.join(FORMATS)}")
    return "archive" if kind == "archive" else "references"


async def commit(
    overlay: Overlay, plan: Plan, new: NewSource, warn: Callable[[str], None], skip_unsupported: bool = False,
    watch: Callable[[MergedTree], AbstractContextManager[None]] = lambda tree: contextlib.nullcontext(),
) -> None:  # fmt: skip
    """Write the merged tree of `overlay`, over the source of `plan`, to `new`, which appears when it is complete.

    Calls `warn` with a line for each entry that is left out, and enters `watch(tree)` while it writes. Raises
    UsageError if `new` may not be written to, or overlaps with the input; SourceError if writing fails, if a writable
    mount uses the upper directory, or if an entry cannot be read or cannot be represented in the format.
    """
    if overlay.upper.plain:
        raise UsageError(f"{overlay.upper.path}: is the source itself, which contains the changes already")
    _check_place(new, overlay, plan)
    overlay.upper.lock(False)
    tree = MergedTree(overlay, plan.source, warn, skip_unsupported)
    try:
        with contextlib.closing(tree), watch(tree):
            if new.format == "references":
                await _commit_set(tree, plan, new)
            else:
                await _commit_archive(tree, new)
        for entry, rule in (*await overlay.problems(), *(await overlay.left_out("")).items()):
            warn(f"{entry}: {rule}: left out")
    except OSError as exc:
        raise SourceError(new.path, f"cannot be written: {exc.strerror or exc}") from exc


async def _commit_set(tree: MergedTree, plan: Plan, new: NewSource) -> None:
    from zarrfs.copying.commit_writers import DataFile, references_of
    from zarrfs.references.writer import JsonWriter

    with contextlib.ExitStack() as stack:
        data = stack.enter_context(DataFile(new.path, new.relative))
        raw = stack.enter_context(placed(new.path, "references", new.replace))
        with compressor(raw, form_of_name(new.path) or "json") as file:
            writer = JsonWriter(file)
            async for reference in references_of(tree, plan, data, new):
                writer.add(reference)
            writer.commit()
        data.finish()


async def _commit_archive(tree: MergedTree, new: NewSource) -> None:
    from zarrfs.archives.writer import BlobDirectory, archive_rule, write_archive

    form = archive_form(new.path)
    with contextlib.ExitStack() as stack:
        raw = stack.enter_context(placed(new.path, "archive", new.replace))
        blobs = None if new.blobs is None else stack.enter_context(BlobDirectory(new.blobs))
        with compressor(raw, form) as file:
            entries = tree.with_values_ahead(tree.nodes(archive_rule))
            await write_archive(entries, tree, file.write, blobs, new.inline)
            if blobs is not None:
                blobs.finish()


def _check_place(new: NewSource, overlay: Overlay, plan: Plan) -> None:
    """Raise UsageError if the output would be inside the input, or would replace it."""
    upper, source = overlay.upper.path, local_path(plan.source)
    path = os.path.realpath(new.path)
    for name, place in ("--output", path), ("--blobs", new.blobs):
        if place is None:
            continue
        for what, other in ("the upper directory", upper), ("the source", source):
            if other is None:
                continue
            if _within(os.path.realpath(place), other):
                raise UsageError(f"{name} {place}: is {what} {other}, or lies inside it")
            if name == "--output" and _within(os.path.realpath(other), path):
                raise UsageError(f"{name} {place}: {what} {other} lies inside it")


def _within(path: str, other: str) -> bool:
    """Return whether `path` is `other` or is below it, also through bind mounts and links."""
    if not os.path.exists(other):
        return False
    return any(os.path.exists(above) and os.path.samefile(above, other) for above in _upwards(path))


def _upwards(path: str) -> Iterator[str]:
    yield path
    while path != os.path.dirname(path):
        path = os.path.dirname(path)
        yield path

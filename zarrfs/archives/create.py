"""Creation of a file archive from files and directories. Sources: RFC 37 (file archive format), RFC 10 (blobrefs)."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterable
from typing import IO

from zarrfs.archives.blob_writer import BlobDirectory
from zarrfs.archives.document_writer import DocumentWriter
from zarrfs.archives.pack_tree import CreateOptions, EntryWriter, Progress, TreeWalk, named, opened
from zarrfs.errors import UsageError, ZarrfsError, reason_of


def create(
    base: str, paths: Iterable[str], out: IO[bytes], options: CreateOptions, progress: Progress,
    warn: Callable[[str], None],
) -> None:  # fmt: skip
    """Archive `paths`, which are relative to the directory `base`, into `out` and a directory of blobs. Blocks.

    Directories are archived recursively, and no entry twice. `warn` is called with each warning.

    Raise SourceError, which names the entry and the rule, for an entry that cannot be read or archived; UsageError
    for invalid paths or options, and for a file that needs a blob if options.blobs is not set; OSError if `out` cannot
    be written.
    """
    options.check()
    wanted = named(paths)
    with contextlib.ExitStack() as stack:
        try:
            descriptor = os.open(base, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as exc:
            raise UsageError(f"{base}: {reason_of(exc)}") from exc
        stack.callback(os.close, descriptor)
        blobs: BlobDirectory | None = None
        if options.blobs is not None:
            blobs = stack.enter_context(BlobDirectory(options.blobs, options.algorithm))
            blobs.open()
            status = os.stat(options.blobs)
            options = dataclasses.replace(options, own=options.own | {(status.st_dev, status.st_ino)})
        writer = DocumentWriter(out, options.dictionary)
        entries = EntryWriter(descriptor, base, options, blobs, writer, progress, warn)
        for part in TreeWalk(descriptor, base, options).parts(wanted, warn):
            entries.add(part)
        if blobs is not None and options.sync:
            blobs.finish()
        writer.close()


def expect(base: str, paths: Iterable[str], options: CreateOptions, progress: Progress) -> None:
    """Count the files and bytes that create() will read, for a progress bar. Runs in a thread beside create().

    Errors are ignored, because create() reports them.
    """
    files = size = 0
    with contextlib.suppress(ZarrfsError, OSError):
        descriptor = os.open(base, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            walk = TreeWalk(descriptor, base, dataclasses.replace(options, skip_unsupported=True))
            for _own, directory, _identity, names, _others in walk.parts(named(paths), lambda text: None):
                files += len(names)
                with opened(descriptor, base, directory, os.O_RDONLY | os.O_DIRECTORY) as at:
                    found = [os.stat(name, dir_fd=at, follow_symlinks=False) for name in names]
                whole = options.all_inline
                size += sum(one.st_size if whole else min(one.st_size, one.st_blocks * 512) for one in found)
        finally:
            os.close(descriptor)
        progress.expected_files, progress.expected_bytes = files, size

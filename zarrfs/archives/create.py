"""Creation of a file archive from files and directories. Sources: RFC 37 (file archive format), RFC 10 (blobrefs)."""

from __future__ import annotations

import base64
import codecs
import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterable, Iterator
from typing import IO, Any

import orjson

from zarrfs.archives.blob_writer import BlobDirectory
from zarrfs.archives.document_writer import DocumentWriter, cut, encoded_around
from zarrfs.archives.dump_writer import DumpWriter, TaskBlobs, memory_of
from zarrfs.archives.pack_tree import (
    MANY,
    CreateOptions,
    EntryBatch,
    EntryReader,
    LargeFile,
    TreeWalk,
    changed,
    named,
    reading,
)  # fmt: skip
from zarrfs.errors import UsageError, ZarrfsError, reason_of
from zarrfs.system.beneath import FileVersion, file_version
from zarrfs.system.sparse import each_extent
from zarrfs.system.workers import Workers

_PIECE = 3 << 18  # bytes of an inline file encoded at a time; base64 needs a multiple of 3


@dataclasses.dataclass
class Progress:
    """The progress of create(). The expected counts are None until expect() has counted all entries."""

    files: int = 0
    bytes: int = 0
    expected_files: int | None = None
    expected_bytes: int | None = None


def create(
    base: str, paths: Iterable[str], out: IO[bytes], options: CreateOptions, progress: Progress,
    warn: Callable[[str], None], begun: Callable[[], None] | None = None,
) -> None:  # fmt: skip
    """Archive `paths`, which are relative to the directory `base`, into `out` and a directory of blobs. Blocks.

    `out` gets the document, or with options.dump a dump tar of the document and its blobs; then `out` must be an empty
    file with a descriptor. Directories are archived recursively, and no entry twice. Files are read in forked
    processes, or in this one if options.processes() is 1 or a single task reads them all. `begun` is called after the
    last fork, and may start threads: a child forked while a thread holds a lock would inherit that lock and never see
    it released. `warn` is called with each warning.

    Raise SourceError, which names the entry and the rule, for an entry that cannot be read or archived; UsageError
    for invalid paths or options, and for a file that needs a blob if neither options.blobs nor options.dump is set;
    OSError if `out` cannot be written.
    """
    options.check()
    wanted = named(paths)
    with contextlib.ExitStack() as stack:
        try:
            descriptor = os.open(base, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as exc:
            raise UsageError(f"{base}: {reason_of(exc)}") from exc
        stack.callback(os.close, descriptor)
        blobs: BlobDirectory | TaskBlobs | None = None
        dump = None
        text = out
        if options.dump is not None:
            blobs, dump = TaskBlobs(options.algorithm), DumpWriter(out, options.dump)
            text = stack.enter_context(_beside(out))
        elif options.blobs is not None:
            blobs = stack.enter_context(BlobDirectory(options.blobs, options.algorithm))
            blobs.open()
            status = os.stat(options.blobs)
            options = dataclasses.replace(options, own=options.own | {(status.st_dev, status.st_ino)})
        reader = EntryReader(descriptor, base, options, blobs)
        memory = 0 if dump is None else memory_of(options.region)
        workers = stack.enter_context(contextlib.closing(Workers(reader.run, options.processes(), memory)))
        if begun is not None:
            workers.start()
            begun()
        writer = DocumentWriter(text, options.dictionary)
        task_bytes = 0 if blobs is None else blobs.room() // 2
        document = _Document(base, options, reader, workers, writer, dump, task_bytes, progress)
        tasks = TreeWalk(descriptor, base, options, reader).tasks(wanted, warn)
        for (found, files, size, warnings), held in workers.map(tasks):
            for warning in warnings:
                warn(warning)
            for part in found:
                document.add(part, held)
            progress.files += files
            progress.bytes += size
        if isinstance(blobs, BlobDirectory) and options.sync:
            blobs.finish()
        writer.close()
        if dump is not None:
            dump.close(text)


def expect(base: str, paths: Iterable[str], options: CreateOptions, progress: Progress) -> None:
    """Count the files and bytes that create() will read, for a progress bar. Runs in a thread beside create().

    Errors are ignored, because create() reports them.
    """
    files = size = 0
    with contextlib.suppress(ZarrfsError, OSError):
        descriptor = os.open(base, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            reader = EntryReader(descriptor, base, dataclasses.replace(options, skip_unsupported=True), None)
            for _own, directory, _identity, names, _others in TreeWalk(descriptor, base, options, reader).parts(
                named(paths), lambda text: None
            ):
                files += len(names)
                with reader.opened(directory, os.O_RDONLY | os.O_DIRECTORY) as at:
                    found = [os.stat(name, dir_fd=at, follow_symlinks=False) for name in names]
                whole = options.all_inline
                size += sum(one.st_size if whole else min(one.st_size, one.st_blocks * 512) for one in found)
        finally:
            os.close(descriptor)
        progress.expected_files, progress.expected_bytes = files, size


class _Document:
    """The writer of the entries in order; a large file is read and written in pieces."""

    def __init__(
        self, base: str, options: CreateOptions, reader: EntryReader, workers: Workers, writer: DocumentWriter,
        dump: DumpWriter | None, task_bytes: int, progress: Progress,
    ) -> None:  # fmt: skip
        self._base, self._options, self._reader, self._workers = base, options, reader, workers
        self._writer, self._dump, self._progress = writer, dump, progress
        self._task_bytes = task_bytes  # bytes of a large file that one task reads

    def add(self, found: EntryBatch | LargeFile, memory: memoryview) -> None:
        """Write a batch of entries and their blobs, which are in `memory`, or read and write a large file."""
        if len(found) == 2:
            entries, blobs = found
            self._writer.add(entries)
            if self._dump is not None:
                self._dump.add(blobs, memory)
            return
        path, fields, version = found
        with self._reader.opened(path) as descriptor:
            if file_version(os.fstat(descriptor)) != version:
                raise changed(self._base, path)
            if self._options.all_inline or fields["size"] <= self._options.inline:
                self._add_inline(descriptor, path, fields)
            else:
                self._add_blobvec(descriptor, path, fields, version)
            if file_version(os.fstat(descriptor)) != version:
                raise changed(self._base, path)

    def _add_blobvec(self, descriptor: int, path: str, fields: dict[str, Any], version: FileVersion) -> None:
        before, after = encoded_around(path, fields | {"encoding": "blobvec"}, self._options.dictionary)
        self._writer.add(before)
        mark = b"["
        regions = cut(self._extents(descriptor, path, fields["size"]), self._options.region)
        tasks = (("regions", (path, version, task)) for task in _grouped(regions, self._task_bytes))
        for (found, blobs), memory in self._workers.map(tasks):
            if self._dump is not None:
                self._dump.add(blobs, memory)
            self._writer.append(mark + orjson.dumps(found)[1:-1])
            self._progress.bytes += sum(length for _start, length, _name in found)
            mark = b","
        self._writer.append((b"]" if mark == b"," else b"[]") + after)

    def _add_inline(self, descriptor: int, path: str, fields: dict[str, Any]) -> None:
        size = fields["size"]
        text = self._is_text(descriptor, path, size)
        fields = fields | {"encoding": "utf-8" if text else "base64"}
        before, after = encoded_around(path, fields, self._options.dictionary)
        self._writer.add(before + b'"')
        decoder = codecs.getincrementaldecoder("utf-8")()
        try:
            for piece in self._pieces(descriptor, path, size):
                shown = orjson.dumps(decoder.decode(piece))[1:-1] if text else base64.b64encode(piece)
                self._writer.append(shown)
                self._progress.bytes += len(piece)
            decoder.decode(b"", final=text)
        except UnicodeDecodeError:
            raise changed(self._base, path) from None
        self._writer.append(b'"' + after)

    def _is_text(self, descriptor: int, path: str, size: int) -> bool:
        """Return whether a file is UTF-8 without NUL. It is read a second time later, as it may not fit in memory."""
        decoder = codecs.getincrementaldecoder("utf-8")()
        try:
            for piece in self._pieces(descriptor, path, size):
                if b"\0" in piece:
                    return False
                decoder.decode(piece)
            decoder.decode(b"", final=True)
        except UnicodeDecodeError:
            return False
        return True

    def _extents(self, descriptor: int, path: str, size: int) -> Iterator[tuple[int, int]]:
        with reading(self._base, path):
            yield from each_extent(descriptor, size)

    def _pieces(self, descriptor: int, path: str, size: int) -> Iterator[bytes]:
        for at in range(0, size, _PIECE):
            with reading(self._base, path):
                piece = os.pread(descriptor, min(_PIECE, size - at), at)
            if len(piece) != min(_PIECE, size - at):
                raise changed(self._base, path)
            yield piece


def _beside(out: IO[bytes]) -> IO[bytes]:
    """Open an unnamed temporary file in the directory of `out`."""
    import tempfile

    path = getattr(out, "name", None)
    return tempfile.TemporaryFile(dir=(os.path.dirname(path) or None) if isinstance(path, str) else None)


def _grouped(regions: Iterable[tuple[int, int]], task_bytes: int) -> Iterator[list[tuple[int, int]]]:
    """Group regions into lists of about `task_bytes` bytes in total, and of 1,024 regions at most."""
    group: list[tuple[int, int]] = []
    size = 0
    for start, stop in regions:
        group.append((start, stop))
        size += stop - start
        if size >= task_bytes or len(group) * 4 >= MANY:
            yield group
            group, size = [], 0
    if group:
        yield group

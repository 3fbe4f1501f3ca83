"""Files and directories as a file archive. Sources: RFC 37 (file archive format), RFC 10 (blobrefs)."""

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
from zarrfs.archives.contents import MANY, Contents, Identity, Later, Written, identity_of
from zarrfs.archives.create_options import Making as Making
from zarrfs.archives.create_options import Progress as Progress
from zarrfs.archives.create_options import changed, reading
from zarrfs.archives.document_writer import Writer, cut, encoded_around
from zarrfs.archives.dump_writer import DumpWriter, TaskBlobs, memory_of
from zarrfs.archives.inputs import Walk, named
from zarrfs.errors import UsageError, ZarrfsError
from zarrfs.system.sparse import each_extent
from zarrfs.system.workers import Workers

_PIECE = 3 << 18  # bytes of a file that is in the document: a multiple of 3, for base64


def create(
    base: str, paths: Iterable[str], out: IO[bytes], making: Making, progress: Progress, warn: Callable[[str], None],
    begun: Callable[[], None] | None = None,
) -> None:  # fmt: skip
    """Write what `paths`, relative to the directory `base`, name to `out`, and to blobs; blocks.

    `out` becomes the document, or a dump tar of it and its blobs, and is then an empty file of the system.
    Directories are taken with all that is in them; nothing twice. Processes are forked for the reading. SourceError
    for what cannot be read or represented, naming the entry and the rule; UsageError for paths that cannot be meant,
    and where a blob has no place; OSError of `out`. `begun` is called when all processes are forked, and may start
    threads: of one that was there before, a forked process could have a lock that nobody gives back.
    """
    making.check()
    wanted = named(paths)
    with contextlib.ExitStack() as stack:
        try:
            descriptor = os.open(base, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as exc:
            raise UsageError(f"{base}: {(exc.strerror or str(exc)).lower()}") from exc
        stack.callback(os.close, descriptor)
        blobs: BlobDirectory | TaskBlobs | None = None
        dump = None
        text = out
        if making.dump is not None:
            blobs, dump = TaskBlobs(making.algorithm), DumpWriter(out, making.dump)
            text = stack.enter_context(_beside(out))
        elif making.blobs is not None:
            blobs = stack.enter_context(BlobDirectory(making.blobs, making.algorithm))
            blobs.open()
            status = os.stat(making.blobs)
            making = dataclasses.replace(making, own=making.own | {(status.st_dev, status.st_ino)})
        contents = Contents(descriptor, base, making, blobs)
        memory = 0 if dump is None else memory_of(making.region)
        workers = stack.enter_context(contextlib.closing(Workers(contents.run, making.processes(), memory)))
        if begun is not None:
            workers.start()
            begun()
        writer = Writer(text, making.dictionary)
        together = 0 if blobs is None else blobs.room() // 2
        document = _Document(base, making, contents, workers, writer, dump, together, progress)
        tasks = Walk(descriptor, base, making, contents).tasks(wanted, warn)
        for (found, files, size, warnings), held in workers.map(tasks):
            for warning in warnings:
                warn(warning)
            for part in found:
                document.add(part, held)
            progress.files += files
            progress.bytes += size
        if isinstance(blobs, BlobDirectory) and making.sync:
            blobs.finish()
        writer.close()
        if dump is not None:
            dump.close(text)


def expect(base: str, paths: Iterable[str], making: Making, progress: Progress) -> None:
    """Count what create() is to read, in a thread beside it, for those who wait; what fails is create()'s to tell."""
    files = size = 0
    with contextlib.suppress(ZarrfsError, OSError):
        descriptor = os.open(base, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            contents = Contents(descriptor, base, dataclasses.replace(making, skip_unsupported=True), None)
            for _own, directory, _identity, names, _others in Walk(descriptor, base, making, contents).parts(
                named(paths), lambda text: None
            ):
                files += len(names)
                with contents.opened(directory, os.O_RDONLY | os.O_DIRECTORY) as at:
                    found = [os.stat(name, dir_fd=at, follow_symlinks=False) for name in names]
                whole = making.all_inline
                size += sum(one.st_size if whole else min(one.st_size, one.st_blocks * 512) for one in found)
        finally:
            os.close(descriptor)
        progress.expected_files, progress.expected_bytes = files, size


class _Document:
    """What is written: entries, and the large files among them in pieces."""

    def __init__(
        self, base: str, making: Making, contents: Contents, workers: Workers, writer: Writer,
        dump: DumpWriter | None, together: int, progress: Progress,
    ) -> None:  # fmt: skip
        self._base, self._making, self._contents, self._workers = base, making, contents, workers
        self._writer, self._dump, self._progress = writer, dump, progress
        self._together = together  # bytes of a large file that one task reads

    def add(self, found: Written | Later, memory: memoryview) -> None:
        """Write entries and the blobs that are held in `memory`, or read and write a large file."""
        if len(found) == 2:
            entries, blobs = found
            self._writer.add(entries)
            if self._dump is not None:
                self._dump.add(blobs, memory)
            return
        path, fields, identity = found
        with self._contents.opened(path) as descriptor:
            if identity_of(os.fstat(descriptor)) != identity:
                raise changed(self._base, path)
            if self._making.all_inline or fields["size"] <= self._making.inline:
                self._add_inline(descriptor, path, fields)
            else:
                self._add_blobvec(descriptor, path, fields, identity)
            if identity_of(os.fstat(descriptor)) != identity:
                raise changed(self._base, path)

    def _add_blobvec(self, descriptor: int, path: str, fields: dict[str, Any], identity: Identity) -> None:
        before, after = encoded_around(path, fields | {"encoding": "blobvec"}, self._making.dictionary)
        self._writer.add(before)
        mark = b"["
        regions = cut(self._extents(descriptor, path, fields["size"]), self._making.region)
        tasks = (("regions", (path, identity, task)) for task in _grouped(regions, self._together))
        for (found, blobs), memory in self._workers.map(tasks):
            if self._dump is not None:
                self._dump.add(blobs, memory)
            self._writer.go_on(mark + orjson.dumps(found)[1:-1])
            self._progress.bytes += sum(length for _start, length, _name in found)
            mark = b","
        self._writer.go_on((b"]" if mark == b"," else b"[]") + after)

    def _add_inline(self, descriptor: int, path: str, fields: dict[str, Any]) -> None:
        size = fields["size"]
        text = self._is_text(descriptor, path, size)
        fields = fields | {"encoding": "utf-8" if text else "base64"}
        before, after = encoded_around(path, fields, self._making.dictionary)
        self._writer.add(before + b'"')
        decoder = codecs.getincrementaldecoder("utf-8")()
        try:
            for piece in self._pieces(descriptor, path, size):
                shown = orjson.dumps(decoder.decode(piece))[1:-1] if text else base64.b64encode(piece)
                self._writer.go_on(shown)
                self._progress.bytes += len(piece)
            decoder.decode(b"", final=text)
        except UnicodeDecodeError:
            raise changed(self._base, path) from None
        self._writer.go_on(b'"' + after)

    def _is_text(self, descriptor: int, path: str, size: int) -> bool:
        """Whether a file is UTF-8 without NUL: it is read twice rather than held."""
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
    """A file without a name, where `out` is."""
    import tempfile

    path = getattr(out, "name", None)
    return tempfile.TemporaryFile(dir=(os.path.dirname(path) or None) if isinstance(path, str) else None)


def _grouped(regions: Iterable[tuple[int, int]], together: int) -> Iterator[list[tuple[int, int]]]:
    """Lists of regions: of about so many bytes together, unless one is larger, or a thousand."""
    group: list[tuple[int, int]] = []
    size = 0
    for start, stop in regions:
        group.append((start, stop))
        size += stop - start
        if size >= together or len(group) * 4 >= MANY:
            yield group
            group, size = [], 0
    if group:
        yield group

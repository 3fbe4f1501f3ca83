"""Where a reference set is written, and in which form: JSON, compressed or not, Parquet, or an index.

What is written has a temporary name beside the final one until it is whole and on the disk.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import secrets
import shutil
import sqlite3
import stat
import sys
from collections.abc import Callable, Iterator
from typing import IO, Any, cast

from zarrfs.errors import SourceError, UsageError
from zarrfs.stage.jsonwriter import JsonWriter
from zarrfs.store.api import Reference
from zarrfs.store.indexfile import IndexWriter

STDOUT = "-"
FORMATS = ("json", "json.gz", "json.zst", "json.xz", "json.bz2", "parquet", "index")
_ENDINGS = {f".{name}": name for name in FORMATS} | {".parq": "parquet"}


@dataclasses.dataclass
class Writer:
    """What takes references, each key once; an index keeps the `notes`."""

    add: Callable[[Reference], None]
    notes: dict[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Output:
    """A set that is to be written: `path` ("-" is standard output) in one of FORMATS."""

    path: str
    format: str
    replace: bool = False  # what is there may be replaced
    record_size: int | None = None  # of Parquet: references of one record file; None: as ParquetWriter has it
    version: int = 1  # of JSON

    @property
    def base(self) -> str | None:
        """The directory that relative URLs in the set will be taken from, with a trailing "/"; None: not known.

        That of the file; a Parquet set is a directory itself.
        """
        if self.path == STDOUT or os.path.islink(self.path):
            return None
        path = os.path.abspath(self.path)
        return os.path.join(path if self.format == "parquet" else os.path.dirname(path), "")

    @contextlib.contextmanager
    def opened(self) -> Iterator[Writer]:
        """A Writer; leaving the block makes the set whole, leaving it with an exception leaves nothing behind.

        UsageError where `path` cannot be written to, SourceError where writing fails.
        """
        if self.path == STDOUT:
            if not self.format.startswith("json"):
                raise UsageError(f"standard output takes JSON, not {self.format}: name a file")
            with _json(sys.stdout.buffer, self.format, self.version) as writer:
                yield writer
            return
        path = os.path.realpath(self.path)
        _check_destination(path, self)
        scratch = os.path.join(os.path.dirname(path), f".{os.path.basename(path)[:200]}.{secrets.token_hex(8)}.tmp")
        try:
            with self._encoder(scratch) as writer:
                yield writer
            _check_destination(path, self)  # it may have taken long
            _place(scratch, path)
        except (OSError, sqlite3.Error) as exc:  # SQLite has its own: a full disk, a value over 1 GB
            raise SourceError(self.path, f"cannot be written: {getattr(exc, 'strerror', None) or exc}") from exc
        finally:
            _remove(scratch)

    @contextlib.contextmanager
    def _encoder(self, scratch: str) -> Iterator[Writer]:
        if self.format == "index":
            with IndexWriter(scratch) as index:
                writer = Writer(functools.partial(add_reference, index))
                yield writer
                index.commit(writer.notes.items())
        elif self.format == "parquet":
            from zarrfs.stage.parquetwriter import RECORD_SIZE, ParquetWriter

            with ParquetWriter(scratch, self.record_size or RECORD_SIZE, self.path) as parquet:
                yield Writer(parquet.add)
                parquet.commit()
            for directory, _, names in os.walk(scratch):
                for name in names:
                    _sync(os.path.join(directory, name))
        else:
            with open(scratch, "xb") as file:
                with _json(file, self.format, self.version) as writer:
                    yield writer
                file.flush()
                os.fsync(file.fileno())


def output_format(path: str, said: str | None = None, usual: str | None = None) -> str:
    """The form of a set called `path`: `said`, else what the ending of the name tells, else `usual`. UsageError."""
    if said is not None:
        return said
    if path.endswith("/") or os.path.isdir(path):
        return "parquet"
    for ending, name in _ENDINGS.items():
        if path.lower().endswith(ending):
            return name
    if usual is None:
        raise UsageError(f"{path}: its name does not tell the form; say --to {'|'.join(FORMATS)}")
    return usual


def add_reference(index: IndexWriter, reference: Reference) -> None:
    """Add one entry to an index."""
    key, data, url, offset, length = reference
    if data is not None:
        index.inline(key, data)
    elif length is None:
        index.whole(key, url)
    else:
        index.range(key, url, offset, length)


@contextlib.contextmanager
def _json(raw: IO[bytes], form: str, version: int) -> Iterator[Writer]:
    with _compressor(raw, form) as file:
        encoder = JsonWriter(file, version)
        yield Writer(encoder.add)
        encoder.commit()
    raw.flush()


def _compressor(raw: IO[bytes], form: str) -> contextlib.AbstractContextManager[IO[bytes]]:
    """A file that compresses into `raw`, and leaves that open."""
    file: Any
    match form.partition(".")[2]:
        case "gz":
            import gzip

            # no name and no time: equal sets make equal files
            file = gzip.GzipFile("", "wb", fileobj=raw, compresslevel=6, mtime=0)
        case "zst":
            import zstandard

            file = zstandard.ZstdCompressor().stream_writer(raw, closefd=False)
        case "xz":
            import lzma

            file = lzma.LZMAFile(raw, "wb")  # noqa: SIM115  (the caller's to close)
        case "bz2":
            import bz2

            file = bz2.BZ2File(raw, "wb")
        case _:
            return contextlib.nullcontext(raw)
    return cast(contextlib.AbstractContextManager[IO[bytes]], file)


# -- the destination


def _check_destination(path: str, output: Output) -> None:
    """UsageError unless `path` is free, or may be replaced by a set of this form."""
    shown = output.path
    try:
        status = os.stat(path)
    except FileNotFoundError:
        if not os.path.isdir(os.path.dirname(path)):
            raise UsageError(f"{shown}: no such directory") from None
        if shown.endswith("/") and output.format != "parquet":
            raise UsageError(f"{shown}: names a directory; {output.format} is a file") from None
        return
    except OSError as exc:
        raise UsageError(f"{shown}: {(exc.strerror or str(exc)).lower()}") from exc
    if stat.S_ISDIR(status.st_mode):
        if output.format != "parquet":
            raise UsageError(f"{shown}: is a directory; {output.format} is a file")
        if not os.listdir(path):
            return
        if not _is_parquet_set(path):
            raise UsageError(f"{shown}: holds something else than a reference set: it stays")
    elif output.format == "parquet":
        raise UsageError(f"{shown}: is a file; a Parquet set is a directory")
    elif not stat.S_ISREG(status.st_mode):
        raise UsageError(f"{shown}: is no regular file")
    if not output.replace:
        raise UsageError(f"{shown}: is there already; --force replaces it")


def _is_parquet_set(directory: str) -> bool:
    try:
        with open(os.path.join(directory, ".zmetadata"), "rb") as file:
            found = json.load(file)
    except (OSError, ValueError):
        return False
    return isinstance(found, dict) and "record_size" in found


def _place(scratch: str, path: str) -> None:
    """Give what is whole its name, at once; an old directory goes away after that."""
    old = f"{scratch}.old"
    if os.path.isdir(path) and os.listdir(path):
        os.rename(path, old)
    try:
        os.rename(scratch, path)
    except OSError:
        if os.path.isdir(old):
            os.rename(old, path)
        raise
    shutil.rmtree(old, ignore_errors=True)
    _sync(os.path.dirname(path))


def _sync(path: str) -> None:
    """Have a file or directory on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove(scratch: str) -> None:
    with contextlib.suppress(OSError):
        if os.path.isdir(scratch):
            shutil.rmtree(scratch, ignore_errors=True)
        else:
            os.unlink(scratch)

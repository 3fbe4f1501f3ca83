"""The input and output of commands on reference sets: the references of a set; JSON, Parquet and index files."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import stat
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import IO, TYPE_CHECKING, Any, cast

from zarrfs.config.redaction import without_secrets
from zarrfs.errors import SourceError, UsageError
from zarrfs.store.api import Reference, Store
from zarrfs.store.destination import is_utf8, placed

if TYPE_CHECKING:
    from zarrfs.documents.plan import Plan
    from zarrfs.store.indexfile import IndexWriter

STDOUT = "-"
DUMP = "tar"  # the format of a file archive with its blobs
FORMATS = ("json", "json.gz", "json.zst", "json.xz", "json.bz2", "parquet", "index")
# endings that the name of a file archive cannot have
_PACKED = (".tar", ".tgz", ".tbz", ".tbz2", ".txz", ".tzst", ".zip", ".7z", ".rar", ".cpio", ".zarr")
_ENDINGS = {f".{name}": name for name in FORMATS} | {".parq": "parquet"}


@dataclasses.dataclass
class ReferenceWriter:
    """An open output. `add` writes one reference; every key is added once.

    `own`: the local paths that writing creates or changes. `notes`: the notes of an index; other formats ignore them.
    """

    add: Callable[[Reference], None]
    own: tuple[str, ...] = ()
    notes: dict[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Output:
    """The output of a set: `path` ("-" for standard output) and one of FORMATS."""

    path: str
    format: str
    replace: bool = False  # whether an existing set may be replaced
    record_size: int | None = None  # Parquet: references in one record file; None: ParquetWriter's default
    version: int = 1  # JSON: of the reference set specification, 0 or 1

    @property
    def base(self) -> str | None:
        """The directory against which relative URLs of the set are resolved, with a trailing "/".

        For a Parquet set it is the set's own directory, else the directory of the file. None for standard output and
        symbolic links.
        """
        if self.path == STDOUT or os.path.islink(self.path):
            return None
        path = os.path.abspath(self.path)
        return os.path.join(path if self.format == "parquet" else os.path.dirname(path), "")

    @contextlib.contextmanager
    def open_writer(self) -> Iterator[ReferenceWriter]:
        """Provide a ReferenceWriter. Leaving the block completes the set; after an exception no new file remains.

        Raise UsageError if `path` is no valid destination, SourceError if writing fails.
        """
        if self.path == STDOUT:
            if not self.format.startswith("json"):
                raise UsageError(f"standard output takes JSON, not {self.format}: name a file")
            with _json(sys.stdout.buffer, self.format, self.version) as writer:
                writer.own = _standard_output()
                yield writer
            return
        with placed(self.path, self.format, self.replace) as place, self._encoder(place.new) as writer:
            writer.own = place.own
            yield writer

    @contextlib.contextmanager
    def _encoder(self, path: str) -> Iterator[ReferenceWriter]:
        if self.format == "parquet":
            from zarrfs.references.parquet_writer import RECORD_SIZE, ParquetWriter

            with ParquetWriter(path, self.record_size or RECORD_SIZE, self.path) as parquet:
                yield ReferenceWriter(parquet.add)
                parquet.commit()
            return
        with open(path, "xb") as file:
            mode = os.fstat(file.fileno()).st_mode
            if self.format != "index":
                with _json(file, self.format, self.version) as writer:
                    yield writer
                return
        from zarrfs.store.indexfile import IndexWriter

        with IndexWriter(path) as index:
            writer = ReferenceWriter(functools.partial(add_reference, index))
            yield writer
            if not is_utf8(writer.notes.get("base", "")):
                raise SourceError(self.path, "relative to a path that is not UTF-8, which no index can note")
            index.commit(writer.notes.items())
        os.chmod(path, stat.S_IMODE(mode))  # as the umask says: IndexWriter sets 0644, for indexes in the cache


def output_format(path: str, said: str | None = None, usual: str | None = None) -> str:
    """Return the format of a set at `path`: `said`, else by the ending of its name, else `usual`.

    An existing directory and a name that ends in "/" mean Parquet. Raise UsageError if nothing implies a format.
    """
    if said is not None:
        return said
    if path.endswith("/") or os.path.isdir(path):
        return "parquet"
    found = form_of_name(path)
    if found is not None:
        return found
    if usual is None:
        raise UsageError(f"{path}: its name has no known ending; give --to {'|'.join(FORMATS)}")
    return usual


def form_of_name(path: str) -> str | None:
    """Return the format that the ending of a name implies; None for an unknown ending."""
    return next((form for ending, form in _ENDINGS.items() if path.lower().endswith(ending)), None)


def archive_form(path: str, dumps: bool = False) -> str:
    """Return the format of a file archive called `path`: one of JSON, or "tar" if `dumps` are allowed.

    Raise UsageError if the name implies another format. Unlike the name of a set, the name of an archive need not
    contain "json": any name that ends in .gz, .zst, .xz or .bz2 means compressed JSON.
    """
    if dumps and path.lower().endswith(".tar"):
        return DUMP
    form = form_of_name(path)
    if form is not None and not form.startswith("json"):
        raise UsageError(f"{path}: a file archive is JSON, not {form}: give it another name (.json)")
    rest, ending = os.path.splitext(path.lower())
    compressed = ending if f"json{ending}" in FORMATS else ""
    packed = os.path.splitext(rest)[1] if compressed else ending
    if packed in _PACKED:
        raise UsageError(f"{path}: a file archive is JSON, not {packed[1:]}: give it another name (.json)")
    return f"json{compressed}"


def add_reference(index: IndexWriter, reference: Reference) -> None:
    key, data, url, offset, length = reference
    if data is not None:
        index.inline(key, data)
    elif length is None:
        index.whole(key, url)
    else:
        index.range(key, url, offset, length)


def _standard_output() -> tuple[str, ...]:
    """Return the path of the file that standard output is redirected to; () if it is not a file."""
    try:
        path = os.path.realpath(f"/proc/self/fd/{sys.stdout.fileno()}")
    except (OSError, ValueError):
        return ()
    return (path,) if os.path.isfile(path) else ()


@contextlib.contextmanager
def _json(raw: IO[bytes], form: str, version: int) -> Iterator[ReferenceWriter]:
    from zarrfs.references.json_writer import JsonWriter

    with compressor(raw, form) as file:
        encoder = JsonWriter(file, version)
        yield ReferenceWriter(encoder.add)
        encoder.commit()
    raw.flush()


def compressor(raw: IO[bytes], form: str) -> contextlib.AbstractContextManager[IO[bytes]]:
    """Open a file that writes to `raw` in the compression of `form` ("json.zst"); closing it leaves `raw` open."""
    file: Any
    match form.partition(".")[2]:
        case "gz":
            import gzip

            # without name and time, so that equal sets give equal files
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


def reference_set(store: Store, plan: Plan) -> Store:
    """Return `store` if it is a reference set; raise SourceError otherwise."""
    if plan.kind == "archive":
        raise SourceError(plan.source, "is a file archive, not a reference set")
    if plan.kind == "icechunk":
        way = "zarrfs refs from-store --option type=icechunk makes a set of it"
        raise SourceError(plan.source, f"is an Icechunk repository; {way}")
    if not store.is_reference_set:
        raise SourceError(plan.source, "is no reference set; zarrfs refs from-store makes one of a Zarr store")
    return store


async def entries(store: Store, plan: Plan, alone: bool = True) -> AsyncIterator[Reference]:
    """Yield the references of a set in a form that does not depend on the format of the set.

    A Parquet set's `.zmetadata` becomes consolidated metadata of Zarr. It is left out unless the set is `alone` in its
    directory of the output, because it would hide the other sets' nodes from readers of consolidated metadata.
    """
    parquet = plan.index is None
    async for reference in store.references():
        if parquet and reference.key == ".zmetadata" and reference.data is not None:
            if not alone:
                continue
            document = {"zarr_consolidated_format": 1} | json.loads(bytes(reference.data))  # kerchunk omits it
            document.pop("record_size", None)
            reference = reference._replace(data=json.dumps(document).encode())
        yield reference


def notes(plan: Plan) -> dict[str, str]:
    """Return the notes of an index written from the set of `plan`. Its URLs stay relative to the base of the set."""
    return _notes(plan.source, without_secrets(plan.base), plan.mtime_ns, plan.origin)


def notes_of_many(plans: Sequence[Plan], output: Output) -> dict[str, str]:
    """Return the notes of an index made from other sources; its relative URLs, if any, are relative to `output`."""
    times = [plan.mtime_ns for plan in plans if plan.mtime_ns is not None]
    origins = {plan.origin for plan in plans}
    origin = origins.pop() if len(origins) == 1 else ""  # "", as for a local set: the user trusts all of them
    return _notes(os.path.abspath(output.path), output.base or "", max(times, default=None), origin)


def _notes(source: str, base: str, mtime_ns: int | None, origin: str) -> dict[str, str]:
    return {
        "kind": "references",
        "source": source,
        "warnings": "[]",  # reported while the set was written
        "base": base,
        "mtime_ns": "" if mtime_ns is None else str(mtime_ns),
        "origin": origin,
    }

"""ParquetWriter, which writes reference sets in the Parquet layout, with keys in any order.

Memory is bounded as long as the `.zarray` of an array comes before its chunks.

Source: fsspec's LazyReferenceMapper, which reads the layout; docs/reference-sets.md has the rules.
"""

from __future__ import annotations

import base64
import io
import json
import os
import secrets
import shutil
from array import array
from collections import OrderedDict
from types import TracebackType
from typing import Any

from zarrfs.errors import SourceError
from zarrfs.references.keys import BASE64
from zarrfs.references.parquet_metadata import DOCUMENT, RECORD_SIZE_MAX, check_package, grid_of
from zarrfs.store.api import Reference, join_key, key_rule, split_key
from zarrfs.store.destination import is_utf8
from zarrfs.system.buffers import Buffer
from zarrfs.zarr.grid import Grid

RECORD_SIZE = 10_000  # references in one record file; fsspec's default
RECORD_FILES_MAX = 1_000_000  # of a set; they are written even if all chunks are absent
_HELD_MAX = 128 << 20  # bytes of references not yet written to a file
_ROW = 28  # bytes of memory for a reference
_RAW = -2  # in place of a path's code: the bytes are inline


class _Rows:
    """The references of one record file, in order of arrival; the last one of a row replaces the earlier ones."""

    def __init__(self) -> None:
        self.rows, self.offsets, self.sizes, self.codes = array("q"), array("q"), array("q"), array("i")
        self.paths: dict[str, int] = {}
        self.raws: dict[int, bytes] = {}
        self.held = 0

    def add(self, row: int, raw: bytes | None, path: str, offset: int, size: int) -> int:
        """Add a reference; return the bytes of memory it takes."""
        held = _ROW
        if raw is not None:
            code = _RAW
            self.raws[row] = raw
            held += len(raw)
        else:
            known = self.paths.get(path)
            code = self.paths.setdefault(path, len(self.paths)) if known is None else known
            held += len(path) if known is None else 0
        self.rows.append(row)
        self.codes.append(code)
        self.offsets.append(offset)
        self.sizes.append(size)
        self.held += held
        return held


class _Array:
    """The grid of an array, and for each of its record files, whether it has been written."""

    def __init__(self, grid: Grid, record_size: int) -> None:
        self.grid = grid
        self.written = bytearray(-(-grid.size // record_size))


class ParquetWriter:
    """A context manager that writes a set to `directory`, which appears at the end of commit().

    Without commit() nothing remains. A set can hold metadata (names that begin with ".z") in JSON, and chunks of Zarr
    v2 arrays whose names join indices with "."; for any other key, add() or commit() raises SourceError. A
    `.zmetadata` at the root is left out, because the layout has its own. Chunks that are added before their `.zarray`
    are kept in memory until it is added. `shown`: the name of the set in messages.
    """

    def __init__(self, directory: str, record_size: int = RECORD_SIZE, shown: str = "") -> None:
        self._directory, self._record_size = os.path.abspath(directory), record_size
        self._shown = shown or directory
        check_package(self._shown)
        if not 1 <= record_size <= RECORD_SIZE_MAX:
            raise SourceError(self._shown, f"record_size: expected a whole number from 1 to {RECORD_SIZE_MAX}")
        parent, name = os.path.split(self._directory)
        self._scratch = os.path.join(parent, f".{name[:50]}.{secrets.token_hex(8)}.tmp")
        self._metadata: dict[str, Any] = {}
        self._arrays: dict[str, _Array] = {}
        self._waiting: dict[str, list[Reference]] = {}  # by array
        self._open: OrderedDict[tuple[str, int], _Rows] = OrderedDict()  # least recently used first
        self._last: tuple[str, int] | None = None
        self._held = self._files = 0
        self._empty = b""

    def __enter__(self) -> ParquetWriter:
        if os.path.lexists(self._directory) and not _is_empty_directory(self._directory):
            raise SourceError(self._shown, "is there already, and is no empty directory")
        try:
            os.mkdir(self._scratch)
        except OSError as exc:
            raise SourceError(self._shown, f"cannot be written: {exc.strerror}") from exc
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        shutil.rmtree(self._scratch, ignore_errors=True)

    def add(self, reference: Reference) -> None:
        """Add one reference. Raise SourceError if the layout cannot hold it, OSError if writing fails."""
        key = reference.key
        prefix, name = split_key(key)
        if name.startswith(".z"):
            self._add_metadata(reference, prefix, name)
            return
        if name == "zarr.json":  # refused now: its chunks would be kept in memory, for lack of a .zarray
            raise self._refusal(key, "the Parquet layout cannot hold Zarr v3, nor nested chunks (c/0/0): write JSON")
        known = self._arrays.get(prefix)
        if known is None:
            self._waiting.setdefault(prefix, []).append(reference)
            return
        number = known.grid.number(name)
        if number is None:
            counts = " x ".join(map(str, known.grid.counts)) or "1"
            raise self._refusal(key, f"no chunk of its array, whose grid is {counts} (names are joined with '.')")
        record, row = divmod(number, self._record_size)
        rows = self._rows(prefix, record)
        self._held += rows.add(row, *self._columns(reference))
        if len(rows.rows) == min(self._record_size, known.grid.size - record * self._record_size):
            self._write(prefix, record)
        elif self._held > _HELD_MAX:
            while self._held > _HELD_MAX // 2:
                self._write(*next(iter(self._open)))

    def commit(self) -> None:
        """Write the rest and rename the directory to its final name. Raise as add() does."""
        for prefix, references in self._waiting.items():
            raise self._refusal(references[0].key, f"neither metadata nor a chunk: no {join_key(prefix, '.zarray')}")
        while self._open:
            self._write(*next(iter(self._open)))
        for prefix, known in self._arrays.items():
            number = known.written.find(0)
            while number >= 0:
                self._write_empty(prefix, number)
                known.written[number] = 1
                number = known.written.find(0, number)
        document = {
            "metadata": self._metadata, "zarr_consolidated_format": 1, "record_size": self._record_size,
        }  # fmt: skip
        with open(os.path.join(self._scratch, DOCUMENT), "w", encoding="ascii") as file:
            json.dump(document, file, separators=(",", ":"))
        os.rename(self._scratch, self._directory)

    # -- parts

    def _add_metadata(self, reference: Reference, prefix: str, name: str) -> None:
        key = reference.key
        rule = key_rule(key)
        if rule or f"/{prefix}".find("/.z") >= 0:
            raise self._refusal(key, f"not a key: {rule}" if rule else "below a name that begins with .z")
        if key == DOCUMENT:
            return
        if key in self._metadata:
            raise self._refusal(key, "comes twice")
        if reference.data is None:
            raise self._refusal(key, "metadata must be inline in the Parquet layout, not in a target")
        try:
            value = json.loads(bytes(reference.data))
        except (ValueError, RecursionError):
            raise self._refusal(key, "not JSON, which is all metadata that the Parquet layout can hold") from None
        if name == ".zarray":
            if not prefix:
                raise self._refusal(key, "the Parquet layout has no place for an array at the root")
            self._add_array(key, prefix, value)
            value["chunks"] = list(self._arrays[prefix].grid.chunks)  # never 0: fsspec would divide by it
        self._metadata[key] = value
        for waiting in self._waiting.pop(prefix, ()) if name == ".zarray" else ():
            self.add(waiting)

    def _add_array(self, key: str, prefix: str, value: object) -> None:
        try:
            grid = grid_of(value)
        except ValueError as exc:
            raise self._refusal(key, str(exc)) from None
        files = -(-grid.size // self._record_size)
        self._files += files
        if self._files > RECORD_FILES_MAX:
            rule = f"{files} record files for {grid.size} chunks: over {RECORD_FILES_MAX} in the set"
            raise self._refusal(key, f"{rule}; a larger record size takes fewer (--record-size)")
        self._arrays[prefix] = _Array(grid, self._record_size)

    def _columns(self, reference: Reference) -> tuple[bytes | None, str, int, int]:
        """Return (raw, path, offset, size) of a reference."""
        key, data, url, offset, length = reference
        if data is not None:
            return _raw(data), "", 0, 0
        if length == 0 == offset:
            return b"", "", 0, 0  # a row with offset and size 0 means the whole target
        if not is_utf8(url):
            raise self._refusal(key, "url: a lone surrogate, which UTF-8 cannot hold")
        return None, url, offset, length or 0

    def _refusal(self, key: str, rule: str) -> SourceError:
        return SourceError(self._shown, rule, key)

    # -- record files

    def _rows(self, prefix: str, record: int) -> _Rows:
        """Return the rows of a record file, marked as the most recently used."""
        at = prefix, record
        rows = self._open.get(at)
        if rows is None:
            rows = self._open[at] = _Rows()
            if self._arrays[prefix].written[record]:
                self._read_again(at, rows)
        elif at != self._last:
            self._open.move_to_end(at)
        self._last = at
        return rows

    def _path(self, prefix: str, record: int) -> str:
        return os.path.join(self._scratch, prefix, f"refs.{record}.parq")

    def _read_again(self, at: tuple[str, int], rows: _Rows) -> None:
        """Load a record file into `rows`, after it was written early to free memory."""
        import pyarrow.parquet as pq

        with open(self._path(*at), "rb") as file:  # pyarrow accepts only UTF-8 paths
            table = pq.ParquetFile(file).read()
        columns = (table[name].to_pylist() for name in ("path", "offset", "size", "raw"))
        for row, (path, offset, size, raw) in enumerate(zip(*columns, strict=True)):
            if path is not None or raw is not None:
                self._held += rows.add(row, raw, path, offset, size)

    def _write(self, prefix: str, record: int) -> None:
        import pyarrow.parquet as pq

        rows = self._open.pop((prefix, record))
        self._held -= rows.held
        self._arrays[prefix].written[record] = 1
        path = self._path(prefix, record)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "wb") as file:
            pq.write_table(_table(rows, self._record_size), file, **_HOW)

    def _write_empty(self, prefix: str, record: int) -> None:
        if not self._empty:
            import pyarrow.parquet as pq

            file = io.BytesIO()
            pq.write_table(_table(_Rows(), self._record_size), file, **_HOW)
            self._empty = file.getvalue()
        path = self._path(prefix, record)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "wb") as to:
            to.write(self._empty)


# The file has no Arrow schema, because with one pandas would read a dictionary as a categorical, whose nulls fsspec
# cannot read. It has statistics, because without them fastparquet reads offsets and sizes as floats.
_HOW: dict[str, Any] = {
    "compression": "zstd", "use_dictionary": ["path"], "write_statistics": ["offset", "size"], "store_schema": False,
    "row_group_size": RECORD_SIZE_MAX,
}  # fmt: skip


def _table(rows: _Rows, record_size: int) -> Any:
    """Return the table of a record file, padded with absent chunks to `record_size` rows."""
    import numpy as np
    import pyarrow as pa

    at = np.frombuffer(rows.rows, np.int64) if rows.rows else np.zeros(0, np.int64)
    columns = []
    for found, empty in (rows.codes, -1), (rows.offsets, 0), (rows.sizes, 0):
        column = np.full(record_size, empty, f"i{found.itemsize}")
        column[at] = found
        columns.append(column)
    codes, offsets, sizes = columns
    raws: list[bytes | None] = [None] * record_size if rows.raws else []
    for row, data in rows.raws.items():
        if codes[row] == _RAW:  # not replaced later by a path
            raws[row] = data
    raw = pa.array(raws, pa.binary()) if raws else pa.nulls(record_size, pa.binary())
    paths = pa.DictionaryArray.from_arrays(pa.array(codes, mask=codes < 0), pa.array(list(rows.paths), pa.string()))
    schema = pa.schema([
        pa.field("path", paths.type), pa.field("offset", pa.int64(), nullable=False),
        pa.field("size", pa.int64(), nullable=False), pa.field("raw", pa.binary()),
    ])  # fmt: skip
    return pa.table([paths, pa.array(offsets), pa.array(sizes), raw], schema=schema)


def _raw(data: Buffer) -> bytes:
    """Return inline bytes for the column raw, in base64 if they begin with "base64:", as readers decode those."""
    found = bytes(data)
    return BASE64 + base64.b64encode(found) if found.startswith(BASE64) else found


def _is_empty_directory(path: str) -> bool:
    return os.path.isdir(path) and not os.path.islink(path) and not os.listdir(path)

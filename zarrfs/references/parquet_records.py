"""Record files of the Parquet layout (`refs.N.parq`), parsed into a form of a few bytes per row.

Source: fsspec's LazyReferenceMapper; docs/sources.md has the rules. This module imports numpy and pyarrow, so
callers import it only when they read a record file.
"""

from __future__ import annotations

import binascii
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from zarrfs.references.keys import BASE64, decode_base64
from zarrfs.references.parquet_metadata import ABSENT, UNKNOWN, Bound
from zarrfs.references.parquet_pages import expanded_size
from zarrfs.system.buffers import Buffer

COLUMNS = ("path", "offset", "size", "raw")
_PATH_MAX = 4 * 65536  # bytes of a path: enough for the longest URL of a JSON set
_ROW_BYTES = 32  # memory of a row while a file is parsed
_LARGEST = np.iinfo(np.int64).max

Array = np.ndarray[Any, np.dtype[Any]]


class RecordRow(NamedTuple):
    """One reference: inline bytes, a range of a target, or a whole target (without a length).

    `broken` is the rule that an invalid reference breaks.
    """

    data: Buffer | None
    url: str = ""
    offset: int = 0
    length: int | None = None
    broken: str = ""


class RecordFile:
    """A parsed record file; its len() is its memory in bytes.

    An offset or size that is null is 0; rows with one are `bare`.
    """

    def __init__(self, paths: _Texts, raws: _Texts, offsets: Array, sizes: Array, bare: Array) -> None:
        self.rows = len(offsets)
        self._paths, self._raws = paths, raws
        self._offsets, self._sizes, self._bare = offsets, sizes, bare

    def __len__(self) -> int:
        parts = (self._paths, self._raws, self._offsets, self._sizes, self._bare)
        return 1000 + sum(part.nbytes for part in parts)

    def row(self, number: int) -> RecordRow | None:
        """Return the reference in row `number`; None if it is empty. Raise ValueError if it is missing."""
        if number >= self.rows:
            raise ValueError(f"row {number}: missing: the file has {self.rows} rows")
        raw, path = self._raws.value(number), self._paths.value(number)
        offset, size = int(self._offsets[number]), int(self._sizes[number])
        length = 1
        if raw is not None:
            try:
                return RecordRow(decode_base64(raw) if raw.startswith(BASE64) else raw)
            except binascii.Error:
                rule = "raw: malformed base64"
        elif path is None:
            if not offset and not size:
                return None
            rule = "an offset or size without a path"
        elif self._bare[number]:
            rule = "a path without offset or size"
        elif offset < 0 or size < 0:
            rule = "a negative offset or size"
        elif size > _LARGEST - offset:
            rule = "offset + size is over 2^63 - 1"
        else:
            rule = _path_rule(path)
            whole = not offset and not size
            if not rule:
                return RecordRow(None, path.decode()) if whole else RecordRow(None, path.decode(), offset, size)
            length = 1 if whole else size  # as sizes() has it
        return RecordRow(None, length=length, broken=f"row {number}: {rule}")

    def sizes(self, start: int, stop: int) -> Array:
        """Return the sizes in bytes of the chunks in the rows [start, stop).

        A size is ABSENT for an empty row, and UNKNOWN for a whole target and a missing row.
        """
        found = np.full(stop - start, UNKNOWN, np.int64)
        rows = slice(start, min(stop, self.rows))
        offsets, sizes, bare = self._offsets[rows], self._sizes[rows], self._bare[rows]
        inline, path = self._raws.codes[rows] >= 0, self._paths.codes[rows] >= 0
        part, unset = found[: len(offsets)], (offsets == 0) & (sizes == 0)
        part[~inline & ~path & unset] = ABSENT
        plain = path & ~inline & ~bare & (offsets >= 0) & (sizes >= 0) & (sizes <= _LARGEST - offsets)
        part[plain & ~unset] = sizes[plain & ~unset]
        for at in np.flatnonzero(~plain & (part != ABSENT)).tolist():
            row = self.row(start + at)
            assert row is not None
            part[at] = 1 if row.data is None else len(row.data)  # 1: a broken row
        return found


def _path_rule(path: bytes) -> str:
    """Return the rule that a path breaks, or ""."""
    if not path:
        return "path: empty"
    if len(path) > _PATH_MAX and not path.startswith(b"data:"):
        return f"path: over {_PATH_MAX} bytes"
    if b"\0" in path:
        return "path: a NUL character"
    try:
        path.decode()
    except UnicodeDecodeError:
        return "path: not UTF-8"
    return ""


def parse_record(data: Buffer, record_size: int, limit: Bound) -> RecordFile:
    """Parse a record file. Raise ValueError if it is invalid as a whole; RecordFile.row() reports invalid rows.

    `limit` bounds the decompressed size, which is checked before anything is decompressed.
    """
    table = _read(data, record_size, limit)
    names = table.column_names
    if "path" not in names and "raw" not in names:
        raise ValueError("neither a column path nor a column raw")
    for name in ("offset", "size"):
        if "path" in names and name not in names:
            raise ValueError(f"a column path, but no column {name}")
    offsets, no_offset = _numbers(table, "offset")
    sizes, no_size = _numbers(table, "size")
    return RecordFile(_texts(table, "path"), _texts(table, "raw"), offsets, sizes, no_offset | no_size)


class _Texts:
    """A dictionary-encoded column of bytes: `codes` has an index into `values` for each row, -1 for null."""

    def __init__(self, codes: Array, values: Any) -> None:
        self.codes, self.values = codes, values

    @property
    def nbytes(self) -> int:
        return int(self.codes.nbytes + self.values.nbytes)

    def value(self, row: int) -> bytes | None:
        code = int(self.codes[row])
        found: bytes | None = None if code < 0 else self.values[code].as_py()
        return found


def _read(data: Buffer, record_size: int, limit: Bound) -> Any:
    """Read the table, with text columns dictionary-encoded if pyarrow can. Raise ValueError if it is refused."""
    try:
        about = pq.read_metadata(pa.BufferReader(data))
        schema = about.schema.to_arrow_schema()
    except Exception as exc:
        raise ValueError(f"not a Parquet file: {_reason(exc)}") from None
    for name in COLUMNS:
        if schema.names.count(name) > 1:
            raise ValueError(f"two columns {name}")
    found = [name for name in COLUMNS if name in schema.names]
    for name in found:  # before any page is read
        _check_type(name, schema.field(name).type)
    try:
        rows, size = expanded_size(memoryview(data).cast("B"), found)
    except ValueError as exc:
        raise ValueError(f"a damaged Parquet file: {exc}") from None
    rows = max(rows, about.num_rows)
    if rows > record_size:
        raise ValueError(f"{rows} rows, record_size is {record_size}")
    if size + rows * _ROW_BYTES > limit.size:
        raise ValueError(f"expands to {limit}")
    texts = [name for name in found if name in ("path", "raw") and _is_text(schema.field(name).type)]
    try:
        file = pq.ParquetFile(pa.BufferReader(data), metadata=about, read_dictionary=texts)
        table = file.read(found, use_threads=False)
        table.validate(full=True)
    except Exception as exc:
        raise ValueError(f"a damaged Parquet file: {_reason(exc)}") from None
    if table.num_rows != about.num_rows:
        raise ValueError(f"a damaged Parquet file: {table.num_rows} rows of {about.num_rows}")
    return table


def _check_type(name: str, kind: Any) -> None:
    """Raise ValueError for a type that no column may have; a few bytes of some types expand without bound."""
    value = kind.value_type if pa.types.is_dictionary(kind) else kind
    if not (_is_text(value) or pa.types.is_primitive(value) or pa.types.is_null(value)):
        expected = "text or bytes" if name in ("path", "raw") else "whole numbers"
        raise ValueError(f"column {name}: expected {expected}, not {kind}")


def _texts(table: Any, name: str) -> _Texts:
    if name not in table.column_names or _only_nulls(table[name]):
        return _Texts(np.full(table.num_rows, -1, np.int8), pa.array([], pa.large_binary()))
    column = table[name]
    if not pa.types.is_dictionary(column.type):
        if not _is_text(column.type):
            raise ValueError(f"column {name}: expected text or bytes, not {column.type}")
        column = column.dictionary_encode()
    if not _is_text(column.type.value_type):
        raise ValueError(f"column {name}: expected text or bytes, not {column.type.value_type}")
    array = column.unify_dictionaries().combine_chunks()
    codes = array.indices.fill_null(-1).to_numpy(zero_copy_only=False)
    return _Texts(codes, array.dictionary.cast(pa.large_binary()))


def _numbers(table: Any, name: str) -> tuple[Array, Array]:
    """Return (values as int64, 0 for null; whether each is null)."""
    if name not in table.column_names or pa.types.is_null(table[name].type):
        return np.zeros(table.num_rows, np.int64), np.ones(table.num_rows, np.bool_)
    column = table[name].combine_chunks()
    if not pa.types.is_integer(column.type):
        raise ValueError(f"column {name}: expected whole numbers, not {column.type}")
    # a uint64 beyond int64 becomes negative, and is refused for that
    values = column.fill_null(0).cast(pa.int64(), safe=False).to_numpy(zero_copy_only=False)
    return values, column.is_null().to_numpy(zero_copy_only=False)


def _only_nulls(column: Any) -> bool:
    """Return whether a column holds only nulls. Such a column may have any type; NaN counts as null."""
    if pa.types.is_floating(column.type):
        return bool(pc.all(column.is_null(nan_is_null=True), min_count=0).as_py())
    return int(column.null_count) == len(column)


def _is_text(kind: Any) -> bool:
    types = pa.types
    return any(
        check(kind)
        for check in (
            types.is_string, types.is_large_string, types.is_string_view,
            types.is_binary, types.is_large_binary, types.is_binary_view,
        )
    )  # fmt: skip


def _reason(exc: Exception) -> str:
    return " ".join(str(exc).split())[:300] or type(exc).__name__

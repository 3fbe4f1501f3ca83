"""Record files of the Parquet layout (`refs.N.parq`), parsed into a form of a few bytes per row.

Source: fsspec's LazyReferenceMapper; docs/reference-sets.md has the rules. This module imports numpy and pyarrow, so
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

# The state of a row. From _BAD on, each state stands for the rule that the row breaks.
_NOTHING, _INLINE, _RANGE, _WHOLE, _BAD = range(5)
_RULES = (
    "an offset or size without a path",
    "a path without offset or size",
    "a negative offset or size",
    "offset + size is over 2^63 - 1",
    "path: empty",
    f"path: over {_PATH_MAX} bytes",
    "path: a NUL character",
    "path: not UTF-8",
    "raw: malformed base64",
)
_LONE, _BARE, _NEGATIVE, _BEYOND, _EMPTY, _LONG, _NUL, _TEXT, _MALFORMED = range(_BAD, _BAD + len(_RULES))

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
    """A parsed record file; its len() is its memory in bytes."""

    def __init__(self, states: Array, paths: _Texts, offsets: Array, sizes: Array, raws: _Texts) -> None:
        self.rows = len(states)
        self._states, self._paths, self._raws = states, paths, raws
        self._offsets, self._sizes = offsets, sizes

    def __len__(self) -> int:
        parts = (self._states, self._paths, self._raws, self._offsets, self._sizes)
        return 1000 + sum(part.nbytes for part in parts)

    def row(self, number: int) -> RecordRow | None:
        """Return the reference in row `number`; None if it is empty. Raise ValueError if it is missing."""
        if number >= self.rows:
            raise ValueError(f"row {number}: missing: the file has {self.rows} rows")
        state = int(self._states[number])
        if state == _NOTHING:
            return None
        if state == _INLINE:
            return RecordRow(self._raws.value(number))
        if state >= _BAD:
            return RecordRow(None, length=1, broken=f"row {number}: {_RULES[state - _BAD]}")
        url = self._paths.value(number).decode()
        if state == _WHOLE:
            return RecordRow(None, url)
        return RecordRow(None, url, int(self._offsets[number]), int(self._sizes[number]))

    def sizes(self, start: int, stop: int) -> Array:
        """Return the sizes in bytes of the chunks in the rows [start, stop).

        A size is ABSENT for an empty row, UNKNOWN for a whole target and a missing row, and 1 for an invalid row.
        """
        found = np.full(stop - start, UNKNOWN, np.int64)
        rows = slice(start, min(stop, self.rows))
        states = self._states[rows]
        part = found[: len(states)]
        part[states == _NOTHING] = ABSENT
        part[states >= _BAD] = 1
        ranges = states == _RANGE
        part[ranges] = self._sizes[rows][ranges]
        inline = np.flatnonzero(states == _INLINE)
        if len(inline):
            part[inline] = self._raws.lengths(inline + start)
        return found


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
    rows = table.num_rows
    paths, raws = _texts(table, "path"), _texts(table, "raw")
    offsets, no_offset = _numbers(table, "offset")
    sizes, no_size = _numbers(table, "size")
    has_raw = raws.codes >= 0
    has_path = (paths.codes >= 0) & ~has_raw
    states = np.zeros(rows, np.uint8)
    states[has_raw] = _INLINE
    states[~has_raw & ~has_path & ((offsets != 0) | (sizes != 0))] = _LONE
    states[has_path] = np.where((offsets == 0) & (sizes == 0), _WHOLE, _RANGE)[has_path]
    _mark(states, has_path, paths, _path_rules(paths.values))
    states[has_path & (sizes > np.iinfo(np.int64).max - np.maximum(offsets, 0))] = _BEYOND
    states[has_path & ((offsets < 0) | (sizes < 0))] = _NEGATIVE
    states[has_path & (no_offset | no_size)] = _BARE
    raws.values, malformed = _decoded(raws.values)
    _mark(states, has_raw, raws, malformed)
    good = states == _RANGE
    paths.keep(good | (states == _WHOLE))
    raws.keep(states == _INLINE)
    return RecordFile(states, paths, _narrow(np.where(good, offsets, 0)), _narrow(np.where(good, sizes, 0)), raws)


class _Texts:
    """A dictionary-encoded column of bytes: `codes` has an index into `values` for each row, -1 for null."""

    def __init__(self, codes: Array, values: Any) -> None:
        self.codes, self.values = codes, values

    @property
    def nbytes(self) -> int:
        return int(self.codes.nbytes + self.values.nbytes)

    def value(self, row: int) -> bytes:
        found: bytes = self.values[int(self.codes[row])].as_py()
        return found

    def lengths(self, rows: Array) -> Array:
        lengths: Array = pc.binary_length(self.values).to_numpy(zero_copy_only=False)
        return lengths[self.codes[rows]]

    def keep(self, rows: Array) -> None:
        """Keep the codes of `rows` in the smallest integer type, and drop the codes of all other rows."""
        if rows.any():
            self.codes = _narrow(np.where(rows, self.codes, 0))
        else:
            self.codes, self.values = np.zeros(0, np.uint8), self.values[:0].cast(pa.binary())


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


def _path_rules(values: Any) -> Array:
    """Return, for each distinct path, the state of the rows that have it, or 0 if it breaks no rule."""
    lengths = pc.binary_length(values).to_numpy(zero_copy_only=False)
    rules = np.zeros(len(values), np.uint8)
    rules[lengths == 0] = _EMPTY
    rules[(lengths > _PATH_MAX) & ~pc.starts_with(values, b"data:").to_numpy(zero_copy_only=False)] = _LONG
    rules[pc.match_substring(values, "\0").to_numpy(zero_copy_only=False)] = _NUL
    try:
        values.cast(pa.large_string())
    except pa.ArrowInvalid:
        for number, value in enumerate(values.to_pylist()):
            try:
                value.decode()
            except UnicodeDecodeError:
                rules[number] = _TEXT
    return rules


def _decoded(values: Any) -> tuple[Any, Array]:
    """Decode base64 in raw values, as fsspec does; return (the values, states as in _path_rules)."""
    rules = np.zeros(len(values), np.uint8)
    encoded = pc.starts_with(values, BASE64).to_numpy(zero_copy_only=False)
    if not encoded.any():
        return values, rules
    found = values.to_pylist()
    for number in np.flatnonzero(encoded):
        try:
            found[number] = decode_base64(found[number])
        except binascii.Error:
            rules[number] = _MALFORMED
    return pa.array(found, pa.large_binary()), rules


def _mark(states: Array, rows: Array, column: _Texts, rules: Array) -> None:
    """Set the state of those `rows` whose value breaks a rule."""
    if rules.any():
        found = rules[np.where(rows, column.codes, 0)]
        bad = rows & (found > 0)
        states[bad] = found[bad]


def _narrow(array: Array) -> Array:
    """Convert `array`, whose values are not negative, to the smallest integer type."""
    return array.astype(np.min_scalar_type(int(array.max(initial=0))))


def _reason(exc: Exception) -> str:
    return " ".join(str(exc).split())[:300] or type(exc).__name__

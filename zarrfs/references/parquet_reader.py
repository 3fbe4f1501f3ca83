"""The parser of record files of the Parquet layout (`refs.N.parq`), which runs in a child process (system.bounded).

pyarrow allocates as much memory as a page's header says, and aborts the process on some damage.
Source: fsspec's LazyReferenceMapper; docs/sources.md has the rules.
"""

from __future__ import annotations

import binascii
import os
from typing import Any

import numpy as np

from zarrfs.references.keys import BASE64, decode_base64
from zarrfs.references.parquet_records import ABSENT, PATH_MAX, RULES, UNKNOWN, Row
from zarrfs.system.bounded import Header, limit_memory

os.environ["ARROW_DEFAULT_MEMORY_POOL"] = "system"  # other pools reserve address space, which is limited
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

_COLUMNS = ("path", "offset", "size", "raw")
_COPIES = 3  # a record file is in memory as pages, as columns, and as its answer
_SLACK = 32 << 20  # bytes
_ROW_BYTES = 32  # memory of a row while a file is parsed
_LARGEST = np.iinfo(np.int64).max

Array = np.ndarray[Any, np.dtype[Any]]


def answer(header: Header, body: bytearray) -> tuple[Header, bytes]:
    """Parse a record file of at most `record_size` rows and `limit` bytes to the body of a RecordFile.

    Raise ValueError if it is invalid as a whole.
    """
    limit_memory(_COPIES * header["limit"] + _SLACK)
    table = _read(body, header["record_size"], header["limit"])
    names = table.column_names
    if "path" not in names and "raw" not in names:
        raise ValueError("neither a column path nor a column raw")
    for name in ("offset", "size"):
        if "path" in names and name not in names:
            raise ValueError(f"a column path, but no column {name}")
    return _parsed(table)


def _parsed(table: Any) -> tuple[Header, bytes]:
    """Return the numbers of rows and texts, and the body that RecordFile reads."""
    offsets, no_offset = _numbers(table, "offset")
    sizes, no_size = _numbers(table, "size")
    path_codes, paths = _texts(table, "path")
    raw_codes, raws = _texts(table, "raw")
    path_kinds = np.array([*map(_kind_of_path, paths), 0], np.int8)[path_codes]  # the last one for code -1
    raw_kinds = np.full(len(raws) + 1, Row.INLINE, np.int8)
    for code, raw in enumerate(raws):
        if raw.startswith(BASE64):
            try:
                raws[code] = bytes(decode_base64(raw))
            except binascii.Error:
                raw_kinds[code], raws[code] = Row.BAD_BASE64, b""
    inline, named, unset = raw_codes >= 0, path_codes >= 0, (offsets == 0) & (sizes == 0)
    kinds = np.select(
        [
            inline, ~named & unset, ~named, no_offset | no_size, (offsets < 0) | (sizes < 0),
            sizes > _LARGEST - np.maximum(offsets, 0), path_kinds > 0, unset,
        ],
        [
            raw_kinds[raw_codes], Row.ABSENT, Row.NO_PATH, Row.BARE, Row.NEGATIVE, Row.BEYOND, path_kinds, Row.WHOLE,
        ],
        Row.RANGE,
    ).astype(np.int8)  # fmt: skip
    texts = paths + raws
    bounds = np.cumsum([0, *map(len, texts)], dtype=np.int64)
    codes = np.where(inline, raw_codes + len(paths), path_codes).astype(np.int32)
    found = np.select(
        [kinds == Row.INLINE, kinds == Row.ABSENT, kinds == Row.WHOLE, kinds == Row.RANGE],
        [np.append(np.diff(bounds), 0)[codes], ABSENT, UNKNOWN, sizes],
        1,  # a broken row
    )
    columns = (part.tobytes() for part in (found.astype(np.int64), offsets, bounds, codes, kinds))
    body = b"".join([*columns, *texts])
    return {"rows": table.num_rows, "texts": len(texts)}, body


def _kind_of_path(path: bytes) -> int:
    """Return the kind of a row with a bad path, or 0."""
    rule = ""
    if not path:
        rule = "path: empty"
    elif len(path) > PATH_MAX and not path.startswith(b"data:"):
        rule = f"path: over {PATH_MAX} bytes"
    elif b"\0" in path:
        rule = "path: a NUL character"
    else:
        try:
            path.decode()
        except UnicodeDecodeError:
            rule = "path: not UTF-8"
    return RULES.index(rule) if rule else 0


def _read(data: bytearray, record_size: int, limit: int) -> Any:
    """Read the table, with text columns dictionary-encoded if pyarrow can. Raise ValueError if it is refused."""
    try:
        about = pq.read_metadata(pa.BufferReader(data))
        schema = about.schema.to_arrow_schema()
    except MemoryError:
        raise
    except Exception as exc:
        raise ValueError(f"not a Parquet file: {_reason(exc)}") from None
    for name in _COLUMNS:
        if schema.names.count(name) > 1:
            raise ValueError(f"two columns {name}")
    if about.num_rows > record_size:
        raise ValueError(f"{about.num_rows} rows, record_size is {record_size}")
    found = [name for name in _COLUMNS if name in schema.names]
    texts = [name for name in found if name in ("path", "raw") and _is_text(schema.field(name).type)]
    try:
        file = pq.ParquetFile(pa.BufferReader(data), metadata=about, read_dictionary=texts)
        table = file.read(found, use_threads=False)
        table.validate(full=True)
    except MemoryError:
        raise
    except Exception as exc:
        raise ValueError(f"a damaged Parquet file: {_reason(exc)}") from None
    if table.num_rows != about.num_rows:
        raise ValueError(f"a damaged Parquet file: {table.num_rows} rows of {about.num_rows}")
    if table.nbytes + table.num_rows * _ROW_BYTES > limit:
        raise MemoryError
    return table


def _texts(table: Any, name: str) -> tuple[Array, list[bytes]]:
    """Return a column as (an index into the texts for each row, -1 for null; the texts)."""
    if name not in table.column_names or _only_nulls(table[name]):
        return np.full(table.num_rows, -1, np.int32), []
    column = table[name]
    if not _is_text(column.type.value_type if pa.types.is_dictionary(column.type) else column.type):
        raise ValueError(f"column {name}: expected text or bytes, not {column.type}")
    if not pa.types.is_dictionary(column.type):
        column = column.dictionary_encode()
    array = column.unify_dictionaries().combine_chunks()
    codes = array.indices.cast(pa.int32()).fill_null(-1).to_numpy(zero_copy_only=False)
    return codes, array.dictionary.cast(pa.large_binary()).to_pylist()


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

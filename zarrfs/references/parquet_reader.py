"""The parser of record files of the Parquet layout (`refs.N.parq`), which runs in a child process (system.bounded).

pyarrow allocates as much memory as a page's header says, and aborts the process on some damage.
Source: fsspec's LazyReferenceMapper; docs/sources.md has the rules.
"""

from __future__ import annotations

import binascii
import functools
import itertools
import os
from array import array
from collections.abc import Iterable
from typing import Any

from zarrfs.references.keys import BASE64, decode_base64
from zarrfs.references.parquet_records import ABSENT, BROKEN, INLINE, UNKNOWN, WHOLE
from zarrfs.system.bounded import Header, limit_memory

os.environ["ARROW_DEFAULT_MEMORY_POOL"] = "system"  # other pools reserve address space, which is limited
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

_COLUMNS = ("path", "offset", "size", "raw")
_COPIES = 3  # a record file is in memory as pages, as columns, and as its answer
_SLACK = 32 << 20  # bytes
_ROW_BYTES = 32  # memory of a row while a file is parsed
_PATH_MAX = 4 * 65536  # bytes of a path: enough for the longest URL of a JSON set
_BATCH = 65_536  # rows whose values are Python objects at the same time
_LARGEST = 2**63 - 1

Row = tuple[int, int, bytes]  # the size of the chunk, the offset or what stands in place of it, the text of RecordFile


def answer(header: Header, body: bytearray) -> tuple[Header, bytes]:
    """Parse a record file of at most `record_size` rows and `limit` bytes to the body of a RecordFile.

    Raise ValueError if it is invalid as a whole.
    """
    limit_memory(_COPIES * header["limit"] + _SLACK)
    table = _read(body, header["record_size"], header["limit"])
    sizes, offsets, codes = (array("q") for _ in range(3))
    texts: dict[bytes, int] = {}
    for batch in table.to_batches(max_chunksize=_BATCH):
        for row in zip(*(_values(batch, name) for name in _COLUMNS), strict=True):
            size, offset, text = _row(*row)
            sizes.append(size)
            offsets.append(offset)
            codes.append(texts.setdefault(text, len(texts)))
    bounds = itertools.accumulate(map(len, texts), initial=0)
    parts = [_narrow(numbers) for numbers in (sizes, offsets, codes, array("q", bounds))]
    return {"columns": [(part.typecode, len(part) * part.itemsize) for part in parts]}, b"".join([*parts, *texts])


def _narrow(numbers: array[int]) -> array[int]:
    """Return whole numbers in the narrowest type that holds them all: a daemon keeps many record files."""
    largest = max(map(abs, (max(numbers, default=0), min(numbers, default=0))))
    return array(next(kind for kind, bits in (("h", 15), ("i", 31), ("q", 63)) if largest < 1 << bits), numbers)


def _row(path: bytes | None, offset: int | None, size: int | None, raw: bytes | None) -> Row:
    """Return a row as RecordFile has it."""
    if raw is not None:
        try:
            data = bytes(decode_base64(raw)) if raw.startswith(BASE64) else raw
        except binascii.Error:
            return 1, BROKEN, b"raw: malformed base64"
        return len(data), INLINE, data
    if path is None:
        if not offset and not size:
            return ABSENT, 0, b""
        rule = "an offset or size without a path"
    elif offset is None or size is None:
        rule = "a path without offset or size"
    elif offset < 0 or size < 0:
        rule = "a negative offset or size"
    elif offset + size > _LARGEST:
        rule = "offset + size is over 2^63 - 1"
    elif not (rule := _path_rule(path)):
        return (size, offset, path) if offset or size else (UNKNOWN, WHOLE, path)
    return 1, BROKEN, rule.encode()


@functools.lru_cache(1024)
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
    if "path" not in found and "raw" not in found:
        raise ValueError("neither a column path nor a column raw")
    for name in ("offset", "size"):
        if "path" in found and name not in found:
            raise ValueError(f"a column path, but no column {name}")
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
    for name in found:
        column = table[name]
        if _only_nulls(column):
            table = table.drop_columns(name)
        elif name in ("path", "raw"):
            kind = column.type.value_type if pa.types.is_dictionary(column.type) else column.type
            if not _is_text(kind):
                raise ValueError(f"column {name}: expected text or bytes, not {kind}")
        elif not pa.types.is_integer(column.type):
            raise ValueError(f"column {name}: expected whole numbers, not {column.type}")
    return table


def _values(batch: Any, name: str) -> Iterable[Any]:
    """Return a column of a batch: bytes or whole numbers, or None."""
    if name not in batch.schema.names:
        return [None] * batch.num_rows
    column = batch.column(name)
    if not pa.types.is_dictionary(column.type):
        return list((column.cast(pa.large_binary()) if name in ("path", "raw") else column).to_pylist())
    texts = column.dictionary.cast(pa.large_binary()).to_pylist()
    return (None if code is None else texts[code] for code in column.indices.to_pylist())


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

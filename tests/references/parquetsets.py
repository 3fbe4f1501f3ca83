"""Helpers for the tests of Parquet sets: write record files, and query stores from synchronous code."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq
import trio

from tests.sources.opening import open_source
from tests.store.contract import keys
from zarrfs.config.options import Options
from zarrfs.errors import ReadError
from zarrfs.references.parquet import ParquetStore

T = TypeVar("T")
Reference = None | bytes | list[Any]  # absent, inline, [url] or [url, offset, size]


def zarray(shape: object, chunks: object, **more: object) -> dict[str, object]:
    """Return the `.zarray` of an array of bytes."""
    return {
        "zarr_format": 2, "shape": shape, "chunks": chunks, "dtype": "|u1", "fill_value": 7, "order": "C",
        "compressor": None, "filters": None, **more,
    }  # fmt: skip


def columns(references: Sequence[Reference], rows: int) -> dict[str, list[Any]]:
    """Return the columns of a record file, padded to `rows` rows."""
    found: dict[str, list[Any]] = {"path": [], "offset": [], "size": [], "raw": []}
    for reference in [*references, *[None] * (rows - len(references))]:
        path, offset, size = ([*reference, 0, 0][:3]) if isinstance(reference, list) else (None, 0, 0)
        for name, value in zip(found, (path, offset, size, reference), strict=True):
            found[name].append(value if name != "raw" or isinstance(value, bytes) else None)
    return found


def write_record(path: Path, table: dict[str, Any] | pa.Table) -> None:
    """Write `table` as a record file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(table, dict):
        kinds = {"path": pa.string(), "offset": pa.int64(), "size": pa.int64(), "raw": pa.binary()}
        table = pa.table({
            name: values if isinstance(values, pa.Array) else pa.array(values, kinds.get(name))
            for name, values in table.items()
        })  # fmt: skip
    pq.write_table(table, path)


def write_set(
    root: Path, metadata: dict[str, Any], arrays: dict[str, Sequence[Reference]], record_size: int = 4
) -> Path:
    """Write a set; `arrays` has the references of each array in C order, None for an absent chunk."""
    root.mkdir(parents=True, exist_ok=True)
    for array, references in arrays.items():
        for start in range(0, len(references), record_size):
            part = references[start : start + record_size]
            write_record(root / array / f"refs.{start // record_size}.parq", columns(part, record_size))
    (root / ".zmetadata").write_text(json.dumps({"metadata": metadata, "record_size": record_size}))
    return root


def ask(source: Path | str, question: Callable[[ParquetStore], Awaitable[T]], **options: Any) -> T:
    """Open the set at `source` and return the result of `question(store)`."""

    async def main() -> T:
        store = open_source(str(source), Options(**{"retries": 0, **options}), child=False)
        assert isinstance(store, ParquetStore)
        try:
            return await question(store)
        finally:
            await store.aclose()

    return trio.run(main)


def tree_of(source: Path | str, **options: Any) -> dict[str, bytes | str]:
    """Return all keys of a set, in order, with their bytes or the text of the ReadError."""

    async def read(store: ParquetStore) -> dict[str, bytes | str]:
        found: dict[str, bytes | str] = {}
        for key in await keys(store):
            try:
                found[key] = bytes(await store.get(key))
                assert (await store.info(key)).size == len(found[key])
            except ReadError as exc:
                found[key] = str(exc)
        return found

    return ask(source, read, **options)


def chunks_of(source: Path | str, array: str = "a", **options: Any) -> dict[str, bytes | str]:
    """Return the chunks of one array as tree_of() does, by their names within the array."""
    found = tree_of(source, **options).items()
    return {key[len(array) + 1 :]: value for key, value in found if key.startswith(array) and "/." not in key}

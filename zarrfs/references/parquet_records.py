"""Record files of the Parquet layout as a child process has parsed them: some bytes per row, and each text once."""

from __future__ import annotations

from typing import NamedTuple

from zarrfs.references.parquet_metadata import Bound
from zarrfs.system import bounded
from zarrfs.system.buffers import Buffer

ABSENT, UNKNOWN = -1, -2  # in place of the size of a chunk: no such chunk; size not known yet
WHOLE, INLINE, BROKEN = -1, -2, -3  # in place of the offset: the text is a whole target, the bytes, or a broken rule


class Target(NamedTuple):
    """The target of a chunk: a range, or without a length, all of it.

    `broken` is the rule that an invalid reference breaks.
    """

    url: str
    offset: int
    length: int | None
    broken: str = ""


class RecordFile:
    """A parsed record file; its len() is its memory in bytes.

    `body` has the size of each row, its offset, the number of its text, the bounds of the texts, and the texts.
    `columns` has the type and the bytes of each part before the texts.
    """

    def __init__(self, columns: list[tuple[str, int]], body: Buffer) -> None:
        rest, parts = memoryview(body), []
        for kind, size in columns:
            parts.append(rest[:size].cast(kind))  # type: ignore[call-overload]
            rest = rest[size:]
        self._sizes, self._offsets, self._codes, self._bounds = parts
        self.rows, self._texts, self._bytes = len(self._sizes), rest, len(body)

    def __len__(self) -> int:
        return 1000 + self._bytes

    def row(self, number: int) -> bytes | Target | None:
        """Return the inline bytes or the target in a row; None if it is empty. Raise ValueError if it is missing."""
        if number >= self.rows:
            raise ValueError(f"row {number}: missing: the file has {self.rows} rows")
        size, offset, code = self._sizes[number], self._offsets[number], self._codes[number]
        if size == ABSENT:
            return None
        text = bytes(self._texts[self._bounds[code] : self._bounds[code + 1]])
        if offset == INLINE:
            return text
        if offset == BROKEN:
            return Target("", 0, size, f"row {number}: {text.decode()}")
        return Target(text.decode(), max(offset, 0), None if offset == WHOLE else size)

    def sizes(self, start: int, stop: int) -> list[int]:
        """Return the sizes in bytes of the chunks in the rows [start, stop).

        A size is ABSENT for an empty row, and UNKNOWN for a whole target and a missing row.
        """
        found: list[int] = self._sizes[start:stop].tolist()
        return found + [UNKNOWN] * (stop - start - len(found))


def parse_record(data: Buffer, record_size: int, limit: Bound) -> RecordFile:
    """Parse a record file in a child process. Blocks.

    Raise ValueError if it is invalid as a whole, or needs more than `limit` bytes; RecordFile.row() reports invalid
    rows.
    """
    request = {"record_size": record_size, "limit": limit.size}
    try:
        header, body = bounded.call("zarrfs.references.parquet_reader", request, data, 2 * limit.size)
    except bounded.OutOfMemory:
        raise ValueError(f"expands to {limit}") from None
    except bounded.ChildError as exc:
        raise ValueError(str(exc)) from None
    return RecordFile(header["columns"], body)

"""The parser of --shard I/N, the share of the work that a process does."""

from __future__ import annotations

import dataclasses
import re
import zlib

from zarrfs.errors import UsageError

_MOST = 1_000_000  # shares
_SHAPE = re.compile(r"([0-9]{1,7})/([0-9]{1,7})", re.ASCII)


@dataclasses.dataclass(frozen=True)
class Share:
    """One of `count` shares of the keys of a source; `index` counts from 0."""

    index: int
    count: int

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"

    def has(self, key: str) -> bool:
        """Return whether a key is in this share. It is in exactly one, whatever other keys there are."""
        return zlib.crc32(key.encode("utf-8", "surrogateescape")) % self.count == self.index


WHOLE = Share(0, 1)


def share_of(text: str | None) -> Share:
    """Parse --shard: I/N with 0 <= I < N; everything without the option. Raise UsageError for anything else."""
    if text is None:
        return WHOLE
    match = _SHAPE.fullmatch(text)
    if match is None:
        raise UsageError(f"--shard {text}: expected I/N, such as 0/4, or $SLURM_PROCID/$SLURM_NTASKS")
    index, count = int(match[1]), int(match[2])
    if not 1 <= count <= _MOST:
        raise UsageError(f"--shard {text}: the number of shares must be 1 to {_MOST:,}")
    if index >= count:
        raise UsageError(f"--shard {text}: shares count from 0: the last of {count} is {count - 1}/{count}")
    return Share(index, count)

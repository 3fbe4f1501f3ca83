"""The parser of --shard I/N, the share of the work that a process does."""

from __future__ import annotations

import dataclasses
import re
import zlib

from zarrfs.errors import UsageError


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
    match = re.fullmatch(r"([0-9]{1,6})/([0-9]{1,6})", text)
    if match is None or int(match[1]) >= int(match[2]):
        raise UsageError(f"--shard {text}: expected I/N with I from 0 to N-1, such as $SLURM_PROCID/$SLURM_NTASKS")
    return Share(int(match[1]), int(match[2]))

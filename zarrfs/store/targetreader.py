"""What a store asks of whoever fetches its bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    from zarrfs.config.options import Options
    from zarrfs.system.buffers import Buffer

class TargetReader(Protocol):
    """Reads ranges of targets: files, URLs, or blobs."""

    forbidden_device: int | None  # st_dev that no local target may lie on: reading there would wait for us

    async def read(self, url: str, offset: int, length: int, low: int, high: int) -> Buffer:
        """Exactly the bytes [offset, offset + length) of `url`, or a ReadError.

        [low, high) is the extent of the value that they are part of: what it is worth to fetch with them.
        """
        ...

    @property
    def remote(self) -> bool:
        """Whether bytes came over a network so far."""
        ...

    async def get_ready(self, url: str) -> None:
        """Import and start what it takes to read `url`, if that is not local; asks no server."""
        ...

    async def prefetch(self, wanted: Sequence[tuple[str, int, int]]) -> None:
        """Bring the beginnings of values (url, low, high) into the cache; errors are left to who reads them.

        Returns when they are there; cancelling it drops what has not come.
        """
        ...

    async def size(self, url: str, begin: bool = False) -> int:
        """The size of `url` in bytes, or a ReadError; to `begin` with, the first bytes are fetched with it."""
        ...

    def resolve(self, url: str) -> str:
        """`url` as it is looked for: absolute, without credentials."""
        ...

    def adjust(self, options: Options) -> None:
        """Take over what may change of the options while a mount goes on."""
        ...

    def stats(self) -> dict[str, Any]:
        """Counters, for the log."""
        ...

    async def aclose(self) -> None:
        """Give back descriptors, connections and threads."""
        ...


@runtime_checkable
class WholeReader(Protocol):
    """A TargetReader that has small targets at hand."""

    def whole(self, url: str, only_sound: bool = False) -> memoryview | None:
        """All bytes of a target, verified; None: ask read(). Blocks, in any thread; raises as read().

        `only_sound`: None as well where a place that was asked before has failed, which is to be told.
        """
        ...

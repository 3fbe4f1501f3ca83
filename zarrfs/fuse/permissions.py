"""Permission bits in a mount: those of the store without umask=.

A source's files never have set-user-ID or set-group-ID bits (store.api.ordinary_mode). The mask applies to the bits
that the mount shows, also for files of an upper directory. As with vfat and ntfs, it does not change the stored bits.
"""

from __future__ import annotations

import stat

from zarrfs.store.api import Info, Kind, ordinary_mode


class Permissions:
    """The permission rules of one mount."""

    def __init__(self, umask: int) -> None:
        self._unmasked_bits = ~umask

    def unmasked(self, info: Info) -> int:
        """Return the bits of a source entry before the mask. Its copy in an upper directory gets the same bits."""
        if info.kind is Kind.SYMLINK:
            return 0o777
        if info.mode is None:
            return 0o555 if info.kind is Kind.DIRECTORY else 0o444
        return ordinary_mode(info)

    def of(self, info: Info) -> int:
        """Return the visible bits of a source entry."""
        return self.unmasked(info) & (~0 if info.kind is Kind.SYMLINK else self._unmasked_bits)

    def of_upper(self, mode: int) -> int:
        """Return the visible st_mode of a file in an upper directory."""
        return mode if stat.S_ISLNK(mode) else mode & self._unmasked_bits

"""Permission bits in a mount: those of the store, or file_mode= and dir_mode=, without umask=, fmask= and dmask=.

A source's files never have set-user-ID or set-group-ID bits (store.api.ordinary_mode). Masks apply to the bits that
the mount shows, also for files of an upper directory. As with vfat and ntfs, they do not change the stored bits.
"""

from __future__ import annotations

import stat

from zarrfs.config.options import Options
from zarrfs.store.api import Info, Kind, ordinary_mode


class Permissions:
    """The permission rules of one mount."""

    def __init__(self, options: Options) -> None:
        self._fixed = {Kind.FILE: options.file_mode, Kind.DIRECTORY: options.dir_mode, Kind.SYMLINK: 0o777}
        masks = {Kind.FILE: options.fmask, Kind.DIRECTORY: options.dmask, Kind.SYMLINK: 0}
        self._unmasked_bits = {kind: ~(options.umask if mask is None else mask) for kind, mask in masks.items()}

    def unmasked(self, info: Info) -> int:
        """Return the bits of a source entry before masks. Its copy in an upper directory gets the same bits."""
        fixed = self._fixed[info.kind]
        if fixed is not None:
            return ordinary_mode(info._replace(mode=fixed))
        if info.mode is None:
            return 0o555 if info.kind is Kind.DIRECTORY else 0o444
        return ordinary_mode(info)

    def of(self, info: Info) -> int:
        """Return the visible bits of a source entry."""
        return self.unmasked(info) & self._unmasked_bits[info.kind]

    def of_upper(self, mode: int) -> int:
        """Return the visible st_mode of a file in an upper directory."""
        if stat.S_ISLNK(mode):
            return mode
        return mode & self._unmasked_bits[Kind.DIRECTORY if stat.S_ISDIR(mode) else Kind.FILE]

"""Permission bits that a mount shows: those of the store, or file_mode= and dir_mode=, less umask=, fmask= and dmask=.

Set-user-ID and set-group-ID bits of a source's files are never among them (store.api.ordinary_mode). Masks are taken
from what is shown, also of an upper directory, and change nothing that is stored there, as with vfat and ntfs.
"""

from __future__ import annotations

import stat

from zarrfs.config.options import Options
from zarrfs.store.api import Info, Kind, ordinary_mode


class Permissions:
    """The rules of one mount."""

    def __init__(self, options: Options) -> None:
        self._said = {Kind.FILE: options.file_mode, Kind.DIRECTORY: options.dir_mode, Kind.SYMLINK: 0o777}
        masks = {Kind.FILE: options.fmask, Kind.DIRECTORY: options.dmask, Kind.SYMLINK: 0}  # of links nobody asks
        self._kept = {kind: ~(options.umask if mask is None else mask) for kind, mask in masks.items()}

    def unmasked(self, info: Info) -> int:
        """The bits of an entry of the source, which are those of its copy in an upper directory, too."""
        said = self._said[info.kind]
        if said is not None:
            return ordinary_mode(info._replace(mode=said))
        if info.mode is None:
            return 0o555 if info.kind is Kind.DIRECTORY else 0o444
        return ordinary_mode(info)

    def of(self, info: Info) -> int:
        """The bits that are shown of an entry of the source."""
        return self.unmasked(info) & self._kept[info.kind]

    def of_upper(self, mode: int) -> int:
        """st_mode as it is shown of a file in an upper directory, which has an owner of its own."""
        if stat.S_ISLNK(mode):
            return mode
        return mode & self._kept[Kind.DIRECTORY if stat.S_ISDIR(mode) else Kind.FILE]

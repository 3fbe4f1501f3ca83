"""The flags that the kernel keeps for a mount: ro, nosuid, noatime, ...

They are changed with mount(2) instead of mount(8), because mount(8) would merge in options from fstab and mountinfo,
and so drop nosuid or keep noexec.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable

from zarrfs.errors import MountError, UsageError
from zarrfs.system import mounts

_BITS = {
    "ro": 1, "nosuid": 2, "nodev": 4, "noexec": 8, "sync": 16, "dirsync": 1 << 7, "noatime": 1 << 10,
    "nodiratime": 1 << 11, "relatime": 1 << 21, "strictatime": 1 << 24, "lazytime": 1 << 25,
}  # fmt: skip
_REMOUNT = 32
OFF = {"rw": "ro", "suid": "nosuid", "dev": "nodev", "exec": "noexec", "async": "sync"}
_ATIME = ("noatime", "relatime", "strictatime")  # exactly one of them is set


def bits(flags: Iterable[str]) -> int:
    """Return the flags of mount(2) for options of mount(8). Options without a flag are ignored."""
    return sum(_BITS.get(flag, 0) for flag in flags)


def flags_of(mount: mounts.Mount) -> set[str]:
    """Return the flags of a mount, as names. With neither noatime nor relatime, strictatime is added."""
    found = {flag for flag in mount.flags if flag in _BITS}
    return found if found & {*_ATIME} else {*found, "strictatime"}


def combined(now: set[str], words: Iterable[str], whole: bool) -> set[str]:
    """Return the flags after a remount, of a mount with the flags `now`, with the options `words`. Later words win.

    With `whole`, `words` is the complete list, as mount(8) gives it to its helpers: flags that are not named are
    cleared, except ro, nosuid, nodev, dirsync and those about atime, which stay unless an option clears them. Raise
    UsageError for an option that no remount can change.
    """
    flags = now & {"ro", "nosuid", "nodev", "nodiratime", "dirsync", *_ATIME} if whole else {*now}
    for word in words:
        if word == "dirsync" and word not in now:
            raise UsageError("option dirsync: cannot change while mounted: unmount, and mount again")
        if word in OFF:
            flags.discard(OFF[word])
        elif word == "atime":  # means the kernel's default
            flags = {*(flags - {*_ATIME}), "relatime"}
        elif word in _ATIME:
            flags = {*(flags - {*_ATIME}), word}
        elif word in _BITS:
            flags.add(word)
    return flags


def remount(mountpoint: str, flags: set[str]) -> None:
    """Set exactly `flags` on the mount at `mountpoint`. Raise MountError if the kernel refuses or ignores a flag."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"none", os.fsencode(mountpoint), None, ctypes.c_ulong(_REMOUNT | bits(flags)), None):
        raise MountError(f"{mountpoint}: cannot remount: {os.strerror(ctypes.get_errno()).lower()}")
    mount = mounts.mount_at(mountpoint)
    left = (set() if mount is None else flags_of(mount)) ^ flags
    if left:
        raise MountError(f"{mountpoint}: remounted, but the kernel has not changed {', '.join(sorted(left))}")

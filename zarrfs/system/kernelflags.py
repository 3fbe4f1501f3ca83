"""The flags that the kernel keeps for a mount: ro, nosuid, noatime, ...

They are changed by mount(2) itself: mount(8) would mix in what fstab and mountinfo say, and so take nosuid off, or
leave noexec on.
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
_ATIME = ("noatime", "relatime", "strictatime")  # one of them holds


def bits(flags: Iterable[str]) -> int:
    """The flags of mount(2) for words of mount(8); words without a flag of their own add nothing."""
    return sum(_BITS.get(flag, 0) for flag in flags)


def flags_of(mount: mounts.Mount) -> set[str]:
    """The flags that hold for a mount."""
    found = {flag for flag in mount.flags if flag in _BITS}
    return found if found & {*_ATIME} else {*found, "strictatime"}


def wanted(now: set[str], said: Iterable[str], whole: bool) -> set[str]:
    """The flags that are to hold, where `now` do and a remount says `said`; later words win.

    `whole`: what is not said is off, as mount(8) tells its helpers all that is to hold. What it never means to take
    away by silence is kept: ro, nosuid, nodev and what becomes of times. UsageError for what no remount can change.
    """
    flags = now & {"ro", "nosuid", "nodev", "nodiratime", "dirsync", *_ATIME} if whole else {*now}
    for word in said:
        if word == "dirsync" and word not in now:
            raise UsageError("option dirsync: cannot change while mounted: unmount, and mount again")
        if word in OFF:
            flags.discard(OFF[word])
        elif word == "atime":  # as after a mount without any word of it
            flags = {*(flags - {*_ATIME}), "relatime"}
        elif word in _ATIME:
            flags = {*(flags - {*_ATIME}), word}
        elif word in _BITS:
            flags.add(word)
    return flags


def remount(mountpoint: str, flags: set[str]) -> None:
    """Let exactly `flags` hold for the mount at `mountpoint`; MountError where it does not come true."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"none", os.fsencode(mountpoint), None, ctypes.c_ulong(_REMOUNT | bits(flags)), None):
        raise MountError(f"{mountpoint}: cannot remount: {os.strerror(ctypes.get_errno()).lower()}")
    mount = mounts.mount_at(mountpoint)
    left = (set() if mount is None else flags_of(mount)) ^ flags
    if left:
        raise MountError(f"{mountpoint}: remounted, but the kernel has not changed {', '.join(sorted(left))}")

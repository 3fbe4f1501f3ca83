"""The flags that the kernel keeps for a mount: ro, nosuid, noatime, ..."""

from __future__ import annotations

from collections.abc import Iterable

_BITS = {
    "ro": 1, "nosuid": 2, "nodev": 4, "noexec": 8, "sync": 16, "dirsync": 1 << 7, "nosymfollow": 1 << 8,
    "noatime": 1 << 10, "nodiratime": 1 << 11, "relatime": 1 << 21, "strictatime": 1 << 24, "lazytime": 1 << 25,
}  # fmt: skip
_OFF = {"rw": "ro", "suid": "nosuid", "dev": "nodev", "exec": "noexec", "async": "sync", "diratime": "nodiratime"}
_ATIME = ("noatime", "relatime", "strictatime")  # exactly one of them is set


def bits(flags: Iterable[str]) -> int:
    """Return the flags of mount(2) for options of mount(8). Options without a flag are ignored."""
    return sum(_BITS.get(flag, 0) for flag in flags)


def combined(words: Iterable[str]) -> set[str]:
    """Return the flags of a mount with the options `words`. Later words win."""
    flags = {"nosuid", "nodev"}
    for word in words:
        if word in _OFF:
            flags.discard(_OFF[word])
        elif word == "atime":  # means the kernel's default
            flags = {*(flags - {*_ATIME}), "relatime"}
        elif word in _ATIME:
            flags = {*(flags - {*_ATIME}), word}
        elif word in _BITS:
            flags.add(word)
    return flags

"""renameat2(2), which Python lacks: a rename that fails if the new name exists, or that exchanges two names."""

from __future__ import annotations

import ctypes
import os

NOREPLACE, EXCHANGE = 1, 2  # linux/fs.h
CWD = -100  # AT_FDCWD: names are relative to the working directory, or absolute

_libc = ctypes.CDLL(None, use_errno=True)


def rename(one: bytes, other: bytes, flags: int, one_directory: int = CWD, other_directory: int = CWD) -> None:
    """Rename `one` in `one_directory` to `other` in `other_directory`; with EXCHANGE, exchange them.

    Raise OSError; EINVAL if the file system does not support the flag.
    """
    if _libc.renameat2(one_directory, one, other_directory, other, flags):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), os.fsdecode(one))

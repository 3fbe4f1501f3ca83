"""Mounts as the kernel sees them: what is mounted where, who uses it, and how it is undone.

Nothing here touches a path below a mount point, except getxattr in `ask` and statvfs in is_dead, with deadlines.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import re
import shutil
import stat
import subprocess
import threading
from typing import Any, NamedTuple

from zarrfs.errors import MountError
from zarrfs.transfer.machine import readable

FSTYPE = "fuse.zarrfs"
_ANSWER = 3.0  # seconds that a daemon has for an answer
_LAST_REQUESTS = 10.0  # seconds that a daemon has to end after the kernel has let go of the mount


class Mount(NamedTuple):
    """One line of /proc/self/mountinfo."""

    device: str  # "major:minor", also its folder in /sys/class/bdi
    mountpoint: str
    fstype: str
    source: str


def mounts() -> list[Mount]:
    """All mounts of this mount namespace, in the order they were made."""
    found = []
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
        for line in file:
            left, _, right = line.partition(" - ")
            fields, more = left.split(" "), right.split(" ")
            found.append(Mount(fields[2], _unescape(fields[4]), more[0], _unescape(more[1])))
    return found


def mount_at(mountpoint: str) -> Mount | None:
    """The topmost mount at exactly `mountpoint`, or None; a waiting automount trigger is none."""
    at = [mount for mount in mounts() if mount.mountpoint == mountpoint]
    return at[-1] if at and at[-1].fstype != "autofs" else None


def canonical(mountpoint: str) -> str:
    """`mountpoint` as mountinfo spells it; its last part is not resolved, as it may be a dead mount."""
    parent, name = os.path.split(os.path.abspath(mountpoint))
    path = os.path.join(os.path.realpath(parent), name)
    if mount_at(path) is None and os.path.islink(path):
        return os.path.realpath(path)
    return path


def check_mountpoint(mountpoint: str) -> str | None:
    """Raise MountError for a place that cannot be mounted on; returns a note if it cleared a dead mount."""
    mount = mount_at(mountpoint)
    note = None
    if mount is not None:
        if mount.fstype != FSTYPE or not is_dead(mountpoint):
            raise MountError(f"{mountpoint}: already a mount point ({mount.source}, type {mount.fstype})")
        unmount(mountpoint, lazy=True)
        note = f"{mountpoint}: cleared a mount whose daemon had died"
    try:
        status = os.stat(mountpoint)
    except OSError as exc:
        raise MountError(f"{mountpoint}: {(exc.strerror or str(exc)).lower()}") from None
    if not stat.S_ISDIR(status.st_mode):
        raise MountError(f"{mountpoint}: not a directory")
    return note


def is_dead(mountpoint: str) -> bool:
    """Whether a FUSE mount has lost its daemon: every call says ENOTCONN. Not of one that does not answer in time."""
    found: list[int | None] = []

    def ask() -> None:
        try:
            os.statvfs(mountpoint)
        except OSError as exc:
            found.append(exc.errno)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(_ANSWER)
    return bool(found) and found[0] in (errno.ENOTCONN, errno.ECONNABORTED)


def unmount(mountpoint: str, lazy: bool = False) -> None:
    """Unmount; MountError with the kernel's reason, EBUSY with who holds it."""
    if os.geteuid() == 0:
        libc = ctypes.CDLL(None, use_errno=True)
        flags = 8 | (2 if lazy else 0)  # UMOUNT_NOFOLLOW, MNT_DETACH
        if libc.umount2(os.fsencode(mountpoint), flags) == 0:
            return
        code = ctypes.get_errno()
        reason, busy = os.strerror(code).lower(), code == errno.EBUSY
    else:
        done = subprocess.run(
            [fusermount(), "-u", *(["-z"] if lazy else []), "--", mountpoint],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        if done.returncode == 0:
            return
        reason = done.stderr.strip().rpartition(": ")[2].lower() or f"fusermount3 status {done.returncode}"
        busy = "busy" in reason
    if busy:
        reason = f"in use by {', '.join(holders(mountpoint)) or 'a process that cannot be seen from here'}"
    raise MountError(f"{mountpoint}: cannot unmount: {reason}")


def end(mountpoint: str, lazy: bool = False) -> None:
    """Unmount what zarrfs has mounted at `mountpoint` and wait for its daemon to end; MountError."""
    mountpoint = canonical(mountpoint)
    mount = mount_at(mountpoint)
    if mount is None or mount.fstype != FSTYPE:
        what = "not mounted" if mount is None else f"not a mount of zarrfs but of type {mount.fstype}"
        raise MountError(f"{mountpoint}: {what}")
    daemon = daemon_of(mountpoint)
    unmount(mountpoint, lazy)
    if daemon is not None and not lazy and not wait_for_end(daemon["pid"], _LAST_REQUESTS):
        raise MountError(f"{mountpoint}: unmounted, but its daemon (pid {daemon['pid']}) has not ended")


def fusermount() -> str:
    """The path of fusermount3; helpers and units run without PATH."""
    found = shutil.which("fusermount3", path=os.environ.get("PATH", "") + ":/bin:/usr/bin:/usr/local/bin")
    if found is None:
        raise MountError("fusermount3 is not installed (Debian: apt install fuse3)")
    return found


def holders(mountpoint: str, limit: int = 5) -> list[str]:
    """Processes that have a file, directory or mapping below `mountpoint` open, as "pid 12 (vim)"."""
    found: list[str] = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        if any(path == mountpoint or path.startswith(mountpoint + "/") for path in _paths_of(pid)):
            with contextlib.suppress(OSError), open(f"/proc/{pid}/comm") as file:
                found.append(f"pid {pid} ({file.read().strip()})")
    return found if len(found) <= limit else [*found[:limit], f"{len(found) - limit} more"]


def _paths_of(pid: str) -> list[str]:
    """What a process holds open, from links alone: nothing is resolved."""
    links = [f"/proc/{pid}/cwd", f"/proc/{pid}/root"]
    with contextlib.suppress(OSError):
        links += [f"/proc/{pid}/fd/{number}" for number in os.listdir(f"/proc/{pid}/fd")]
    paths = []
    for link in links:
        with contextlib.suppress(OSError):
            paths.append(os.readlink(link))
    with contextlib.suppress(OSError), open(f"/proc/{pid}/maps", errors="surrogateescape") as file:
        paths += [line.split(None, 5)[5].rstrip("\n") for line in file if line.count("/")]
    return paths


def daemon_of(mountpoint: str, timeout: float = 2.0) -> dict[str, Any] | None:
    """What the daemon behind a mount says of itself (pid, source, kind); None when it does not answer."""
    try:
        return dict(json.loads(ask(mountpoint, "user.zarrfs.mount", timeout)))
    except OSError:
        return None


def ask(mountpoint: str, name: str, timeout: float) -> bytes:
    """The extended attribute `name` of the root of a mount; OSError, TimeoutError after `timeout` seconds."""
    answer: list[bytes | OSError] = []

    def wait() -> None:
        try:
            answer.append(os.getxattr(mountpoint, name))
        except OSError as exc:
            answer.append(exc)

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    thread.join(timeout)
    found = answer[0] if answer else TimeoutError(errno.ETIMEDOUT, "does not answer")
    if isinstance(found, OSError):
        raise found
    return found


def wait_for_end(pid: int, timeout: float) -> bool:
    """Wait until process `pid` is gone; False when it is still there after `timeout` seconds."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return readable(descriptor, timeout)
    finally:
        os.close(descriptor)


def _unescape(text: str) -> str:
    """Undo mountinfo's octal escapes of blanks and backslashes."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)

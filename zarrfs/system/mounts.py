"""Mounts as the kernel sees them: what is mounted where, who uses it, and how it is undone.

Nothing here touches a path below a mount point, except getxattr in `ask` and statvfs in `unanswered`, with deadlines.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import re
import shutil
import signal
import stat
import subprocess
import threading
import time
from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

from zarrfs.errors import MountError
from zarrfs.system.processes import readable

FSTYPE = "fuse.zarrfs"
_NOT_OURS = "permission denied, also for root: run it as the user who mounted it (or mount with allow_root)"
_ANSWER = 3.0  # seconds that a daemon has for an answer
_KILLED = 1.0  # seconds that a process that was killed may take to go
_ASKED = 1.0  # seconds that a question to a mount may keep it busy
_LAST_REQUESTS = 10.0  # seconds that a daemon has to end after the kernel has let go of the mount


class Mount(NamedTuple):
    """One line of /proc/self/mountinfo."""

    device: str  # "major:minor", also its folder in /sys/class/bdi
    mountpoint: str
    fstype: str
    source: str
    flags: tuple[str, ...] = ()  # of the mount and of its file system: ro, nosuid, noatime, ...


def mounts() -> list[Mount]:
    """All mounts of this mount namespace, in the order they were made."""
    found = []
    with open("/proc/self/mountinfo", "rb") as file:
        for line in file.read().split(b"\n")[:-1]:  # a name may have other characters that end lines of text
            left, _, right = os.fsdecode(line).partition(" - ")
            fields, more = left.split(" "), right.split(" ")
            flags = (*fields[5].split(","), *more[2].split(","))
            found.append(Mount(fields[2], _unescape(fields[4]), more[0], _unescape(more[1]), flags))
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
    note = None
    if clear_dead(mountpoint):
        note = f"{mountpoint}: cleared a mount whose daemon had died"
    elif (mount := mount_at(mountpoint)) is not None:
        raise MountError(f"{mountpoint}: already a mount point ({mount.source}, type {mount.fstype})")
    try:
        status = os.stat(mountpoint)
    except OSError as exc:
        raise MountError(f"{mountpoint}: {(exc.strerror or str(exc)).lower()}") from None
    if not stat.S_ISDIR(status.st_mode):
        raise MountError(f"{mountpoint}: not a directory")
    return note


def clear_dead(mountpoint: str) -> bool:
    """Unmount what zarrfs has mounted there if its daemon has died; whether that was so. MountError."""
    mount = mount_at(mountpoint)
    if mount is None or mount.fstype != FSTYPE or not is_dead(mountpoint):
        return False
    unmount(mountpoint, lazy=True)
    return True


def is_dead(mountpoint: str) -> bool:
    """Whether a FUSE mount has lost its daemon: every call says ENOTCONN. Not of one that does not answer in time."""
    return bool(unanswered([mountpoint], _ANSWER)[0])


def unanswered(mountpoints: Sequence[str], patience: float = 2.0) -> tuple[list[str], list[str]]:
    """(FUSE mounts without a daemon, those that do not answer for `patience` seconds); all are asked at once."""
    found: dict[str, int | None] = {}

    def ask(mountpoint: str) -> None:
        try:
            os.statvfs(mountpoint)
            found[mountpoint] = None
        except OSError as exc:
            found[mountpoint] = exc.errno

    threads = [threading.Thread(target=ask, args=(one,), daemon=True) for one in mountpoints]
    deadline = time.monotonic() + patience
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    said = dict(found)
    dead = [one for one, code in said.items() if code in (errno.ENOTCONN, errno.ECONNABORTED)]
    return dead, [one for one in mountpoints if one not in said]


def unmount(mountpoint: str, lazy: bool = False) -> None:
    """Unmount; MountError with the kernel's reason, EBUSY with who holds it.

    Who asks a mount something, as `zarrfs top` and df do, keeps it busy just then: a moment is given to those.
    """
    asked, pause = mount_at(mountpoint), 0.01
    deadline = time.monotonic() + _ASKED
    while (refused := _refusal(mountpoint, lazy)) is not None:
        if asked is not None and mount_at(mountpoint) != asked:
            return  # somebody else was faster, and has perhaps mounted something else
        reason, busy = refused
        users = holders(mountpoint) if busy else []
        if busy and not users and time.monotonic() < deadline:
            time.sleep(pause)
            pause = min(2 * pause, 0.04)
            continue
        if busy:
            reason = f"in use by {', '.join(users) or 'a process that cannot be seen from here'}"
        raise MountError(f"{mountpoint}: cannot unmount: {reason}")


def _refusal(mountpoint: str, lazy: bool) -> tuple[str, bool] | None:
    """Unmount, once: None, or the kernel's reason and whether it is EBUSY."""
    if os.geteuid() == 0:
        libc = ctypes.CDLL(None, use_errno=True)
        flags = 8 | (2 if lazy else 0)  # UMOUNT_NOFOLLOW, MNT_DETACH
        if libc.umount2(os.fsencode(mountpoint), flags) == 0:
            return None
        code = ctypes.get_errno()
        return os.strerror(code).lower(), code == errno.EBUSY
    done = subprocess.run(
        [fusermount(), "-u", *(["-z"] if lazy else []), "--", mountpoint], capture_output=True, text=True, check=False
    )
    if done.returncode == 0:
        return None
    reason = done.stderr.strip().rpartition(": ")[2].lower() or f"fusermount3 status {done.returncode}"
    return reason, "busy" in reason


def unmount_own(mountpoint: str, device: int | None) -> None:
    """unmount() of what has `device` as st_dev; MountError where something else was mounted over it."""
    top = mount_at(mountpoint)
    if device is not None and top is not None and top.device != f"{os.major(device)}:{os.minor(device)}":
        other = f"{top.source}, {top.fstype}"
        raise MountError(f"{mountpoint}: cannot unmount: something else is mounted over it ({other})")
    unmount(mountpoint)


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
    """The extended attribute `name` of the root of a mount; OSError, TimeoutError after `timeout` seconds.

    A child asks: one that gets no answer is killed, so that nothing of ours keeps the mount in use. A thread that
    waits for a suspended daemon would.
    """
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        _answer(mountpoint, name, write_end)
    os.close(write_end)
    said, deadline = b"", time.monotonic() + timeout
    try:
        while readable(read_end, max(0.0, deadline - time.monotonic())):
            part = os.read(read_end, 1 << 16)
            if not part:
                break
            said += part
        else:
            raise TimeoutError(errno.ETIMEDOUT, "does not answer")
    finally:
        os.close(read_end)
        with contextlib.suppress(ProcessLookupError, ChildProcessError):  # where whoever started us ignores SIGCHLD
            os.kill(child, signal.SIGKILL)
            _reap(child)
    if not said.startswith(b"+"):
        code = int(said or errno.EIO)
        raise OSError(code, _NOT_OURS if code == errno.EACCES else os.strerror(code))
    return said[1:]


def _answer(mountpoint: str, name: str, pipe: int) -> NoReturn:
    """In the child: "+" and the value, or the errno."""
    try:
        try:
            said = b"+" + os.getxattr(mountpoint, name)
        except OSError as exc:
            said = b"%d" % (exc.errno or errno.EIO)
        while said:
            said = said[os.write(pipe, said) :]
    finally:
        os._exit(0)


def _reap(child: int) -> None:
    """Wait for a killed child for a moment: a request that its daemon has taken cannot be broken off."""
    deadline = time.monotonic() + _KILLED
    while os.waitpid(child, os.WNOHANG) == (0, 0) and time.monotonic() < deadline:
        time.sleep(0.002)


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

"""The mount table: lookups in it, the processes that use a mount, and unmounting.

No function accesses the mount that it is called for, except by getxattr in `ask` and statvfs in `unanswered`, which
have deadlines.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import functools
import json
import os
import re
import shlex
import shutil
import signal
import stat
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from zarrfs.errors import MountError, reason_of
from zarrfs.system.processes import close_descriptors, readable, shown

FSTYPE = "fuse.zarrfs"
_NOT_OURS = "permission denied, also for root: run it as the user who mounted it (or mount with allow_root)"
_ANSWER = 3.0  # seconds that a daemon has to answer
_RELEASED = 5.0  # seconds to answer before an unmount; a held mount that does not answer stays
_KILLED = 1.0  # seconds that a killed process may take to end
_BUSY = 1.0  # seconds that a short request, such as one of df, may keep a mount busy
_LAST_REQUESTS = 10.0  # seconds that a daemon has to end after the unmount


class Mount(NamedTuple):
    """One line of /proc/self/mountinfo."""

    device: str  # "major:minor", which is also the name of a directory in /sys/class/bdi
    mountpoint: str
    fstype: str
    source: str
    flags: tuple[str, ...] = ()  # of the mount and of the file system: ro, nosuid, noatime, ...


def mounts() -> list[Mount]:
    """Return all mounts of this mount namespace, oldest first."""
    found = []
    with open("/proc/self/mountinfo", "rb") as file:
        for line in file.read().split(b"\n")[:-1]:  # not splitlines(), as names may have other line separators
            left, _, right = os.fsdecode(line).partition(" - ")
            fields, more = left.split(" "), right.split(" ")
            flags = (*fields[5].split(","), *more[2].split(","))
            found.append(Mount(fields[2], _unescape(fields[4]), more[0], _unescape(more[1]), flags))
    return found


def mount_at(mountpoint: str) -> Mount | None:
    """Return the topmost mount at exactly `mountpoint`, or None. An idle automount trigger does not count."""
    at = [mount for mount in mounts() if mount.mountpoint == mountpoint]
    return at[-1] if at and at[-1].fstype != "autofs" else None


def mount_around(path: str) -> Mount:
    """Return the mount that an absolute path is in; if several are at one mount point, the topmost.

    Links are not resolved.
    """
    found = [mount for mount in mounts() if beneath(path, mount.mountpoint)]  # [] in a chroot whose / is no mount
    return max(reversed(found), key=lambda mount: len(mount.mountpoint), default=Mount("", "/", "", ""))


def beneath(path: str, above: str) -> bool:
    """Return whether `path` equals `above` or is below it. Both are absolute; links are not resolved."""
    return (path + "/").startswith(above.rstrip("/") + "/")


def resolved(path: str) -> str:
    """Return `path` as an absolute path, with symlinks resolved except in the last component.

    Raise MountError for "", such as "$UNSET" in a script, because os.path.abspath("") is the working directory.
    """
    if not path:
        raise MountError("an empty name of a directory (a variable that is not set?)")
    parent, name = os.path.split(os.path.abspath(path))
    return os.path.join(os.path.realpath(parent), name)


def canonical(mountpoint: str) -> str:
    """Return `mountpoint` as mountinfo spells it. Raise MountError for "".

    A mount point itself is not accessed, because its daemon may have died.
    """
    path = resolved(mountpoint)
    if mount_at(path) is None and os.path.islink(path):
        return os.path.realpath(path)
    return path


def check_mountpoint(mountpoint: str) -> bool:
    """Raise MountError if nothing can be mounted on `mountpoint`; return whether a dead mount is there.

    A dead mount stays until the new one is attached: its readers get ENOTCONN, but in the directory beneath it they
    would find nothing, which a Zarr reader takes for fill values.
    """
    mount = mount_at(mountpoint)
    if mount is not None:
        if mount.fstype == FSTYPE and is_dead(mountpoint):
            return True
        raise MountError(f"{mountpoint}: {taken(mount)}")
    try:
        status = os.stat(mountpoint)
    except FileNotFoundError:
        make = f"make the directory: mkdir {shlex.quote(mountpoint)}"
        raise MountError(f"{mountpoint}: no such file or directory; {make}") from None
    except OSError as exc:
        raise MountError(f"{mountpoint}: {reason_of(exc)}") from None
    if not stat.S_ISDIR(status.st_mode):
        raise MountError(f"{mountpoint}: not a directory; a mount point is an existing directory")
    return False


def taken(mount: Mount) -> str:
    """Return the message for a mount point that is in use by `mount`, with what to do."""
    ours = mount.fstype == FSTYPE
    remedy = f"unmount it (zarrfs umount {shlex.quote(mount.mountpoint)}), or take" if ours else "take"
    return f"already a mount point ({mount.source}, type {mount.fstype}): {remedy} another directory"


def clear_dead(mountpoint: str) -> bool:
    """Unmount the zarrfs mount at `mountpoint` if its daemon has died; return whether it had. Raise MountError."""
    mount = mount_at(mountpoint)
    if mount is None or mount.fstype != FSTYPE or not is_dead(mountpoint):
        return False
    unmount(mountpoint, lazy=True)
    return True


def thin(mountpoint: str) -> None:
    """Of several zarrfs mounts at a mount point whose topmost is dead, detach all but the lowest.

    A dead mount under a new one cannot be detached before the new one is, so each restart leaves one.
    """
    at = [mount for mount in mounts() if mount.mountpoint == mountpoint]
    for below, _ in reversed([*pairwise(at)]):
        if below.fstype != FSTYPE:
            return
        _refusal(mountpoint, lazy=True)


def is_dead(mountpoint: str) -> bool:
    """Return whether the daemon of a FUSE mount has died (ENOTCONN). A daemon that is slow to answer is not dead."""
    return bool(unanswered([mountpoint], _ANSWER)[0])


def unanswered(mountpoints: Sequence[str], patience: float) -> tuple[list[str], list[str]]:
    """Probe FUSE mounts concurrently; return (those without a daemon, those without an answer in `patience` seconds).

    A child process probes them, for the reason given in ask().
    """
    said, _ended = from_child(functools.partial(_probe, mountpoints), patience)
    found = {mountpoints[number]: code for number, code in (map(int, line.split()) for line in said.splitlines())}
    dead = [one for one in mountpoints if found.get(one) in (errno.ENOTCONN, errno.ECONNABORTED)]
    return dead, [one for one in mountpoints if one not in found]


def _probe(mountpoints: Sequence[str], pipe: int) -> None:
    """In the child: as each mount answers, write its number and errno, or 0, to the pipe."""
    pipe = _keep_only(pipe)

    def probe(number: int) -> None:
        try:
            os.statvfs(mountpoints[number])
            code = 0
        except OSError as exc:
            code = exc.errno or errno.EIO
        os.write(pipe, b"%d %d\n" % (number, code))

    threads = [threading.Thread(target=probe, args=(number,)) for number in range(len(mountpoints))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def unmount(mountpoint: str, lazy: bool = False) -> None:
    """Unmount, also dead mounts beneath. Raise MountError with the kernel's reason; for EBUSY, with the users.

    A short request, such as one of `zarrfs stats` or df, also makes a mount busy, so EBUSY is retried for a second if
    no process is found that uses the mount.
    """
    before, pause = mount_at(mountpoint), 0.01
    deadline = 0.0
    while (refused := _refusal(mountpoint, lazy)) is not None:
        if before is None or mount_at(mountpoint) != before:
            return  # another process has unmounted it, and perhaps mounted something else
        reason, busy = refused
        users = holders(mountpoint) if busy else []
        deadline = deadline or time.monotonic() + _BUSY  # set now, because holders() may have taken long
        if busy and not users and time.monotonic() < deadline:
            time.sleep(pause)
            pause = min(2 * pause, 0.04)
            continue
        if busy:
            reason = f"in use by {', '.join(users) or 'a process that cannot be seen from here'}"
        raise MountError(f"{mountpoint}: cannot unmount: {reason}")
    clear_dead(mountpoint)


def _refusal(mountpoint: str, lazy: bool) -> tuple[str, bool] | None:
    """Try to unmount; return None if that succeeded, else the kernel's reason and whether it is EBUSY."""
    if os.geteuid() == 0:
        libc = ctypes.CDLL(None, use_errno=True)
        flags = 8 | (2 if lazy else 0)  # UMOUNT_NOFOLLOW, MNT_DETACH
        if libc.umount2(os.fsencode(mountpoint), flags) == 0:
            return None
        code = ctypes.get_errno()
        return os.strerror(code).lower(), code == errno.EBUSY
    command = [fusermount(), "-u", *(["-z"] if lazy else []), "--", mountpoint]
    done = subprocess.run(command, capture_output=True, text=True, errors="backslashreplace", check=False)
    if done.returncode == 0:
        return None
    reason = done.stderr.strip().rpartition(": ")[2].lower() or f"fusermount3 status {done.returncode}"
    return reason, "busy" in reason


def unmount_own(mountpoint: str, device: int | None) -> None:
    """Unmount the mount whose st_dev is `device`. Raise MountError, also if something is mounted over it."""
    try:
        top = mount_at(mountpoint)
        if device is not None and top is not None and top.device != f"{os.major(device)}:{os.minor(device)}":
            other = f"{top.source}, {top.fstype}"
            raise MountError(f"{mountpoint}: cannot unmount: something else is mounted over it ({other})")
        unmount(mountpoint)
    except OSError as exc:  # such as EMFILE, which must not end the daemon
        raise MountError(f"{mountpoint}: cannot unmount: {reason_of(exc)}") from None


def unmount_and_wait(mountpoint: str, lazy: bool = False) -> None:
    """Unmount the zarrfs mount at `mountpoint` and wait until its daemon has ended.

    Raise MountError, also if the daemon has not ended after 10 s. Do not wait with `lazy`, or if the daemon did not
    answer before the unmount.
    """
    mountpoint = canonical(mountpoint)
    mount = mount_at(mountpoint)
    if mount is None or mount.fstype != FSTYPE:
        what = "not mounted" if mount is None else f"not a mount of zarrfs but of type {mount.fstype}: use umount(8)"
        raise MountError(f"{mountpoint}: {what}")
    daemon = release(mountpoint)
    try:
        unmount(mountpoint, lazy)
    except MountError as exc:
        raise MountError(f"{exc}; it is unmounted when that ends") if daemon and daemon["held"] else exc from None
    if daemon is not None and not lazy and not wait_for_end(daemon["pid"], _LAST_REQUESTS):
        raise MountError(f"{mountpoint}: unmounted, but its daemon (pid {daemon['pid']}) has not ended")


def release(mountpoint: str) -> dict[str, Any] | None:
    """End the hold of a mount (-o hold), so that it can be unmounted.

    Return {"pid": of its daemon, "held": whether it was held}; None if the daemon does not answer.
    """
    try:
        return dict(json.loads(ask(mountpoint, "user.zarrfs.release", _RELEASED)))
    except OSError:
        return None


def below(directory: str, only_dead: bool) -> list[str]:
    """Return the mount points of this user's zarrfs mounts at or below a directory, those to unmount first first.

    With `only_dead`, return those whose daemon has died.
    """
    place, ours = canonical(directory), f"user_id={os.geteuid()}"
    found = {  # a mount point once, also if mounts lie over dead ones there
        mount.mountpoint
        for mount in mounts()
        if mount.fstype == FSTYPE and beneath(mount.mountpoint, place) and ours in mount.flags
    }
    chosen = unanswered([*found], _ANSWER)[0] if only_dead else found
    return sorted(chosen, key=lambda one: one.count("/"), reverse=True)


def fusermount() -> str:
    """Return the path of fusermount3, also if PATH is unset, as in mount helpers and units. Raise MountError."""
    found = shutil.which("fusermount3", path=os.environ.get("PATH", "") + ":/bin:/usr/bin:/usr/local/bin")
    if found is None:
        raise MountError("fusermount3 is not installed (Debian: apt install fuse3)")
    return found


def holders(mountpoint: str) -> list[str]:
    """Return the processes that have a file, directory or mapping below `mountpoint` open, as "pid 12 (vim)".

    Of more than five processes, the last item is the number of the others.
    """
    found: list[str] = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        if any(beneath(path, mountpoint) for path in _paths_of(pid)):
            found.append(shown(int(pid)))
    return found if len(found) <= 5 else [*found[:5], f"{len(found) - 5} more"]


def _paths_of(pid: str) -> list[str]:
    """Return the paths of the files that a process has open or mapped, from /proc, without accessing those files."""
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


def ask(mountpoint: str, name: str, timeout: float) -> bytes:
    """Return the extended attribute `name` of a mount's root. Raise OSError; TimeoutError after `timeout` seconds.

    A child process sends the request, because it can be killed at the timeout. A thread that waits for a suspended
    daemon cannot be killed, and would keep the mount busy.
    """
    said, ended = from_child(functools.partial(_answer, mountpoint, name), timeout)
    if not ended:
        raise TimeoutError(errno.ETIMEDOUT, "does not answer")
    if not said.startswith(b"+"):
        code = int(said or errno.EIO)
        raise OSError(code, _NOT_OURS if code == errno.EACCES else os.strerror(code))
    return said[1:]


def _answer(mountpoint: str, name: str, pipe: int) -> None:
    """In the child: write "+" and the value, or the errno, to the pipe."""
    pipe = _keep_only(pipe)
    try:
        said = b"+" + os.getxattr(mountpoint, name)
    except OSError as exc:
        said = b"%d" % (exc.errno or errno.EIO)
    while said:
        said = said[os.write(pipe, said) :]


def from_child(answer: Callable[[int], None], timeout: float) -> tuple[bytes, bool]:
    """Call `answer(pipe)` in a child process; return the bytes that it wrote, and whether it ended before the timeout.

    The child is killed before this returns.
    """
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(read_end)
            answer(write_end)
        finally:
            os._exit(0)
    os.close(write_end)
    said, deadline = b"", time.monotonic() + timeout
    try:
        while readable(read_end, deadline - time.monotonic()):
            part = os.read(read_end, 1 << 16)
            if not part:
                return said, True
            said += part
        return said, False
    finally:
        os.close(read_end)
        _end_child(child)


def _keep_only(pipe: int) -> int:
    """Close all descriptors but a pipe, in a child that may never end. Otherwise readers of our output would wait."""
    pipe = fcntl.fcntl(pipe, fcntl.F_DUPFD_CLOEXEC, 3)
    close_descriptors({pipe})
    os.dup2(0, 2)
    return pipe


def _end_child(child: int) -> None:
    """Kill a child and wait up to a second for its end, because it may be in an uninterruptible FUSE request."""
    with contextlib.suppress(ProcessLookupError, ChildProcessError):  # SIGCHLD may be ignored, as inherited
        os.kill(child, signal.SIGKILL)
        deadline = time.monotonic() + _KILLED
        while os.waitpid(child, os.WNOHANG) == (0, 0) and time.monotonic() < deadline:
            time.sleep(0.002)


def wait_for_end(pid: int, timeout: float) -> bool:
    """Wait until the process `pid` has ended; return False if it has not ended within `timeout` seconds."""
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

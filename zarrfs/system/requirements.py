"""Checks of what a mount requires: /dev/fuse, fusermount3, and the permissions of the user.

They run before the source is prepared, which may take minutes. The rules of fusermount3 are those observed with
libfuse 3.14: it reads /etc/fuse.conf as the user, and ignores a last line without a line feed.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
from typing import NamedTuple

from zarrfs.config.options import Options
from zarrfs.errors import MountError, UsageError, reason_of
from zarrfs.system import mounts

DEVICE = "/dev/fuse"
CONFIGURATION = "/etc/fuse.conf"
MOUNT_MAX = 1000  # FUSE mounts in total up to which users may mount, unless fuse.conf sets another number
_SYS_ADMIN = 21  # CAP_SYS_ADMIN, linux/capability.h
_CONTAINER = "start the container with --device /dev/fuse --cap-add SYS_ADMIN (docs/containers.md)"
_USER = "a user mounts only where he may write"


class Configuration(NamedTuple):
    """The settings in /etc/fuse.conf that fusermount3 reads."""

    user_allow_other: bool = False
    mount_max: int = MOUNT_MAX  # -1: any number
    problem: str = ""  # why the file was not read


def check(mountpoint: str, options: Options) -> None:
    """Raise MountError, or UsageError for an option, if the mount would be refused. The message says what to do."""
    problem = device_problem()
    if problem:
        raise MountError(f"{mountpoint}: {problem}")
    if mounts_itself():
        return
    problem = fusermount_problem() or count_problem()
    if problem:
        raise MountError(f"{mountpoint}: {problem}")
    for name in ("allow_other", "allow_root"):
        problem = allow_problem() if getattr(options, name) else ""
        if problem:
            raise UsageError(f"option {name}: {problem}")
    if options.upperdir is not None:
        _check_owner(options)


def device_problem() -> str:
    """Return why /dev/fuse cannot be used, and what to do about it; "" if it can."""
    try:
        os.close(os.open(DEVICE, os.O_RDWR | os.O_CLOEXEC))
    except FileNotFoundError:
        if in_container():
            return f"there is no {DEVICE} in this container: {_CONTAINER}"
        return f"there is no {DEVICE} here: modprobe fuse (as root), or in a container, {_CONTAINER}"
    except OSError as exc:
        if exc.errno == errno.EACCES:
            status = os.stat(DEVICE)
            mode = f"mode {stat.S_IMODE(status.st_mode):04o}, owner {status.st_uid}:{status.st_gid}"
            return f"no permission to use {DEVICE} ({mode}): root can chmod 666 {DEVICE}"
        if exc.errno == errno.EPERM:
            return f"{DEVICE} is forbidden here, by the rules for devices of a container: {_CONTAINER}"
        if exc.errno in (errno.ENODEV, errno.ENXIO):
            return f"the kernel has no FUSE: modprobe fuse (as root; {DEVICE}: {reason_of(exc)})"
        return f"{DEVICE}: {reason_of(exc)}"
    return ""


def mounts_itself() -> bool:
    """Return whether this process may call mount(2). That takes CAP_SYS_ADMIN, which root has outside containers."""
    return bool(int(_status("CapEff") or "0", 16) >> _SYS_ADMIN & 1)


def fusermount_problem() -> str:
    """Return why fusermount3 cannot mount for this process; "" if it can."""
    try:
        path = mounts.fusermount()
    except MountError as exc:
        return str(exc)
    if os.geteuid() == 0:
        return f"this root may not mount (no CAP_SYS_ADMIN): {_CONTAINER}"
    status = os.stat(path)
    if not status.st_mode & stat.S_ISUID or status.st_uid != 0:
        return f"{path} is not set-user-ID root, so users cannot mount: root can chmod u+s {path}"
    if os.statvfs(path).f_flag & os.ST_NOSUID:
        return f"{path} lies on a file system that is mounted nosuid, so users cannot mount"
    if _status("NoNewPrivs") == "1":
        return (
            f"{path} gets no privileges here (no_new_privs, as of a container with no-new-privileges or a unit with "
            "NoNewPrivileges=): mount outside"
        )
    return ""


def configuration() -> Configuration:
    """Read /etc/fuse.conf as fusermount3 does."""
    allow, most = False, MOUNT_MAX
    try:
        with open(CONFIGURATION, encoding="utf-8", errors="surrogateescape", newline="") as file:
            lines = file.read().split("\n")[:-1]
    except FileNotFoundError:
        return Configuration(problem=f"there is no {CONFIGURATION}")
    except OSError as exc:
        return Configuration(problem=f"{CONFIGURATION} cannot be read ({reason_of(exc)})")
    for line in lines:
        setting = line.partition("#")[0].strip()
        number = re.match(r"mount_max\s*=\s*(-?\d+)", setting)
        allow = allow or setting == "user_allow_other"
        most = int(number[1]) if number else most
    return Configuration(allow, most)


def count() -> int:
    """Return the number of FUSE mounts, as fusermount3 counts them."""
    return sum(one.fstype == "fuse" or one.fstype.startswith("fuse.") for one in mounts.mounts())


def count_problem() -> str:
    """Return why users may not make one more mount; "" if they may."""
    most = configuration().mount_max
    if most == -1 or (there := count()) < most:
        return ""
    return f"too many mounts of FUSE ({there}): mount_max is {most}, root can raise it in {CONFIGURATION}"


def allow_problem() -> str:
    """Return why a user may not give other users access to a mount; "" if that is allowed."""
    found = configuration()
    if found.user_allow_other:
        return ""
    line = '"user_allow_other"'
    if "cannot be read" in found.problem:
        return f"{found.problem}, so no line {line} is seen in it (root can chmod 644 it)"
    if found.problem:
        return f"{found.problem} with the line {line} (root can write it)"
    with contextlib.suppress(OSError), open(CONFIGURATION, "rb") as file:
        last = file.read().rpartition(b"\n")[2]
        if last.partition(b"#")[0].strip() == b"user_allow_other":
            return f"{CONFIGURATION}: its last line {line} does not count without a line feed (root can add it)"
    return f"{CONFIGURATION} has no line {line} (root can add it)"


def in_container() -> bool:
    """Return whether this process seems to run in a container, by files and variables that container runtimes set."""
    if any(map(os.path.exists, ("/.dockerenv", "/run/.containerenv", "/.singularity.d", "/run/systemd/container"))):
        return True
    with contextlib.suppress(OSError), open("/proc/1/environ", "rb") as file:
        return b"container=" in file.read()
    return False


def why_refused(said: str) -> str:
    """Return one line, with what to do if that is known, for an error of mount(2) or the output of fusermount3."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    # the last line is the reason; warnings about fuse.conf come before it
    text = lines[-1] if lines else "fusermount3 gave no reason"
    for words, advice in (
        ("too many FUSE", f"mount_max is {configuration().mount_max}, root can raise it in {CONFIGURATION}"),
        ("no write access to mountpoint", _USER),
        ("not owned by user", _USER),
        ("Operation not permitted", _CONTAINER if in_container() else "CAP_SYS_ADMIN is missing"),
        ("No such device", "modprobe fuse, as root"),
    ):
        if words in text:
            return f"{text.partition(';')[0]}: {advice}"
    return text


def _check_owner(options: Options) -> None:
    """Raise UsageError for a uid= or gid= that a user cannot give to files copied to the upper directory."""
    groups = {os.getegid(), *os.getgroups()}
    for name, number, ours in (("uid", options.uid, {os.geteuid()}), ("gid", options.gid, groups)):
        if number is not None and number not in ours:
            raise UsageError(f"option {name}={number}: only root can make another user the owner in upperdir=")


def _status(name: str) -> str:
    """Return a field of /proc/self/status; "" if it does not exist."""
    with contextlib.suppress(OSError), open("/proc/self/status") as file:
        for line in file:
            if line.startswith(f"{name}:"):
                return line.partition(":")[2].strip()
    return ""

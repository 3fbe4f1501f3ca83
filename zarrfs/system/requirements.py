"""Check /dev/fuse and permissions before a mount, and explain why the kernel or fusermount3 has refused one."""

from __future__ import annotations

import contextlib
import errno
import os
import stat

from zarrfs.config.options import Options
from zarrfs.errors import MountError, UsageError, reason_of

DEVICE = "/dev/fuse"
_CONTAINER = "start the container with --device /dev/fuse --cap-add SYS_ADMIN (docs/mounting.md)"
_WHERE = "a user mounts only where he may write"
_PRIVILEGES = (
    "fusermount3 got no privileges: it must be set-user-ID root (chmod u+s), not on a file system mounted nosuid, and "
    "not run with no_new_privs, as in some containers and units"
)


def check(mountpoint: str, options: Options) -> None:
    """Raise MountError, or UsageError for an option, if the mount would be refused. The message says what to do."""
    problem = device_problem()
    if problem:
        raise MountError(f"{mountpoint}: {problem}")
    if options.upperdir is not None and os.geteuid() != 0:
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
    not_permitted = _PRIVILEGES if os.geteuid() else f"CAP_SYS_ADMIN is missing (in a container: {_CONTAINER})"
    for words, advice in (
        ("too many FUSE", "root can raise mount_max in /etc/fuse.conf"),
        ("no write access to mountpoint", _WHERE),
        ("not owned by user", _WHERE),
        ("user_allow_other", "root can write it there as a line, and let all users read the file"),
        ("Operation not permitted", not_permitted),
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

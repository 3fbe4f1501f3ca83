"""Checks of the machine by zarrfs doctor: versions, the kernel, the device, fusermount3, limits."""

from __future__ import annotations

import os
import platform
import re
import resource
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.metadata import version

from zarrfs.cli.doctor.findings import OK, PROBLEM, WARNING, Finding, problem_finding, size_text
from zarrfs.config.options import Options
from zarrfs.errors import MountError
from zarrfs.system import mounts, requirements
from zarrfs.system.memory import memory_limit, quarter

_FILES = 4096  # open files: with a lower limit, many readers of a directory exceed it
_LEAST = 512 << 20  # bytes of address space
_EPOCH = 1_700_000_000  # seconds since 1970: a correct clock is past it


def versions(options: Options) -> Iterator[Finding]:
    """versions: those of zarrfs, Python and pyfuse3."""
    python = platform.python_version()
    text = f"zarrfs {version('zarrfs')}, Python {python}, pyfuse3 {version('pyfuse3')}, at {sys.prefix}"
    yield Finding("versions", OK, text)


def kernel(options: Options) -> Iterator[Finding]:
    """kernel: whether it has FUSE loaded."""
    release = platform.release()
    with open("/proc/filesystems") as file:
        known = {line.split()[-1] for line in file if line.split()}
    if "fuse" in known:
        yield Finding("kernel", OK, f"Linux {release} with FUSE")
    else:
        yield Finding("kernel", WARNING, f"Linux {release}: FUSE is not loaded", "modprobe fuse, as root")


def device(options: Options) -> Iterator[Finding]:
    """device: whether /dev/fuse can be opened."""
    problem = requirements.device_problem()
    if problem:
        yield problem_finding("device", problem)
    else:
        yield Finding("device", OK, f"{requirements.DEVICE} can be opened")


def user(options: Options) -> Iterator[Finding]:
    """user: whether this user may mount, with fusermount3 or without."""
    number = os.geteuid()
    try:
        path = mounts.fusermount()
        said = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=2, check=False).stdout
        found = re.search(r"[\d.]+$", said.strip())
        fact = f"{path}{f' {found[0]}' if found else ''}"
    except (MountError, OSError, subprocess.TimeoutExpired) as exc:
        fact = str(exc)
    if requirements.mounts_itself():
        yield Finding("user", OK, f"user {number} may mount without fusermount3 ({fact})")
        return
    problem = requirements.fusermount_problem()
    if problem:
        yield problem_finding("user", problem)
    else:
        yield Finding("user", OK, f"user {number} mounts with {fact}, set-user-ID root")


def fuse_conf(options: Options) -> Iterator[Finding]:
    """fuse.conf: whether it permits another mount, and allow_other; only fusermount3 reads it."""
    if requirements.mounts_itself():
        yield Finding("fuse.conf", OK, f"{requirements.CONFIGURATION} is not asked for this user")
        return
    found = requirements.configuration()
    many = requirements.count_problem()
    if many:
        yield Finding("fuse.conf", PROBLEM, many)
    allow = requirements.allow_problem()
    asked = options.allow_other or options.allow_root
    if not allow:
        yield Finding("fuse.conf", OK, f"allow_other is permitted; {requirements.count()} of {found.mount_max} mounts")
    elif asked:
        yield Finding("fuse.conf", PROBLEM, f"allow_other: {allow}")
    elif "cannot be read" in allow:
        yield Finding("fuse.conf", WARNING, allow)
    else:
        yield Finding("fuse.conf", OK, f"only you will see your mounts (for allow_other: {allow})")


def container(options: Options) -> Iterator[Finding]:
    """container: whether this process runs in one; mounts made in a container are not seen outside."""
    if requirements.in_container():
        text = f"this looks like a container ({_namespace()}): mounts made here are not seen outside"
        yield Finding("container", OK, text)
    else:
        yield Finding("container", OK, f"no container is seen ({_namespace()})")


def _namespace() -> str:
    here = os.readlink("/proc/self/ns/mnt")
    try:
        first = os.readlink("/proc/1/ns/mnt")
    except OSError:
        return "mount namespace of process 1: not ours to see"
    return "the mount namespace of process 1" if here == first else "a mount namespace of its own"


def limits(options: Options) -> Iterator[Finding]:
    """limits: those of open files, address space and locked memory."""
    _soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    files = "unlimited" if hard == resource.RLIM_INFINITY else f"{hard:,}"
    if hard != resource.RLIM_INFINITY and hard < _FILES:
        yield Finding("limits", WARNING, f"open files: {files} (ulimit -Hn)", "many readers at once need more")
    else:
        yield Finding("limits", OK, f"open files: {files}")
    space = resource.getrlimit(resource.RLIMIT_AS)[0]
    if space != resource.RLIM_INFINITY and space < max(_LEAST, 2 * memory_limit(options)):
        text = f"address space: {size_text(space)} (ulimit -v)"
        yield Finding("limits", WARNING, text, "raise it, or lower memory_limit=")
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    yield Finding(
        "limits", OK,
        f"locked memory: {'unlimited' if locked == resource.RLIM_INFINITY else size_text(locked)} (none is needed)",
    )  # fmt: skip


def memory(options: Options) -> Iterator[Finding]:
    """memory: how much of the memory of the machine or cgroup a mount may take."""
    taken, there = memory_limit(options), 4 * quarter()
    text = f"{size_text(taken)} for fetched bytes (memory_limit=), of {size_text(there)}"
    if taken > there // 2:
        yield Finding("memory", WARNING, text, "lower memory_limit=: the daemon may be killed")
    else:
        yield Finding("memory", OK, text)


def clock(options: Options) -> Iterator[Finding]:
    """clock: whether it is plausible; servers refuse signed requests from a machine whose clock is wrong."""
    now = time.time()
    text = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(now))
    newest = _newest_file()
    if now < max(_EPOCH, newest - 86_400):
        text = f"{text} is before files of this machine were made"
        yield Finding("clock", WARNING, text, "set the clock: signatures and TLS need it")
    else:
        yield Finding("clock", OK, text)


def _newest_file() -> float:
    """Return the time when zarrfs was installed, in seconds since 1970; a correct clock is past it."""
    return os.stat(os.path.dirname(__file__), follow_symlinks=True).st_mtime


def helper(options: Options) -> Iterator[Finding]:
    """mount helper: whether mount(8), and so fstab, finds a working mount.zarrfs."""
    for path in ("/sbin/mount.zarrfs", "/usr/sbin/mount.zarrfs"):
        try:
            status = os.stat(path)
            with open(path, "rb") as file:
                text = file.read(4096)
        except FileNotFoundError:
            continue
        if b"zarrfs.cli.mount_helper" not in text:
            yield Finding("mount helper", WARNING, f"{path} is not zarrfs's", "mount -t zarrfs runs something else")
            return
        program = text.partition(b"\n")[0].removeprefix(b"#!").split()
        interpreter = os.fsdecode(program[0]) if program else ""
        if not status.st_mode & stat.S_IXOTH or not os.access(interpreter, os.X_OK):
            yield Finding("mount helper", WARNING, f"{path} cannot be run ({interpreter})", "install it again")
        else:
            yield Finding("mount helper", OK, f"{path}, run by {interpreter}")
        return
    fact = "mount.zarrfs is not installed, which only fstab and mount(8) need"
    ours = os.path.join(os.path.dirname(sys.executable), "mount.zarrfs")
    yield Finding("mount helper", OK, f"{fact} (root: ln -s {ours} /sbin)" if os.path.exists(ours) else fact)


_UNITS = ("/lib/systemd/system", "/usr/lib/systemd/system", "/etc/systemd/system")


def units(options: Options) -> Iterator[Finding]:
    """units: whether zarrfs@.service is in a directory of systemd units."""
    for directory in _UNITS:
        if os.path.exists(f"{directory}/zarrfs@.service"):
            yield Finding("units", OK, f"of systemd, in {directory}")
            return
    yield Finding(
        "units", OK, "none of systemd, which only mounts at boot without fstab need (the Debian package has them, and "
        "scripts/install-helper --units of the sources)",
    )  # fmt: skip


CHECKS = (versions, kernel, device, user, fuse_conf, container, limits, memory, clock, helper, units)

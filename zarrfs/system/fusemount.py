"""Mounting of a FUSE file system, by mount(2) or through fusermount3.

libfuse does not mount, because pyfuse3 encodes its options in ASCII, but a source or a mount point may have any name
that Linux allows. Instead, libfuse gets a descriptor of /dev/fuse whose file system is mounted already.
Source: mount(2), fuse(4), fusermount3(1) and its _FUSE_COMMFD.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import errno
import os
import socket
import stat
import subprocess
from collections.abc import Iterable, Iterator

from zarrfs.config.options import Options
from zarrfs.errors import MountError, reason_of
from zarrfs.system import kernelflags, mounts, requirements

_SUBTYPE = "zarrfs"


def attach(source: str, mountpoint: str, options: Options, kernel: Iterable[str], writable: bool) -> int:
    """Mount a new FUSE file system on `mountpoint` and return its descriptor of /dev/fuse.

    The mount table shows `source`. `kernel` are options of mount(8): nosuid, noatime, ... Raise MountError with the
    reason that the kernel or fusermount3 gives.
    """
    flags = kernelflags.combined(kernel)
    if not writable:
        flags.add("ro")
    dead = mounts.check_mountpoint(mountpoint)
    with contextlib.suppress(PermissionError):  # users, and root in a container, need fusermount3
        if dead:  # mount over it, so that no reader sees the directory beneath
            mounts.thin(mountpoint)
        return _mount(source, mountpoint, options, flags)
    mounts.clear_dead(mountpoint)  # fusermount3 does not mount over it
    with _writable(mountpoint) if options.guard or options.hold else contextlib.nullcontext():
        return _fusermount(source, mountpoint, options, flags)


def guard(mountpoint: str) -> None:
    """Set the mode of a directory to 000, so that its readers get EACCES whenever nothing is mounted on it.

    Raise MountError if that is not permitted.
    """
    with _opened(mountpoint) as descriptor:
        _set_mode(descriptor, mountpoint, 0)


@contextlib.contextmanager
def _writable(mountpoint: str) -> Iterator[None]:
    """Lift the mode 000 of a guarded directory for fusermount3, which mounts only where the user may write."""
    with _opened(mountpoint) as descriptor:  # opened before the mount, which then hides the directory
        _set_mode(descriptor, mountpoint, 0o300)
        try:
            yield
        finally:
            _set_mode(descriptor, mountpoint, 0)


@contextlib.contextmanager
def _opened(directory: str) -> Iterator[int]:
    descriptor = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _set_mode(descriptor: int, mountpoint: str, mode: int) -> None:
    try:
        os.chmod(f"/proc/self/fd/{descriptor}", mode)
    except OSError as exc:
        raise MountError(f"{mountpoint}: cannot be guarded (mode 000): {reason_of(exc)}") from None


def _permissions(options: Options) -> list[str]:
    """Return the permission options. allow_root is mounted as allow_other; libfuse admits only root and the owner."""
    others = ["allow_other"] if options.allow_other or options.allow_root else []
    return ["default_permissions", *others]


def _mount(source: str, mountpoint: str, options: Options, flags: set[str]) -> int:
    """Mount by mount(2). Raise PermissionError if this process may not, MountError for any other refusal."""
    device = os.open(requirements.DEVICE, os.O_RDWR | os.O_CLOEXEC)
    try:
        data = [f"fd={device}", f"rootmode={stat.S_IFDIR:o}", f"user_id={os.getuid()}", f"group_id={os.getgid()}"]
        libc = ctypes.CDLL(None, use_errno=True)
        failed = libc.mount(
            os.fsencode(source), os.fsencode(mountpoint), f"fuse.{_SUBTYPE}".encode(),
            ctypes.c_ulong(kernelflags.bits(flags)), ",".join([*data, *_permissions(options)]).encode(),
        )  # fmt: skip
    except BaseException:
        os.close(device)
        raise
    if not failed:
        return device
    code = ctypes.get_errno()
    os.close(device)
    if code == errno.EPERM:
        raise PermissionError(code, os.strerror(code))
    raise MountError(requirements.why_refused(f"mount failed: {os.strerror(code)}"))


def _fusermount(source: str, mountpoint: str, options: Options, flags: set[str]) -> int:
    """Mount through fusermount3, which opens /dev/fuse and sends the descriptor over a socket."""
    name = source.replace("\\", "\\\\").replace(",", "\\,")
    words = {"suid", "dev"} - {flag.removeprefix("no") for flag in flags}  # else fusermount3 adds nosuid and nodev
    words |= flags - {"relatime"}  # the kernel's default, which fusermount3 does not know
    chosen = [*sorted(words), *_permissions(options), f"subtype={_SUBTYPE}", f"fsname={name}"]
    ours, theirs = socket.socketpair()
    with ours, theirs:
        process = subprocess.Popen(
            [mounts.fusermount(), "-o", ",".join(chosen), "--", mountpoint],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, pass_fds=[theirs.fileno()],
            env={**os.environ, "_FUSE_COMMFD": str(theirs.fileno())},
        )  # fmt: skip
        theirs.close()
        device = _receive(ours)
        said = process.communicate()[0].decode(errors="surrogateescape")
    if device is None:
        raise MountError(requirements.why_refused(said))
    os.set_inheritable(device, False)
    return device


def _receive(connection: socket.socket) -> int | None:
    """Receive the descriptor that fusermount3 sends; return None if fusermount3 failed."""
    descriptors = array.array("i")
    _data, ancillary, _flags, _address = connection.recvmsg(1, socket.CMSG_SPACE(descriptors.itemsize))
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            descriptors.frombytes(data[: descriptors.itemsize])
            return descriptors[0]
    return None

"""Deadlock avoidance among zarrfs mounts that read from each other.

A target may be in another zarrfs mount, unless that mount reads from ours in turn: then both daemons would wait for
each other in the kernel for ever. So before a process opens its first file in another mount, it asks that mount by an
extended attribute whether it reads from ours, directly or through further mounts. Such a request is answered without
reading targets. A process registers the other mount before it asks, so that if two mounts enter each other at the same
time, at least one is refused.

A mount is identified by its st_dev, which is the same in every mount namespace of a machine.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading

from zarrfs.errors import Loop

# prefix of an attribute name that ends in DEVICE:HOPS and is never listed. The name is not in user.*, because for such
# names the kernel first requests the attributes of the file, whose size may have to be read from a target.
XATTR = "system.zarrfs.waits_for:"
YES, _NO = b"1", b"0"
_HOPS = 16  # mounts in a chain of mounts that each read from the next one
_FSTYPE = b"fuse.zarrfs"
_RULE = "lies in a mount that itself reads from this one: each would wait for the other (copy what one of them needs)"


class OtherMounts:
    """The zarrfs mounts that this process reads from. Methods are thread-safe; those that open files or ask may block.

    `device` is the st_dev of our own mount. It is None before the mount and in commands, because no mount waits for
    them.
    """

    def __init__(self) -> None:
        self.device: int | None = None
        self._entered: dict[int, int] = {}  # by st_dev: an O_PATH descriptor in that mount, used for requests
        self._entering, self._reading = threading.Lock(), threading.Lock()
        self._table: int | None = None  # descriptor of mountinfo
        self._changed = select.poll()
        self._devices: dict[bytes, int] = {}  # st_dev by mount id

    def present(self) -> bool:
        """Return whether files must be checked by enter() before they are opened; False before our own mount."""
        return self.device is not None and bool(self._mounts())

    def enter(self, descriptor: int, path: str) -> None:
        """Register the mount of `descriptor` (O_PATH) before its file is opened. Raise Loop if it reads from ours."""
        device = self.device_of(descriptor)
        if device is None or device == self.device or self.device is None:
            return
        with self._entering:
            if device in self._entered:
                return
            self._entered[device] = os.dup(descriptor)
            if _asked(f"/proc/self/fd/{descriptor}", self.device, _HOPS):
                os.close(self._entered.pop(device))
                raise Loop(path, _RULE)

    def note(self, path: str) -> None:
        """Register the zarrfs mount that `path` is in, if any, without asking it.

        Call this before our mount exists, because until then no mount can read from it.
        """
        with contextlib.suppress(OSError):
            descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
            device = self.device_of(descriptor)
            if device is None or device in self._entered:
                os.close(descriptor)
            else:
                self._entered[device] = descriptor

    def descriptors(self) -> set[int]:
        """Return the descriptors that a forked process has to keep."""
        return {*self._entered.values(), *([] if self._table is None else [self._table])}

    def forked(self) -> None:
        """Open mountinfo again in a forked process, because the kernel reports a change only once per open file."""
        if self._table is not None:
            os.close(self._table)
        self._table, self._changed, self._devices = None, select.poll(), {}

    def entered(self, process: str = "self") -> dict[int, str]:
        """Return a path in each mount that this process reads from, by st_dev.

        `process` is "self", or the pid of this process if another process will use the paths.
        """
        return {device: f"/proc/{process}/fd/{descriptor}" for device, descriptor in list(self._entered.items())}

    def device_of(self, descriptor: int) -> int | None:
        """Return the st_dev of the zarrfs mount that an O_PATH descriptor is in; None if it is in none.

        This sends no request to the daemon of that mount.
        """
        devices = self._mounts()
        if not devices:
            return None
        return devices.get(mount_id(descriptor))

    def _mounts(self) -> dict[bytes, int]:
        """Return the st_dev of each zarrfs mount by mount id; read the mount table again only if it has changed."""
        with self._reading:
            if self._table is None:
                try:
                    self._table = os.open("/proc/self/mountinfo", os.O_RDONLY | os.O_CLOEXEC)
                except OSError:
                    return {}
                self._changed.register(self._table, select.POLLERR | select.POLLPRI)
            elif not self._changed.poll(0):  # proc_pid_mountinfo(5)
                return self._devices
            found = {}
            with open(os.dup(self._table), "rb") as file:
                file.seek(0)
                for line in file:
                    fields, _, rest = line.partition(b" - ")
                    if rest.startswith(_FSTYPE):
                        number, _, numbers = fields.split()[:3]
                        major, _, minor = numbers.partition(b":")
                        found[number] = os.makedev(int(major), int(minor))
            self._devices = found
            return found


OTHER_MOUNTS = OtherMounts()  # a process has one mount


def mount_id(descriptor: int) -> bytes:
    """Return the id, as in mountinfo, of the mount of a descriptor; b"" if unknown. Sends no request to its daemon."""
    with open(f"/proc/self/fdinfo/{descriptor}", "rb") as file:
        return next((line.split()[1] for line in file if line.startswith(b"mnt_id:")), b"")


def answer(question: str, entered: dict[int, str]) -> bytes | None:
    """Return the value of XATTR + `question` for our mount, which reads from the mounts `entered`.

    None means that those mounts must be asked.
    """
    device, _ = _parts(question)
    return YES if device in entered else None if entered else _NO


def ask(question: str, entered: dict[int, str]) -> bytes:
    """Return the value of XATTR + `question` by asking the mounts that ours reads from. Blocks."""
    device, hops = _parts(question)
    return YES if hops > 0 and any(_asked(path, device, hops - 1) for path in entered.values()) else _NO


def _parts(question: str) -> tuple[int, int]:
    """Return (device, hops). For a malformed question, the device is 0, which no mount has."""
    device, _, hops = question.partition(":")
    return (int(device), min(int(hops), _HOPS)) if device.isdecimal() and hops.isdecimal() else (0, 0)


def _asked(path: str, device: int, hops: int) -> bool:
    """Return whether the mount that `path` is in reads from `device`, through up to `hops` other mounts."""
    try:
        return os.getxattr(path, f"{XATTR}{device}:{hops}") == YES
    except OSError:  # unmounted, or served by a version without this attribute
        return False

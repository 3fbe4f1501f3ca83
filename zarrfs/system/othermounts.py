"""Other mounts of zarrfs that this process reads from, so that no read ever waits for itself.

A target may lie in the mount of another zarrfs, but not if that waits for us in turn: each would wait for the other's
answer, for ever, in the kernel. So before a process opens its first file in such a mount, it asks whether that mount
waits for ours, directly or through others: an extended attribute, which is answered without asking targets. A process
counts a mount before it asks, so of two that enter each other at the same time at least one is refused.

A mount is known by its st_dev, which is the same in every mount namespace of a machine.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading

from zarrfs.errors import Loop

# DEVICE:HOPS; never listed. Not in user.*, for which the kernel asks for attributes, and a size may be a target's.
XATTR = "system.zarrfs.waits_for:"
_YES, _NO = b"1", b"0"
_HOPS = 16  # mounts, each of which reads from the next one
_FSTYPE = b"fuse.zarrfs"
_RULE = "lies in a mount that itself reads from this one: each would wait for the other (copy what one of them needs)"


class OtherMounts:
    """Those that this process waits for. Thread-safe; what opens or asks blocks.

    `device`: st_dev of our own mount; None as long as there is none, and in commands, which nobody waits for.
    """

    def __init__(self) -> None:
        self.device: int | None = None
        self._entered: dict[int, int] = {}  # by st_dev: a descriptor (O_PATH) in that mount, to ask it
        self._entering, self._reading = threading.Lock(), threading.Lock()
        self._table: int | None = None  # descriptor of mountinfo
        self._changed = select.poll()
        self._devices: dict[bytes, int] = {}  # by the id of a mount

    def present(self) -> bool:
        """Return whether there are any at all: what is opened must be judged first."""
        return self.device is not None and bool(self._mounts())

    def enter(self, descriptor: int, path: str) -> None:
        """Before a file is opened: `descriptor` (O_PATH) is of it. Loop where its mount waits for ours."""
        device = self.device_of(descriptor)
        if device is None or device == self.device or self.device is None:
            return
        with self._entering:
            if device in self._entered:
                return
            self._entered[device] = os.dup(descriptor)
            if _asked(descriptor, self.device, _HOPS):
                os.close(self._entered.pop(device))
                raise Loop(path, _RULE)

    def note(self, path: str) -> None:
        """Before we are mounted, so nobody can wait for us: count the mount that `path` lies in."""
        with contextlib.suppress(OSError):
            descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
            device = self.device_of(descriptor)
            if device is None or device in self._entered:
                os.close(descriptor)
            else:
                self._entered[device] = descriptor

    def answer(self, question: str) -> bytes | None:
        """The value of XATTR, whose end is `question`; None where others must be asked: waits_for()."""
        device, _ = _parts(question)
        return _YES if device in self._entered else None if self._entered else _NO

    def waits_for(self, question: str) -> bytes:
        """As answer(), by asking others."""
        device, hops = _parts(question)
        others = list(self._entered.values()) if hops > 0 else []
        return _YES if any(_asked(descriptor, device, hops - 1) for descriptor in others) else _NO

    def device_of(self, descriptor: int) -> int | None:
        """st_dev of the zarrfs mount that an O_PATH descriptor is in, without asking that; None for anything else."""
        devices = self._mounts()
        if not devices:
            return None
        with open(f"/proc/self/fdinfo/{descriptor}", "rb") as file:
            ids = [line.split()[1] for line in file if line.startswith(b"mnt_id:")]
        return devices.get(ids[0]) if ids else None

    def _mounts(self) -> dict[bytes, int]:
        """The zarrfs mounts, by their ids: read again when the kernel says that mounts have changed."""
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


def _parts(question: str) -> tuple[int, int]:
    """(device, hops); a device that there is not where it is no question."""
    device, _, hops = question.partition(":")
    return (int(device), min(int(hops), _HOPS)) if device.isdecimal() and hops.isdecimal() else (0, 0)


def _asked(descriptor: int, device: int, hops: int) -> bool:
    """Return whether the mount of a descriptor waits for `device`, through up to `hops` others."""
    try:
        return os.getxattr(f"/proc/self/fd/{descriptor}", f"{XATTR}{device}:{hops}") == _YES
    except OSError:  # it is gone, or of a version that does not know
        return False

"""The mount that this process serves: a file in it must not be opened, because the request would wait for itself."""

from __future__ import annotations

import os

RULE = "lies in the mount that refers to it"


class OwnMount:
    """The mount of this process, by st_dev and by mount ids; `device` is None where nothing is served."""

    def __init__(self) -> None:
        self.device: int | None = None
        self._ids: frozenset[bytes] = frozenset()

    def serve(self, device: int | None) -> None:
        """Set the st_dev of the mount. mountinfo has its ids: with bind mounts, there are several."""
        self.device, self._ids = device, frozenset() if device is None else _mounts_of(device)

    def has(self, descriptor: int) -> bool:
        """Return whether an O_PATH descriptor is in the mount. Sends no request to any daemon."""
        return self.device is not None and _mount_id(descriptor) in self._ids


OWN_MOUNT = OwnMount()  # a process has one mount


def _mount_id(descriptor: int) -> bytes:
    with open(f"/proc/self/fdinfo/{descriptor}", "rb") as file:
        return next((line.split()[1] for line in file if line.startswith(b"mnt_id:")), b"")


def _mounts_of(device: int) -> frozenset[bytes]:
    number = b"%d:%d" % (os.major(device), os.minor(device))
    try:
        with open("/proc/self/mountinfo", "rb") as file:
            return frozenset(fields[0] for fields in map(bytes.split, file) if fields[2] == number)
    except OSError:
        return frozenset()

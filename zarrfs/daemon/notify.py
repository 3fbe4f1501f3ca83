"""What a service manager is told: sd_notify(3), a datagram to $NOTIFY_SOCKET."""

from __future__ import annotations

import functools
import logging
import os
import socket

import trio

from zarrfs.config.redaction import without_secrets
from zarrfs.fuse.operations import Operations

log = logging.getLogger("zarrfs")

_EVERY = 30.0  # seconds between two looks at what the status says


def tell_manager(*assignments: str) -> None:
    """Send lines such as "READY=1" and "STATUS=..." to the service manager, if one started us; must not raise."""
    address = _address()
    if address is None:
        return
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
            lines = "\n".join(map(_line, assignments))
            sock.sendto(lines.encode(), "\0" + address[1:] if address.startswith("@") else address)
    except OSError as exc:
        log.warning("cannot tell the service manager %s: %s", assignments[0], exc)


def status(source: str, mountpoint: str, opened: int) -> str:
    """What `systemctl status` shows. `opened`: how many files and directories are open in the mount."""
    use = f"{opened} open" if opened else "nothing open"
    return f"STATUS={without_secrets(source)} on {mountpoint}: {use}"


async def tell_use(operations: Operations, source: str, mountpoint: str) -> None:
    """Tell a manager how much is open in the mount, once it answers, and when that has changed; until cancelled."""
    if _address() is None:
        return
    await operations.started.wait()
    told = ""
    while True:
        text = status(source, mountpoint, operations.open_handles)
        if text != told:
            tell_manager(text)
            told = text
        await trio.sleep(_EVERY)


def _line(assignment: str) -> str:
    """A name with a line feed in it would be an assignment of its own."""
    return "".join(letter if letter.isprintable() else "?" for letter in assignment)


@functools.cache
def _address() -> str | None:
    return os.environ.pop("NOTIFY_SOCKET", None)  # programs that we start are no services

"""Notifications to the service manager: sd_notify(3), datagrams to $NOTIFY_SOCKET."""

from __future__ import annotations

import functools
import logging
import os
import socket

import trio

from zarrfs.config.redaction import without_secrets
from zarrfs.fuse.operations import Operations

log = logging.getLogger(__name__)

_EVERY = 30.0  # seconds between two updates of the status
# seconds for which a manager that does not read may block the event loop: with a status, and with all other messages,
# for which the manager waits
_PATIENCE, _PATIENCE_READY = 0.2, 5.0


def notify_manager(*assignments: str) -> None:
    """Send lines such as "READY=1" and "STATUS=..." to the service manager that started us, if any. Never raise."""
    address = _address()
    if address is None:
        return
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
            sock.settimeout(_PATIENCE if assignments[0].startswith("STATUS=") else _PATIENCE_READY)
            lines = "\n".join(map(_line, assignments))
            # connected, because poll() always reports a socket without a peer as writable, which would be a busy wait
            sock.connect("\0" + address[1:] if address.startswith("@") else address)
            sock.send(lines.encode())
    except OSError as exc:
        log.warning("cannot notify the service manager (%s): %s", assignments[0], exc)


def status(source: str, mountpoint: str, opened: int) -> str:
    """Return the line for `systemctl status`. `opened` is the number of open files and directories in the mount."""
    use = f"{opened} open" if opened else "nothing open"
    return f"STATUS={without_secrets(source)} on {mountpoint}: {use}"


async def report_use(operations: Operations, source: str, mountpoint: str) -> None:
    """Report the number of open files to the service manager when the mount is up and whenever it changes, forever."""
    if _address() is None:
        return
    await operations.started.wait()
    reported = ""
    while True:
        text = status(source, mountpoint, operations.open_handles)
        if text != reported:
            notify_manager(text)
            reported = text
        await trio.sleep(_EVERY)


def _line(assignment: str) -> str:
    """Replace control characters, because a line feed in a name would begin another assignment."""
    return "".join(letter if letter.isprintable() else "?" for letter in assignment)


@functools.cache
def _address() -> str | None:
    return os.environ.pop("NOTIFY_SOCKET", None)  # removed, because programs that we start must not notify the manager

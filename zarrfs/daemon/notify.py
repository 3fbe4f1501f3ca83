"""Notifications to the service manager: sd_notify(3), datagrams to $NOTIFY_SOCKET."""

from __future__ import annotations

import functools
import logging
import os
import socket

log = logging.getLogger(__name__)

_PATIENCE = 5.0  # seconds for which a manager that does not read may block the event loop


def notify_manager(*assignments: str) -> None:
    """Send lines such as "READY=1" to the service manager that started us, if any. Never raise."""
    address = _address()
    if address is None:
        return
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
            sock.settimeout(_PATIENCE)
            # connected, because poll() always reports a socket without a peer as writable, which would be a busy wait
            sock.connect("\0" + address[1:] if address.startswith("@") else address)
            sock.send("\n".join(assignments).encode())
    except OSError as exc:
        log.warning("cannot notify the service manager (%s): %s", assignments[0], exc)


@functools.cache
def _address() -> str | None:
    return os.environ.pop("NOTIFY_SOCKET", None)  # removed, because programs that we start must not notify the manager

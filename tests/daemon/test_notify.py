"""Notifications to a service manager that does not read them."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

import pytest

from zarrfs.daemon import notify


@pytest.fixture
def silent_manager(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A service manager that does not read: its socket has no room for another datagram."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind("")  # a free abstract name: paths of tests may be too long
        sent = 1
        while sent:  # a sender may have filled its own buffer, and not that of the manager
            sent = 0
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender, contextlib.suppress(BlockingIOError):
                sender.setblocking(False)
                while True:
                    sender.sendto(b"STATUS=full", manager.getsockname())
                    sent += 1
        address = "@" + manager.getsockname()[1:].decode()
        monkeypatch.setattr(notify, "_address", lambda: address)
        yield


@pytest.mark.usefixtures("silent_manager")
def test_a_manager_that_does_not_read_blocks_nothing(caplog: pytest.LogCaptureFixture) -> None:
    thread = threading.Thread(target=notify.notify_manager, args=("READY=1",), daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()
    assert "cannot notify the service manager (READY=1): timed out" in caplog.text

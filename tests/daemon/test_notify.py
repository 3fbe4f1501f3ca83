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
    """Set up a service manager that does not read: its socket has no room for another datagram."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind("")  # an abstract address, because a path in tmp_path may be too long
        sent = 1
        while sent:  # a sender may have filled only its own buffer, so that another can still send
            sent = 0
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender, contextlib.suppress(BlockingIOError):
                sender.setblocking(False)
                while True:
                    sender.sendto(b"STATUS=full", manager.getsockname())
                    sent += 1
        address = "@" + manager.getsockname()[1:].decode()
        monkeypatch.setattr(notify, "_address", lambda: address)
        monkeypatch.setattr(notify, "_PATIENCE", 0.3)
        yield


@pytest.mark.usefixtures("silent_manager")
def test_a_notification_that_is_not_read_times_out(caplog: pytest.LogCaptureFixture) -> None:
    thread = threading.Thread(target=notify.notify_manager, args=("READY=1",), daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()
    assert "cannot notify the service manager (READY=1): timed out" in caplog.text

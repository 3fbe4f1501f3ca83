"""Connecting to servers: an unreachable one delays only its own readers, and for a bounded time."""

from __future__ import annotations

import dataclasses
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trio

from tests.remotereading import using
from tests.servers import Ftp
from zarrfs.config.options import Options
from zarrfs.errors import ReadError
from zarrfs.net import openers, request_queue
from zarrfs.store.remotefiles import RemoteFiles

VALUE = bytes(range(256))
URL = "ftp://nowhere.invalid/v"
LONG = 30.0  # seconds; no step of these tests takes as long
OPTIONS = Options(allow=("ftp",), request_timeout=2 * LONG, wait_for_outages="all")


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Make every connection attempt hang until the test ends; the event is set at the first one."""
    begun, end = threading.Event(), threading.Event()

    def connect(*_args: object) -> None:
        begun.set()
        end.wait(2 * LONG)
        raise OSError

    monkeypatch.setattr(openers, "_file_system", connect)
    yield begun
    end.set()


def test_a_silent_server_does_not_delay_other_urls(silent: threading.Event, tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("m", VALUE)

    async def check(files: RemoteFiles) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(files.find, URL)
            await trio.to_thread.run_sync(silent.wait, LONG)
            with trio.fail_after(LONG):
                assert bytes(await files.read(f"zip://m::{tmp_path}/a.zip", 3, 5, 0, 256)) == VALUE[3:8]
            nursery.cancel_scope.cancel()

    using(check, OPTIONS)


@pytest.mark.usefixtures("silent")
def test_all_readers_of_a_silent_server_fail_at_their_deadline() -> None:
    async def check(files: RemoteFiles) -> None:
        async def one() -> None:
            with pytest.raises(ReadError, match=rf"^{URL}: not reached within 0.5 s \(-o read_timeout=\)$"):
                await files.read(URL, 0, 100, 0, 100)

        with trio.fail_after(LONG):
            async with trio.open_nursery() as nursery:
                for _ in range(8):
                    nursery.start_soon(one)

    using(check, dataclasses.replace(OPTIONS, read_timeout=0.5))


@pytest.mark.usefixtures("silent")
def test_a_repeated_read_does_not_wait_for_read_timeout_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel repeats a read that failed; the repeated read gets one short attempt."""
    monkeypatch.setattr(request_queue, "_LAST_ATTEMPT", 0.01)
    monkeypatch.setattr(request_queue, "_SAME", 2 * LONG)

    async def check(files: RemoteFiles) -> None:
        with pytest.raises(ReadError, match=r"not reached within 0\.1 s"):
            await files.find(URL)
        files.adjust(dataclasses.replace(OPTIONS, read_timeout=2 * LONG))
        with trio.fail_after(LONG), pytest.raises(ReadError, match="not reached within 60 s"):
            await files.find(URL)

    using(check, dataclasses.replace(OPTIONS, read_timeout=0.1))


@pytest.mark.parametrize("patience", ["answered", "all"])
def test_a_refused_connection_is_retried(ftp: Ftp, patience: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in any outage: `retries` times while a source is opened, and until read_timeout in a mount."""
    ftp.values["v"] = VALUE
    monkeypatch.setattr(request_queue, "_FIRST_PAUSE", 0.001)
    make, refused = openers._file_system, [1, 2, 3]

    def refusing(*args: Any) -> Any:
        if refused:
            refused.pop()
            raise ConnectionRefusedError(111, "Connection refused")
        return make(*args)

    monkeypatch.setattr(openers, "_file_system", refusing)

    async def check(files: RemoteFiles) -> None:
        if patience == "answered":
            with pytest.raises(ReadError, match=rf"^{ftp.url}/v: Connection refused \(2 attempts\)$"):
                await files.find(f"{ftp.url}/v")
            refused.pop()
        assert bytes(await files.read(f"{ftp.url}/v", 3, 5, 0, 256)) == VALUE[3:8]
        assert not refused

    using(check, Options(allow=("ftp",), retries=1, wait_for_outages=patience))

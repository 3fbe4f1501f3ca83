"""Export of metrics: places to export to, and failures of the export, which end no mount."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trio

from zarrfs.config.options import parse
from zarrfs.errors import MountError, UsageError
from zarrfs.metrics import exporters
from zarrfs.metrics.exporters import HTTPExporter, TextfileExporter, Watch

ABOUT = {"source": "https://a.example/refs.json", "kind": "references", "pid": 4711}


def watched(watch: Watch, stats: Callable[[], dict[str, Any]], script: Callable[[], Any]) -> None:
    """Run `script` while a mount is watched."""

    async def main() -> None:
        with trio.fail_after(20):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(watch.run, stats)
                await script()
                nursery.cancel_scope.cancel()

    trio.run(main)


async def until(what: Callable[[], bool]) -> None:
    while not what():  # noqa: ASYNC110
        await trio.sleep(0.005)


def test_a_metrics_file_that_cannot_be_written_is_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(exporters, "_EVERY", 0.01)
    caplog.set_level("INFO", "zarrfs")
    directory = tmp_path / "node_exporter"
    directory.mkdir()
    place = directory / "x.prom"
    reads = 0

    def stats() -> dict[str, Any]:
        nonlocal reads
        reads += 1
        return {"read": reads}

    async def script() -> None:
        await until(place.exists)
        text = place.read_text()
        await until(lambda: place.read_text() != text)
        directory.rename(tmp_path / "away")
        before = reads
        await until(lambda: reads > before + 5)
        (tmp_path / "away").rename(directory)
        await until(lambda: "written again" in caplog.text)

    watched(Watch(TextfileExporter(str(place)), "/mnt", dict(ABOUT)), stats, script)
    assert [text for text in caplog.messages if text.startswith("metrics=")] == [
        f"metrics={place}: No such file or directory; tried again every 0.01 s", f"metrics={place}: is written again",
    ]  # fmt: skip
    assert [
        name for name in os.listdir(directory) if not name.endswith(".new")
    ] == []  # a .new file may be in progress


def test_an_exception_in_the_export_ends_no_mount(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def stats() -> dict[str, Any]:
        raise KeyError("x")

    async def script() -> None:
        await until(lambda: bool(caplog.messages))
        await trio.sleep(0.01)

    watched(Watch(TextfileExporter(str(tmp_path / "x.prom")), "/mnt", dict(ABOUT)), stats, script)
    assert caplog.messages == ["metrics: KeyError: 'x'; they are no longer served"]


def test_a_directory_is_refused_as_a_text_file(tmp_path: Path) -> None:
    with pytest.raises(MountError, match="is a directory"):
        TextfileExporter(str(tmp_path))


@pytest.mark.parametrize(
    "where",
    ["127.0.0.1:9400", "0.0.0.0:0", "localhost:1", "host.example:65535", "[::1]:9400", "[fe80::1%eth0]:9", "/x.prom"],
)
def test_addresses_and_absolute_paths_are_accepted(where: str) -> None:
    assert parse([f"metrics={where}"]).options.metrics == where


@pytest.mark.parametrize(
    "where", ["", ":9400", "9400", "h:65536", "::1:9400", "[::1]", "[h]:1", "x.prom", "http://h:1/"]
)
def test_bad_values_of_metrics_are_refused(where: str) -> None:
    with pytest.raises(UsageError, match="option metrics"):
        parse([f"metrics={where}"])


def test_addresses_that_the_machine_lacks_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """localhost has ::1 even in a container without IPv6, and some /etc/hosts name an address twice."""
    v4 = socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", 0)
    v6 = socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("2001:db8::1", 0, 0, 0)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [v6, v4, v4])
    exporter = HTTPExporter("localhost:0")
    assert len(exporter._sockets) == 1
    exporter.close()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [v6])
    with pytest.raises(MountError, match="metrics=localhost:0: cannot assign requested address"):
        HTTPExporter("localhost:0")

"""Staging as a copy: links."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
import trio

from zarrfs.config.options import Options
from zarrfs.jobs import records, staged_copy
from zarrfs.jobs.records import Record
from zarrfs.store.directory import FileSystemStore


def test_a_slow_file_server_does_not_block_the_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are checked in a thread."""
    source = tmp_path / "source"
    source.mkdir()
    (source / "a").write_text("a")
    record = Record("link", str(source), str(tmp_path / "d"), str(tmp_path / "d"), records.process_here())
    asked, going_on, waited = threading.Event(), threading.Event(), []

    def slow(path: str) -> bool:
        asked.set()
        waited.append(going_on.wait(20))
        return True

    async def link() -> str | None:
        store = FileSystemStore(str(source))
        links = staged_copy._Linking(store, record, Options())
        monkeypatch.setattr(os.path, "isfile", slow)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(setting)
            found = await links.link("a", await store.info("a"))
        await store.aclose()
        return found

    async def setting() -> None:
        await trio.to_thread.run_sync(asked.wait, 20)
        going_on.set()

    assert trio.run(link) == str(source / "a")
    assert waited == [True]

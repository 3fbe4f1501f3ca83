"""Staging with links: how their targets are found."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import pytest
import trio

from zarrfs.config.options import Options
from zarrfs.errors import TargetMissing
from zarrfs.jobs import records, staged_copy
from zarrfs.jobs.records import Record
from zarrfs.sources import open_source
from zarrfs.store.directory import FileSystemStore


def test_a_slow_file_server_does_not_block_the_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file to be linked is checked in a thread."""
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


def test_a_percent_encoded_target_is_linked_as_the_file_that_is_read(tmp_path: Path) -> None:
    (tmp_path / "a b?").write_text("read")
    (tmp_path / "c%20d").write_text("read")
    (tmp_path / "c d").write_text("not read")
    urls = {"one": f"file://{tmp_path}/a%20b%3F", "other": f"file://{tmp_path}/c%20d", "none": f"file://{tmp_path}/no%"}
    (tmp_path / "set.json").write_text(json.dumps({key: [url] for key, url in urls.items()}))
    record = Record("link", "set", str(tmp_path / "to/d"), str(tmp_path / "to/d"), records.process_here())

    async def link() -> list[str | None]:
        store = open_source(str(tmp_path / "set.json"), Options())
        links = staged_copy._Linking(store, record, Options())
        found = [await links.link(key, await store.info(key)) for key in ("one", "other")]
        with pytest.raises(TargetMissing):
            await links.link("none", await store.info("one"))
        await store.aclose()
        return found

    assert trio.run(link) == [str(tmp_path / "a b?"), str(tmp_path / "c%20d")]

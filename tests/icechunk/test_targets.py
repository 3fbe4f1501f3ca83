"""Targets of virtual chunks on servers whose responses have no version: a change shows in their attributes."""

from __future__ import annotations

import fsspec
import pytest
import trio

from zarrfs.config.options import Options
from zarrfs.errors import TargetChanged
from zarrfs.icechunk import targets
from zarrfs.icechunk.targets import RepositoryTargets

URL = "memory://icechunk-targets/v"
TARGET = targets.target(URL, None, 2**31)  # a time after every mtime in this test


def put(value: bytes) -> None:
    fsspec.filesystem("memory").pipe(URL.removeprefix("memory:/"), value)


def test_a_file_replaced_after_its_first_read_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets, "_FRESH", 0.0)

    async def main() -> None:
        reader = RepositoryTargets(Options(), "/repo")
        put(bytes(80))
        assert bytes(await reader.read(TARGET, 0, 40, 0, 40)) == bytes(40)
        put(b"\1" * 80)
        for low in (40, 0):
            with pytest.raises(TargetChanged, match="has changed since it was first read"):
                await reader.read(TARGET, low, 40, low, low + 40)
        await reader.aclose()

    trio.run(main)

"""The check for stale consolidated metadata, which must not end the mount that runs it."""

from __future__ import annotations

from pathlib import Path

import trio

from zarrfs.fuse.stale_metadata import warn_of_stale
from zarrfs.store.overlay import Overlay
from zarrfs.store.upper import Upper


def test_a_document_too_deeply_nested_to_parse_is_ignored(tmp_path: Path) -> None:
    (tmp_path / "zarr.json").write_text("[" * 100_000)

    async def body() -> None:
        overlay, reported = Overlay(None, Upper(str(tmp_path), plain=True)), set[str]()
        await warn_of_stale(overlay, "a/zarr.json", reported)
        assert not reported
        await overlay.aclose()

    trio.run(body)

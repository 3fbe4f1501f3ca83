"""Reads of local files."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio

from tests.system.leases import leased
from zarrfs.system.localfiles import LocalFiles


@pytest.mark.parametrize("checked", [True, False])
def test_a_file_with_a_lease_is_read_once_its_holder_releases_it(checked: bool, tmp_path: Path) -> None:
    (path := tmp_path / "a").write_bytes(b"value")

    async def body() -> bytes:
        files = LocalFiles((str(tmp_path),) if checked else None)
        try:
            return bytes(await files.read(str(path), 0, 5))
        finally:
            await files.aclose()

    with leased(path):
        assert trio.run(body) == b"value"

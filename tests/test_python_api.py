"""The Python API, `import zarrfs`: a source as a Store, with options as Python values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import trio

import zarrfs
from zarrfs.errors import SourceError, UsageError


def test_a_source_is_a_store(tmp_path: Path) -> None:
    (tmp_path / "refs.json").write_text('{"version": 1, "refs": {"a/b": "hello"}}')
    store = zarrfs.open_store(str(tmp_path / "refs.json"), type="references", strict=True)

    async def read() -> bytes:
        try:
            assert (await store.info("a")).kind is zarrfs.Kind.DIRECTORY
            return bytes(await store.get("a/b", 1))
        finally:
            await store.aclose()

    assert isinstance(store, zarrfs.Store)
    assert trio.run(read) == b"ello"
    with pytest.raises(SourceError, match=r"none\.json: no such file"):
        zarrfs.open_store(str(tmp_path / "none.json"))


@pytest.mark.parametrize(
    ("option", "rule"),
    [
        ({"part_size": 0}, "option part_size=0: expected a size from 4KiB to 1GiB"),
        ({"host_requests": 0}, "option host_requests=0: expected a whole number from 1 to 10000"),
        ({"read_timeout": 0.0}, "option read_timeout=0.0: expected a time from 10ms to 30d"),
        ({"retries": "5"}, "option retries=5: expected a whole number from 0 to 1000"),
        ({"retries": {}}, "option retries={}: expected a whole number from 0 to 1000"),
    ],
)
def test_numbers_have_the_bounds_that_they_have_elsewhere(tmp_path: Path, option: dict[str, Any], rule: str) -> None:
    (tmp_path / "refs.json").write_text('{"version": 1, "refs": {}}')
    with pytest.raises(UsageError) as caught:
        zarrfs.open_store(str(tmp_path / "refs.json"), **option)
    assert str(caught.value) == rule


def test_storage_options_are_given_by_protocol(tmp_path: Path) -> None:
    (tmp_path / "refs.json").write_text('{"version": 1, "refs": {"a": "x"}}')
    store = zarrfs.open_store(str(tmp_path / "refs.json"), storage={"s3": {"anon": True}})
    trio.run(store.aclose)

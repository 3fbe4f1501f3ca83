"""Real repositories, written with the icechunk package."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any, NamedTuple

import icechunk
import numpy as np
import zarr
from zarr.core.buffer import default_buffer_prototype

VALUES = np.arange(48, dtype="f4").reshape(6, 8)
NUMBERS = np.arange(20, dtype="<i4")
FORMAT: Any = {} if icechunk.__version__ < "2" else {"spec_version": 1}  # format 2 is in tests/data


class Repository(NamedTuple):
    """A repository at `path`: tag v1 and branch dev are `first`, main is `second`. `numbers` holds virtual chunks."""

    path: Path
    first: str
    second: str
    numbers: Path


def write(directory: Path) -> Repository:
    """Write a repository with inline, native and virtual chunks, and several manifests of one array."""
    path, outside = directory / "repo", directory / "outside"
    outside.mkdir()
    numbers = outside / "the numbers.bin"
    numbers.write_bytes(NUMBERS.tobytes())
    config = icechunk.RepositoryConfig.default()
    config.inline_chunk_threshold_bytes = 40
    split = {icechunk.ManifestSplitCondition.AnyArray(): {icechunk.ManifestSplitDimCondition.Axis(0): 1}}
    config.manifest = icechunk.ManifestConfig(splitting=icechunk.ManifestSplittingConfig.from_dict(split))
    prefix = f"file://{directory}/outside/"
    config.set_virtual_chunk_container(
        icechunk.VirtualChunkContainer(prefix, icechunk.local_filesystem_store(str(outside)))
    )
    repo = icechunk.Repository.create(icechunk.local_filesystem_storage(str(path)), config, **FORMAT)
    session = repo.writable_session("main")
    group = zarr.open_group(session.store, mode="w", attributes={"title": "rain"})
    group.create_array("rain", shape=VALUES.shape, chunks=(3, 4), dtype="f4")[:] = VALUES
    group.create_array("deep/er/n", shape=(), dtype="i4")[...] = 7
    group.create_array("virtual", shape=(20,), chunks=(10,), dtype="<i4", compressors=None)
    url, when = f"{prefix}the numbers.bin", int(os.stat(numbers).st_mtime) + 1
    specs = [icechunk.VirtualChunkSpec([at], url, 40 * at, 40) for at in (0, 1)]
    specs[1] = icechunk.VirtualChunkSpec([1], url, 40, 40, last_updated_at_checksum=_time(when))
    assert session.store.set_virtual_refs("virtual", specs) is None  # None: all were accepted
    first = session.commit("first")
    repo.create_tag("v1", first)
    repo.create_branch("dev", first)
    return Repository(path, first, commit(path, 5), numbers)


def write_virtual(path: Path, url: str, tag: str | None) -> Path:
    """Write a repository whose array `virtual` has the halves of `url` as chunks, only for the ETag `tag` if given."""
    repo = icechunk.Repository.create(icechunk.local_filesystem_storage(str(path)), **FORMAT)
    session = repo.writable_session("main")
    group = zarr.open_group(session.store, mode="w")
    group.create_array("virtual", shape=(20,), chunks=(10,), dtype="<i4", compressors=None)
    specs = [icechunk.VirtualChunkSpec([at], url, 40 * at, 40, etag_checksum=tag) for at in (0, 1)]
    assert session.store.set_virtual_refs("virtual", specs, validate_containers=False) is None
    session.commit("virtual")
    repo.create_tag("v1", repo.lookup_branch("main"))
    return path


def commit(path: Path, value: int) -> str:
    """Set the upper half of `rain` to `value`, commit that to main, and return the id of the snapshot."""
    session = icechunk.Repository.open(icechunk.local_filesystem_storage(str(path))).writable_session("main")
    zarr.open_array(session.store, path="rain", mode="r+")[:3] = value
    return session.commit("second")


def _time(seconds: int) -> Any:
    from datetime import UTC, datetime

    return datetime.fromtimestamp(seconds, UTC)


def contents(repository: Repository, **ref: str) -> dict[str, bytes]:
    """Return every key and value of a snapshot, as icechunk's own store reads them."""
    prefix = f"file://{repository.numbers.parent}/"
    repo = icechunk.Repository.open(
        icechunk.local_filesystem_storage(str(repository.path)), authorize_virtual_chunk_access={prefix: None}
    )
    store = repo.readonly_session(**ref).store

    async def read() -> dict[str, bytes]:
        found = {}
        async for key in store.list():
            value = await store.get(key, default_buffer_prototype())
            assert value is not None
            found[key] = value.to_bytes()
        return found

    return asyncio.run(read())

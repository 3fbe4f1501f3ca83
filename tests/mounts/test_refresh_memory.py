"""Memory of older store versions, while readers have their files open."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from pathlib import Path

import numpy as np
import zarr

from tests.mounts.mounting import counters_of, mounted
from tests.mounts.refreshing import refresh
from tests.servers import Faulty, faulty

__all__ = ["faulty"]

LARGE = 16 << 20


def resident(root: Path) -> int:
    """Return the resident memory of a mount's daemon, in bytes."""
    return int(counters_of(root)["process"]["resident"])


def test_older_versions_release_their_memory(faulty: Faulty, tmp_path: Path) -> None:
    """Ten files, each read and still open in a version of its own, add less memory than three files of their size."""
    document, values = tmp_path / "set.json", [bytes([number]) * LARGE for number in range(10)]

    def put(number: int) -> None:
        url = faulty.put(f"/{number}", values[number])
        document.write_text(json.dumps({"version": 1, "refs": {"a": [url, 0, LARGE]}}))

    put(0)
    with (
        mounted(document, tmp_path / "mnt", "allow=private", "memory_limit=64MiB") as root,
        contextlib.ExitStack() as opened,
    ):
        files, had = [], list[int]()
        for number, value in enumerate(values):
            file = opened.enter_context(open(root / "a", "rb"))
            assert file.read() == value
            files.append(file)
            had.append(resident(root))
            if number + 1 < len(values):
                put(number + 1)
                assert refresh(root) == "refreshed"
        assert had[-1] < had[0] + 3 * LARGE
        faulty.requests.clear()
        for file, value in zip(files, values, strict=True):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # else the page cache answers
            file.seek(0)
            assert file.read() == value
        assert len({path for _, path, _ in faulty.requests}) >= len(values) - 1
        assert resident(root) < had[0] + 3 * LARGE


def test_a_large_blob_of_an_older_version_is_still_read(faulty: Faulty, tmp_path: Path) -> None:
    """The blob is larger than the memory that an older version may keep."""
    value, document = b"blob" * (2 << 20), tmp_path / "archive.json"
    name = "sha1-" + hashlib.sha1(value).hexdigest()
    faulty.put(f"/{name}", value)

    def put(*names: str) -> None:
        entry = {"mode": 0o100644, "size": len(value), "encoding": "blobvec", "data": [[0, len(value), name]]}
        document.write_text(json.dumps([{**entry, "path": path} for path in names]))

    put("a")
    options = ("type=archive", f"blobs={faulty.url}", "allow=private", "memory_limit=64MiB")
    with mounted(document, tmp_path / "mnt", *options) as root, open(root / "a", "rb") as file:
        put("a", "b")
        assert refresh(root) == "refreshed"
        assert file.read() == value


def test_a_large_chunk_of_an_older_version_is_still_read(tmp_path: Path) -> None:
    place, values = tmp_path / "set", np.arange(1 << 20, dtype="i4")
    for name in ("one", "two"):
        zarr.create_array(str(tmp_path / name / "x"), data=values, chunks=(1 << 19,), zarr_format=2)
    place.symlink_to("one")
    options = ("view=arrays", "array_cache=4MiB")
    with mounted(place, tmp_path / "mnt", *options) as root, open(root / "x.npy", "rb") as file:
        (tmp_path / "next").symlink_to("two")
        (tmp_path / "next").rename(place)
        assert refresh(root) == "refreshed"
        assert (np.load(file) == values).all()

"""A tree that `zarrfs archive create` archives and zarrfs mounts is equal to the original tree."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.archives.createdtrees import File, Model, models, on_disk, write
from tests.conftest import run
from tests.mounts.mounting import log_of, mounted
from zarrfs.store.api import SET_IDS, Kind


def together(drawn: list[Model]) -> Model:
    """Join several trees, each in a directory of its own."""
    model: Model = {}
    for number, one in enumerate(drawn):
        model[f"t{number}"] = (0o750, number * 10**9)
        model |= {f"t{number}/{path}": what for path, what in one.items()}
    return model


@pytest.mark.parametrize(
    "more",
    [
        ["--dictionary", "--hash", "sha256"], ["--inline-threshold", "0", "--region-size", "4096", "--jobs", "1"],
        ["--jobs", "2"], ["--inline"],
    ],
)  # fmt: skip
def test_a_mounted_archive_equals_the_archived_tree(more: list[str]) -> None:
    @settings(
        deadline=None, max_examples=2, phases=[Phase.generate], database=None, derandomize=True,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(st.lists(models(), min_size=30, max_size=30).map(together))
    def check(model: Model) -> None:
        with tempfile.TemporaryDirectory() as name:
            compare(Path(name), model, more)

    check()


def compare(place: Path, model: Model, more: list[Any]) -> None:
    """Write the tree, archive it, mount the archive, and compare the two."""
    tree, blobs, document = place / "tree", place / "blobs", place / "new.json.zst"
    tree.mkdir()
    blobs.mkdir()
    write(tree, model)
    where = [] if "--inline" in more else ["--blobs", blobs]
    done = run("archive", "create", "-C", tree, ".", "-O", document, *where, *more)
    assert (done.returncode, done.stderr) == (0, "")
    with mounted(document, place / "mnt", f"blobs={blobs}") as mountpoint:
        expected = {
            path: (what[0], what[1] & ~SET_IDS, *what[2:]) if what[0] is Kind.FILE else what
            for path, what in on_disk(tree).items()
        }
        assert on_disk(mountpoint) == expected  # a mount shows no set-ID bits, as they have no effect
        for path, what in model.items():
            if isinstance(what, File) and "--inline" not in more and len(what.data()) > 1024:
                assert (mountpoint / path).stat().st_blocks * 512 <= -(-what.allocated() // 512) * 512
        assert log_of(mountpoint) == ""

"""zarrfs commit: what is written shows the merged tree, whole or not at all."""

from __future__ import annotations

import contextlib
import json
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trio
from click.testing import CliRunner, Result
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.unit.mergedtrees import (
    SECOND,
    Model,
    Shown,
    change,
    model_of,
    model_shown,
    opened,
    operations,
    sets,
    shown,
    write_source,
)
from tests.unit.refsets import TARGET, targets
from tests.unit.refsets import entries as entries_of
from zarrfs import sources
from zarrfs.cli import main
from zarrfs.errors import SourceError
from zarrfs.options import Options
from zarrfs.stage.commit import New, commit
from zarrfs.store.api import Kind

# -- the property: a random source, random changes, and NEW shows what the mount would

_URLS = tempfile.TemporaryDirectory(prefix="zarrfs-targets-")
_SETS = sets(targets(Path(_URLS.name)))


def expected(merged: dict[str, Shown], form: str) -> dict[str, Any]:
    """As much of a merged tree as something of this form can tell."""
    if form == "references":
        return {key: entry.data for key, entry in merged.items() if entry.kind is Kind.FILE}
    if form == "zip":
        return {key: (entry.kind, entry.data) for key, entry in merged.items()}
    unit = SECOND if form == "archive" else 1
    return {
        key: (entry.kind, entry.data, entry.mode, None if entry.mtime_ns is None else entry.mtime_ns // unit)
        for key, entry in merged.items()
    }


async def check_commit(place: Path, kind: str, entries: dict[str, Any], changes: list[Any], new: New) -> None:
    """Make a source and changes, commit, and compare."""
    upper, blobs = place / "upper", place / "blobs"
    upper.mkdir()
    blobs.mkdir()
    model = model_of(entries)
    overlay, plan = opened(write_source(place, kind, entries), upper)
    for operation in changes:
        await change(overlay, model, operation)
    merged = await shown(overlay)
    assert {key: entry.data for key, entry in merged.items()} == model
    root = await overlay.info("")
    told: list[str] = []
    await commit(overlay, plan, new._replace(path=str(place / new.path), blobs=str(blobs)), told.append)
    await overlay.aclose()
    assert set(told) == empty(model) if new.format == "references" else not told

    options = Options(index_dir=str(place / "indexes"), blobs=(str(blobs),), type=typed(new.format))
    store = sources.open_source(str(place / new.path), options, child=False)
    found = await shown(store)
    if new.format == "directory":
        assert (await store.info(""))[2:5] == root[2:5]
    await store.aclose()
    assert expected(found, new.format) == expected(merged, new.format)
    left = {"source", "upper", "blobs", "indexes", new.path, f"{new.path}.data"}
    assert set(os.listdir(place)) <= left


def typed(form: str) -> str:
    return {"directory": "zarr", "zip": "zarr"}.get(form, form)


def empty(model: Model) -> set[str]:
    """The warnings of directories that hold nothing."""
    return {
        f"{key}: an empty directory, of which a reference set knows nothing: left out"
        for key, value in model.items()
        if value is None and not any(other.startswith(f"{key}/") for other in model)
    }


@pytest.mark.parametrize("kind", ["references", "archive", "zarr"])
@pytest.mark.parametrize(
    ("path", "form", "more"),
    [
        ("new.json", "references", {}),
        ("new.json.zst", "references", {"inline": 0, "relative": True}),
        ("new.index", "references", {"inline": 100, "in_place": True}),
        ("archive.json", "archive", {"inline": 8}),
        ("archive.json.gz", "archive", {}),
        ("new.zarr", "directory", {}),
        ("new.zip", "zip", {}),
    ],
)
def test_new_shows_the_merged_tree(kind: str, path: str, form: str, more: dict[str, Any]) -> None:
    @settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
    @given(_SETS, operations(links=form in ("archive", "directory")))
    def check(entries: dict[str, Any], changes: list[Any]) -> None:
        with tempfile.TemporaryDirectory() as place:
            trio.run(check_commit, Path(place), kind, entries, changes, New(path, form, **more))

    check()

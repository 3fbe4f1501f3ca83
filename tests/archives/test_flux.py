"""Archives from Flux: in the KVS, and in a jobspec."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import trio

from tests.archives.compiled import blobref, file
from tests.fakeflux import FakeFlux
from tests.sources.opening import open_source
from zarrfs.config.options import Options
from zarrfs.errors import SourceError
from zarrfs.sources import plan_source

SMALL, LARGE = b"small\n", os.urandom(300_000)
ARCHIVE = [
    file([[0, len(LARGE), blobref(LARGE)]], path="dir/large", encoding="blobvec", size=len(LARGE)),
    file(SMALL.decode(), path="small"),
]
JOBSPEC = {"version": 1, "resources": [], "tasks": [], "attributes": {"system": {"files": {
    entry["path"]: {name: value for name, value in entry.items() if name != "path"} for entry in ARCHIVE
}}}}  # fmt: skip


@pytest.fixture
def flux(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeFlux:
    """Return a fake Flux instance that has ARCHIVE, with its flux command on PATH."""
    found = FakeFlux(tmp_path / "flux")
    monkeypatch.setenv("PATH", found.environment()["PATH"])
    found.store(LARGE)
    found.put("archive.main", ARCHIVE)
    found.put("archive.a.b", ARCHIVE)
    found.job("f26M1xTq", JOBSPEC)
    return found


def contents(source: str | Path, **options: Any) -> dict[str, bytes]:
    """Open a source, which a child process plans, and return the two files of ARCHIVE."""

    async def main() -> dict[str, bytes]:
        store = open_source(str(source), Options(**options))
        try:
            return {key: bytes(await store.get(key)) for key in ("dir/large", "small")}
        finally:
            await store.aclose()

    return trio.run(main)


EXPECTED = {"dir/large": LARGE, "small": SMALL}


def refused(source: str | Path, rule: str, **options: Any) -> None:
    with pytest.raises(SourceError, match=rule) as caught:
        plan_source(str(source), Options(**options))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("source", ["flux:main", "flux:a.b", "flux:job/f26M1xTq"])
def test_an_archive_of_the_running_instance(flux: FakeFlux, source: str) -> None:
    plan = plan_source(source, Options())
    assert (plan.kind, plan.source, plan.blobs, plan.warnings) == ("archive", source, ("flux:",), ())
    assert contents(source) == EXPECTED


def test_an_archive_is_found_from_within_a_job(flux: FakeFlux, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job has a KVS namespace of its own, but archives are in that of the instance."""
    monkeypatch.setenv("FLUX_KVS_NAMESPACE", "job-4711")
    assert contents("flux:main") == EXPECTED


def test_blobs_of_another_source_than_the_instance(flux: FakeFlux, tmp_path: Path) -> None:
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs" / blobref(LARGE)).write_bytes(LARGE)
    assert contents("flux:main", blobs=(str(tmp_path / "blobs"),)) == EXPECTED
    assert not any(call.startswith("content") for call in flux.calls())


def test_sources_that_flux_cannot_give(flux: FakeFlux, monkeypatch: pytest.MonkeyPatch) -> None:
    refused("flux:none", "flux kvs get archive.none: flux-kvs: archive.none: No such file")
    refused("flux:job/none", "flux job info none jobspec: flux-job: No such file")
    for source in ("flux:", "flux:job/", "flux:--help", "flux:job/-x"):
        refused(source, "expected flux:NAME")
    flux.put("archive.refs", {"a": ["/etc/passwd"]})
    assert plan_source("flux:refs", Options()).kind == "archive"  # it is never taken for a reference set
    refused("flux:main", "more than 100 bytes", document_limit=100)
    flux.delay(600)
    refused("flux:main", "flux kvs get archive.main: no answer within 0.2 s", read_timeout=1)
    flux.delay(0)
    flux.stop()
    refused("flux:main", "Unable to connect to Flux")
    monkeypatch.setenv("PATH", os.path.dirname(sys.executable))
    refused("flux:main", "flux kvs get archive.main: cannot run flux: no such file")


def test_a_file_whose_name_begins_with_flux(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("flux:x").write_text("[]")
    assert plan_source("./flux:x", Options()).kind == "archive"

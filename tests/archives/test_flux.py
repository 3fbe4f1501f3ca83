"""Archives from Flux: in the KVS, in a jobspec, and in a dump tar, local or behind a URL."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import trio

from tests.archives.compiled import blobref, file
from tests.conftest import run as zarrfs
from tests.fakeflux import FakeFlux, dump_tar
from tests.servers import S3, Nginx
from zarrfs.archives.dump_reader import split_member
from zarrfs.config.options import Options
from zarrfs.errors import SourceError
from zarrfs.sources import open_source, plan_source

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
    refused("flux:refs", "archive|not an object")  # a document in the KVS is never taken for a reference set
    refused("flux:main", "document_limit", document_limit=100)
    flux.delay(600)
    refused("flux:main", "flux kvs get archive.main: no answer within 0.2 s", request_timeout=0.2)
    flux.delay(0)
    flux.stop()
    refused("flux:main", "Unable to connect to Flux")
    monkeypatch.setenv("PATH", os.path.dirname(sys.executable))
    refused("flux:main", "flux kvs get archive.main: cannot run flux: no such file")


def test_a_file_whose_name_begins_with_flux(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("flux:x").write_text("[]")
    assert plan_source("./flux:x", Options()).kind == "archive"


def test_an_archive_in_a_dump(tmp_path: Path) -> None:
    tar = tmp_path / "no-matter-what.data"
    dump_tar(tar, {"main": (ARCHIVE, [LARGE])})
    assert contents(tar) == EXPECTED
    assert plan_source(str(tar), Options(type="archive")).blobs == (str(tar),)
    refused(tar, "neither|index|is a file", type="zarr")


def test_one_of_several_archives_in_a_dump(tmp_path: Path) -> None:
    tar = tmp_path / "all.tar"
    dump_tar(tar, {"main": ([], []), "a.b": (ARCHIVE, [LARGE])})
    refused(tar, r"more than one archive; name one with FILE.tar#NAME: a.b, main")
    refused(f"{tar}#x", r"no archive 'x'; name one with FILE.tar#NAME: a.b, main")
    assert contents(f"{tar}#a.b") == EXPECTED
    (tmp_path / "all.tar#a.b").write_text("[]")  # an existing file of this name is preferred
    assert plan_source(f"{tar}#a.b", Options()).blobs == ()
    refused(f"{tmp_path}/none.tar#a", "no such file")
    (tmp_path / "text.tar").write_text("[]")
    refused(f"{tmp_path}/text.tar#a", "no tar of flux dump")


def test_the_name_of_an_archive_is_split_from_that_of_its_tar() -> None:
    assert split_member("/a/b.tar#x.y") == ("/a/b.tar", "x.y")
    assert split_member("https://h/b.TAR#x") == ("https://h/b.TAR", "x")
    for other in ("/a/b.json#x", "/a/b.tar#", "#x", "/a/b.tar"):
        assert split_member(other) == (other, "")


def test_bad_dumps(tmp_path: Path) -> None:
    tar = tmp_path / "x.tar"
    dump_tar(tar, {"main": (ARCHIVE, [LARGE])})
    data = tar.read_bytes()
    for size in (600, 2000, 100_000, 301_000):
        tar.write_bytes(data[:size])
        refused(tar, "the tar is cut short after")
    tar.write_bytes(data[:1024] + bytes(data[1024:1100]) + b"\xff" * 4000)
    refused(tar, "the tar is damaged at byte")
    dump_tar(tar, {})
    refused(tar, "has no member archive/NAME")
    dump_tar(tar, {"main": (ARCHIVE, [LARGE])})
    refused(tar, "document_limit", document_limit=100)


def test_a_dump_behind_a_url(nginx: Nginx, s3: S3, tmp_path: Path) -> None:
    dump_tar(tmp_path / "x.tar", {"main": (ARCHIVE, [LARGE]), "other": ([], [])})
    shutil.copy(tmp_path / "x.tar", nginx.plain.root / "x.tar")
    url = f"{nginx.plain.url}/x.tar"
    dump_tar(nginx.plain.root / "data", {"main": (ARCHIVE, [LARGE])})
    assert contents(f"{nginx.plain.url}/data?x=y") == EXPECTED  # recognised by its content
    (tmp_path / "a.json").write_text(json.dumps(ARCHIVE))
    assert contents(tmp_path / "a.json", blobs=(f"dump:{nginx.plain.url}/data",)) == EXPECTED
    assert contents(f"{url}#main") == EXPECTED
    assert contents(f"{url}#main", type="archive") == EXPECTED
    refused(url, "more than one archive; name one with FILE.tar#NAME: main, other")
    refused(f"{url}#none", "no archive 'none'")
    s3.client.upload_file(str(tmp_path / "x.tar"), s3.bucket, "y.tar")
    assert contents(f"s3://{s3.bucket}/y.tar#main", storage={"s3": s3.options}) == EXPECTED


def test_check_and_ls_accept_archives_of_flux(flux: FakeFlux, tmp_path: Path) -> None:
    done = zarrfs("ls", "-R", "flux:main", env=flux.environment())
    assert (done.returncode, done.stdout.split()) == (0, ["dir", "dir/large", "small"]), done.stderr
    assert zarrfs("check", "flux:main", env=flux.environment()).returncode == 0
    (flux.root / "content" / blobref(LARGE)).write_bytes(LARGE[::-1])
    done = zarrfs("check", "flux:main", env=flux.environment())
    assert done.returncode != 0
    assert "wrong hash" in done.stdout + done.stderr
    dump_tar(tmp_path / "x.tar", {"main": (ARCHIVE, [LARGE])})
    assert zarrfs("check", tmp_path / "x.tar").returncode == 0

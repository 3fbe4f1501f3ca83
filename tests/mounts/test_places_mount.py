"""Mounts of archives that are, or whose blobs are, at a URL or in a Flux instance."""

from __future__ import annotations

import errno
import json
import os
import shutil
import tempfile
from pathlib import Path

import pytest

from tests.archives.compiled import blobref, file, put
from tests.conftest import run
from tests.fakeflux import FakeFlux
from tests.mounts.mounting import log_of, mounted, until
from tests.mounts.test_semantics import error_of
from tests.servers import Faulty, Nginx, faulty, nginx

__all__ = ["faulty", "nginx"]

ONE, TWO = os.urandom(2 << 20), b"two" * 5000
FILES = {"one": ONE, "d/two": TWO, "d/both": ONE + TWO}


def archive() -> list[dict[str, object]]:
    def regions(*blobs: bytes) -> list[list[object]]:
        found, at = [], 0
        for data in blobs:
            found.append([at, len(data), blobref(data)])
            at += len(data)
        return found

    return [
        file(regions(ONE), path="one", encoding="blobvec", size=len(ONE)),
        file(regions(TWO), path="d/two", encoding="blobvec", size=len(TWO)),
        file(regions(ONE, TWO), path="d/both", encoding="blobvec", size=len(ONE + TWO)),
    ]


@pytest.fixture
def document(tmp_path: Path) -> Path:
    (tmp_path / "archive.json").write_text(json.dumps(archive()))
    return tmp_path / "archive.json"


@pytest.fixture
def flux(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeFlux:
    found = FakeFlux(tmp_path / "flux")
    monkeypatch.setenv("PATH", found.environment()["PATH"])
    found.store(ONE)
    found.store(TWO)
    found.put("archive.main", archive())
    return found


def web(nginx: Nginx) -> tuple[str, Path]:
    place = Path(tempfile.mkdtemp(dir=nginx.plain.root))
    place.chmod(0o755)
    put(place, ONE)
    put(place, TWO)
    return f"{nginx.plain.url}/{place.name}", place


def check_files(root: Path) -> None:
    assert {name: (root / name).read_bytes() for name in FILES} == FILES


def test_blobs_read_over_http_are_kept_in_the_cache(nginx: Nginx, document: Path, tmp_path: Path) -> None:
    url, place = web(nginx)
    cache = tmp_path / "cache"
    with mounted(document, tmp_path / "mnt", f"blobs={url}", f"cache_dir={cache}") as root:
        check_files(root)
        stats = json.loads(run("stats", "--json", root).stdout)
        assert stats["requests_total"] >= 2
    shutil.rmtree(place)
    with mounted(document, tmp_path / "mnt", f"blobs={url}", f"cache_dir={cache}") as root:
        check_files(root)


def test_an_instance_that_hangs_or_stops(flux: FakeFlux, tmp_path: Path) -> None:
    with mounted("flux:main", tmp_path / "mnt", "read_timeout=25s") as root:  # which limits the flux command too
        # read_timeout= of a mount cannot be changed, and a busy machine may exceed it even without the delay
        until(lambda: error_of((root / "d/two").read_bytes) is None)
        assert (root / "d/two").read_bytes() == TWO
        flux.delay(600)
        assert error_of((root / "one").read_bytes) == errno.EIO
        assert sorted(os.listdir(root)) == ["d", "one"]  # other requests do not wait
        flux.delay(0)
        until(lambda: error_of((root / "one").read_bytes) is None)
        check_files(root)
        flux.stop()
        check_files(root)  # from the cache
    assert "no answer within 5 s" in log_of(tmp_path / "mnt")
    until(lambda: not any(Path(f"/proc/{helper}").exists() for helper in flux.helpers()))


def test_servers_that_fail(faulty: Faulty, document: Path, tmp_path: Path) -> None:
    url = faulty.put(f"/{blobref(ONE)}", ONE, 500, 503).rpartition("/")[0]
    faulty.put(f"/{blobref(TWO)}", TWO[::-1])
    with mounted(document, tmp_path / "mnt", f"blobs={url}") as root:
        assert (root / "one").read_bytes() == ONE
        assert error_of((root / "d/two").read_bytes) == errno.EIO
        faulty.put(f"/{blobref(TWO)}", TWO)
        check_files(root)
    assert "another hash" in log_of(tmp_path / "mnt")

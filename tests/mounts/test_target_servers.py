"""A mount whose targets are on servers of SFTP and of Google Cloud Storage."""

from __future__ import annotations

import errno
import json
import time
from pathlib import Path

import pytest

from tests.conftest import PROGRAM, run
from tests.mounts.mounting import mounted
from tests.mounts.test_semantics import error_of
from tests.servers import GCS, Sftp, either_client, gcs, sftp

__all__ = ["either_client", "gcs", "sftp"]

VALUE = bytes(range(256)) * 40


def test_targets_on_sftp(sftp: Sftp, tmp_path: Path) -> None:
    (sftp.root / "target").write_bytes(VALUE)
    document = tmp_path / "set.json"
    url = f"{sftp.url}/target"
    document.write_text(json.dumps({"part": [url, 100, 300], "whole": [url], "none": [f"{sftp.url}/none", 0, 1]}))
    given = ",".join(f"sftp.{name}={json.dumps(value)}" for name, value in sftp.options.items())
    with mounted(document, tmp_path / "mnt", f"allow=sftp,retries=0,{given}") as root:
        assert (root / "part").read_bytes() == VALUE[100:400]
        assert (root / "whole").read_bytes() == VALUE
        assert error_of((root / "none").read_bytes) == errno.EIO


@pytest.mark.usefixtures("either_client")
def test_targets_on_gcs(gcs: GCS, tmp_path: Path) -> None:
    gcs.put("target", VALUE)
    document = tmp_path / "set.json"
    url = f"gs://{gcs.bucket}/target"
    document.write_text(json.dumps({"part": [url, 100, 300], "whole": [url], "none": [f"{url}/none", 0, 1]}))
    given = ",".join(f"gcs.{name}={value}" for name, value in gcs.options.items())
    with mounted(document, tmp_path / "mnt", f"retries=0,{given}") as root:
        assert (root / "part").read_bytes() == VALUE[100:400]
        assert (root / "whole").read_bytes() == VALUE
        assert error_of((root / "none").read_bytes) == errno.EIO


def test_a_bucket_of_google_without_a_network_fails_as_soon_as_any_other(tmp_path: Path) -> None:
    (tmp_path / "refs.json").write_text(json.dumps({"version": 1, "refs": {"k": ["gs://bucket/key", 0, 10]}}))
    began = time.monotonic()
    done = run("cat", tmp_path / "refs.json", "k", program=("unshare", "-n", PROGRAM))
    assert done.returncode == 1
    assert "gs://bucket/key" in done.stderr
    assert "name resolution" in done.stderr
    assert time.monotonic() - began < 25, "it was a minute"

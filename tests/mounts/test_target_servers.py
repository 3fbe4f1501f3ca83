"""Mounts of data on SFTP, Google Cloud Storage and Azure servers."""

from __future__ import annotations

import errno
import json
import time
from pathlib import Path

import pytest

from tests.conftest import PROGRAM, run
from tests.mounts.mounting import mounted
from tests.mounts.test_semantics import error_of
from tests.servers import GCS, Azure, Sftp, azure, gcs, sftp
from zarrfs.config.keywords import as_items

__all__ = ["azure", "gcs", "sftp"]

VALUE = bytes(range(256)) * 40


@pytest.mark.parametrize("kind", ["sftp", "gcs", "az"])
def test_targets_are_read(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    if kind == "sftp":
        sftp: Sftp = request.getfixturevalue("sftp")
        (sftp.root / "target").write_bytes(VALUE)
        url, given = f"{sftp.url}/target", ["allow=sftp", *as_items({"sftp": sftp.options})]
    elif kind == "gcs":
        gcs: GCS = request.getfixturevalue("gcs")
        gcs.put("target", VALUE)
        url, given = f"gs://{gcs.bucket}/target", as_items({"gcs": gcs.options})
    else:
        azure: Azure = request.getfixturevalue("azure")
        azure.put("private", "target", VALUE)
        url, given = "az://private/target", given_to(azure, "key")
    document = tmp_path / "set.json"
    document.write_text(json.dumps({"part": [url, 100, 300], "whole": [url], "none": [f"{url}none", 0, 1]}))
    with mounted(document, tmp_path / "mnt", "retries=0", *given) as root:
        assert (root / "part").read_bytes() == VALUE[100:400]
        assert (root / "whole").read_bytes() == VALUE
        assert error_of((root / "none").read_bytes) == errno.EIO


def test_without_a_network_a_google_bucket_fails_soon(tmp_path: Path) -> None:
    (tmp_path / "refs.json").write_text(json.dumps({"version": 1, "refs": {"k": ["gs://bucket/key", 0, 10]}}))
    began = time.monotonic()
    done = run("cat", tmp_path / "refs.json", "k", program=("unshare", "-n", PROGRAM))
    assert done.returncode == 1
    assert "gs://bucket/key" in done.stderr
    assert "name resolution" in done.stderr
    assert time.monotonic() - began < 50, "it was a minute"


# -- Azure


def given_to(azure: Azure, who: str) -> list[str]:
    """Return the mount options for the account's key, a SAS, or anonymous access."""
    return [f"abfs.{name}={value}" for name, value in azure.options[who].items()]


def put_store(azure: Azure, container: str) -> dict[str, bytes]:
    """Upload a store with nested directories and an empty value; return its files."""
    files = {f"store/{name}": VALUE[:size] for name, size in {"a/x y": 10, "a-b": 20, "a/b/c%20ä": 30, "z": 0}.items()}
    for name, value in files.items():
        azure.put(container, name, value)
    return {name.removeprefix("store/"): value for name, value in files.items()}


def tree_of(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def test_a_store_on_azure_is_read_and_a_private_one_refused(azure: Azure, tmp_path: Path) -> None:
    files = put_store(azure, "public")
    with mounted("az://public/store", tmp_path / "mnt", "type=zarr", *given_to(azure, "anonymous")) as root:
        assert tree_of(root) == files
        assert error_of((root / "none").read_bytes) == errno.ENOENT
    options = [part for option in given_to(azure, "anonymous") for part in ("-o", option)]
    began = time.monotonic()
    done = run("ls", "-o", "type=zarr", *options, "az://private/store")
    assert (done.returncode, done.stdout) == (1, "")
    assert "403" in done.stderr
    assert (done.stderr.count("\n"), len(done.stderr) < 300) == (1, True), done.stderr
    assert time.monotonic() - began < 60, "it is refused, not out"

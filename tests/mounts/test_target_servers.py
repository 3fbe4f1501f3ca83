"""Mounts of data on SFTP, Google Cloud Storage and Azure servers."""

from __future__ import annotations

import errno
import json
import time
from pathlib import Path

from tests.archives.compiled import blobref, file, put
from tests.conftest import PROGRAM, run
from tests.mounts.mounting import mounted
from tests.mounts.test_semantics import error_of
from tests.servers import GCS, Azure, Sftp, azure, gcs, sftp

__all__ = ["azure", "gcs", "sftp"]

VALUE = bytes(range(256)) * 40
TEXT = b"a line of a blob\n" * 100


def test_targets_on_sftp_are_read(sftp: Sftp, tmp_path: Path) -> None:
    (sftp.root / "target").write_bytes(VALUE)
    document = tmp_path / "set.json"
    url = f"{sftp.url}/target"
    document.write_text(json.dumps({"part": [url, 100, 300], "whole": [url], "none": [f"{sftp.url}/none", 0, 1]}))
    texts = {name: value if isinstance(value, str) else json.dumps(value) for name, value in sftp.options.items()}
    given = ",".join(f"sftp.{name}={text}" for name, text in texts.items())
    with mounted(document, tmp_path / "mnt", f"allow=sftp,retries=0,{given}") as root:
        assert (root / "part").read_bytes() == VALUE[100:400]
        assert (root / "whole").read_bytes() == VALUE
        assert error_of((root / "none").read_bytes) == errno.EIO


def test_targets_on_gcs_are_read(gcs: GCS, tmp_path: Path) -> None:
    gcs.put("target", VALUE)
    document = tmp_path / "set.json"
    url = f"gs://{gcs.bucket}/target"
    document.write_text(json.dumps({"part": [url, 100, 300], "whole": [url], "none": [f"{url}/none", 0, 1]}))
    given = ",".join(f"gcs.{name}={value}" for name, value in gcs.options.items())
    with mounted(document, tmp_path / "mnt", f"retries=0,{given}") as root:
        assert (root / "part").read_bytes() == VALUE[100:400]
        assert (root / "whole").read_bytes() == VALUE
        assert error_of((root / "none").read_bytes) == errno.EIO


def test_without_a_network_a_google_bucket_fails_within_25_seconds(tmp_path: Path) -> None:
    (tmp_path / "refs.json").write_text(json.dumps({"version": 1, "refs": {"k": ["gs://bucket/key", 0, 10]}}))
    began = time.monotonic()
    done = run("cat", tmp_path / "refs.json", "k", program=("unshare", "-n", PROGRAM))
    assert done.returncode == 1
    assert "gs://bucket/key" in done.stderr
    assert "name resolution" in done.stderr
    assert time.monotonic() - began < 25, "it was a minute"


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


def test_targets_on_azure_are_read(azure: Azure, tmp_path: Path) -> None:
    azure.put("private", "target", VALUE)
    document = tmp_path / "set.json"
    url = "az://private/target"
    document.write_text(json.dumps({"part": [url, 100, 300], "whole": [url], "none": [f"{url}/none", 0, 1]}))
    with mounted(document, tmp_path / "mnt", "retries=0", *given_to(azure, "key")) as root:
        assert (root / "part").read_bytes() == VALUE[100:400]
        assert (root / "whole").read_bytes() == VALUE
        assert error_of((root / "none").read_bytes) == errno.EIO


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


def test_blobs_on_azure_are_cached(azure: Azure, tmp_path: Path) -> None:
    put(tmp_path, TEXT)
    for path in tmp_path.glob("sha1-*"):
        azure.put("private", f"blobs/{path.name}", path.read_bytes())
        path.unlink()
    region = [0, len(TEXT), blobref(TEXT)]
    document = tmp_path / "archive.json"
    document.write_text(json.dumps([file([region], path="one", encoding="blobvec", size=len(TEXT))]))
    options = ["-o", f"cache_dir={tmp_path}/cache", *(f"-o{option}" for option in given_to(azure, "sas"))]
    for place in ("blobs", "none"):  # "none" has no blobs: the second run reads the cache
        done = run("cat", "-o", f"blobs=az://private/{place}", *options, document, "one")
        assert (done.returncode, done.stdout) == (0, TEXT.decode()), done.stderr



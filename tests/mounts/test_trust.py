"""Mounted sets with targets that they may not read: EACCES, one line in the log, and the report of `check`."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest

from tests.conftest import run
from tests.mounts.mounting import log_of, mounted
from tests.mounts.test_semantics import error_of
from tests.servers import Faulty, Nginx, faulty, nginx

__all__ = ["faulty", "nginx"]

VALUE = b"0123456789" * 100


def publish(nginx: Nginx, name: str, references: dict[str, object]) -> str:
    """Put a set, and a target beside it, on the web server; return the URL of the set."""
    directory = nginx.plain.root / name
    directory.mkdir(exist_ok=True)
    (directory / "target").write_bytes(VALUE)
    (directory / "set.json").write_text(json.dumps({"version": 1, "refs": references}))
    return f"{nginx.plain.url}/{name}/set.json"


def test_a_set_from_the_network(nginx: Nginx, faulty: Faulty, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(VALUE)
    inside = faulty.put("/inside", VALUE)
    references = {
        "own": ["target", 10, 10], "file": [str(secret), 10, 10], "url": [f"file://{secret}", 10, 10],
        "whole": [str(secret)], "web": [inside, 10, 10], "text": "here",
    }  # fmt: skip
    url = publish(nginx, "wanting", references)
    with mounted(url, tmp_path / "mnt") as root:
        assert sorted(os.listdir(root)) == sorted(references)
        assert (root / "own").read_bytes() == VALUE[10:20]
        assert (root / "text").read_bytes() == b"here"
        for name in ("file", "url", "whole", "web"):
            assert error_of((root / name).read_bytes) == errno.EACCES, name
        lines = [line for line in log_of(root).splitlines() if "ERROR" in line]
        assert not faulty.requests
    for name, target, option in ("file", secret, "-o allow=file"), ("web", inside, "-o allow=private"):
        [line] = [line for line in lines if f" {name}: " in line]
        assert str(target) in line
        assert "a set from the network reaches" in line
        assert option in line
    checked = run("check", url)
    assert checked.returncode == 1
    assert checked.stdout.count("reaches no local file (-o allow=file") == 3
    assert "127.0.0.1 is none (-o allow=private)" in checked.stdout
    with mounted(url, tmp_path / "mnt", "allow=file,allow=private") as root:
        for name in ("own", "file", "url", "web"):
            assert (root / name).read_bytes() == VALUE[10:20]
    assert run("check", url, "-o", "allow=file,private").returncode == 0


def test_a_set_from_a_private_server_reads_targets_on_that_server(nginx: Nginx, tmp_path: Path) -> None:
    """The server is given by name, so only the child that fetches the set knows that its address is private."""
    url = publish(nginx, "byname", {"own": ["target", 10, 10]}).replace("127.0.0.1", "localhost")
    with mounted(url, tmp_path / "mnt") as root:
        assert (root / "own").read_bytes() == VALUE[10:20]


@pytest.mark.skipif(os.geteuid() != 0, reason="is about root")
def test_root_mounts_for_others(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    for path in (data / "target", tmp_path / "secret"):
        path.write_bytes(VALUE)
    (data / "link").symlink_to(tmp_path / "secret")
    document = data / "set.json"
    names = {"relative": "target", "absolute": str(data / "target"), "secret": str(tmp_path / "secret"),
             "link": "link", "up": "../secret"}  # fmt: skip
    document.write_text(json.dumps({name: [target, 10, 10] for name, target in names.items()}))
    with mounted(document, tmp_path / "mnt") as root:
        for name in names:
            assert (root / name).read_bytes() == VALUE[10:20]
    with mounted(document, tmp_path / "mnt", "allow_other") as root:
        for name in names:
            assert error_of((root / name).read_bytes) == errno.EACCES
        assert "only beneath -o allow_path=DIR" in log_of(root)
    with mounted(document, tmp_path / "mnt", f"allow_other,allow_path={data}") as root:
        for name in ("relative", "absolute"):
            assert (root / name).read_bytes() == VALUE[10:20]
        for name in ("secret", "link", "up"):
            assert error_of((root / name).read_bytes) == errno.EACCES
    # `zarrfs mount` itself prints the warning; a relative DIR is below its working directory
    (tmp_path / "mnt2").mkdir()
    for option, told in ("allow_other", 1), ("allow_other,allow_path=data", 0):
        done = run("mount", document, tmp_path / "mnt2", "-o", option, cwd=tmp_path)
        assert done.returncode == 0
        assert done.stderr.count("give allow_path=") == told
        if not told:
            assert (tmp_path / "mnt2/relative").read_bytes() == VALUE[10:20]
        assert run("umount", tmp_path / "mnt2").returncode == 0

"""The choice of a node-local directory."""

from __future__ import annotations

from pathlib import Path

import pytest

from zarrfs.errors import UsageError
from zarrfs.jobs import nodelocal
from zarrfs.system.mounts import Mount


def test_directories_are_tried_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    places = {name: tmp_path / name for name in ("SLURM_TMPDIR", "FLUX_JOB_TMPDIR", "TMPDIR")}
    for name, path in places.items():
        path.mkdir()
        monkeypatch.setenv(name, str(path))
    assert nodelocal.directory("", "n", True, False) == str(places["SLURM_TMPDIR"] / "n")
    monkeypatch.setenv("SLURM_TMPDIR", str(tmp_path / "missing"))
    assert nodelocal.directory("", "n", False, False) == str(places["FLUX_JOB_TMPDIR"] / "n")
    assert nodelocal.directory("", "n", True, False) == str(places["TMPDIR"] / "n")
    monkeypatch.setenv("TMPDIR", str(places["FLUX_JOB_TMPDIR"]))
    assert nodelocal.directory("", "n", True, True) == "/tmp/n"
    assert nodelocal.directory(str(tmp_path), "n", True, True) == str(tmp_path / "n")
    with pytest.raises(UsageError, match="no such directory"):
        nodelocal.directory(str(tmp_path / "missing"), "n", True, True)
    with pytest.raises(UsageError, match="Flux deletes"):
        nodelocal.directory(str(places["FLUX_JOB_TMPDIR"]), "n", True, True)


@pytest.mark.parametrize("kind", ["nfs4", "lustre", "gpfs", "beegfs", "fuse.sshfs", "fuse.zarrfs"])
def test_a_shared_file_system_is_not_local(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = [Mount("8:1", "/", "ext4", "/dev/sda"), Mount("0:9", str(tmp_path), kind, "x"),
             Mount("0:7", str(tmp_path / "own"), "tmpfs", "x")]  # fmt: skip
    (tmp_path / "own").mkdir()
    (tmp_path / "sub").mkdir()
    monkeypatch.setattr(nodelocal.mounts, "mounts", lambda: found)
    with pytest.raises(UsageError, match=f"is of type {kind}"):
        nodelocal.directory(str(tmp_path / "sub"), "n", True, False)
    assert nodelocal.directory(str(tmp_path / "own"), "n", True, False)
    monkeypatch.setenv("TMPDIR", str(tmp_path / "sub"))
    assert nodelocal.directory("", "n", True, False) == "/tmp/n"


def test_a_name_is_the_same_on_all_nodes_of_a_job() -> None:
    assert nodelocal.name_of("/x", "5") == nodelocal.name_of("/x", "5")
    assert len({nodelocal.name_of(dest, job) for dest in ("/x", "/y") for job in ("5", "6")}) == 4

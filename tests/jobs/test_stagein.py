"""Staging as a mount: cleaning up after a failure, and joining the mount of another process."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.jobs.staged import add_record
from zarrfs.config.options import parse
from zarrfs.errors import MountError
from zarrfs.jobs import records, stagein
from zarrfs.jobs.records import Record
from zarrfs.jobs.stagein import StageRequest
from zarrfs.system import mounts


def test_a_failure_kills_no_earlier_child(sleeper: subprocess.Popen[bytes]) -> None:
    new: list[subprocess.Popen[bytes]] = []

    def fail() -> None:
        with stagein.undone_on_failure(add_record()):
            new.append(subprocess.Popen(["sleep", "100"]))
            raise MountError("failed")

    with pytest.raises(MountError, match="failed"):
        fail()
    assert new[0].wait(60) < 0
    assert sleeper.poll() is None


def begun(dest: Path, *options: str, source: str = "refs.json", join: bool = True) -> Record:
    request = StageRequest(source, str(dest), "mount", owner=os.getpid(), join=join)
    return stagein.begin(request, parse(options), pytest.fail)


def test_another_node_may_make_the_link_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both nodes replace an empty directory by it, on a file system that they share."""
    dest, remove = tmp_path / "in", os.rmdir
    dest.mkdir()
    record = add_record(str(dest), place=str(tmp_path / "place"), link=True)

    def late(path: str) -> None:
        remove(path)
        os.symlink(record.place, path)
        remove(path)

    monkeypatch.setattr(os, "rmdir", late)
    stagein.link(record)
    assert os.readlink(dest) == record.place


class Waits(Exception):
    """Raised in place of a wait to join a mount."""


@pytest.fixture
def _waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    def wait(pid: int, timeout: float) -> None:
        raise Waits

    monkeypatch.setattr(mounts, "wait_for_end", wait)


@pytest.mark.usefixtures("_waiting")
@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("tag=v1", "tag=v2"), ("", "view=v3"), ("base=x", "base=y"), ("blobs=x", "blobs=y"),
        ("s3.endpoint_url=http://a", "s3.endpoint_url=http://b"),
    ],
)  # fmt: skip
def test_a_mount_with_other_options_is_not_joined(first: str, second: str, tmp_path: Path) -> None:
    """The mount shows another version of the source, or other bytes."""
    begun(tmp_path / "in", *filter(None, [first]))
    with pytest.raises(Waits):
        begun(tmp_path / "in", *filter(None, [first]))
    with pytest.raises(MountError, match="is staged there already"):
        begun(tmp_path / "in", second)


@pytest.mark.usefixtures("_waiting")
def test_relative_paths_in_another_working_directory_name_another_mount(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in "one", "two":
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "one")
    begun(tmp_path / "in", "blobs=b", source="./refs.json")
    monkeypatch.chdir(tmp_path / "two")
    with pytest.raises(MountError, match="is staged there already"):
        begun(tmp_path / "in", "blobs=b", source="./refs.json")


@pytest.mark.usefixtures("_waiting")
def test_a_mount_is_joined_with_other_credentials_and_retries(tmp_path: Path) -> None:
    begun(tmp_path / "in", "s3.key=a", "s3.secret=b", "retries=1", source="https://h/x?X-Amz-Signature=a")
    with pytest.raises(MountError, match="is staged there already"):
        begun(tmp_path / "in", source="https://h/y")
    with pytest.raises(Waits):
        begun(tmp_path / "in", "s3.key=c", "s3.secret=d", "retries=2", source="https://h/x?X-Amz-Signature=b")


@pytest.mark.usefixtures("_waiting")
@pytest.mark.parametrize("other", ["older", "container"])
def test_a_mount_of_an_older_zarrfs_is_joined_and_one_of_a_container_is_not(other: str, tmp_path: Path) -> None:
    record = begun(tmp_path / "in")
    if other == "older":
        record.asked = ""
    else:
        record.pid_namespace = "pid:[1]"
    record.save()
    with pytest.raises(Waits if other == "older" else MountError):
        begun(tmp_path / "in")


def test_joining_waits_a_limited_time_for_an_unstage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The unstage may itself wait for an hour for a process that the job has left running."""
    record, now, waited = begun(tmp_path / "in"), [0.0], list[int]()

    def wait(pid: int, timeout: float) -> None:
        waited.append(pid)
        now[0] += 1
        if len(waited) == 6:  # until now the mount was being created, and that wait has no limit
            record.state = records.ENDING
            record.save()
        assert len(waited) < 20

    monkeypatch.setattr(mounts, "wait_for_end", wait)
    monkeypatch.setattr(stagein, "_ENDING", 4.0)
    monkeypatch.setattr("zarrfs.jobs.stagein.time.monotonic", lambda: now[0])
    with pytest.raises(MountError) as caught:
        begun(tmp_path / "in")
    who = f"process {os.getpid()} is unstaging it"
    assert str(caught.value) == f"{tmp_path}/in: {who}, and waits for others that use it"
    assert 8 < len(waited) < 12

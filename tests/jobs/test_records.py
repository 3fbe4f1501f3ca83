"""Records of what is staged, and places on a node: whose they are, and which are believed."""

from __future__ import annotations

import json
import os
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import trio

from zarrfs.errors import MountError, SourceError, TimedOut, UsageError
from zarrfs.jobs import nodelocal, processes, records, reports, stageout, upload
from zarrfs.jobs.deadline import Deadline
from zarrfs.jobs.records import Record
from zarrfs.jobs.unstage import why_stale
from zarrfs.system.mounts import Mount


@pytest.fixture(autouse=True)
def _place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv(records.VARIABLE, str(tmp_path / "state"))
    for variable in ("SLURM_TMPDIR", "FLUX_JOB_TMPDIR", "TMPDIR", "XDG_RUNTIME_DIR"):
        monkeypatch.delenv(variable, raising=False)
    yield
    assert not list(tmp_path.glob("state/staged/*.new"))


def made(dest: str = "/somewhere", **more: object) -> Record:
    """A record that is on disk."""
    record = Record("copy", "source", dest, dest, records.process_here(), state=records.READY)
    for name, value in more.items():
        setattr(record, name, value)
    assert records.add(record) is None
    return record


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    record = made("/s\udcff m\nh", owners=[records.process_here()], keeper=records.process_here(), made=["/a", "/a/b"])
    assert records.found() == [record]
    (file,) = tmp_path.glob("state/staged/*.json")
    file.write_bytes(file.read_bytes().rstrip(b"}") + b', "of another zarrfs": 1}')
    assert records.found() == [record]
    assert (tmp_path / "state").stat().st_mode & 0o777 == 0o700
    record.remove()
    assert records.found() == []
    assert not (tmp_path / "state/staged").exists()


def test_what_an_upper_hides_is_told_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory that cannot be read may hide anything."""
    (tmp_path / "a/b").mkdir(parents=True)
    (tmp_path / "a/.wh.x").write_text("")
    assert stageout.deleted(str(tmp_path)) == ["a/x"]
    scandir = os.scandir

    def refusing(path: str) -> object:
        if path.endswith("b"):
            raise PermissionError(13, "Permission denied", path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refusing)
    with pytest.raises(SourceError, match="a/b: permission denied"):
        stageout.deleted(str(tmp_path))


def test_one_place_is_staged_to_once() -> None:
    first, second = made("/x"), Record("copy", "s", "/x", "/x", records.process_here())
    assert records.add(second) == first
    assert records.found() == [first]


def test_many_at_once_get_one_place() -> None:
    results: list[Record | None] = []

    def add() -> None:
        results.append(records.add(Record("copy", "s", "/x", "/x", records.process_here())))

    threads = [threading.Thread(target=add) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results.count(None) == 1
    assert len(records.found()) == 1


def test_one_process_takes_it_away() -> None:
    other = subprocess.Popen(["sleep", "100"])
    try:
        who = processes.process(other.pid)
        assert who is not None
        record = made(maker=who)
        record.state = records.ENDING
        record.save()
        assert not records.claim(record)
    finally:
        other.kill()
        other.wait()
    assert records.claim(record)
    assert record.maker == records.process_here()
    record.remove()
    assert not records.claim(record)


@pytest.mark.parametrize("what", ["writable", "link", "file"])
def test_a_directory_of_somebody_else_is_not_used(what: str, tmp_path: Path) -> None:
    state, target = tmp_path / "state", tmp_path / "target"
    target.mkdir(mode=0o700)
    if what == "link":
        state.symlink_to(target)
    elif what == "file":
        state.touch()
    else:
        state.mkdir()
        state.chmod(0o777)
    with pytest.raises(MountError, match="nobody else can write to"):
        records.home()
    with pytest.raises(MountError, match="nobody else can write to"):
        records.found()
    assert list(target.iterdir()) == []


@pytest.mark.parametrize("text", ["", "{", "[]", '{"zarrfs_staged": 2}', '{"zarrfs_staged": 1, "how": "x"}', "null"])
def test_a_damaged_record_is_one_clear_error(text: str, tmp_path: Path) -> None:
    made()
    path = tmp_path / "state/staged/bad.json"
    path.write_text(text)
    with pytest.raises(MountError, match=r"bad\.json: is damaged"):
        records.found()
    path.unlink()
    path.symlink_to("/etc/passwd")
    with pytest.raises(MountError, match=r"bad\.json: no record"):
        records.found()


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a file away")
def test_a_record_of_another_user_is_not_believed(tmp_path: Path) -> None:
    made()
    (path,) = (tmp_path / "state/staged").iterdir()
    os.chown(path, 12345, 12345)
    with pytest.raises(MountError, match="no record of ours"):
        records.found()


def test_users_are_those_whose_directories_are_theirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    owners = {"/tmp/zarrfs-7": 7, "/tmp/zarrfs-8": 9, "/tmp/zarrfs-x": 7, "/run/user/5/zarrfs": 5, "/tmp/other": 3}
    names = {"/tmp": ["zarrfs-7", "zarrfs-8", "zarrfs-x", "other", "zarrfs-77"], "/run/user": ["5", "6"]}
    monkeypatch.setattr(os, "listdir", names.__getitem__)
    with mock.patch.object(records, "_owner", owners.get):
        assert records.users_with_records() == [5, 7]


def test_what_is_stale(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = processes.Process(os.getpid(), 1)  # the number was given again
    assert why_stale(made("/usr")) == ""
    assert "not there" in why_stale(made("/1"))
    assert "anew" in why_stale(made("/2", boot="another"))
    assert "died" in why_stale(made("/3", state=records.MAKING, maker=gone))
    assert why_stale(made("/4", state=records.MAKING)) == ""
    assert "has ended" in why_stale(made("/5", owners=[gone]))
    assert why_stale(made("/6", owners=[gone, records.process_here()])) == ""
    assert "not mounted" in why_stale(made("/7", how="mount"))
    monkeypatch.setattr(processes, "job_is_gone", lambda manager, job: (manager, job) == ("slurm", "5"))
    assert "job" in why_stale(made("/8", manager="slurm", job="5"))
    assert why_stale(made("/9", manager="slurm", job="6")) == ""


@pytest.mark.parametrize(
    ("script", "gone"),
    [
        ("echo RUNNING", False), ("echo COMPLETING", False), ("true", True),
        ("echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1", True),
        ("echo 'Unable to contact slurm controller' >&2; exit 1", False),
    ],
)  # fmt: skip
def test_a_job_is_gone_when_slurm_says_so(
    script: str, gone: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "squeue"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert processes.job_is_gone("slurm", "5") is gone
    assert not processes.job_is_gone("", "5")
    assert not processes.job_is_gone("slurm", "")


def test_which_job_it_is() -> None:
    assert processes.job_of({"SLURM_JOB_ID": "5"}) == ("slurm", "5")
    assert processes.job_of({"SLURM_JOB_ID": "5"}, "5") == ("slurm", "5")
    assert processes.job_of({"SLURM_JOB_ID": "5"}, "6") == ("", "6")
    assert processes.job_of({"FLUX_JOB_ID": "f5"}) == ("flux", "f5")
    assert processes.job_of({"PBS_JOBID": "7.x"}) == ("", "7.x")
    assert processes.job_of({}) == ("", "")


# -- places on the node


def test_places_are_tried_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_what_other_nodes_see_is_not_local(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


# -- deadlines, reports, sums


def test_a_deadline_ends_what_blocks_and_what_does_not() -> None:
    with pytest.raises(TimedOut), Deadline(0.05).armed():
        threading.Event().wait(20)

    async def forever(deadline: Deadline) -> None:
        with deadline.on_trio():
            await trio.sleep_forever()

    deadline = Deadline(0.05)
    with pytest.raises(TimedOut), deadline.armed():
        trio.run(forever, deadline)
    with Deadline(None).armed(), Deadline(60).armed():
        pass


def test_a_report_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "report"
    reports.write(str(path), {"a": 1})
    assert json.loads(path.read_text()) == {"node": os.uname().nodename, "a": 1}
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(UsageError, match="--report"):
        reports.write(str(tmp_path / "nowhere/report"), {})
    with pytest.raises(UsageError, match=r"--report /.*: is a directory"):
        reports.write(str(tmp_path), {})
    reports.write(None, {})


def test_a_report_goes_where_it_is_to_go(tmp_path: Path) -> None:
    """It replaces no device, and follows no link that others have laid."""
    real, link, fifo = tmp_path / "real", tmp_path / "link", tmp_path / "fifo"
    link.symlink_to(real)
    reports.write(str(link), {"a": 1})
    assert (link.is_symlink(), json.loads(real.read_text())["a"]) == (True, 1)
    guess = tmp_path / f"new.{os.getpid()}.tmp"
    guess.symlink_to(real)
    reports.write(str(tmp_path / "new"), {"a": 2})
    assert json.loads(real.read_text())["a"] == 1
    os.mkfifo(fifo)
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    try:
        reports.write(str(fifo), {"a": 3})
        assert json.loads(os.read(reader, 1 << 16))["a"] == 3
    finally:
        os.close(reader)
    assert fifo.is_fifo()
    if os.geteuid() == 0:
        os.chown(link, 12345, 12345, follow_symlinks=False)
        with pytest.raises(UsageError, match="a link that another user has made"):
            reports.write(str(link), {})


def test_sums_that_servers_tell() -> None:
    known = "900150983cd24fb0d6963f7d28e17f72"
    assert upload.md5_of_info({"ETag": f'"{known}"'}) == known
    assert upload.md5_of_info({"ETag": f'"{known}-2"'}) == ""
    assert upload.md5_of_info({"md5Hash": "kAFQmDzST7DWlj99KOF/cg=="}) == known
    assert upload.md5_of_info({"content_settings": {"content_md5": bytearray.fromhex(known)}}) == known
    assert upload.md5_of_info({"size": 1}) == ""

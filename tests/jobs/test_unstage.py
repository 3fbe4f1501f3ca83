"""Unstaging: stale records, other users, damaged records."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.conftest import run
from tests.jobs.staged import add_record
from zarrfs.errors import MountError
from zarrfs.jobs import (
    processes,
    records,
    unstage,
)
from zarrfs.jobs.records import Record
from zarrfs.jobs.unstage import UnstageOptions, why_stale

root_only = pytest.mark.skipif(os.geteuid() != 0, reason="gives a directory away")


def test_why_stale_returns_the_reason_or_an_empty_string(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = processes.Process(os.getpid(), 1)  # the pid is in use again
    assert why_stale(add_record("/usr")) == ""
    assert "not there" in why_stale(add_record("/1"))
    assert "rebooted" in why_stale(add_record("/2", boot="another"))
    assert "died" in why_stale(add_record("/3", state=records.MAKING, maker=gone))
    assert why_stale(add_record("/4", state=records.MAKING)) == ""
    assert "has ended" in why_stale(add_record("/5", owners=[gone]))
    assert why_stale(add_record("/6", owners=[gone, records.process_here()])) == ""
    assert "not mounted" in why_stale(add_record("/7", how="mount"))
    monkeypatch.setattr(processes, "job_is_gone", lambda manager, job: (manager, job) == ("slurm", "5"))
    assert "job" in why_stale(add_record("/8", manager="slurm", job="5"))
    assert why_stale(add_record("/9", manager="slurm", job="6")) == ""


def test_a_record_of_another_pid_namespace_is_stale_after_its_job_or_a_reboot(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its pids are those of other processes here, or of none."""
    gone, there = processes.Process(os.getpid(), 1), {"pid_namespace": "pid:[1]"}
    for number, more in enumerate(
        ({"state": records.MAKING, "maker": gone}, {"owners": [gone]}, {"how": "mount"}, {"keeper": gone}, {})
    ):
        assert why_stale(add_record(f"/{number}", **more, **there)) == ""
    assert "rebooted" in why_stale(add_record("/5", boot="another", **there))
    monkeypatch.setattr(processes, "job_is_gone", lambda manager, job: (manager, job) == ("slurm", "5"))
    assert "job" in why_stale(add_record("/6", manager="slurm", job="5", owners=[gone], **there))
    assert why_stale(add_record("/7", manager="slurm", job="6", owners=[gone], **there)) == ""


def test_no_keeper_is_started_for_a_record_of_another_pid_namespace(monkeypatch: pytest.MonkeyPatch) -> None:
    """The keeper would find none of the owners, and unstage the mount."""
    add_record("/1", how="mount", pid_namespace="pid:[1]")
    monkeypatch.setattr(unstage, "_replace_keeper", lambda record, notify: pytest.fail("a keeper"))
    assert unstage.unstage_stale(UnstageOptions()) == []


def test_another_node_may_remove_the_link_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place, unlink = tmp_path / "place", os.unlink
    place.mkdir()
    (tmp_path / "in").symlink_to(place)
    record = add_record(str(tmp_path / "in"), place=str(place), local=str(place), link=True, replaced=0o755)

    def late(path: str, **more: int) -> None:
        if path == record.dest:
            unlink(path)
        unlink(path, **more)

    monkeypatch.setattr(os, "unlink", late)
    assert unstage.unstage(record, UnstageOptions()) is not False
    assert list(tmp_path.glob("*")) == [tmp_path / "state"] or not place.exists()
    assert records.found() == []


@root_only
def test_a_child_process_that_is_killed_while_it_answers_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Root runs it as another user, who may kill it, so that its output is cut short."""
    pipes, pipe = list[tuple[int, int]](), os.pipe
    monkeypatch.setattr(os, "pipe", lambda: pipes.append(pipe()) or pipes[-1])

    def body() -> list[dict[str, object]]:
        os.write(pipes[0][1], b'[{"dest": ')
        os._exit(0)

    (result,) = unstage._as_user(65534, body, 60)
    assert "records of user 65534" in str(result["error"])


@root_only
def test_a_damaged_record_of_another_user_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def found(damaged: list[MountError]) -> list[Record]:
        if os.geteuid():
            damaged.append(MountError("x.json: is damaged"))
        return []

    monkeypatch.delenv(records.VARIABLE)
    monkeypatch.setattr(records, "users_with_records", lambda: [65534])
    monkeypatch.setattr(unstage, "_remove_leftovers", lambda tell: None)
    monkeypatch.setattr(records, "found", found)
    told: list[str] = []
    (result,) = unstage.unstage_stale(UnstageOptions(notify=told.append))
    assert told == [result["error"]] == ["x.json: is damaged"]


@pytest.mark.parametrize("how", ["--stale", "--all"])
def test_a_damaged_record_does_not_prevent_unstaging_of_others(how: str, tmp_path: Path) -> None:
    record = add_record()
    if how == "--stale":
        record.boot = "another"
        record.save()
    bad = tmp_path / "state/staged/bad.json"
    bad.write_text("{")
    done = run("unstage", how, "--report", "-")
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert f"{bad}: is damaged" in done.stderr
    report = json.loads(done.stdout)
    assert [one["dest"] for one in report["unstaged"]] == ["/somewhere"]
    assert [one["error"] for one in report["failed"]] == [done.stderr.removeprefix("zarrfs: ").rstrip()]
    assert os.listdir(bad.parent) == ["bad.json"]


def test_a_damaged_record_is_named_if_nothing_else_is_found(tmp_path: Path) -> None:
    add_record()
    (tmp_path / "state/staged/bad.json").write_text("{")
    done = run("unstage", tmp_path / "x")
    assert (done.returncode, "bad.json: is damaged" in done.stderr) == (1, True)
    assert run("unstage", "/somewhere").returncode == 0


@root_only
def test_a_child_process_that_does_not_answer_is_an_error() -> None:
    (result,) = unstage._as_user(65534, lambda: time.sleep(100) or [], 0.2)
    assert "records of user 65534" in str(result["error"])


@root_only
@pytest.mark.parametrize("said", [b"", b"[" + b" " * 100_000])
def test_a_child_process_that_is_stopped_is_an_error(said: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root runs it as another user, who may stop it at any time, and waits only until the deadline."""
    pipes, pipe = list[tuple[int, int]](), os.pipe
    monkeypatch.setattr(os, "pipe", lambda: pipes.append(pipe()) or pipes[-1])

    def body() -> list[dict[str, object]]:
        rest = said
        while rest:
            rest = rest[os.write(pipes[0][1], rest) :]
        os.kill(os.getpid(), signal.SIGSTOP)
        return []

    began = time.monotonic()
    (result,) = unstage._as_user(65534, body, 1.0)
    assert time.monotonic() - began < 60
    assert "records of user 65534" in str(result["error"])


@pytest.mark.parametrize("meanwhile", ["gone", records.ENDING])
def test_no_keeper_for_a_record_that_is_being_unstaged(meanwhile: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process may unstage after the record was read and before the keeper is started."""
    record, kept = add_record(how="mount"), []
    monkeypatch.setattr(unstage, "ensure_keeper", kept.append)
    other = records.found()[0]
    if meanwhile == "gone":
        other.remove()
    else:
        other.state = meanwhile
        other.save()
    unstage._replace_keeper(record, pytest.fail)
    assert kept == []
    assert [one.state for one in records.found()] == ([] if meanwhile == "gone" else [meanwhile])


def test_a_state_directory_removed_by_another_process_is_created_again(tmp_path: Path) -> None:
    """Removing the last record removes the directory, perhaps while another process creates it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(records.VARIABLE, str(tmp_path / "state"))
        path = records.home()
        checked, removed = records._check_owned, []

        def check(part: str) -> None:
            if part == path and len(removed) < 3:
                os.rmdir(path)
                removed.append(path)
            checked(part)

        patch.setattr(records, "_check_owned", check)
        assert records.home() == path
        assert os.path.isdir(path)


def test_a_staged_source_with_another_living_owner_is_kept(sleeper: subprocess.Popen[bytes]) -> None:
    owner = processes.process(sleeper.pid)
    assert owner is not None
    record = add_record("/usr", owners=[records.process_here(), owner])
    leaving = UnstageOptions(unless_owned=True, leaving=os.getpid())
    assert unstage.unstage_all([(record, "")], leaving) == []  # not unstaged, and no failure
    (left,) = records.found()
    assert left.owners == [owner]
    sleeper.kill()
    sleeper.wait()
    assert unstage.unstage(left, leaving)
    assert records.found() == []


@pytest.mark.parametrize("words", [("stage", "--join", "/a", "/b"), ("stage", "--copy", "--join", "/a", "/b"),
                                   ("unstage", "--stale", "--for", "1")])  # fmt: skip
def test_join_and_for_are_refused_where_they_do_not_apply(words: tuple[str, ...]) -> None:
    done = run(*words)
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (2, "", 1)
    assert "--join: is for mounts with --for PID" in done.stderr or "--for: is for DEST" in done.stderr


@pytest.mark.parametrize("link", [False, True])
def test_the_mode_of_a_restored_directory_is_not_set_through_a_link(
    link: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A user who can write to its parent may replace the new directory by a link to another one."""
    dest, place, shadow, mkdir = tmp_path / "dest", tmp_path / "place", tmp_path / "shadow", os.mkdir
    shadow.mkdir(mode=0o700)
    dest.symlink_to(place)
    record = add_record(str(dest), place=str(place), link=True, replaced=0o755)

    def swapped(path: str, mode: int = 0o777, **more: int) -> None:
        mkdir(path, mode, **more)
        if path == str(dest) and link:
            os.rmdir(path)
            os.symlink(shadow, path)

    monkeypatch.setattr(os, "mkdir", swapped)
    assert unstage.unstage(record, UnstageOptions())
    assert shadow.stat().st_mode & 0o777 == 0o700
    assert dest.is_symlink() == link
    assert link or dest.stat().st_mode & 0o777 == 0o755

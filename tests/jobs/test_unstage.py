"""Records beside other users, other processes and other commands, none of which must be in the way or harmed."""

from __future__ import annotations

import json
import os
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import trio

from tests.conftest import run
from zarrfs.config.options import Options
from zarrfs.errors import MountError
from zarrfs.jobs import processes, records, running, staged_copy, stagein, stageout, unstage
from zarrfs.jobs.records import Record
from zarrfs.jobs.unstage import UnstageOptions
from zarrfs.store.directory import FileSystemStore

root_only = pytest.mark.skipif(os.geteuid() != 0, reason="gives a directory away")


@pytest.fixture(autouse=True)
def _place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(records.VARIABLE, str(tmp_path / "state"))


def made(how: str = "copy") -> Record:
    """A record that is on disk."""
    record = Record(how, "source", "/somewhere", "/somewhere", records.process_here(), state=records.READY)
    assert records.add(record) is None
    return record


@root_only
@pytest.mark.parametrize("inner", [False, True])
def test_a_directory_that_another_user_has_put_there(
    inner: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As anybody can in /tmp: nobody's records are hidden by it, and none are taken from it."""
    foreign = tmp_path / "zarrfs-0"
    (foreign / "staged").mkdir(parents=True, mode=0o700)
    (foreign / "staged/bad.json").write_text("{")
    os.chmod(foreign, 0o700)
    os.chown(foreign / "staged" if inner else foreign, 12345, 12345)
    both = [str(tmp_path / "state/staged"), str(foreign / "staged")]
    monkeypatch.setattr(records, "places", lambda: both)
    record = made()
    assert records.found() == [record]
    both.reverse()
    assert records.found() == [record]
    with pytest.raises(MountError, match="nobody else can write to"):
        records.home()


def test_names_in_tmp_that_are_no_numbers_of_users(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {"/tmp": ["zarrfs-²", "zarrfs-" + "9" * 200, "zarrfs-7", "zarrfs-"], "/run/user": ["٣"]}
    monkeypatch.setattr(os, "listdir", names.__getitem__)
    with mock.patch.object(records, "_owner", {"/tmp/zarrfs-7": 7}.get):
        assert records.users_with_records() == [7]


@root_only
def test_a_child_that_its_user_ends() -> None:
    """What it has said by then is half an answer."""
    def body() -> list[dict[str, object]]:
        os.write(max(int(name) for name in os.listdir("/proc/self/fd")[:-1]), b'[{"dest": ')
        os._exit(0)

    (result,) = unstage._as_user(65534, body)
    assert "records of user 65534" in str(result["error"])


@root_only
def test_a_damaged_record_of_another_user_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_a_damaged_record_does_not_keep_the_others(how: str, tmp_path: Path) -> None:
    record = made()
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


def test_a_damaged_record_is_named_where_nothing_else_is_found(tmp_path: Path) -> None:
    made()
    (tmp_path / "state/staged/bad.json").write_text("{")
    done = run("unstage", tmp_path / "x")
    assert (done.returncode, "bad.json: is damaged" in done.stderr) == (1, True)
    assert run("unstage", "/somewhere").returncode == 0


@root_only
def test_a_child_that_its_user_holds_up() -> None:
    (result,) = unstage._as_user(65534, lambda: time.sleep(100) or [], 0.2)
    assert "records of user 65534" in str(result["error"])


@pytest.mark.parametrize("meanwhile", ["gone", records.ENDING])
def test_what_is_taken_away_meanwhile_is_not_looked_after(meanwhile: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A record that was read is of a moment ago."""
    record, kept = made("mount"), []
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


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    """A child of this process: as one of a shell that has become zarrfs by exec."""
    child = subprocess.Popen(["sleep", "100"])
    yield child
    child.kill()
    child.wait()


def test_a_child_that_was_there_before_is_not_killed(sleeper: subprocess.Popen[bytes]) -> None:
    new: list[subprocess.Popen[bytes]] = []

    def fail() -> None:
        with stagein.undone_on_failure(made()):
            new.append(subprocess.Popen(["sleep", "100"]))
            raise MountError("failed")

    with pytest.raises(MountError, match="failed"):
        fail()
    assert new[0].wait(10) < 0
    assert sleeper.poll() is None


def test_a_child_that_was_there_before_is_not_waited_for(sleeper: subprocess.Popen[bytes]) -> None:
    left = running._find_left(made(), processes.children())
    assert left() == []
    with subprocess.Popen(["sleep", "100"]) as new:
        assert [who.pid for who in left()] == [new.pid]
        new.kill()


def test_what_was_on_its_way_out_was_not_deleted_by_the_job(tmp_path: Path) -> None:
    """A directory that a killed mount was removing, whiteouts and all, says nothing of the source."""
    for path in (".wh.a", "d/.wh.b", ".zarrfs-staging/0123456789abcdef/sub/.wh.c"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).touch()
    assert stageout.deleted(str(tmp_path)) == ["a", "d/b"]


def test_a_file_server_that_takes_long_holds_nothing_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether a file can be linked to is asked in a thread."""
    source = tmp_path / "source"
    source.mkdir()
    (source / "a").write_text("a")
    record = Record("link", str(source), str(tmp_path / "d"), str(tmp_path / "d"), records.process_here())
    asked, going_on, waited = threading.Event(), threading.Event(), []

    def slow(path: str) -> bool:
        asked.set()
        waited.append(going_on.wait(20))
        return True

    async def link() -> str | None:
        store = FileSystemStore(str(source))
        links = staged_copy._Links(store, record, Options())
        monkeypatch.setattr(os.path, "isfile", slow)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(setting)
            found = await links.link("a", await store.info("a"))
        await store.aclose()
        return found

    async def setting() -> None:
        await trio.to_thread.run_sync(asked.wait, 20)
        going_on.set()

    assert trio.run(link) == str(source / "a")
    assert waited == [True]

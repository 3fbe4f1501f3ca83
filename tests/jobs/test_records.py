"""Records of staged sources: reading, writing and claiming them, and those of other users."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import threading
import time
from pathlib import Path
from unittest import mock

import pytest

from tests.conftest import tmpfs
from tests.jobs.staged import add_record
from zarrfs.errors import MountError
from zarrfs.jobs import (
    processes,
    records,
)
from zarrfs.jobs.records import Record

root_only = pytest.mark.skipif(os.geteuid() != 0, reason="gives a directory away")


def test_a_record_round_trips(tmp_path: Path) -> None:
    here = records.process_here()
    record = add_record("/s\udcff m\nh", owners=[here], keeper=here, made=["/a", "/a/b"])
    assert records.found() == [record]
    (file,) = tmp_path.glob("state/staged/*.json")
    file.write_bytes(file.read_bytes().rstrip(b"}") + b', "of another zarrfs": 1}')
    assert records.found() == [record]
    assert (tmp_path / "state").stat().st_mode & 0o777 == 0o700
    record.remove()
    assert records.found() == []
    assert not (tmp_path / "state/staged").exists()


def test_a_record_is_updated_on_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise nothing on that disk could be unstaged, not even the copy that fills it."""
    with tmpfs(tmp_path / "small", "size=64k") as small:
        monkeypatch.setenv(records.VARIABLE, str(small / "state"))
        record = add_record(str(tmp_path / "in"), note={"some": "thing"})
        with contextlib.suppress(OSError), open(small / "fill", "wb", buffering=0) as file:
            while file.write(bytes(4096)):
                pass
        for state, note in ((records.ENDING, {}), (records.READY, {"some": "other thing"})):
            record.state, record.note = state, note
            record.save()
            assert records.found() == [record]
        record.note = {"some": "thing" * 2000}
        with pytest.raises(MountError, match="cannot be written: no space left on device"):
            record.save()
        record.note = {"some": "other thing"}
        assert records.found() == [record]
        record.remove()


def test_a_record_without_a_pid_namespace_is_not_foreign(tmp_path: Path) -> None:
    record = add_record()
    (file,) = tmp_path.glob("state/staged/*.json")
    told = json.loads(file.read_text())
    assert (told.pop("pid_namespace"), record.foreign) == (os.readlink("/proc/self/ns/pid"), False)
    file.write_text(json.dumps(told))
    (found,) = records.found()
    assert (found.pid_namespace, found.foreign) == ("", False)


def test_a_second_record_of_a_dest_is_refused() -> None:
    first, second = add_record("/x"), Record("copy", "s", "/x", "/x", records.process_here())
    assert records.add(second) == first
    assert records.found() == [first]


def test_only_one_of_many_concurrent_records_of_a_dest_is_written() -> None:
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


def test_a_record_is_claimed_only_after_its_maker_has_ended() -> None:
    other = subprocess.Popen(["sleep", "100"])
    try:
        who = processes.process(other.pid)
        assert who is not None
        record = add_record(maker=who)
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
def test_an_unsafe_state_directory_is_refused(what: str, tmp_path: Path) -> None:
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
    add_record()
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
    add_record()
    (path,) = (tmp_path / "state/staged").iterdir()
    os.chown(path, 12345, 12345)
    with pytest.raises(MountError, match="is not a record of zarrfs"):
        records.found()


def test_users_with_records_own_the_directory_with_their_uid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    owners = {"/tmp/zarrfs-7": 7, "/tmp/zarrfs-8": 9, "/tmp/zarrfs-x": 7, "/run/user/5/zarrfs": 5, "/tmp/other": 3}
    names = {"/tmp": ["zarrfs-7", "zarrfs-8", "zarrfs-x", "other", "zarrfs-77"], "/run/user": ["5", "6"]}
    monkeypatch.setattr(os, "listdir", names.__getitem__)
    with mock.patch.object(records, "_owner", owners.get):
        assert records.users_with_records() == [5, 7]


@root_only
@pytest.mark.parametrize("inner", [False, True])
def test_a_directory_that_another_user_has_put_there(
    inner: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any user can create such a directory in /tmp. It does not hide our records, and none are read from it."""
    foreign = tmp_path / "zarrfs-0"
    (foreign / "staged").mkdir(parents=True, mode=0o700)
    (foreign / "staged/bad.json").write_text("{")
    os.chmod(foreign, 0o700)
    os.chown(foreign / "staged" if inner else foreign, 12345, 12345)
    both = [str(tmp_path / "state/staged"), str(foreign / "staged")]
    monkeypatch.setattr(records, "places", lambda: both)
    record = add_record()
    assert records.found() == [record]
    both.reverse()
    assert records.found() == [record]
    with pytest.raises(MountError, match="nobody else can write to"):
        records.home()


def test_names_in_tmp_that_are_not_uids_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {"/tmp": ["zarrfs-²", "zarrfs-" + "9" * 200, "zarrfs-7", "zarrfs-"], "/run/user": ["٣"]}
    monkeypatch.setattr(os, "listdir", names.__getitem__)
    with mock.patch.object(records, "_owner", {"/tmp/zarrfs-7": 7}.get):
        assert records.users_with_records() == [7]


def test_the_last_record_is_removed_while_another_is_added(tmp_path: Path) -> None:
    """The directory is kept while another process has it locked, and is removed with the last record."""
    first = add_record("/x")
    removal = threading.Thread(target=first.remove)
    with records.locked():
        removal.start()
        while first.exists():
            time.sleep(0.01)
        second = Record("copy", "s", "/y", "/y", records.process_here(), directory=first.directory)
        second.save()
    removal.join()
    assert records.found() == [second]
    second.remove()
    assert not (tmp_path / "state/staged").exists()


def test_claiming_a_removed_record_creates_no_directory(tmp_path: Path) -> None:
    record = add_record("/x")
    record.remove()
    assert not records.claim(record)
    assert not (tmp_path / "state/staged").exists()

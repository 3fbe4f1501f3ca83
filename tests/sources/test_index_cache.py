"""The index cache: an index is made once, by one process, in a directory of one's own."""

from __future__ import annotations

import contextlib
import errno
import gzip
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import trio

from tests.conftest import open_descriptors
from zarrfs.config.options import Options
from zarrfs.documents.plan import Plan
from zarrfs.errors import SourceError, UsageError
from zarrfs.sources import index_cache, open_plan, plan_source
from zarrfs.sources.prepare import prepare

VALUE = "a value that stands in the index once"


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def plan(directory: Path, **more: object) -> Plan:
    document = directory / "refs.json"
    if not document.exists():
        document.write_text(json.dumps({"version": 1, "refs": {"k": VALUE}}))
    return prepare(str(document), Options(**more))  # type: ignore[arg-type]


def value(made: Plan) -> str:
    return bytes(trio.run(open_plan(made, Options()).get, "k")).decode()


def indexes(directory: Path) -> set[int]:
    """Return the inodes of all indexes: an index may have several names."""
    return {path.stat().st_ino for path in (directory / "cache/zarrfs/index").iterdir()}


def test_an_index_is_made_once(tmp_path: Path) -> None:
    first = plan(tmp_path)
    made = indexes(tmp_path)
    assert len(made) == 1
    assert plan(tmp_path) == first
    assert value(first) == VALUE
    time.sleep(2.5)  # until any further change would alter the ctime
    for _ in range(2):
        assert value(plan(tmp_path)) == VALUE
        (tmp_path / "refs.json").chmod(0o640)
    (tmp_path / "refs.json").rename(tmp_path / "other.json")
    assert prepare(str(tmp_path / "other.json"), Options()).index
    assert indexes(tmp_path) == made


def test_the_lock_of_a_killed_process_is_free(tmp_path: Path) -> None:
    made = plan(tmp_path)
    key = Path(made.index or "").name.partition(".")[0]
    lock = str(tmp_path / "cache/zarrfs/index" / f"{key}.lock")
    program = f"import fcntl, time; fcntl.flock(open({lock!r}, 'w'), 2); print(flush=True); time.sleep(99)"
    holder = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    assert holder.stdout is not None
    holder.stdout.readline()
    Path(made.index or "").unlink()
    threading.Timer(1, holder.kill).start()
    assert value(plan(tmp_path)) == VALUE
    assert holder.wait() < 0


@pytest.mark.parametrize("mode", [0o770, 0o777, 0o1777])
def test_a_directory_that_others_may_write_is_not_used(mode: int, tmp_path: Path) -> None:
    index = tmp_path / "cache/zarrfs/index"
    index.mkdir(parents=True)
    index.chmod(mode)
    made = plan(tmp_path)
    assert (made.temporary, value(made), list(index.iterdir())) == (True, VALUE, [])


def test_a_damaged_index_is_made_again(tmp_path: Path) -> None:
    path = Path(plan(tmp_path).index or "")
    path.write_bytes(path.read_bytes()[:-4096])
    assert value(plan(tmp_path)) == VALUE


def test_an_index_that_is_unused_for_a_month_is_removed(tmp_path: Path) -> None:
    path = Path(plan(tmp_path).index or "")
    old = time.time() - 31 * 86_400
    os.utime(path, (old, old))
    index_cache._swept.clear()
    plan(tmp_path, type="references")
    assert not path.exists()


def test_each_set_of_options_has_its_own_index(tmp_path: Path) -> None:
    assert plan(tmp_path).index != plan(tmp_path, type="references").index


def test_the_default_directory_is_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for value, found in (("cache", tmp_path / ".cache"), ("", tmp_path / ".cache"), ("/c", Path("/c"))):
        monkeypatch.setenv("XDG_CACHE_HOME", value)
        assert index_cache.usual_directory() == str(found / "zarrfs/index")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("os.geteuid", lambda: 54321)
    monkeypatch.setattr("os.getuid", lambda: 54321)  # a user without an entry in /etc/passwd, and so without a home
    assert os.path.isabs(index_cache.usual_directory())


def test_without_a_cache_directory_the_index_is_temporary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    (tmp_path / "refs.json").write_text(json.dumps({"version": 1, "refs": {"k": VALUE}}))
    made = prepare(str(tmp_path / "refs.json"), Options())
    assert made.temporary
    assert value(made) == VALUE
    assert list((tmp_path / "tmp").iterdir()) == []


def test_a_refused_option_leaves_no_temporary_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "refs.json"))
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    (tmp_path / "refs.json").write_text(json.dumps({"version": 1, "refs": {"k": VALUE}}))
    with pytest.raises(UsageError, match="tag"):
        plan_source(str(tmp_path / "refs.json"), Options(tag="v1"), child=False)
    assert list((tmp_path / "tmp").iterdir()) == []


@pytest.mark.parametrize("compressed", [False, True])
def test_a_document_that_cannot_be_read_is_an_error_of_the_document(
    compressed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "refs.json"
    data = json.dumps({"version": 1, "refs": {"k": VALUE}}).encode()
    path.write_bytes(gzip.compress(data) if compressed else data)
    left = 0

    def preadv(*arguments: object) -> int:
        nonlocal left
        left -= 1
        if left < 0:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return read(*arguments)  # type: ignore[arg-type]

    read = os.preadv
    monkeypatch.setattr(os, "preadv", preadv)
    errors: list[str] = []
    failed = True
    while failed:
        left, failed = len(errors), False  # in each round, one more read succeeds
        try:
            plan(tmp_path)
        except SourceError as exc:
            errors.append(str(exc))
            failed = True
    assert len(errors) > 3
    assert set(errors) == {f"{path}: input/output error"}


def test_no_descriptor_of_a_document_stays_open(tmp_path: Path) -> None:
    """Commands plan many documents in one process, so leaks would add up."""
    path = tmp_path / "refs.json"
    index = b"SQLite format 3\0" + bytes(100)
    for data in (b'{"a": "b"}', gzip.compress(b'{"a": "b"}'), b"{", b"[3]", b"PK\5\6" + bytes(18), index):
        path.write_bytes(data)
        before = open_descriptors()
        with contextlib.suppress(SourceError):
            prepare(str(path), Options())
        assert open_descriptors() <= before, data  # those of an earlier test may be closed meanwhile

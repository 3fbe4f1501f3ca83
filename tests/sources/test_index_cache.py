"""The index cache: indexes are found again, and not trusted if their content does not match their name."""

from __future__ import annotations

import contextlib
import errno
import gzip
import json
import os
import stat
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import trio

from tests.conftest import open_descriptors
from zarrfs.config.options import Options
from zarrfs.documents.plan import Plan
from zarrfs.errors import SourceError, UsageError
from zarrfs.sources import index_cache, open_plan, plan_source
from zarrfs.sources.prepare import prepare
from zarrfs.store.indexfile import MAGIC

VALUE = "a value that stands in the index once"


def plan(directory: Path, **more: object) -> Plan:
    document = directory / "refs.json"
    if not document.exists():
        document.write_text(json.dumps({"version": 1, "refs": {"k": VALUE}}))
    return prepare(str(document), Options(index_dir=str(directory / "index"), **more))  # type: ignore[arg-type]


def value(made: Plan) -> str:
    return bytes(trio.run(open_plan(made, Options()).get, "k")).decode()


def indexes(directory: Path) -> list[Path]:
    return sorted((directory / "index").iterdir())


def test_an_index_is_made_once(tmp_path: Path) -> None:
    first = plan(tmp_path)
    [path] = indexes(tmp_path)
    made = path.stat().st_mtime_ns
    assert plan(tmp_path) == first
    assert [path] == indexes(tmp_path)
    assert path.stat().st_mtime_ns == made
    assert value(first) == VALUE


def flip(path: Path) -> None:
    data = path.read_bytes()
    assert data.count(VALUE.encode()) == 1
    path.write_bytes(data.replace(VALUE.encode(), VALUE.upper().encode()))


def cut(path: Path) -> None:
    os.truncate(path, 4096)


def empty(path: Path) -> None:
    os.truncate(path, 0)


def writable(path: Path) -> None:
    path.chmod(0o666)


def foreign(path: Path) -> None:
    os.chown(path, 65534, 65534)


def link(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


@pytest.mark.parametrize("damage", [flip, cut, empty, writable, foreign, link])
def test_an_index_that_is_not_what_it_says(damage: Callable[[Path], None], tmp_path: Path) -> None:
    plan(tmp_path)
    [path] = indexes(tmp_path)
    damage(path)
    again = plan(tmp_path)
    assert value(again) == VALUE
    assert again.index is not None
    status = os.lstat(again.index)
    assert (status.st_uid, status.st_mode) == (os.geteuid(), 0o100644)


@contextlib.contextmanager
def user(number: int) -> Iterator[None]:
    """Run the block as another user; a directory swept before is swept again, as in a new process."""
    os.seteuid(number)
    index_cache._swept.clear()
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """Return a directory with a document, and an index directory in which every user may create files."""
    for above in (tmp_path, *tmp_path.parents):
        mode = stat.S_IMODE(above.stat().st_mode)
        if mode & 5 != 5:
            above.chmod(mode | 0o055)
    (tmp_path / "index").mkdir()
    (tmp_path / "index").chmod(0o1777)
    (tmp_path / "refs.json").write_text(json.dumps({"version": 1, "refs": {"k": VALUE}}))
    return tmp_path


root = pytest.mark.skipif(os.geteuid() != 0, reason="becomes several users")


@root
def test_users_may_share_an_index_directory(shared: Path) -> None:
    # both indexes have the same bytes; under one name, the sticky bit would let only the first user replace it
    made = {}
    for number in (65534, 65533, 65534, 65533):
        with user(number):
            made[number] = plan(shared)
            assert value(made[number]) == VALUE
            assert os.stat(made[number].index or "").st_uid == number
    assert made[65534].index != made[65533].index
    assert len([path for path in indexes(shared) if path.suffix == ".index"]) == 2, "each is found again"


@root
def test_each_user_of_a_shared_directory_recognises_documents(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zarrfs.documents.document._SETTLED_NS", -1)
    monkeypatch.setattr("zarrfs.documents.document.keeps_ctime", lambda _: True)  # even on a container's overlayfs
    for number in (65534, 65533):
        with user(number):
            first = plan(shared)
            with monkeypatch.context() as patched:
                patched.setattr(index_cache.IndexCache, "find", None)  # find() hashes the document
                assert plan(shared).index == first.index


def test_a_document_is_recognised_whatever_the_umask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zarrfs.documents.document._SETTLED_NS", -1)
    monkeypatch.setattr("zarrfs.documents.document.keeps_ctime", lambda _: True)  # even on a container's overlayfs
    before = os.umask(0o002)
    try:
        first = plan(tmp_path)
        monkeypatch.setattr(index_cache.IndexCache, "find", None)  # find() hashes the document
        assert plan(tmp_path).index == first.index
    finally:
        os.umask(before)


@root
def test_files_of_other_users_are_not_removed(shared: Path) -> None:
    with user(65534):
        plan(shared)
    names = [shared / "index" / f".zarrfs-{number}.tmp" for number in range(6)]
    for number, path in enumerate(names):
        path.touch()
        os.utime(path, (0, 0))
        os.chown(path, 65533 + number % 2, -1)
    with user(65533):
        plan(shared)  # removes abandoned files
        assert [path.exists() for path in names] == [False, True] * 3


@pytest.mark.timeout(30)
def test_a_fifo_in_place_of_an_index_is_replaced(tmp_path: Path) -> None:
    plan(tmp_path)
    [path] = indexes(tmp_path)
    path.unlink()
    os.mkfifo(path, 0o644)
    assert value(plan(tmp_path)) == VALUE


def test_each_set_of_options_has_its_own_index(tmp_path: Path) -> None:
    assert plan(tmp_path).index != plan(tmp_path, strict=True).index


def test_abandoned_files_are_removed_after_a_day(tmp_path: Path) -> None:
    (tmp_path / "index").mkdir()
    old, new = tmp_path / "index/.zarrfs-1.tmp", tmp_path / "index/.zarrfs-2.tmp"
    old.touch()
    new.touch()
    os.utime(old, (0, 0))
    plan(tmp_path)
    assert not old.exists()
    assert new.exists()


def test_an_index_directory_that_cannot_be_created_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "index").write_text("")
    with pytest.raises(UsageError, match=r"option index_dir=.*index: "):
        plan(tmp_path)


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


# -- cache=none


def unkept(tmp_path: Path, count: int = 1) -> Plan:
    """Plan a set of `count` entries with cache=none and an index_dir=."""
    refs = {f"k{number}": VALUE for number in range(count)}
    (tmp_path / "refs.json").write_text(json.dumps({"version": 1, "refs": refs}))
    return prepare(str(tmp_path / "refs.json"), Options(cache="none", index_dir=str(tmp_path / "index")))


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a directory that takes this process's temporary files."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    return tmp_path / "tmp"


def place_of(made: Plan) -> Path:
    assert made.index is not None
    assert made.temporary
    return Path(made.index).parent.parent


def test_with_cache_none_the_index_is_in_memory(tmp_path: Path, temporary: Path) -> None:
    made = unkept(tmp_path)
    assert place_of(made) == Path("/dev/shm")
    assert bytes(trio.run(open_plan(made, Options()).get, "k0")).decode() == VALUE
    assert not os.path.exists(made.index or "")
    assert not (tmp_path / "index").exists()
    assert list(temporary.iterdir()) == []


def test_with_cache_none_and_no_tmpfs_the_index_is_on_disk(
    tmp_path: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "disk").mkdir()
    monkeypatch.setattr("zarrfs.sources.index_cache._MEMORY", str(tmp_path / "disk"))
    made = unkept(tmp_path)
    assert place_of(made) == temporary
    assert bytes(trio.run(open_plan(made, Options()).get, "k0")).decode() == VALUE
    assert list(temporary.iterdir()) == list((tmp_path / "disk").iterdir()) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a tmpfs")
def test_with_cache_none_and_a_full_tmpfs_the_index_is_on_disk(
    tmp_path: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In containers, /dev/shm often has only 64 MiB."""
    (tmp_path / "small").mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", tmp_path / "small"], check=True)
    try:
        monkeypatch.setattr("zarrfs.sources.index_cache._MEMORY", str(tmp_path / "small"))
        made = unkept(tmp_path, 5000)
        assert place_of(made) == temporary
        assert list((tmp_path / "small").iterdir()) == []
        assert bytes(trio.run(open_plan(made, Options()).get, "k4999")).decode() == VALUE
    finally:
        subprocess.run(["umount", tmp_path / "small"], check=True)


def test_a_refused_option_leaves_no_temporary_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zarrfs.sources.index_cache._MEMORY", str(tmp_path / "none"))
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    (tmp_path / "refs.json").write_text(json.dumps({"version": 1, "refs": {"k": VALUE}}))
    with pytest.raises(UsageError, match="tag"):
        plan_source(str(tmp_path / "refs.json"), Options(cache="none", tag="v1"), child=False)
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
    for data in (b'{"a": "b"}', gzip.compress(b'{"a": "b"}'), b"{", b"[3]", b"PK\5\6" + bytes(18), MAGIC + bytes(100)):
        path.write_bytes(data)
        before = open_descriptors()
        with contextlib.suppress(SourceError):
            prepare(str(path), Options(index_dir=str(tmp_path / "index")))
        assert open_descriptors() == before, data
    (tmp_path / "refs.tar").write_text("{}")
    with pytest.raises(SourceError, match="is no tar"):
        prepare(f"{tmp_path}/refs.tar#main", Options())
    assert open_descriptors() == before

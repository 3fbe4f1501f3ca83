"""remove_written(): all files of a copy are removed and no others, at any depth, also while others write."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from zarrfs.copying import removal
from zarrfs.copying.destination_directory import DestinationDirectory
from zarrfs.copying.destination_journal import Spans, changed_now, kept
from zarrfs.copying.removal import remove_written
from zarrfs.store.api import Info, Kind


def span(tmp_path: Path, write: Callable[[], object]) -> Spans:
    """Call `write`; return the span of time in which it wrote."""
    clock = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        since = changed_now(clock, changed_now(clock))
        write()
        until = changed_now(clock)
        changed_now(clock, until)
        return [[since, until]]
    finally:
        os.close(clock)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Return a directory with files and directories of a user."""
    found = tmp_path / "place"
    (found / "before").mkdir(parents=True)
    (found / "touched").mkdir()
    (found / "mine").write_text("mine")
    return found


def copied(place: Path, count: int = 20) -> Callable[[], None]:
    """Return a function that writes as a copy does, also into a directory that existed before."""

    def write() -> None:
        for number in range(count):
            (place / f"d{number % 3}").mkdir(exist_ok=True)
            (place / f"d{number % 3}" / str(number)).write_text("copied")
        (place / "before/copied").write_text("copied")
        (place / "empty").mkdir()
        os.symlink("/", place / "link")

    return write


def names(place: Path) -> set[str]:
    """Return the relative paths of all entries below a directory."""
    return {str(path.relative_to(place)) for path in place.rglob("*")}


def test_files_that_are_not_of_the_copy_are_kept(place: Path, tmp_path: Path) -> None:
    before = names(place)
    spans = span(tmp_path, copied(place))
    (place / "touched").chmod(0o750)
    (place / "results").mkdir()
    (place / "d1/result").write_text("mine")
    (place / "d2/2").write_text("changed")
    assert remove_written(str(place), spans) == 3
    assert names(place) == before | {"results", "d1", "d1/result", "d2", "d2/2"}


def test_files_changed_during_the_copy_are_kept(place: Path, tmp_path: Path) -> None:
    """By chmod or a backup, for example. The time of birth, which not every file system has, tells them apart."""

    def write() -> None:
        copied(place)()
        (place / "mine").chmod(0o600)
        (place / "touched").chmod(0o700)

    before, spans = names(place), span(tmp_path, write)
    handle = os.open(place, os.O_PATH)
    if removal._born(handle, b"mine") is None:
        pytest.skip("a file system without times of birth")
    os.close(handle)
    assert remove_written(str(place), spans) == 1
    assert names(place) == before


def test_without_times_of_birth_only_the_time_of_change_counts(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(removal, "_statx", None)
    before, spans = names(place), span(tmp_path, copied(place))
    (place / "results").mkdir()
    assert remove_written(str(place), spans) == 1
    assert names(place) == (before | {"results"}) - {"before"}  # the copy wrote to it, so it counts as new


def test_the_time_of_birth_is_the_one_that_stat_prints(place: Path) -> None:
    told = subprocess.run(["stat", "-c", "%.9W", place / "mine"], capture_output=True, text=True, check=True).stdout
    handle = os.open(place, os.O_PATH)
    born = removal._born(handle, b"mine")
    os.close(handle)
    assert born is not None
    assert f"{born // 10**9}.{born % 10**9:09}" == told.strip()


def test_files_removed_by_others_meanwhile_are_no_error(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, spans, unlink = names(place), span(tmp_path, copied(place)), os.unlink

    def both(name: bytes, dir_fd: int) -> None:
        unlink(name, dir_fd=dir_fd)
        unlink(name, dir_fd=dir_fd)

    monkeypatch.setattr(removal.os, "unlink", both)
    assert remove_written(str(place), spans) == 1
    assert names(place) == before


REMOVE = """
import sys, json
from zarrfs.copying.removal import remove_written
print(remove_written(sys.argv[1], json.loads(sys.argv[2])))
"""
POWERLESS = ["setpriv", "--bounding-set=-dac_override,-dac_read_search,-fowner", "--inh-caps=-all"]


@pytest.mark.skipif(os.geteuid() != 0, reason="gives files to another user")
def test_unreadable_directories_of_others_are_kept(tmp_path: Path) -> None:
    place = tmp_path / "place"
    (place / "a/closed").mkdir(parents=True)
    (place / "a/closed/secret").write_text("x")
    (place / "a/closed").chmod(0o700)
    os.chown(place / "a/closed", 1234, 1234)
    (place / "b").mkdir()
    spans = span(tmp_path, lambda: [(place / name).write_text("x") for name in ("a/1", "b/2", "z")])
    command = [*POWERLESS, sys.executable, "-c", REMOVE, str(place), str(spans)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("1\n", "")
    assert names(place) == {"a", "a/closed", "a/closed/secret", "b"}


def test_a_deep_tree_needs_few_descriptors(tmp_path: Path) -> None:
    place = tmp_path / "place"
    place.mkdir()

    def write() -> None:
        at = os.open(place, os.O_RDONLY)
        for _ in range(1500):
            os.mkdir("d", 0o500, dir_fd=at)
            below = os.open("d", os.O_RDONLY, dir_fd=at)
            os.fchmod(below, 0o700)
            os.close(at)
            at = below
        os.close(os.open("file", os.O_CREAT | os.O_WRONLY, dir_fd=at))
        os.close(at)

    spans = span(tmp_path, write)
    limited = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64));" + REMOVE
    command = [sys.executable, "-c", limited, str(place), str(spans)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("0\n", "")
    assert os.listdir(place) == []


@pytest.mark.parametrize("when", ["before", "after"])
def test_files_of_a_user_are_kept_with_times_in_whole_seconds(when: str, tmp_path: Path) -> None:
    """They were written in the same second in which the copy began or ended."""
    image, mounted = tmp_path / "image", tmp_path / "mounted"
    mounted.mkdir()
    with open(image, "wb") as file:
        file.truncate(8 << 20)
    try:
        subprocess.run(["mkfs.ext4", "-q", "-I", "128", image], check=True, capture_output=True)
        subprocess.run(["mount", "-o", "loop", image, mounted], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no such file system to be had here")
    try:
        place, mine = mounted / "place", mounted / "place/mine"
        place.mkdir()
        if when == "before":
            mine.write_text("mine")
        filling = DestinationDirectory(str(place), mark="m")
        root = filling.root(Info("", Kind.DIRECTORY))
        info = Info("copied", Kind.FILE)
        handle = filling.open(root)
        filling.place(filling.create(root, handle, None), handle, info, True)
        os.close(handle)
        filling.finish(Info("", Kind.DIRECTORY), more=True)
        if when == "after":
            mine.write_text("mine")
        assert remove_written(str(place), kept(str(place), "m")["spans"]) == 1
        assert mine.read_text() == "mine"
        assert not (place / "copied").exists()
    finally:
        subprocess.run(["umount", mounted], check=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="takes its powers off")
def test_directories_without_write_permission_are_emptied(place: Path, tmp_path: Path) -> None:
    """Those of the copy are removed; those of a user get their mode back."""

    def write() -> None:
        for name in ("closed/inner", "before/closed"):
            (place / name).mkdir(parents=True)
            (place / name / "file").write_text("x")
            (place / name).chmod(0o500)

    spans = span(tmp_path, write)
    (place / "before").chmod(0o500)
    done = subprocess.run(
        [*POWERLESS, sys.executable, "-c", REMOVE, str(place), str(spans)], capture_output=True, text=True, check=False
    )
    assert (done.stdout, done.stderr) == ("1\n", "")
    assert names(place) == {"before", "touched", "mine"}
    assert (place / "before").stat().st_mode & 0o777 == 0o500


def test_links_are_not_followed(place: Path, tmp_path: Path) -> None:
    outside, before = tmp_path / "outside", names(place)
    outside.mkdir()

    def write() -> None:
        (outside / "file").write_text("x")
        os.symlink(outside, place / "link")

    assert remove_written(str(place), span(tmp_path, write)) == 1
    assert (names(place), os.listdir(outside)) == (before, ["file"])


def test_an_abandoned_run_records_when_it_last_wrote(tmp_path: Path) -> None:
    filling = DestinationDirectory(str(tmp_path / "place"), mark="m")
    root = filling.root(Info("", Kind.DIRECTORY))
    handle = filling.open(root)
    filling.place(filling.create(root, handle, None), handle, Info("copied", Kind.FILE), True)
    os.close(handle)
    filling.abandon()
    (tmp_path / "place/mine").write_text("mine")
    assert remove_written(str(tmp_path / "place"), kept(str(tmp_path / "place"), "m")["spans"]) == 1
    assert (names(tmp_path / "place") & {"mine", "copied"}) == {"mine"}

"""copy_store() when killed, raced or out of space: every file is whole, and none is written elsewhere."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import random
import shutil
import signal
import stat
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from tests.archives.compiled import D, file, opened, put
from tests.conftest import PROGRAM, run, tmpfs
from tests.copying.extracting import extract, snapshot, write
from zarrfs.copying import destination_directory as filling
from zarrfs.copying import destination_journal
from zarrfs.copying.destination_directory import DestinationDirectory
from zarrfs.errors import ReadError, SourceError, UsageError
from zarrfs.store.api import Info, Kind, Store, Value
from zarrfs.store.directory import FileSystemStore

KILLS = int(os.environ.get("ZARRFS_KILLS", "5"))  # of one command; ZARRFS_KILLS=100 tries harder than CI


def archive_of(base: Path, files: int, seed: int = 1) -> list[dict[str, Any]]:
    """Return an archive of many files in directories with unusual modes; write its blobs to `base`."""
    chance, entries = random.Random(seed), []
    for index in range(files):
        folder = f"d{index % 13}/e{index % 3}"
        parts, at = [], 0
        for _ in range(chance.choice((1, 1, 1, 3))):
            data = chance.randbytes(chance.choice((0, 10, 4096, 70_000)))
            parts.append([at, len(data), put(base, data)])
            at += len(data) + chance.choice((0, 0, 5000))
        entries.append({"path": f"{folder}/f{index}", "size": at, "encoding": "blobvec", "data": parts, "mtime": index,
                        "mode": 0o100000 | chance.choice((0o644, 0o400, 0o4711))})  # fmt: skip
    for index in range(13):
        mode = 0o40000 | (0o555, 0o2700, 0o711)[index % 3]
        entries.append({"path": f"d{index}", "mode": mode, "mtime": index})
        entries += [{"path": f"d{index}/e{at}", "mode": mode, "mtime": at} for at in range(3)]
    entries += [{"path": f"d{index}/l", "mode": 0o120777, "data": f"e{index}", "mtime": 5} for index in range(13)]
    large, at = [], 0
    for _ in range(5):
        data = chance.randbytes(3 << 20)
        large.append([at, len(data), put(base, data)])
        at += len(data)
    return [*entries, {"path": "d0/large", **file(large, encoding="blobvec", size=at, mtime=77)}]


def test_an_extraction_killed_at_any_time_resumes(tmp_path: Path) -> None:
    """After kill -9 at random times, every file is whole, and the same command completes the copy."""
    blobs = tmp_path / "blobs"
    blobs.mkdir()
    document, out = tmp_path / "a.json", tmp_path / "out"
    document.write_text(json.dumps(archive_of(blobs, 800)))
    command = [PROGRAM, "archive", "extract", str(document), "-C", str(out), "--blobs", str(blobs)]
    began = time.monotonic()
    assert run(*command[1:]).returncode == 0
    whole = time.monotonic() - began
    expected, chance = snapshot(out), random.Random(os.urandom(8))
    killed = ended = 0
    subprocess.run(["rm", "-rf", out], check=True)
    while killed < KILLS:
        began = time.monotonic()
        process = subprocess.Popen(command, stderr=subprocess.PIPE)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(chance.uniform(0.2, 0.8) * whole)
        process.kill()
        _, err = process.communicate()
        killed += process.returncode == -signal.SIGKILL
        if process.returncode != -signal.SIGKILL:
            # the run before may have been killed after its journal was removed, and then its files are in the way
            assert process.returncode == 0 or b"is there already" in err, err
            ended += 1
            whole = min(whole, time.monotonic() - began)  # the first, timed run may have been slow
        if out.exists():
            found = snapshot(out)
            for key in found.keys() & expected.keys():
                if found[key].data is not None:
                    assert found[key] == expected[key], key
            assert all(key.startswith(".zarrfs-staging") for key in found.keys() - expected.keys())
            if process.returncode != -signal.SIGKILL or chance.random() < 0.2:
                if process.returncode == -signal.SIGKILL:
                    done = run(*command[1:])
                    assert done.returncode == 0 or "is there already" in done.stderr, done.stderr
                assert {k: v for k, v in snapshot(out).items() if k} == {k: v for k, v in expected.items() if k}
                subprocess.run(["rm", "-rf", out], check=True)


def broken_off(document: Any, out: Path, blobs: Path, mark: str) -> None:
    """Run an extraction that fails at a missing blob."""
    with pytest.raises(SourceError, match="no such blob"):
        extract(document, out, blobs, mark=mark, jobs=1)


def test_a_run_with_the_same_mark_resumes(tmp_path: Path) -> None:
    document = archive_of(tmp_path, 300)
    last = max((one for one in document if one["path"].startswith("d9/e")), key=lambda one: one["path"])
    lost = {"path": "d9/z", **file([[0, 3, put(tmp_path, b"xyz")]], encoding="blobvec", size=3, mtime=1)}
    (tmp_path / lost["data"][0][2]).rename(tmp_path / "lost")
    out = tmp_path / "out"
    broken_off([*document, lost], out, tmp_path, "one")
    assert os.listdir(out / ".zarrfs-staging") == ["note"]
    before = {key: (out / key).stat().st_ino for key in snapshot(out) if (out / key).is_file()}
    assert len(before) > 100
    broken_off([*document, lost], out, tmp_path, "one")
    (tmp_path / "lost").rename(tmp_path / lost["data"][0][2])
    changed = out / last["path"]
    changed.unlink()
    changed.write_bytes(b"not what it was")
    report = extract([*document, lost], out, tmp_path, mark="one", existing="overwrite")
    assert report.resumed >= len(before) - 2
    assert (out / "d9/z").read_bytes() == b"xyz"
    with pytest.raises(SourceError, match="is there already"):
        extract(document, out, tmp_path, mark="one")
    assert {k: v for k, v in snapshot(out).items() if k} == snapshot_of([*document, lost], tmp_path)


def test_a_file_without_a_time_is_resumed_only_if_a_run_wrote_it(tmp_path: Path) -> None:
    """A file from before the first run may have the same size and other bytes."""
    document, out = {"a": file("aaa"), "b": file("bbb")}, tmp_path / "out"
    out.mkdir()
    (out / "b").write_text("old")
    for _ in range(2):
        with pytest.raises(SourceError, match="b: is there already"):
            extract(document, out, mark="one", jobs=1)
        assert ((out / "a").read_text(), (out / "b").read_text()) == ("aaa", "old")


def test_a_file_from_before_the_first_run_is_not_resumed(tmp_path: Path) -> None:
    """It may have the size and time of its entry and still other bytes."""
    document, out = {"a": file("aaa", mtime=1), "b": file("bbb", mtime=1)}, tmp_path / "out"
    out.mkdir()
    (out / "b").write_text("old")
    os.utime(out / "b", (1, 1))
    for _ in range(2):
        with pytest.raises(SourceError, match="b: is there already"):
            extract(document, out, mark="one", jobs=1)
        assert ((out / "a").read_text(), (out / "b").read_text()) == ("aaa", "old")


def test_an_older_version_is_not_resumed(tmp_path: Path) -> None:
    out, newer = tmp_path / "out", {"a": file("two", mtime=1), "b": file("two", mtime=1)}
    extract({"a": file("one", mtime=1), "b": file("one", mtime=1)}, out, mark="one")
    choice = {"mark": "two", "existing": "overwrite"}
    assert extract(newer, out, include=("a",), unfinished=True, **choice).files == 1
    report = extract(newer, out, **choice)
    assert (report.files, report.resumed) == (1, 1)
    assert ((out / "a").read_text(), (out / "b").read_text()) == ("two", "two")


def test_leftovers_of_a_dead_run_are_removed(tmp_path: Path) -> None:
    staging = tmp_path / "out/.zarrfs-staging"
    (staging / "0123456789abcdef").mkdir(parents=True)
    (staging / "0123456789abcdef/17").write_bytes(b"half")
    (staging / "note").write_bytes(b"{")
    extract({"f": file("x")}, tmp_path / "out")
    assert set(snapshot(tmp_path / "out")) == {"", "f"}


def test_one_run_writes_to_a_directory_at_a_time(tmp_path: Path) -> None:
    living = DestinationDirectory(str(tmp_path))
    with pytest.raises(UsageError, match="another run is writing to it"):
        extract({"f": file("x")}, tmp_path)
    living.abandon()
    extract({"f": file("x")}, tmp_path)


@pytest.fixture
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a run wait longer for the lock of the previous run."""
    monkeypatch.setattr(destination_journal, "_ENDING", 60.0)


# -- races


def swap(out: str, outside: str, names: list[str], stop: Any) -> None:
    """Replace the directories `names` by links to `outside`, again and again until `stop` is set."""
    turn = 0
    while not stop.is_set():
        for name in names:
            path, aside = os.path.join(out, name), os.path.join(out, f"aside{turn}")
            turn += 1
            with contextlib.suppress(OSError):
                os.rename(path, aside)
            with contextlib.suppress(OSError):
                os.symlink(outside, path)
            time.sleep(0.0005)  # without a pause, the copy would write nothing at all


@pytest.mark.parametrize("staging", [False, True])
@pytest.mark.parametrize("existing", ["refuse", "overwrite"])
def test_directories_that_turn_into_links_meanwhile(existing: str, staging: bool, tmp_path: Path) -> None:
    document = archive_of(tmp_path, 2000, seed=2)
    outside = tmp_path / "outside"
    outside.mkdir()
    names = [f"d{index}" for index in range(13)] + [f"d{index}/e{index % 3}" for index in range(13)]
    for turn in range(2):
        out, stop = tmp_path / f"out{turn}", multiprocessing.Event()
        out.mkdir()
        arguments = str(out), str(outside), [".zarrfs-staging"] if staging else names, stop
        attacker = multiprocessing.get_context("fork").Process(target=swap, args=arguments)
        attacker.start()
        try:
            with contextlib.suppress(SourceError, UsageError):
                extract(document, out, tmp_path, existing=existing, keep_going=True)
        finally:
            stop.set()
            attacker.join()
    # the attacker's own links are created there, too
    assert [name for name in os.listdir(outside) if not os.path.islink(outside / name)] == []


# -- no space, no permission


@pytest.mark.parametrize("options", ["size=1m", "nr_inodes=60"])
@pytest.mark.parametrize("keep_going", [False, True])
def test_a_copy_resumes_after_a_full_disk_was_enlarged(options: str, keep_going: bool, tmp_path: Path) -> None:
    document = archive_of(tmp_path, 300)
    expected = snapshot_of(document, tmp_path)
    with tmpfs(tmp_path / "small", options) as small:
        with pytest.raises(SourceError, match=r"/out: d.*: cannot be written: no space left on device") as caught:
            extract(document, small / "out", tmp_path, mark="m", keep_going=keep_going)
        assert "\n" not in str(caught.value)
        found = {key: one for key, one in snapshot(small / "out").items() if one.data is not None and key in expected}
        assert found
        assert all(one == expected[key] for key, one in found.items())
        assert os.listdir(small / "out/.zarrfs-staging") == ["note"]
        subprocess.run(["mount", "-o", "remount,size=100m,nr_inodes=10000", small], check=True)
        report = extract(document, small / "out", tmp_path, mark="m")
        assert report.resumed == len(found)
        assert {k: v for k, v in snapshot(small / "out").items() if k} == expected


def snapshot_of(document: Any, blobs: Path) -> dict[str, Any]:
    extract(document, blobs / "expected", blobs)
    return {key: one for key, one in snapshot(blobs / "expected").items() if key}


class Odd(Store):
    """A directory of two large files whose sizes only info() knows; reading one of them raises an unexpected error."""

    immutable, size, when = True, 9 << 20, 10**18

    def __init__(self) -> None:
        self.failed = trio.Event()

    async def info(self, key: str, sized: bool = True) -> Info:
        kind = Kind.FILE if "/" in key else Kind.DIRECTORY
        return Info(key.rpartition("/")[2], kind, self.size, 0o555 if key else 0o755, self.when)

    async def list_dir(self, prefix: str, after: str = "") -> AsyncIterator[Info]:
        for name in ("a", "b") if prefix else ("d",):
            found = await self.info(f"{prefix}/{name}".lstrip("/"))
            yield found._replace(size=None) if prefix else found

    async def open(self, key: str) -> Value:
        return OddValue(self, key, await self.info(key))

    async def aclose(self) -> None:
        pass


class OddValue(Value):
    """A file of an Odd store: reading `d/a` fails, and the other one is read after that."""

    def __init__(self, store: Odd, key: str, info: Info) -> None:
        super().__init__(info)
        self._failed, self._fails = store.failed, key == "d/a"

    async def read(self, start: int, length: int) -> bytes:
        if self._fails:
            self._failed.set()
            raise RuntimeError("odd")
        await self._failed.wait()
        await trio.testing.wait_all_tasks_blocked(0.2)
        return bytes([1]) * length


class Bare(Store):
    """A directory whose listing has only names. `files`: (bytes, time) by name; None: info() fails."""

    immutable = False

    def __init__(self, files: dict[str, tuple[bytes, int] | None]) -> None:
        self.files = files

    async def info(self, key: str, sized: bool = True) -> Info:
        if not key:
            return Info("", Kind.DIRECTORY)
        found = self.files[key]
        if found is None:
            raise ReadError(key, "refused")
        return Info(key, Kind.FILE, len(found[0]), None, found[1])

    async def list_dir(self, prefix: str, after: str = "") -> AsyncIterator[Info]:
        for name in self.files:
            yield Info(name, Kind.FILE, None)

    async def open(self, key: str) -> Value:
        found = self.files[key]
        assert found is not None
        return BareValue(await self.info(key), found[0])

    async def aclose(self) -> None:
        pass


class BareValue(Value):
    """A file of a Bare store."""

    def __init__(self, info: Info, data: bytes) -> None:
        super().__init__(info)
        self._data = data

    async def read(self, start: int, length: int) -> bytes:
        return self._data[start : start + length]


def as_nobody(document: Any, out: Path, existing: str = "refuse") -> str:
    """Extract as user nobody; return the number of files or the error."""
    extract(document, out.parent / "warm")  # import all modules first: user nobody may not be able to read them
    shutil.rmtree(out.parent / "warm")
    scratch = out.parent / "scratch"
    scratch.mkdir(exist_ok=True)
    scratch.chmod(0o1777)  # user nobody may not be able to write to /tmp
    receive, send = multiprocessing.Pipe(duplex=False)

    def child() -> None:
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)
        tempfile.tempdir = str(scratch)
        try:
            send.send(str(extract(document, out, mark="m", existing=existing).files))
        except (SourceError, UsageError) as exc:
            send.send(str(exc))

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join(60)
    return str(receive.recv()) if receive.poll() else f"ended with {process.exitcode}"


@pytest.fixture
def shared(tmp_path: Path) -> Iterator[Path]:
    """Return a directory that every user can enter."""
    if os.geteuid():
        pytest.skip("takes root to become somebody else")
    with tempfile.TemporaryDirectory(dir="/tmp") as made:
        os.chmod(made, 0o755)
        yield Path(made)


def test_directories_without_permissions_are_filled_by_their_owner(shared: Path) -> None:
    out = shared / "out"
    assert as_nobody({"f": file("x")}, out) == f"{out}: permission denied"
    out.mkdir()
    assert as_nobody({"f": file("x")}, out) == f"{out}: cannot be written to: permission denied"
    os.chown(out, 65534, 65534)
    modes = {"d": {"mode": D & ~0o777, "mtime": 1}, "d/e": {"mode": D & ~0o777 | 0o500, "mtime": 2}}
    closed = {**modes, "d/e/f": file("x", mtime=3)}
    assert as_nobody(closed, out) == "1"
    assert (snapshot(out)["d"].mode, snapshot(out)["d/e"].mode) == (0, 0o500)
    assert as_nobody({**closed, "d/e/g": file("y")}, out, "overwrite") == "2"
    found = snapshot(out)
    assert (found["d"].mode, found["d/e"].mode, found["d/e/g"].data) == (0, 0o500, b"y")
    assert (found["d"].mtime_ns, found["d/e"].mtime_ns) == (10**9, 2 * 10**9)


def test_a_file_created_meanwhile_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process creates the file after compare_existing() found none, and before ours is renamed into place."""
    (tmp_path / "out").mkdir()
    (tmp_path / "out/other").write_bytes(b"")
    compare_existing = DestinationDirectory.compare_existing

    def slow(self: DestinationDirectory, directory: int, info: Any) -> str:
        verdict = compare_existing(self, directory, info)
        (tmp_path / "out/f").write_bytes(b"theirs")
        return verdict

    monkeypatch.setattr(filling.DestinationDirectory, "compare_existing", slow)
    with pytest.raises(SourceError, match="f: is there already"):
        extract({"f": file("ours")}, tmp_path / "out")
    assert (tmp_path / "out/f").read_bytes() == b"theirs"


@pytest.mark.parametrize("there", [False, True])
def test_an_existing_directory_keeps_its_mode(there: bool, tmp_path: Path) -> None:
    """Copying a private directory into a shared one does not make that private."""
    source, out = tmp_path / "source", tmp_path / "out"
    source.mkdir(mode=0o700)
    (source / "f").touch()
    if there:
        out.mkdir()
        out.chmod(0o2775)
        os.utime(out, (7, 7))
    write(FileSystemStore(str(source)), out)
    assert stat.S_IMODE(out.stat().st_mode) == (0o2775 if there else 0o700)
    broken, lost = tmp_path / "broken", file([[0, 3, f"sha1-{'0' * 40}"]], encoding="blobvec", size=3)
    with pytest.raises(SourceError):  # a directory that the first run created gets its mode from the run that resumes
        extract({"f": file("x"), "g": lost}, broken, mark="m")
    with opened({".": {"mode": 0o40711, "mtime": 5}, "f": file("x")}, type="archive") as (store, _plan):
        write(store, broken, mark="m")
    assert stat.S_IMODE(broken.stat().st_mode) == 0o711

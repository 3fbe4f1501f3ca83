"""A writable mount and a plain directory agree after every step of random operations, also after kill -9."""

from __future__ import annotations

import json
import os
import shutil
import signal
import stat
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tests.conftest import run
from tests.mounts.mounting import alive, daemon_pid, mount_lines, mounted, until
from tests.mounts.treemodel import EXCHANGE, NOREPLACE, NOW, OLD, OMIT, Outcome, Tree, attempt, differences, snapshot

NAMES = ("a", "b", "d", "e", "sub", "n", "läng er", "no\udcffutf-8")
PAGE = 4096
OFFSETS = st.one_of(st.sampled_from([0, 1, PAGE - 1, PAGE, 2 * PAGE + 1, 70_000]), st.integers(0, 9000))
BYTES = st.one_of(
    st.binary(max_size=20), st.builds(lambda byte, n: bytes([byte]) * n, st.integers(0, 255), st.integers(0, 9000))
)
MODES = st.sampled_from([0o644, 0o600, 0o755, 0o000, 0o444, 0o4755, 0o2755, 0o1777, 0o2070])
MTIMES = st.one_of(st.integers(0, OLD - 1), st.sampled_from([NOW, OMIT]))
KINDS = st.sampled_from([stat.S_IFIFO, stat.S_IFSOCK, stat.S_IFREG])
TARGETS = st.sampled_from(["a", "d", "d/sub", "../d", "../e/n", "sub/c", "nowhere", ".", "e/a"])
WRITE_FLAGS = st.sampled_from(
    [0, os.O_CREAT, os.O_CREAT | os.O_EXCL, os.O_TRUNC, os.O_CREAT | os.O_TRUNC, os.O_APPEND, os.O_CREAT | os.O_APPEND]
)
OPEN_FLAGS = st.one_of(
    st.sampled_from([os.O_RDONLY, os.O_RDWR, os.O_WRONLY, os.O_WRONLY | os.O_APPEND, os.O_RDONLY | os.O_DIRECTORY]),
    st.sampled_from([os.O_RDWR | os.O_CREAT, os.O_RDWR | os.O_TRUNC, os.O_RDWR | os.O_CREAT | os.O_EXCL]),
)
MAX_HANDLES, MAX_REMOUNTS = 4, 2


# -- the sources


def write_references(directory: Path) -> Path:
    (directory / "target.bin").write_bytes(bytes(range(256)) * 400)
    target = str(directory / "target.bin")
    os.utime(target, (10**9, 10**9))
    refs = {"a": "text", "d/a": [target, 10, 9000], "d/b": "", "d/sub/c": [target, 0, 70_000], "d/sub/deep/x": "x",
            "e/n": [target], "e/.zarray": "{}"}  # fmt: skip
    (directory / "refs.json").write_text(json.dumps({"version": 1, "refs": refs}))
    os.utime(directory / "refs.json", (10**9, 10**9))
    return directory / "refs.json"


def write_archive(directory: Path) -> Path:
    def entry(path: str, mode: int, **more: object) -> dict[str, object]:
        return {"path": path, "mode": mode, "mtime": 10**9 + len(path), "ctime": 10**9, **more}

    def text(path: str, mode: int, data: str) -> dict[str, object]:
        return entry(path, mode | stat.S_IFREG, data=data, size=len(data), encoding="utf-8")

    entries = [
        text("a", 0o600, "text"), text("d/b", 0o755, "#!/bin/sh\n" * 900), text("d/sub/c", 0o4711, "c"),
        entry("e", 0o755 | stat.S_IFDIR), entry("e/n", 0o640 | stat.S_IFREG, size=20_000),
        entry("d", 0o2750 | stat.S_IFDIR), entry("d/sub", 0o700 | stat.S_IFDIR),
        entry("sub", 0o777 | stat.S_IFLNK, data="d/sub"), entry("d/e", 0o777 | stat.S_IFLNK, data="../a"),
        entry("b", 0o1777 | stat.S_IFDIR),
    ]  # fmt: skip
    (directory / "archive.json").write_text(json.dumps(entries))
    return directory / "archive.json"


class WritableMount:
    """The mount of one example, which can be unmounted, killed, and mounted again."""

    def __init__(self, source: Path, mountpoint: Path, options: str) -> None:
        self.source, self.mountpoint, self.options = source, mountpoint, options

    def start(self) -> None:
        self.mountpoint.mkdir(exist_ok=True)
        options = f"{self.options},log_file={self.mountpoint}.log"
        done = run("mount", self.source, self.mountpoint, "-o", options)
        assert done.returncode == 0, done.stderr

    def stop(self) -> None:
        pid = daemon_pid(self.mountpoint)
        done = run("umount", self.mountpoint)
        late = "but its daemon" in done.stderr  # unmounted, and the daemon takes longer than umount waits
        assert done.returncode == 0 or late, done.stderr
        assert not mount_lines(self.mountpoint)
        until(lambda: not alive(pid))

    def kill(self) -> None:
        """Kill the daemon, as a crash would, and unmount."""
        pid = daemon_pid(self.mountpoint)
        os.kill(pid, signal.SIGKILL)
        until(lambda: not alive(pid))
        while mount_lines(self.mountpoint):
            subprocess.run(["umount", "-l", str(self.mountpoint)], check=True)


def by_name(name: str, *drawn: st.SearchStrategy[Any]) -> Any:
    """Return a rule: the operation `name` with a path and drawn arguments."""

    def run(self: Machine, data: st.DataObject, given: tuple[object, ...]) -> None:
        self.both(name, self.key(data), *given)

    run.__name__ = name
    return rule(data=st.data(), given=st.tuples(*drawn))(run)


def by_handle(name: str, *drawn: st.SearchStrategy[Any]) -> Any:
    """Return a rule: the operation `name` with an open file or directory and drawn arguments."""

    def run(self: Machine, data: st.DataObject, given: tuple[object, ...]) -> None:
        self.both(name, self.handle(data), *given)

    run.__name__ = name
    return precondition(lambda self: self.plain.handles)(rule(data=st.data(), given=st.tuples(*drawn))(run))


class Machine(RuleBasedStateMachine):
    """Random operations on a mount and on a plain directory. Subclasses define what is mounted."""

    original: Path  # a plain copy of the source

    def __init__(self) -> None:
        super().__init__()
        self.place = Path(tempfile.mkdtemp(prefix="zarrfs-model-"))
        subprocess.run(["cp", "-a", "--sparse=never", self.original, self.place / "plain"], check=True)
        self.mount = self.prepare(self.place)
        self.mount.start()
        self.found, self.plain = Tree(self.mount.mountpoint), Tree(self.place / "plain")
        self.remounts = self.opened = 0
        self.lower = self.lower_directories()
        self.keys = sorted(snapshot(self.plain.root))

    def prepare(self, place: Path) -> WritableMount:
        raise NotImplementedError

    def lower_directories(self) -> set[str]:
        return {str(path.relative_to(self.plain.root)) for path in self.plain.root.rglob("*") if is_directory(path)}

    def teardown(self) -> None:
        try:
            for tree in (self.found, self.plain):
                for handle in list(tree.handles):
                    tree.close(handle)
        finally:
            self.mount.kill()
        shutil.rmtree(self.place)

    # -- one step

    def both(self, name: str, *arguments: object) -> Outcome:
        """Do an operation on the mount and on the plain directory; the outcomes must be equal."""
        found = attempt(lambda: getattr(self.found, name)(*arguments))
        plain = attempt(lambda: getattr(self.plain, name)(*arguments))
        assert found == plain, f"{name}{arguments!r}: {found} and not {plain}"
        return plain

    def key(self, data: st.DataObject) -> str:
        """Draw a path: mostly an existing one, or a name in an existing directory."""
        below = [key + "/" for key in self.keys if (self.plain.root / key).is_dir()] + [""]
        new = st.builds(lambda directory, name: directory + name, st.sampled_from(below), st.sampled_from(NAMES))
        anything = st.builds("/".join, st.lists(st.sampled_from(NAMES), min_size=1, max_size=3))
        there = [st.sampled_from(self.keys)] * 2 if self.keys else []
        return str(data.draw(st.one_of(*there, new, new, anything), label="key"))

    def real(self, key: str) -> str:
        """Return `key` with symbolic links in its parent directories resolved."""
        root, name = os.path.realpath(self.plain.root), os.path.basename(key)
        parent = os.path.realpath(self.plain.path(os.path.dirname(key)))
        return os.path.relpath(os.path.join(parent, name), root)

    @invariant()
    def the_trees_agree(self) -> None:
        expected = snapshot(self.plain.root)
        self.keys = sorted(expected)
        lines = differences(snapshot(self.found.root), expected)
        assert not lines, "\n".join(lines)
        for handle in self.plain.handles:
            self.both("pread", handle, 0, 9000)
            self.both("fstat", handle)

    # -- names

    mkdir, unlink, look = by_name("mkdir", MODES), by_name("unlink"), by_name("look")
    mknod = by_name("mknod", KINDS)

    @rule(data=st.data())
    def rmdir(self, data: st.DataObject) -> None:
        key = self.key(data)
        gone = self.real(key)
        if self.both("rmdir", key)[0] == "done":
            self.lower.discard(gone)

    @rule(data=st.data(), text=TARGETS)
    def symlink(self, data: st.DataObject, text: str) -> None:
        self.both("symlink", text, self.key(data))

    @rule(data=st.data())
    def link(self, data: st.DataObject) -> None:
        self.both("link", self.key(data), self.key(data))

    @rule(data=st.data(), flags=st.sampled_from([0, 0, 0, NOREPLACE, EXCHANGE]))
    def rename(self, data: st.DataObject, flags: int) -> None:
        key, new = self.key(data), self.key(data)
        moved, replaced = self.real(key), self.real(new)
        if moved in self.lower or (flags == EXCHANGE and replaced in self.lower):
            # a directory of the lower store is not renamed: the plain directory's error, or EXDEV
            outcome = attempt(lambda: self.found.rename(key, new, flags))
            if outcome == ("failed", "EXDEV"):
                return
            assert outcome == attempt(lambda: self.plain.rename(key, new, flags)), f"{key} to {new}: {outcome}"
            assert outcome[0] == "failed" or moved == replaced, f"{key} was renamed to {new}"
        elif self.both("rename", key, new, flags)[0] == "done":
            self.lower.discard(replaced)

    # -- attributes and bytes

    chmod, truncate, utimens = by_name("chmod", MODES), by_name("truncate", OFFSETS), by_name("utimens", MTIMES)
    chown = by_name("chown", st.sampled_from([-1, 0, 1234]), st.sampled_from([-1, 0, 4321]))
    write = by_name("write", WRITE_FLAGS, MODES, OFFSETS, BYTES)

    @precondition(lambda self: len(self.plain.handles) < MAX_HANDLES)
    @rule(data=st.data(), flags=OPEN_FLAGS)
    def open(self, data: st.DataObject, flags: int) -> None:
        self.opened += 1
        self.both("open", self.opened, self.key(data), flags)

    @precondition(lambda self: len(self.plain.handles) < MAX_HANDLES)
    @rule(data=st.data(), how=st.sampled_from(["write", "truncate", "unlink"]), offset=OFFSETS)
    def change_what_a_reader_has_open(self, data: st.DataObject, how: str, offset: int) -> None:
        key = self.key(data)
        self.opened += 1
        if self.both("open", self.opened, key, os.O_RDONLY)[0] == "done":
            self.both("pread", self.opened, 0, 100)
            arguments = {"write": (0, 0o644, offset, b"changed"), "truncate": (offset,), "unlink": ()}[how]
            self.both(how, key, *arguments)

    def handle(self, data: st.DataObject) -> int:
        return int(data.draw(st.sampled_from(sorted(self.plain.handles)), label="handle"))

    close, fstat, names, fsync = by_handle("close"), by_handle("fstat"), by_handle("names"), by_handle("fsync")
    pread, pwrite = by_handle("pread", OFFSETS, st.just(9000)), by_handle("pwrite", OFFSETS, BYTES)
    append, ftruncate = by_handle("append", BYTES), by_handle("ftruncate", OFFSETS)
    map_write = by_handle("map_write", OFFSETS, BYTES.filter(bool))

    @precondition(lambda self: self.plain.handles)
    @rule(data=st.data(), mode=MODES)
    def fchmod(self, data: st.DataObject, mode: int) -> None:
        handle = self.handle(data)
        linked = os.fstat(self.plain.handles[handle]).st_nlink > 0
        # an open file that was deleted before its copy up is the source's, whose set-ID bits are not shown
        self.both("fchmod", handle, mode if linked else mode & 0o1777)

    @precondition(lambda self: self.plain.handles)
    @rule(data=st.data(), method=st.sampled_from(["create_at", "unlink_at"]), name=st.sampled_from(NAMES))
    def in_open_directory(self, data: st.DataObject, method: str, name: str) -> None:
        self.both(method, self.handle(data), name)

    # -- mounts

    @precondition(lambda self: not self.plain.handles and self.remounts < MAX_REMOUNTS)
    @rule(kill=st.booleans())
    def remount(self, kill: bool) -> None:
        self.remounts += 1
        (self.mount.kill if kill else self.mount.stop)()
        self.mount.start()


def is_directory(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def run_machine(machine: type[Machine], original: Path, examples: int = 2, **more: Any) -> None:
    named = type(machine.__name__, (machine,), {"original": original, **more})
    health = [HealthCheck.too_slow, HealthCheck.data_too_large]
    found = [Phase.explicit, Phase.reuse, Phase.generate]  # shrinking with real mounts takes minutes
    bounds = settings(max_examples=examples, stateful_step_count=60, deadline=None, suppress_health_check=health)
    run_state_machine_as_test(named, settings=settings(bounds, phases=found))


class Merged(Machine):
    """A source mounted with an upper directory."""

    source: Path

    def prepare(self, place: Path) -> WritableMount:
        (place / "upper").mkdir()
        return WritableMount(self.source, place / "mnt", f"upperdir={place}/upper,suid")


class OwnUpper(Machine):
    """A local directory mounted with rw; there is no lower store, so every directory can be renamed."""

    def prepare(self, place: Path) -> WritableMount:
        subprocess.run(["cp", "-a", self.original, place / "source"], check=True)
        return WritableMount(place / "source", place / "mnt", "rw,suid")

    def lower_directories(self) -> set[str]:
        return set()


@pytest.mark.timeout(600)
@pytest.mark.parametrize("write_source", [write_references, write_archive], ids=["references", "archive"])
def test_a_merged_tree_behaves_like_a_plain_directory(write_source: Callable[[Path], Path], tmp_path: Path) -> None:
    source = write_source(tmp_path)
    with mounted(source, tmp_path / "mnt") as root:
        subprocess.run(["cp", "-a", "--sparse=never", root, tmp_path / "original"], check=True)
    if write_source is write_references:
        subprocess.run(["chmod", "-R", "u+w", tmp_path / "original"], check=True)
    run_machine(Merged, tmp_path / "original", source=source)


@pytest.mark.timeout(600)
def test_a_directory_mounted_rw_behaves_like_a_plain_directory(tmp_path: Path) -> None:
    with mounted(write_archive(tmp_path), tmp_path / "mnt") as root:
        subprocess.run(["cp", "-a", "--sparse=never", root, tmp_path / "original"], check=True)
    run_machine(OwnUpper, tmp_path / "original", examples=1)

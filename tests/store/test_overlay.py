"""Overlay and Upper: merged trees, whiteouts, copying up, records and locks, and refusals."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import itertools
import os
import stat
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, ClassVar

import pytest
import trio

from tests.store.contract import Tree, WritableContract, check_tree
from zarrfs.errors import AccessDenied, NotFound, ReadError, Refused, SourceError
from zarrfs.store.api import Info, Value
from zarrfs.store.directory import FileSystemStore
from zarrfs.store.overlay import Overlay
from zarrfs.store.upper import Upper
from zarrfs.store.values import BytesValue
from zarrfs.store.writing import NewFile

_numbers = itertools.count()


def write(root: Path, tree: Tree) -> Path:
    """Write the values of `tree` below `root`; return `root`."""
    root.mkdir(parents=True, exist_ok=True)
    for key, value in tree.items():
        path = root / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(value)
    return root


@pytest.fixture(autouse=True)
def _place(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    if request.cls is not None:
        request.cls.place = tmp_path


class TestOverlay(WritableContract):
    """An overlay with half of the tree in each of its stores, and with a file and a directory that are whited out."""

    place: Path
    walks: ClassVar[bool] = True

    @asynccontextmanager
    async def open(self, tree: Tree) -> AsyncIterator[Overlay]:
        root = self.place / str(next(_numbers))
        lower, upper = write(root / "lower", {}), write(root / "upper", {})
        for number, (key, value) in enumerate(tree.items()):
            write(lower if number % 2 else upper, {key: value})
            if not number % 2 and not any((lower / part).is_file() for part in Path(key).parents):
                path = lower / key
                if not path.exists():
                    write(lower, {key: b"below"})
        write(lower, {"hidden file": b"x", "hidden/tree/y": b"y"})
        write(upper, {".wh.hidden file": b"", ".wh.hidden": b""})
        for key in tree:  # a directory of the upper must not be a file in the lower
            for above in Path(key).parents:
                if (upper / above).is_dir() and (lower / above).is_file():
                    (lower / above).unlink()
        store = Overlay(FileSystemStore(str(lower)), Upper(str(upper)))
        store.upper._base._kernel_walks = self.walks
        yield store
        await store.aclose()


class TestPlain(WritableContract):
    """An overlay without a lower store: the directory is its own upper."""

    place: Path

    @asynccontextmanager
    async def open(self, tree: Tree) -> AsyncIterator[Overlay]:
        path = str(write(self.place / str(next(_numbers)), tree))
        store = Overlay(FileSystemStore(path), Upper(path, plain=True))
        yield store
        await store.aclose()


def run(
    root: Path, lower: Tree, check: Callable[[Overlay], Awaitable[Any]], kind: type[FileSystemStore] = FileSystemStore
) -> Any:
    """Write `lower` into root/lower, run `check` with an overlay of it and root/upper, and return the result."""
    write(root / "lower", lower)
    (root / "upper").mkdir(exist_ok=True)

    async def main() -> Any:
        store = Overlay(kind(str(root / "lower")), Upper(str(root / "upper")))
        try:
            return await check(store)
        finally:
            await store.aclose()

    return trio.run(main)


def test_copying_up_keeps_modes_times_holes_and_links(tmp_path: Path) -> None:
    """Several tasks copy up the same entries at the same time: each is copied once. The lower store stays as it is."""
    lower = write(tmp_path / "lower", {"d/e/file": b"value", "d/other": b"other"})
    with open(lower / "d/sparse", "wb") as file:
        file.truncate(8 << 20)
        for place in (5 << 20, (5 << 20) + (32 << 10)):  # with a small hole between them
            file.seek(place)
            file.write(b"data")
    os.symlink("e/file", lower / "d/link")
    os.chmod(lower / "d/e/file", 0o640)
    os.chmod(lower / "d/e", 0o750)
    for path in ("d/e/file", "d/e", "d/sparse"):
        os.utime(lower / path, ns=(1_000_000_001, 1_234_567_890_123))
    before, copied = state(lower), []

    class Noted(FileSystemStore):
        async def open(self, key: str) -> Value:
            copied.append(key)
            return await super().open(key)

    async def check(store: Overlay) -> None:
        async with trio.open_nursery() as nursery:
            for key in ["d/e/file", "d/sparse", "d/link"] * 5:
                nursery.start_soon(store.copy_up, key)
        with pytest.raises(NotFound):
            await store.copy_up("d/nope")

    run(tmp_path, {}, check, Noted)
    assert sorted(copied) == ["d/e/file", "d/sparse"]
    assert state(lower) == before
    upper = tmp_path / "upper"
    for key in ("d/e/file", "d/e", "d/sparse"):
        found, wanted = os.stat(upper / key), os.stat(lower / key)
        assert (found.st_mode, found.st_mtime_ns) == (wanted.st_mode, wanted.st_mtime_ns), key
    assert (upper / "d/e/file").read_bytes() == b"value"
    assert (upper / "d/sparse").read_bytes() == (lower / "d/sparse").read_bytes()
    assert os.stat(upper / "d/sparse").st_blocks * 512 < 1 << 20
    assert os.readlink(upper / "d/link") == "e/file"
    assert sorted(os.listdir(upper / "d")) == ["e", "link", "sparse"]
    assert sorted(os.listdir(upper)) == ["d"]


def state(root: Path) -> dict[str, tuple[object, ...]]:
    """Return what is stored of `root` and of each entry below it, but for the time of the last access."""
    found = {}
    for path in (root, *root.rglob("*")):
        status = path.lstat()
        data = hashlib.sha256(path.read_bytes()).hexdigest() if stat.S_ISREG(status.st_mode) else ""
        times = status.st_mtime_ns, status.st_ctime_ns
        found[str(path)] = (status.st_ino, status.st_mode, status.st_nlink, *times, data)
    return found


@pytest.mark.parametrize("again", [False, True])
def test_a_file_that_is_removed_while_it_is_copied_up_stays_removed(again: bool, tmp_path: Path) -> None:
    """If another file has taken its name meanwhile, that file stays."""
    overlays: list[Overlay] = []

    class Removed(FileSystemStore):
        async def open(self, key: str) -> Value:
            value = await super().open(key)
            await overlays[0].delete(key)
            if again:
                await overlays[0].set(key, b"other")
            return value

    async def check(store: Overlay) -> None:
        overlays.append(store)
        with contextlib.suppress(NotFound):
            await store.copy_up("a/k")
        if again:
            assert await store.get("a/k") == b"other"
        else:
            with pytest.raises(NotFound):
                await store.get("a/k")

    run(tmp_path, {"a/k": b"below"}, check, Removed)


def test_a_link_that_is_removed_while_it_is_copied_up_stays_removed(tmp_path: Path) -> None:
    async def check(store: Overlay) -> None:
        lower = store.lower
        assert lower is not None
        os.symlink("t", tmp_path / "lower/a/l")
        found = lower.info

        async def late(key: str, sized: bool = True) -> Info:
            info = await found(key, sized)
            if key == "a/l":
                lower.info = found  # type: ignore[method-assign]
                await store.delete(key)
            return info

        lower.info = late  # type: ignore[method-assign]
        with pytest.raises(NotFound):
            await store.copy_up("a/l")
        assert [*await store.entries("a")] == ["k"]

    run(tmp_path, {"a/k": b"below"}, check)


@pytest.mark.parametrize("before", [b"value", b""])
@pytest.mark.parametrize("another", [False, True])
def test_a_file_that_grows_before_it_is_copied_up_is_never_cut(
    another: bool, before: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If another file has replaced it, ESTALE makes the kernel look up the name again."""
    longer = b"longer than before"

    async def check(store: Overlay) -> None:
        create = store.upper.create

        def late(mode: int) -> NewFile:
            if another:
                os.replace(write(tmp_path / "new", {"a": longer}) / "a", tmp_path / "lower/a")
            else:
                write(tmp_path / "lower", {"a": longer})
            return create(mode)

        monkeypatch.setattr(store.upper, "create", late)
        if another:
            with pytest.raises(Refused) as caught:
                await store.copy_up("a")
            assert caught.value.errno == errno.ESTALE
            assert not (tmp_path / "upper/a").exists()
            return
        status = await store.copy_up("a")
        assert (tmp_path / "upper/a").read_bytes() == longer
        assert status.st_mtime_ns == os.stat(tmp_path / "lower/a").st_mtime_ns

    run(tmp_path, {"a": before}, check)


def test_the_size_of_a_file_on_a_server_is_requested_unless_it_is_truncated(tmp_path: Path) -> None:
    class Unsized(FileSystemStore):
        @property
        def remote(self) -> bool:
            return True

        async def info(self, key: str, sized: bool = True) -> Info:
            assert not sized or key != "a", "a request"
            info = await super().info(key, sized)
            return info if sized else info._replace(size=None)

    async def check(store: Overlay) -> None:
        assert (await store.copy_up("a", 0)).st_size == 0
        assert (await store.copy_up("b", 3)).st_size == 3
        await store.copy_up("c")

    run(tmp_path, dict.fromkeys("abc", b"value"), check, Unsized)
    assert [(tmp_path / "upper" / name).read_bytes() for name in "abc"] == [b"", b"val", b"value"]


def test_a_removed_entry_is_absent_also_when_the_lower_store_fails(tmp_path: Path) -> None:
    class Failing(FileSystemStore):
        async def info(self, key: str, sized: bool = True) -> Info:
            raise ReadError(key, "the disk is gone")

    async def check(store: Overlay) -> None:
        with pytest.raises(NotFound):
            await store.info("a")
        with pytest.raises(ReadError):
            await store.info("b")

    write(tmp_path / "upper", {".wh.a": b""})
    run(tmp_path, {"a": b"", "b": b""}, check, Failing)


def test_a_value_that_ends_early_while_it_is_copied_up_is_an_error(tmp_path: Path) -> None:
    class Shrinking(FileSystemStore):
        async def open(self, key: str) -> Value:
            return BytesValue(await self.info(key), b"val")

    async def check(store: Overlay) -> None:
        with pytest.raises(ReadError):
            await store.copy_up("a", 5)

    run(tmp_path, {"a": b"value"}, check, Shrinking)
    assert not os.listdir(tmp_path / "upper")


def test_an_os_error_of_the_upper_is_a_read_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in any store. Callers take an OSError for a bug of the store, and fsspec takes it for a missing entry."""

    def refuse(*_: object) -> None:
        raise OSError(errno.EACCES, os.strerror(errno.EACCES))

    async def check(store: Overlay) -> None:
        monkeypatch.setattr(store.upper, "listing", refuse)
        with pytest.raises(AccessDenied, match="d: permission denied"):
            assert [info async for info in store.list_dir("d")]
        monkeypatch.setattr(store.upper, "status", refuse)
        with pytest.raises(AccessDenied, match="d/x: permission denied"):
            await store.info("d/x")

    run(tmp_path, {"d/x": b"x"}, check)


def test_a_special_file_of_the_upper_is_listed_and_cannot_be_read(tmp_path: Path) -> None:
    """As in a store without changes: if it were left out, a copy would lack it without an error."""
    os.mkfifo(write(tmp_path / "upper", {}) / "fifo")

    async def check(store: Overlay) -> None:
        infos = [info async for info in store.list_dir("")]
        assert [info.name for info in infos] == ["a", "fifo"]
        assert infos[1].unreadable == "is a FIFO, which is not opened"
        assert await store.info("fifo") == infos[1]
        with pytest.raises(ReadError, match="fifo: is a FIFO, which is not opened"):
            await store.open("fifo")

    run(tmp_path, {"a": b""}, check)


def test_a_layer_with_opaque_markers_is_understood(tmp_path: Path) -> None:
    write(tmp_path / "upper", {"d/.wh..wh..opq": b"", "d/new": b"new", "e/.wh.gone": b""})
    lower: Tree = {"d/old": b"", "d/sub/old": b"", "e/gone": b"", "e/kept": b"kept"}

    async def check(store: Overlay) -> None:
        for key in "d/old", "d/sub", "d/sub/old", "e/gone":  # looked up before any listing
            with pytest.raises(NotFound):
                await store.info(key)
        await check_tree(store, {"d/new": b"new", "e/kept": b"kept"})

    run(tmp_path, lower, check)


OVER = {"source": "/x/refs.json", "fingerprint": "1"}


@pytest.mark.parametrize("exclusive", [True, False])
def test_changes_of_another_source_that_were_made_before_the_lock_are_refused(exclusive: bool, tmp_path: Path) -> None:
    late = Upper(str(tmp_path), over={**OVER, "source": "/y"})
    first = Upper(str(tmp_path), over=OVER)
    first.lock(exclusive=True)
    first.close()
    with pytest.raises(SourceError, match=r"holds changes of /x/refs.json, not of /y"):
        late.lock(exclusive)
    late.close()
    Upper(str(tmp_path), over=OVER).lock(exclusive=True)


def test_the_record_names_the_view(tmp_path: Path) -> None:
    """In another view the same names are other files."""
    for at, (made, asked, words) in enumerate((
        (None, "netcdf", "without view=, not with view=netcdf"), ("v3", None, "with view=v3, not without view="),
        ("v3", "netcdf", "with view=v3, not with view=netcdf"),
    )):  # fmt: skip
        (place := tmp_path / str(at)).mkdir()
        first = Upper(str(place), over={**OVER, "view": made})
        first.lock(exclusive=True)
        first.close()
        Upper(str(place), over={**OVER, "view": made}).close()
        with pytest.raises(SourceError, match=f"holds changes of /x/refs.json {words}: take another upperdir="):
            Upper(str(place), over={**OVER, "view": asked})

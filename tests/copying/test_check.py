"""check(): every byte is read, each failure is counted as its kind, and holes of any size cost nothing."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trio

from zarrfs.copying.check import READERS, check
from zarrfs.copying.check_report import CheckReport
from zarrfs.errors import AccessDenied, OutOfRange, ReadError, TargetChanged, TargetMissing, WrongHash
from zarrfs.store.index import IndexStore
from zarrfs.store.indexfile import IndexWriter, Region

ERRORS = {
    "missing": TargetMissing,
    "short": OutOfRange,
    "hash": WrongHash,
    "changed": TargetChanged,
    "denied": AccessDenied,
}


class Targets:
    """Targets that fail as their names say; keeps the extents that are read, and the most bytes read at one time."""

    remote = False

    def __init__(self) -> None:
        self.extents: list[tuple[str, int, int]] = []
        self.now = self.most = 0

    async def read(self, url: str, offset: int, length: int, low: int, high: int) -> bytes:
        self.extents.append((url, offset, length))
        self.now += length
        self.most = max(self.most, self.now)
        await trio.lowlevel.checkpoint()
        self.now -= length
        if url in ERRORS:
            raise ERRORS[url](url, "as its name says")
        if url == "bug":
            raise KeyError("x")
        return bytes(length)

    async def size(self, url: str, begin: bool = False) -> int:
        if url in ERRORS:
            raise ERRORS[url](url, "as its name says")
        return 10

    def resolve(self, url: str, shown: bool = True) -> str:
        return f"file:///{url}"

    def stats(self) -> dict[str, Any]:
        return {}

    async def aclose(self) -> None:
        pass


def store_of(directory: Path, fill: Callable[[IndexWriter], None]) -> tuple[IndexStore, Targets]:
    """Return a store of the entries that `fill` writes, and its targets."""
    targets = Targets()
    with IndexWriter(str(directory / "index")) as writer:
        fill(writer)
        writer.commit()
    return IndexStore(str(directory / "index"), targets), targets


def checked(store: IndexStore, key: str = "", keep: int = 20, memory: int = 256 << 20) -> CheckReport:
    report = CheckReport(keep=keep)
    trio.run(check, store, key, report, memory)
    return report


def test_a_sound_store_is_clean_and_read_in_full(tmp_path: Path) -> None:
    def fill(writer: IndexWriter) -> None:
        writer.inline("a/inline", b"12345")
        writer.range("a/range", "data", 100, 50)
        writer.whole("whole", "data")
        writer.regions("empty", 0, [])
        writer.directory("nothing")

    store, targets = store_of(tmp_path, fill)
    report = checked(store)
    assert report.clean
    assert (report.ok, report.bytes, report.files, report.expected_files) == (4, 65, 4, 4)
    assert sorted(targets.extents) == [("data", 0, 10), ("data", 100, 50)]


@pytest.mark.parametrize(
    ("url", "kind"),
    [("missing", "missing"), ("short", "out of range"), ("hash", "wrong hash"), ("changed", "changed"),
     ("denied", "unreadable"), ("bug", "unreadable")],
)  # fmt: skip
def test_each_failure_is_counted_as_its_kind(url: str, kind: str, tmp_path: Path) -> None:
    def fill(writer: IndexWriter) -> None:
        writer.range("good", "data", 0, 5)
        writer.range("bad", url, 0, 5)

    store, _targets = store_of(tmp_path, fill)
    report = checked(store)
    assert (report.ok, dict(report.counts), report.clean) == (1, {kind: 1}, False)
    (bad,) = report.bad
    assert (bad.key, bad.kind) == ("bad", kind)
    assert bad.url is not None
    assert url in bad.url


def test_only_the_first_bad_entries_are_kept_and_all_are_counted(tmp_path: Path) -> None:
    def fill(writer: IndexWriter) -> None:
        for number in range(100):
            writer.range(f"{number:03}", "missing", 0, 1)
            writer.problem(f"p{number}", "a rule")

    report = checked(store_of(tmp_path, fill)[0], keep=7)
    assert (report.counts["missing"], report.left_out) == (100, 100)
    assert [bad.key for bad in report.bad] == [f"{number:03}" for number in range(7)]
    assert len(report.problems) == 7


def test_entries_that_were_left_out_are_failures(tmp_path: Path) -> None:
    def fill(writer: IndexWriter) -> None:
        writer.inline("a/x", b"")
        writer.problem("a/y", "wrong arity")
        writer.problem("b", "a negative offset")

    store, _targets = store_of(tmp_path, fill)
    assert not checked(store).clean
    assert checked(store, "a").problems == [("a/y", "wrong arity")]


def test_holes_are_not_read(tmp_path: Path) -> None:
    def fill(writer: IndexWriter) -> None:
        writer.regions("hole", 1 << 60, [])
        data = [Region(1 << 50, 4096, "data", 0), Region(1 << 59, 10, "data", 4096)]
        writer.regions("sparse", 1 << 60, data)

    store, targets = store_of(tmp_path, fill)
    report = checked(store)
    assert (report.ok, report.bytes) == (2, 4106)
    assert sorted(targets.extents) == [("data", 0, 4096), ("data", 4096, 10)]


def test_memory_is_bounded(tmp_path: Path) -> None:
    def fill(writer: IndexWriter) -> None:
        for number in range(4 * READERS):
            writer.range(str(number), "data", 0, 2 << 20)

    store, targets = store_of(tmp_path, fill)
    report = checked(store, memory=8 << 20)
    assert (report.ok, report.bytes) == (4 * READERS, 4 * READERS * (2 << 20))
    assert targets.most <= 8 << 20
    assert len(set(targets.extents)) * (256 << 10) == 2 << 20


def test_links_are_counted_and_never_bad(tmp_path: Path) -> None:
    def fill(writer: IndexWriter) -> None:
        writer.inline("d/file", b"1")
        writer.symlink("d/good", "file")
        writer.symlink("d/up", "../d/./good")
        writer.symlink("dangling", "d/nothing")
        writer.symlink("through", "d/file/x")
        writer.symlink("absolute", "/etc/passwd")
        writer.symlink("out", "../../x")
        writer.symlink("circle", "circle")

    report = checked(store_of(tmp_path, fill)[0])
    assert report.clean
    assert (report.ok, report.links, report.dangling) == (1, 7, 2)


def test_a_directory_that_cannot_be_listed_is_bad_and_the_rest_is_read(tmp_path: Path) -> None:
    def fill(writer: IndexWriter) -> None:
        for name in "abc":
            writer.inline(f"{name}/x", b"1")
        array = {"zarr_format": 2, "shape": [1], "chunks": [1], "dtype": "|u1", "compressor": None, "fill_value": 0,
                 "order": "C", "filters": None}  # fmt: skip
        writer.inline("d/.zarray", json.dumps(array).encode())
        writer.inline("d/0", b"too long")

    store, _targets = store_of(tmp_path, fill)

    class Broken:
        def __getattr__(self, name: str) -> Any:
            return getattr(store, name)

        async def list_dir(self, prefix: str, after: str = "") -> Any:
            if prefix == "b":
                raise ReadError("http://host/b", "status 500")
            async for info in store.list_dir(prefix, after):
                yield info

    report = checked(Broken())
    assert (report.ok, [bad.key for bad in report.bad]) == (3, ["b", "d/0"])


def test_a_bad_document_is_counted_once(tmp_path: Path) -> None:
    """Unreadable, if it cannot be read; else bad metadata, and not sound as well."""

    def fill(writer: IndexWriter) -> None:
        writer.inline("array/.zarray", b"{")
        writer.inline("array/0", b"1")
        writer.inline("group/.zgroup", b"{")
        writer.inline("top/.zmetadata", b'{"metadata": []}')
        writer.broken("unread/.zarray", "no length")
        writer.broken("unread/0", "no length")

    report = checked(store_of(tmp_path, fill)[0])
    assert [(bad.key, bad.kind) for bad in report.bad] == [
        ("array/.zarray", "bad metadata"), ("group/.zgroup", "bad metadata"),
        ("top/.zmetadata", "bad metadata"), ("unread/.zarray", "unreadable"), ("unread/0", "unreadable"),
    ]  # fmt: skip
    assert (report.ok, report.counts.total()) == (1, 5)


def test_an_array_that_was_not_examined_is_reported(tmp_path: Path) -> None:
    store, _targets = store_of(tmp_path, lambda writer: [writer.inline(f"{d}/x", b"1") for d in "abc"])
    failing = ["b"]

    class Once:
        def __getattr__(self, name: str) -> Any:
            return getattr(store, name)

        async def list_dir(self, prefix: str, after: str = "") -> Any:
            if prefix in failing:
                failing.remove(prefix)
                raise ReadError("http://host/b", "status 500")
            async for info in store.list_dir(prefix, after):
                yield info

    report = checked(Once())
    assert (report.ok, report.clean, [bad.reason for bad in report.bad]) == (3, False, ["status 500"])

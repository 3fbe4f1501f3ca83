"""Targets: the forms of a target, refused targets, and local files, also ones that change or are missing."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conftest import open_descriptors
from zarrfs.config import urls
from zarrfs.config.options import Options
from zarrfs.errors import AccessDenied, Loop, OutOfRange, ReadError, TargetChanged, TargetMissing
from zarrfs.store.targets import Targets
from zarrfs.system.localfiles import LocalFiles
from zarrfs.system.own_mount import OWN_MOUNT

DATA = bytes(range(256)) * 100


@pytest.fixture
def base(tmp_path: Path) -> Path:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub/f").write_bytes(DATA)
    (tmp_path / "f").write_bytes(DATA)
    (tmp_path / "a b").write_bytes(DATA)
    (tmp_path / "c%20d").write_bytes(DATA)
    (tmp_path / "e::f").write_bytes(DATA)
    return tmp_path


def read(targets: Targets, url: str, offset: int = 3, length: int = 5) -> bytes:
    """Read from `targets` once, and close it."""

    async def main() -> bytes:
        try:
            return bytes(await targets.read(url, offset, length, 0, len(DATA)))
        finally:
            await targets.aclose()

    return trio.run(main)


# -- forms


@pytest.mark.parametrize(
    ("url", "path"),
    [
        ("{base}/f", "f"),
        ("file://{base}/f", "f"),
        ("file:{base}/f", "f"),
        ("local://{base}/f", "f"),
        ("file://{base}/a b", "a b"),
        ("file://{base}/a%20b", "a b"),
        ("file://{base}/c%20d", "c%20d"),
        ("{base}/e::f", "e::f"),
        ("f", "f"),
        ("sub/f", "sub/f"),
        ("sub/../f", "sub/../f"),
        ("a b", "a b"),
        ("file://sub/f", "sub/f"),
    ],
)
@pytest.mark.parametrize("form", ["{base}/", "file://{base}/"])
def test_local_targets_of_all_forms_are_found(base: Path, url: str, path: str, form: str) -> None:
    targets = Targets(Options(), form.format(base=base))
    url = url.format(base=base)
    assert read(targets, url) == DATA[3:8]
    assert trio.run(targets.size, url) == len(DATA)
    assert os.path.samefile(targets.resolve(url), base / path)


def test_a_percent_encoded_file_is_shown_as_its_url_until_it_is_found(base: Path) -> None:
    targets = Targets(Options(), f"{base}/")
    assert targets.resolve("file://a%20b") == f"file://{base}/a%20b"
    assert targets.resolve(f"{base}/c%20d") == f"{base}/c%20d"  # a path is not decoded


@pytest.mark.parametrize("archive", ["t.zip", "./sub/../t.zip", "file://t.zip", "zip://t.zip::outer.zip"])
def test_an_archive_may_be_relative_to_the_base(base: Path, archive: str) -> None:
    with zipfile.ZipFile(base / "t.zip", "w") as file:
        file.writestr("a b", DATA)
    with zipfile.ZipFile(base / "outer.zip", "w") as file:
        file.write(base / "t.zip", "t.zip")
    assert read(Targets(Options(), f"{base}/"), f"zip://a b::{archive}") == DATA[3:8]
    assert Targets(Options(), "http://h/d/").resolve("zip://a::../t.zip") == "zip://a::http://h/t.zip"


@pytest.mark.parametrize(
    ("url", "data"),
    [
        ("data:application/octet-stream;base64,AAEC/w==", b"\0\1\2\xff"),
        ("data:;base64,AAEC%2Fw%3D%3D", b"\0\1\2\xff"),
        ("data:,a%20b::c://d,%FF", b"a b::c://d,\xff"),
        ("data:text/plain;charset=utf-8,\u00e9", b"\xc3\xa9"),
        ("data:,", b""),
    ],
)
def test_a_data_url_is_read(url: str, data: bytes) -> None:
    async def main() -> None:
        targets = Targets(Options(), "https://host/d/", "https://host/d/set.json")
        assert await targets.size(url, begin=True) == len(data)
        assert await targets.read(url, 0, len(data), 0, len(data)) == data
        assert await targets.read(url, 1, max(len(data) - 1, 0), 0, len(data)) == data[1:] if data else True
        await targets.prefetch([(url, 0, len(data))])
        with pytest.raises(OutOfRange, match=f"has {len(data)} bytes"):
            await targets.read(url, 1, len(data), 1, 1 + len(data))
        assert (targets.resolve(url), targets.remote) == (url, False)
        await targets.aclose()

    trio.run(main)


@pytest.mark.parametrize(
    ("url", "rule"),
    [
        ("data:;base64,AAE", "malformed: incorrect padding"), ("data:;base64,A*EC", "malformed: "),
        ("data:" + "x" * 1000, "malformed: a data: url without a comma"),
    ],
)  # fmt: skip
def test_a_malformed_data_url_is_a_read_error(url: str, rule: str) -> None:
    with pytest.raises(ReadError, match=rule) as caught:
        read(Targets(Options()), url)
    assert len(str(caught.value)) < 200


def test_without_a_base_the_working_directory_is_the_base(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(base)
    assert read(Targets(Options()), "sub/f") == DATA[3:8]


@pytest.mark.parametrize(
    ("base_url", "relative", "absolute"),
    [
        ("http://h/d/", "x/y", "http://h/d/x/y"),
        ("http://h/d/", "../x", "http://h/x"),
        ("http://h/d/", "../../../x", "http://h/x"),
        ("http://h/d/", "file://x/y", "http://h/d/x/y"),
        ("s3://b/d/e/", "./x", "s3://b/d/e/x"),
        ("http://u:p@h/d/", "x", "http://h/d/x"),
        ("http://h/d/", "http://other/x", "http://other/x"),
    ],
)
def test_a_target_is_relative_to_the_url_of_its_base(base_url: str, relative: str, absolute: str) -> None:
    assert Targets(Options(), base_url).resolve(relative) == absolute


@settings(max_examples=40)
@given(st.text(max_size=30))
def test_any_text_can_be_shown_and_fails_as_a_read_error(url: str) -> None:
    targets = Targets(Options(retries=0), "/nowhere/")
    assert isinstance(targets.resolve(url), str)
    if not urls.protocols(url):
        with pytest.raises(ReadError):
            read(targets, url)


# -- refused targets


def test_a_relative_target_of_a_set_in_an_archive_needs_a_base() -> None:
    with pytest.raises(ReadError, match="give its base with -o base="):
        read(Targets(Options(), "zip://refs.json::http://h/"), "x")


# -- local files


async def _read(files: LocalFiles, path: Path, offset: int = 0, length: int = 10) -> bytes:
    return bytes(await files.read(str(path), offset, length))


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("missing", TargetMissing),
        ("f/below", TargetMissing),
        ("sub", ReadError),
        ("fifo", ReadError),
        ("/dev/zero", ReadError),
    ],
)
def test_only_regular_files_are_read(base: Path, name: str, error: type[ReadError]) -> None:
    os.mkfifo(base / "fifo")
    with pytest.raises(error) as caught:
        trio.run(_read, LocalFiles(), base / name)
    assert caught.type is error
    assert str(base / name) in str(caught.value)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_without_read_permission_is_access_denied(base: Path) -> None:
    (base / "f").chmod(0)
    with pytest.raises(AccessDenied):
        trio.run(_read, LocalFiles(), base / "f")


@pytest.mark.parametrize(("offset", "length"), [(len(DATA), 1), (len(DATA) - 5, 6), (0, len(DATA) + 1), (10**15, 1)])
def test_the_error_of_a_read_beyond_the_end_has_the_size(base: Path, offset: int, length: int) -> None:
    said = rf"has {len(DATA)} bytes, bytes \[{offset}, {offset + length}\) were asked for"
    with pytest.raises(OutOfRange, match=said):
        trio.run(_read, LocalFiles(), base / "f", offset, length)


def grow(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"x")


def rewrite(path: Path) -> None:
    status = path.stat()
    path.write_bytes(DATA[::-1])
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))


def truncate(path: Path) -> None:
    os.truncate(path, 100)


def replace(path: Path) -> None:
    status = path.stat()
    new = path.with_name("new")
    new.write_bytes(DATA[::-1])
    os.utime(new, ns=(status.st_atime_ns, status.st_mtime_ns))
    new.rename(path)


@pytest.mark.parametrize(
    ("change", "closed"), [(how, closed) for how in (grow, rewrite, truncate) for closed in (0, 1)] + [(replace, 1)]
)
def test_a_file_that_changes_is_an_error(base: Path, change: Callable[[Path], None], closed: int) -> None:
    async def main() -> None:
        files = LocalFiles()
        assert await _read(files, base / "f") == DATA[:10]
        if closed:
            files._open.bound = 1
            assert await _read(files, base / "a b") == DATA[:10]  # closes the first file
        change(base / "f")
        with pytest.raises(TargetChanged):
            await _read(files, base / "f")
        await files.aclose()

    trio.run(main)


def test_a_file_that_is_replaced_while_it_is_open_is_still_read(base: Path) -> None:
    async def main() -> None:
        files = LocalFiles()
        assert await _read(files, base / "f") == DATA[:10]
        replace(base / "f")
        assert await _read(files, base / "f", 20) == DATA[20:30]
        await files.aclose()

    trio.run(main)


def test_a_target_in_the_mount_that_refers_to_it_is_a_loop(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OWN_MOUNT, "device", os.stat(base).st_dev)
    with pytest.raises(Loop):
        read(Targets(Options()), str(base / "f"))


@pytest.mark.parametrize("archive", ["{base}/t.zip", "file://{base}/t.zip", "zip://inner.zip::{base}/outer.zip"])
def test_an_archive_in_the_mount_that_refers_to_it_is_a_loop(
    base: Path, archive: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("t.zip", "inner.zip"):
        with zipfile.ZipFile(base / name, "w") as file:
            file.writestr("a", DATA)
    with zipfile.ZipFile(base / "outer.zip", "w") as file:
        file.write(base / "inner.zip", "inner.zip")
    url = "zip://a::" + archive.format(base=base)

    async def main() -> None:
        descriptors = open_descriptors()
        targets = Targets(Options())
        assert bytes(await targets.read(url, 3, 5, 0, len(DATA))) == DATA[3:8]
        await targets.aclose()
        assert open_descriptors() <= descriptors
        targets = Targets(Options())
        monkeypatch.setattr(OWN_MOUNT, "device", os.stat(base).st_dev)
        for call in (targets.read(url, 3, 5, 0, len(DATA)), targets.size(url)):
            with pytest.raises(Loop, match=r"\.zip: lies in the mount that refers to it"):
                await call
        assert open_descriptors() <= descriptors
        await targets.aclose()

    trio.run(main)

"""zarr-python, xarray, dask and fsspec read a source through zarrfs without a mount."""

from __future__ import annotations

import errno
import json
import os
import pickle
import shutil
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dask
import fsspec
import numpy as np
import pytest
import trio
import xarray as xr
import zarr

import zarrfs
from zarrfs.python.filesystem import ZarrfsFileSystem
from zarrfs.store.upper import Upper

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module", autouse=True)
def _registered() -> None:
    fsspec.register_implementation("zarrfs", ZarrfsFileSystem, clobber=True)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a Zarr store of two groups, the same as a zip file, and two reference sets of it, one broken."""
    place = tmp_path_factory.mktemp("libraries")
    values = np.random.default_rng(1).normal(size=(4, 30, 20)).astype("f4")
    dataset = xr.Dataset(
        {"t2m": (("time", "lat", "lon"), values)}, {"lat": np.linspace(-90, 90, 30)}, {"title": "a forecast"}
    )
    dataset.to_zarr(place / "x.zarr", zarr_format=3, consolidated=False, encoding={"t2m": {"chunks": (1, 15, 20)}})
    dataset.isel(time=0).to_zarr(place / "x.zarr", group="first", mode="a", zarr_format=3, consolidated=False)
    shutil.make_archive(str(place / "x"), "zip", place / "x.zarr")
    files = [path for path in sorted((place / "x.zarr").rglob("*")) if path.is_file()]
    refs: dict[str, Any] = {str(path.relative_to(place / "x.zarr")): [str(path)] for path in files}
    for key in list(refs):
        if key.endswith("zarr.json"):
            refs[key] = (place / "x.zarr" / key).read_text()
    (place / "set.json").write_text(json.dumps({"version": 1, "refs": refs}))
    refs["t2m/c/2/0/0"] = [str(place / "none.bin"), 0, 100]
    (place / "broken.json").write_text(json.dumps({"version": 1, "refs": refs}))
    return place


@pytest.fixture(scope="module")
def wanted(place: Path) -> xr.Dataset:
    return xr.open_zarr(place / "x.zarr", consolidated=False).load()


@pytest.fixture(scope="module")
def files(place: Path) -> Iterator[ZarrfsFileSystem]:
    files = fsspec.filesystem("zarrfs", source=str(place / "set.json"))
    yield files
    files.close()


def test_xarray_reads_the_same_by_threads_and_by_processes(place: Path, wanted: xr.Dataset) -> None:
    dataset = xr.open_zarr(f"zarrfs://::{place}/set.json", consolidated=False)
    assert dataset.identical(wanted)
    with dask.config.set(scheduler="threads", num_workers=4):
        assert dataset.compute().identical(wanted)
    with dask.config.set({"scheduler": "processes", "num_workers": 1, "multiprocessing.context": "spawn"}):
        assert dataset.t2m.compute().equals(wanted.t2m)


def test_a_forked_process_gets_an_error(place: Path) -> None:
    files = fsspec.filesystem("zarrfs", source=str(place / "set.json"))
    file = files.open("/t2m/zarr.json")
    reader, writer = os.pipe()
    pid = os.fork()
    if not pid:
        for read in (file.read, lambda: files.cat_file("/zarr.json")):
            try:
                read()
            except (zarrfs.UsageError, RuntimeError) as exc:
                os.write(writer, str(exc).encode())
        os._exit(0)
    os.close(writer)
    with open(reader, "rb") as output:
        found = output.read()
    assert b"was opened before a fork" in found
    assert b"not fork-safe" in found
    os.waitpid(pid, 0)


def test_unpickled_file_systems_show_the_same_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "set.json").write_text('{"version": 1, "refs": {"a": "old"}}')
    monkeypatch.chdir(tmp_path)
    files = fsspec.filesystem("zarrfs", source="set.json", retries=3)
    pickled = pickle.dumps(files)
    monkeypatch.chdir("/")
    copies = [pickle.loads(pickled) for _ in range(2)]
    assert copies[0] is copies[1]  # a worker opens the source once
    assert copies[0].cat_file("/a") == b"old"
    copies[0].close()
    (tmp_path / "set.json").write_text('{"version": 1, "refs": {"a": "newer"}}')
    with pytest.raises(zarrfs.SourceError, match="has changed since"):
        pickle.loads(pickled)
    files.close()
    with pytest.raises(zarrfs.UsageError, match="closed"):
        files.cat_file("/a")


def test_a_group_is_listed_and_read(place: Path, wanted: xr.Dataset) -> None:
    first, source = wanted.isel(time=0), f"zarrfs://::{place}/set.json"
    group = zarr.open_group(source, mode="r")
    assert sorted(group.array_keys()) == ["lat", "t2m"]
    assert sorted(group["first"].array_keys()) == ["lat", "t2m"]  # type: ignore[union-attr]
    assert (group["first/t2m"][:] == first.t2m.values).all()  # type: ignore[index,union-attr]
    assert xr.open_zarr(source, group="first", consolidated=False).identical(first)


def test_an_unreadable_chunk_is_an_error_and_not_a_fill_value(place: Path) -> None:
    array = zarr.open_array(f"zarrfs://::{place}/broken.json", path="t2m", mode="r")
    assert np.isfinite(array[1]).all()
    with pytest.raises(zarrfs.ReadError, match=r"t2m/c/2/0/0.*no such file"):
        array[2]


@pytest.mark.parametrize("name", ["c/1/0/0", "c/1"])
def test_a_file_or_directory_in_the_way_of_a_chunk_is_an_error(place: Path, tmp_path: Path, name: str) -> None:
    shutil.copytree(place / "x.zarr", tmp_path / "x.zarr")
    chunk = tmp_path / "x.zarr/t2m" / name
    if chunk.is_dir():
        shutil.rmtree(chunk)
        chunk.touch()
    else:
        chunk.unlink()
        chunk.mkdir()
    array = zarr.open_array(f"zarrfs://::{tmp_path}/x.zarr", path="t2m", mode="r")
    assert np.isfinite(array[2]).all()
    with pytest.raises(zarrfs.ReadError, match=rf"t2m/{name}.*: is (not )?a directory"):
        array[1]


@pytest.mark.parametrize("target", ["nowhere", "zarr.json/c", "../x/./nowhere/"])
def test_chunks_behind_a_dangling_link_are_errors_and_not_fill_values(tmp_path: Path, target: str) -> None:
    """Chunks that are missing from a linked directory do read as fill values."""
    zarr.create_array(tmp_path / "z", shape=(2,), chunks=(1,), dtype="u1", fill_value=7, compressors=None)
    document = {"mode": 0o100644, "encoding": "utf-8", "data": (tmp_path / "z/zarr.json").read_text()}
    (tmp_path / "a.json").write_text(json.dumps({
        "x/zarr.json": document, "x/c": {"mode": 0o120777, "data": target},
        "y/zarr.json": document, "y/c": {"mode": 0o120777, "data": "../d"},
        "d/1": {"mode": 0o100644, "encoding": "utf-8", "data": "A"},
    }))  # fmt: skip
    source = f"zarrfs://::{tmp_path}/a.json"
    with pytest.raises(zarrfs.ReadError, match=r"x/c/[01]: x/c: is, or lies behind, a symbolic link that"):
        zarr.open_array(source, path="x", mode="r")[:]
    assert zarr.open_array(source, path="y", mode="r")[:].tolist() == [7, 65]


@pytest.mark.parametrize("form", ["archive", "directory"])
def test_directories_behind_links_are_listed_under_the_requested_path(form: str, tmp_path: Path) -> None:
    tree, upper = tmp_path / "tree", tmp_path / "upper"
    upper.mkdir()
    zarr.create_group(tree / "v3")
    zarr.create_array(tree / "v3/x", shape=(2,), chunks=(1,), dtype="u1", fill_value=0, compressors=None)[:] = [65, 66]
    links = {"latest": "v3", "v3/x/back": "../..", "gone": "nowhere", "far": "n" * 300}
    for name, target in links.items():
        (tree / name).symlink_to(target)
    found = [path for path in tree.rglob("*") if not path.is_symlink() and path.is_file()]
    files = {str(path.relative_to(tree)): path for path in found}
    (tmp_path / "a.json").write_text(json.dumps({
        **{key: {"mode": 0o100644, "encoding": "utf-8", "data": path.read_text()} for key, path in files.items()},
        **{key: {"mode": 0o120777, "data": target} for key, target in links.items()},
    }))  # fmt: skip
    source, options = (tmp_path / "a.json", {}) if form == "archive" else (tree, {"upperdir": str(upper)})
    below = ["x/c/0", "x/c/1", "x/zarr.json", "zarr.json"]

    listed = fsspec.filesystem("zarrfs", source=str(source), **options)
    assert sorted(listed.ls("/latest", detail=False)) == ["/latest/x", "/latest/zarr.json"]
    assert listed.info("/latest/x/c/1")["size"] == 1
    assert listed.find("") == [
        "/far",
        "/gone",
        *(f"/{top}/{name}" for top in ("latest", "v3") for name in below),
    ]  # not endless
    listed.get("/latest/x/c", str(tmp_path / "copy"), recursive=True)
    assert (tmp_path / "copy/1").read_bytes() == b"B"
    listed.close()


def test_fsspec_lists_and_reads_the_files(files: ZarrfsFileSystem, place: Path, tmp_path: Path) -> None:
    data = (place / "x.zarr/t2m/zarr.json").read_bytes()
    name = "/t2m/zarr.json"
    assert sorted(files.ls("", detail=False)) == ["/first", "/lat", "/t2m", "/zarr.json"]
    assert files.info(name)["size"] == len(data)
    assert files.find("/lat") == ["/lat/c/0", "/lat/zarr.json"]
    assert files.glob("t2m/c/*/1/0") == [f"/t2m/c/{number}/1/0" for number in range(4)]
    assert files.cat_file(name) == files.cat("zarrfs://t2m/zarr.json") == data
    for start, end in ((3, 9), (-5, None), (None, -5), (-9, -2), (9, 3), (5, 10**6)):
        assert files.cat_file(name, start, end) == data[start:end]
    assert files.cat_ranges([name, name], [0, 4], [2, 9]) == [data[:2], data[4:9]]
    files.get("/lat", str(tmp_path / "lat"), recursive=True)
    assert (tmp_path / "lat/c/0").read_bytes() == (place / "x.zarr/lat/c/0").read_bytes()
    with files.open(name) as file:
        assert (file.read(5), file.seek(-3, 2), file.read()) == (data[:5], len(data) - 3, data[-3:])
    assert [files.exists(path) for path in ("", "/t2m", name)] == [True] * 3
    assert [files.exists(path) for path in ("/none", f"{name}/x", "a//b")] == [False] * 3
    assert pickle.loads(pickle.dumps(files)).cat_file(name) == data


def test_a_downloaded_file_is_of_one_version(tmp_path: Path) -> None:
    whole, new = tmp_path / "tree/big", tmp_path / "new"
    whole.parent.mkdir()
    whole.write_bytes(b"old" * (3 << 20))
    new.write_bytes(b"new" * (3 << 20))

    class Replaces(fsspec.Callback):  # type: ignore[misc]
        def relative_update(self, inc: int = 1) -> None:
            if new.exists():
                new.replace(whole)

    files = fsspec.filesystem("zarrfs", source=str(whole.parent))
    files.get_file("/big", str(tmp_path / "copy"), callback=Replaces())
    files.close()
    assert not new.exists()
    assert (tmp_path / "copy").read_bytes() == b"old" * (3 << 20)


def test_a_directory_that_cannot_be_listed_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tree/a").mkdir(parents=True)
    (tmp_path / "tree/a/b").write_text("x")
    (tmp_path / "upper").mkdir()

    def listing(upper: Upper, key: str) -> Any:
        if key == "a":
            raise OSError(errno.EACCES, "Permission denied")
        return real(upper, key)

    real = Upper.listing
    monkeypatch.setattr(Upper, "listing", listing)
    files = fsspec.filesystem("zarrfs", source=str(tmp_path / "tree"), upperdir=str(tmp_path / "upper"))
    for call in (files.find, files.ls):
        with pytest.raises(zarrfs.ReadError, match="a: permission denied"):
            call("/a")
    with pytest.raises(zarrfs.ReadError, match="a: permission denied"):
        files.get("", str(tmp_path / "copy"), recursive=True)
    files.close()


def test_each_failure_has_its_own_exception(files: ZarrfsFileSystem, place: Path) -> None:
    for call in (files.cat_file, files.info, files.open, files.ls):
        with pytest.raises(FileNotFoundError):
            call("/none")
    with pytest.raises(zarrfs.ReadError, match="is a directory"):
        files.cat_file("/t2m")
    for write in (
        lambda: files.pipe_file("/x", b""), lambda: files.rm_file("/zarr.json"), lambda: files.open("/x", "wb"),
        lambda: files.mkdir("/x"), lambda: files.rmdir("/t2m"),
    ):  # fmt: skip
        with pytest.raises(OSError, match="read-only") as caught:
            write()
        assert caught.value.errno == errno.EROFS
    broken = fsspec.filesystem("zarrfs", source=str(place / "broken.json"))
    assert broken.exists("/t2m/c/2/0/0")
    with pytest.raises(zarrfs.ReadError):
        broken.cat_file("/t2m/c/2/0/0")
    with pytest.raises(zarrfs.UsageError, match="unknown option 'retrys'"):
        fsspec.filesystem("zarrfs", source=str(place / "set.json"), retrys=3)
    with pytest.raises(zarrfs.SourceError, match="no such file"):
        fsspec.open(f"zarrfs://x::{place}/none.json").open()
    with pytest.raises(zarrfs.UsageError, match="no source"):
        fsspec.filesystem("zarrfs")


def test_zarr_writes_through_an_upper_directory(place: Path, tmp_path: Path) -> None:
    """Arrays are changed, made and removed by zarr; a mount, and another file system, show the same; the set stays."""
    document, upper = (place / "set.json").read_bytes(), tmp_path / "upper"
    upper.mkdir()
    url, options = f"zarrfs://::{place}/set.json", {"upperdir": str(upper)}
    group = zarr.open_group(url, mode="r+", storage_options=options)
    wanted = group["t2m"][:]
    group["t2m"][1] = wanted[1] = 7
    group.create_array("new/x", shape=(4,), dtype="i4")[:] = [1, 2, 3, 4]
    del group["lat"]
    xr.Dataset({"q": ("y", [1.5, 2])}).to_zarr(f"zarrfs://more::{place}/set.json", storage_options=options, mode="w")

    seen = fsspec.filesystem("zarrfs", source=str(place / "set.json"), **options)
    with pytest.raises(IsADirectoryError):
        seen.rm("/new")
    seen.put(str(place / "x.zarr/lat"), "/again", recursive=True)
    seen.pipe_file("/again/c/0", b"")
    with pytest.raises(FileNotFoundError):
        seen.rm("/none")
    with pytest.raises(OSError, match="reserved name"):
        seen.pipe_file("/.wh.x", b"")
    with pytest.raises(OSError, match="pipe_file"):
        seen.open("/x", "wb")
    assert seen.cat_file("/again/zarr.json") == (place / "x.zarr/lat/zarr.json").read_bytes()
    seen.rm("/again", recursive=True)
    assert sorted(seen.ls("", detail=False)) == ["/first", "/more", "/new", "/t2m", "/zarr.json"]

    with pytest.raises(zarrfs.SourceError, match="in use"), zarrfs.mounted(str(place / "set.json"), **options):
        pass  # a mount would write to the same directory
    again = zarr.open_group(url, mode="r", storage_options=options)
    assert (again["t2m"][:] == wanted).all()
    assert again["new/x"][:].tolist() == [1, 2, 3, 4]
    assert again["more/q"][:].tolist() == [1.5, 2]
    seen.close()
    assert (place / "set.json").read_bytes() == document


def test_values_below_links_are_written_as_in_a_mount(tmp_path: Path) -> None:
    """zarr takes a FileNotFoundError of a delete for success; an overlay has values at their resolved keys."""
    (tmp_path / "upper").mkdir()
    array = zarr.create_array(tmp_path / "x/a", shape=(6,), chunks=(2,), dtype="i4", fill_value=0)
    array[:] = [1, 2, 3, 4, 5, 6]
    (tmp_path / "x/a/c").rename(tmp_path / "x/real")
    (tmp_path / "x/a/c").symlink_to("../real")
    (tmp_path / "x/out").symlink_to(tmp_path)
    (tmp_path / "x/d").mkdir()
    (tmp_path / "x/link").symlink_to("d")
    options = {"upperdir": str(tmp_path / "upper")}
    written = zarr.open_array(f"zarrfs://a::{tmp_path}/x", mode="r+", storage_options=options)
    written[:4] = [0, 0, 7, 8]  # one chunk is deleted, one set
    assert written[:].tolist() == [0, 0, 7, 8, 5, 6]
    files = fsspec.filesystem("zarrfs", source=str(tmp_path / "x"), **options)
    files.pipe_file("/link/n/e/w", b"1")
    assert files.cat_file("/d/n/e/w") == files.cat_file("/link/n/e/w") == b"1"
    for call in (files.rm_file, lambda path: files.pipe_file(path, b"1")):
        with pytest.raises(zarrfs.ReadError):
            call("/out/x/a/zarr.json")
    with pytest.raises(FileNotFoundError):
        files.rm("/link/none")
    files.close()
    assert sorted(os.listdir(tmp_path / "x/real")) == ["0", "1", "2"]


def test_fsspec_copies_and_removes_the_named_files(tmp_path: Path) -> None:
    for name in ("d/a[0]", "d/a0", "d/e/f"):
        (tmp_path / "x" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "x" / name).write_text(name)
    (tmp_path / "upper").mkdir()
    files = fsspec.filesystem("zarrfs", source=str(tmp_path / "x"), upperdir=str(tmp_path / "upper"))
    files.cp("/d", "/copy", recursive=True)
    files.mv("/copy", "/moved", recursive=True)
    assert files.find("/moved") == ["/moved/a0", "/moved/a[0]", "/moved/e/f"]
    assert not files.exists("/copy")
    files.rm("/d/a[0]")
    assert files.find("/d") == ["/d/a0", "/d/e/f"]
    with pytest.raises(FileExistsError):
        files.put_file(str(tmp_path / "x/d/a0"), "/d/e/f", mode="create")
    files.close()


def test_a_forked_process_needs_the_lock_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    (tmp_path / "x/.zgroup").write_text("{}")
    (tmp_path / "upper").mkdir()
    options = {"source": str(tmp_path / "x"), "upperdir": str(tmp_path / "upper")}
    files = fsspec.filesystem("zarrfs", **options)
    files.pipe_file("/a", b"1")
    told, tell = os.pipe()
    closed, close = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(close)
            own = ZarrfsFileSystem(**options)
            try:
                own.pipe_file("/b", b"1")
            except zarrfs.SourceError:
                os.write(tell, b"in use, ")
            os.read(closed, 1)  # the parent has closed its file system: this process has no lock of it
            own.pipe_file("/b", b"1")
            os.write(tell, b"written")
        finally:
            os._exit(0)
    os.close(tell)
    assert os.read(told, 100) == b"in use, "
    files.close()
    os.close(close)
    os.waitpid(pid, 0)
    assert os.read(told, 100) == b"written"
    os.close(told)
    os.close(closed)


def test_a_refused_directory_of_changes_is_refused_again(tmp_path: Path) -> None:
    opened = []
    (tmp_path / "upper").mkdir()
    for name in ("x", "y"):
        (tmp_path / name).mkdir()
        (tmp_path / name / ".zgroup").write_text("{}")
        opened.append(fsspec.filesystem("zarrfs", source=str(tmp_path / name), upperdir=str(tmp_path / "upper")))
    opened[0].pipe_file("/a", b"x")
    for _ in range(2):
        with pytest.raises(zarrfs.SourceError, match="holds changes of"):
            opened[1].pipe_file("/a", b"y")
    assert opened[0].cat_file("/a") == b"x"
    for files in opened:
        files.close()
    (tmp_path / "x/inside").mkdir()
    for source, upper in (("x", "x/inside"), ("upper/y", "upper")):
        shutil.copytree(tmp_path / "y", tmp_path / "upper/y", dirs_exist_ok=True)
        with pytest.raises(zarrfs.SourceError, match="inside"):
            fsspec.filesystem("zarrfs", source=str(tmp_path / source), upperdir=str(tmp_path / upper))


def test_chained_urls_are_opened(place: Path, wanted: xr.Dataset) -> None:
    with fsspec.open(f"zarrfs://zarr.json::zip://::{place}/x.zip") as file:
        assert file.read() == (place / "x.zarr/zarr.json").read_bytes()
    options = {"retries": 3, "zip": {"allowZip64": True}}
    files, path = fsspec.url_to_fs(f"zarrfs://t2m::zip://::file://{place}/x.zip", **options)
    assert (path, files.ls(path, detail=False)) == ("/t2m", ["/t2m/c", "/t2m/zarr.json"])
    dataset = xr.open_zarr(f"zarrfs://::{place}/x.zarr", consolidated=False, storage_options={"memory_limit": "64MiB"})
    assert dataset.identical(wanted)


def test_fsspec_finds_the_protocol() -> None:
    points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    kind = ZarrfsFileSystem
    assert points == {"fsspec.specs": {"zarrfs": f"{kind.__module__}:{kind.__name__}"}}


def test_a_program_that_runs_in_trio_opens_a_store_in_memory() -> None:
    fsspec.filesystem("memory").pipe("/trio.zarr/.zgroup", b'{"zarr_format": 2}')

    async def names() -> list[str]:
        found: list[str] = fsspec.filesystem("zarrfs", fo="memory://trio.zarr").ls("", detail=False)
        return found

    assert trio.run(names) == ["/.zgroup"]

"""Zarr stores as sources: directories, servers with listings, other places, and the Parquet layout."""

from __future__ import annotations

import json
import os
import tracemalloc
import zipfile
from pathlib import Path
from typing import Any

import fsspec
import pytest

from tests.conftest import DATA
from tests.references.parquetsets import write_set, zarray
from tests.servers import Faulty, Nginx, free_port
from tests.sources.zarrstores import OPTIONS, SAMPLES, put, tree_of, with_store
from tests.store.contract import children, directories, keys, listed
from zarrfs.config.options import Options
from zarrfs.documents.plan import Plan
from zarrfs.errors import NotDirectory, NotFound, SourceError
from zarrfs.sources import plan_source
from zarrfs.sources.zarrstore import plan_directory, plan_remote
from zarrfs.store.api import Kind, Store

TIME_NS = 1_234_567_890 * 10**9


# -- directories


def test_a_directory_in_the_parquet_layout_is_a_reference_set(tmp_path: Path) -> None:
    document = tmp_path / ".zmetadata"
    document.write_text('{"metadata": {}, "record_size": 10000}')
    plan = plan_directory(f"file://{tmp_path}", str(tmp_path), OPTIONS)
    assert (plan.kind, plan.path, plan.source) == ("references", str(tmp_path), str(tmp_path))
    assert (plan.base, plan.origin, plan.mtime_ns) == (f"{tmp_path}/", "", document.stat().st_mtime_ns)
    assert plan_source(str(tmp_path), Options(base="http://h/b")).base == "http://h/b/"
    assert plan_directory(str(tmp_path), str(tmp_path), Options(type="zarr")).kind == "zarr"
    document.write_text("damaged")
    assert plan_directory(str(tmp_path), str(tmp_path), OPTIONS).kind == "zarr"
    with pytest.raises(SourceError, match=r"has the Parquet layout: a \.zmetadata with record_size"):
        plan_directory(str(tmp_path), str(tmp_path), Options(type="references"))


@pytest.mark.parametrize("rest", ["", "?sig=abc", "?sig=a/b", "#a/b"])
def test_relative_targets_of_a_parquet_set_carry_its_query(tmp_path: Path, faulty: Faulty, rest: str) -> None:
    root = write_set(tmp_path / "set", {"x/.zarray": zarray([8], [8])}, {"x": [["./data.bin", 0, 8]]})
    query = rest if rest.startswith("?") else ""
    for key, value in {**tree_of(root), "data.bin": b"GOODDATA"}.items():
        faulty.put(f"/signed/{key}{query}", value)

    async def check(store: Store, _: Plan) -> bytes:
        return bytes(await store.get("x/0"))

    assert with_store(f"{faulty.url}/signed{rest}", check) == b"GOODDATA"
    assert ("GET", f"/signed/data.bin{query}", "bytes=0-7") in faulty.requests


def test_a_zmetadata_that_is_no_regular_file_is_not_read(tmp_path: Path) -> None:
    """A FIFO would block the mount forever; a device has no end."""
    os.mkfifo(tmp_path / ".zmetadata")
    assert plan_directory("x", str(tmp_path), OPTIONS).kind == "zarr"
    (tmp_path / ".zmetadata").unlink()
    (tmp_path / ".zmetadata").symlink_to("/dev/zero")
    assert plan_directory("x", str(tmp_path), OPTIONS).kind == "zarr"


def test_a_zmetadata_over_the_limit_is_refused(tmp_path: Path) -> None:
    (tmp_path / ".zmetadata").write_text('{"metadata": {}, "record_size": 10000}')
    with pytest.raises(SourceError, match=r"zmetadata: more than 20 bytes"):
        plan_directory("x", str(tmp_path), Options(document_limit=20))
    assert plan_directory("x", str(tmp_path), Options(document_limit=20, type="zarr")).kind == "zarr"


def test_consolidated_metadata_is_not_held_in_memory(tmp_path: Path) -> None:
    (tmp_path / ".zmetadata").write_text(json.dumps({"metadata": {"a": "x" * (16 << 20)}}))
    tracemalloc.start()
    try:
        assert plan_directory("x", str(tmp_path), OPTIONS).kind == "zarr"
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("before", [0, (1 << 20) - 8, 5 << 20])
def test_a_record_size_is_found_anywhere_in_the_zmetadata(before: int, tmp_path: Path) -> None:
    (tmp_path / ".zmetadata").write_text(" " * before + '{"record_size": 10000, "metadata": {}}')
    assert plan_directory("x", str(tmp_path), OPTIONS).kind == "references"


# -- servers with listings


@pytest.mark.parametrize("name", SAMPLES)
def test_a_store_on_a_server_that_lists(nginx: Nginx, name: str) -> None:
    """nginx omits names that begin with a dot; the store lists the metadata nevertheless."""
    tree = tree_of(DATA / "zarr" / name)

    async def check(store: Store, plan: Any) -> None:
        assert plan.lists
        assert not plan.warnings
        assert sorted(await keys(store)) == sorted(tree)
        for prefix in directories(tree):
            assert {i.name: i.kind for i in await listed(store, prefix)} == children(tree, prefix)
            assert (await store.info(prefix)).kind is Kind.DIRECTORY
        for key, value in tree.items():
            assert bytes(await store.get(key)) == value

    with_store(put(nginx.listing, name), check)
    if name == "v2_odd":
        with_store(put(nginx.listing, name) + "/", check)


def test_a_plain_tree_on_a_server_that_lists(nginx: Nginx) -> None:
    (nginx.listing.root / "tree/of").mkdir(parents=True)
    (nginx.listing.root / "tree/of/files").write_bytes(b"x")

    async def check(store: Store, plan: Any) -> None:
        assert await keys(store) == ["of/files"]
        with pytest.raises(NotDirectory):
            await listed(store, "of/files")
        with pytest.raises(NotFound):
            await listed(store, "nope")

    with_store(f"{nginx.listing.url}/tree", check)


# -- other places


def test_stores_in_zip_files(nginx: Nginx, tmp_path: Path) -> None:
    tree = tree_of(DATA / "zarr/v2_hier")
    path = nginx.plain.root / "store.zip"
    with zipfile.ZipFile(path, "w") as archive:
        for key, value in tree.items():
            archive.writestr(key, value)

    async def check(store: Store, plan: Any) -> None:
        assert store.immutable
        assert sorted(await keys(store)) == sorted(tree)
        for key, value in tree.items():
            assert bytes(await store.get(key)) == value

    for url in (f"{nginx.plain.url}/store.zip", f"zip://::{nginx.plain.url}/store.zip", f"zip://::file://{path}"):
        with_store(url, check)
        assert plan_remote(url, OPTIONS).url == url.replace("http", "zip://::http", not url.startswith("zip"))


# -- errors


@pytest.mark.parametrize(
    ("url", "rule"),
    [
        ("{listing}/nope", "404"),
        ("{plain}/nope", "404"),
        ("{plain}/empty", "no Zarr metadata there, and the server shows no listing"),
        ("{listing}/file", "404"),
        ("http://127.0.0.1:{free}/x", "Connection refused"),
        ("nosuch://x", "the protocol 'nosuch' is unknown"),
        ("dropbox://x/y", "dropbox needs the package"),
        ("zip://::{listing}/file", "bad zip file"),
        ("zip://::{listing}/nope", "404"),
        ("zip://nope::{listing}/ok.zip", "not found"),
        ("tar://::{listing}/file", "only zip"),
        ("memory://nope", "not found"),
    ],
)
def test_sources_that_cannot_be_opened(nginx: Nginx, url: str, rule: str) -> None:
    root = nginx.listing.root
    (root / "empty").mkdir(exist_ok=True)
    (root / "file").write_bytes(b"text")
    with zipfile.ZipFile(root / "ok.zip", "w") as archive:
        archive.writestr("a", b"")
    url = url.format(listing=nginx.listing.url, plain=nginx.plain.url, free=free_port())
    with pytest.raises(SourceError) as caught:
        plan_remote(url, OPTIONS)
    assert rule in caught.value.rule
    assert str(caught.value).startswith(url)
    assert "\n" not in str(caught.value)


def test_the_parquet_layout_behind_a_url() -> None:
    memory = fsspec.filesystem("memory")
    memory.pipe("/parquet/.zmetadata", b'{"metadata": {}, "record_size": 10}')
    plan = plan_remote("memory://parquet", OPTIONS)
    assert (plan.kind, plan.url, plan.base, plan.origin) == (
        "references", "memory://parquet", "memory://parquet/", "",
    )  # fmt: skip
    assert plan_remote("memory://parquet", Options(type="zarr")).kind == "zarr"
    memory.pipe("/parquet/.zmetadata", b'{"metadata": {}, "zarr_consolidated_format": 1}')
    assert plan_remote("memory://parquet", OPTIONS).kind == "zarr"
    with pytest.raises(SourceError, match=r"has the Parquet layout: a \.zmetadata with record_size"):
        plan_remote("memory://parquet", Options(type="references"))


@pytest.mark.parametrize("listed", [True, False])
def test_a_parquet_set_with_a_refused_zmetadata_is_no_plain_directory(listed: bool, faulty: Faulty) -> None:
    """If other names are listed and `.zmetadata` is not, the server may hide it."""
    names = (".zmetadata", "x/") if listed else ("x/",)
    page = "".join(f'<a href="{name}">{name}</a>' for name in names)
    faulty.put("/set/", f"<html><title>Index of /set/</title>{page}</html>".encode(), forever="html")
    faulty.put("/set/.zmetadata", b"", forever=403)
    faulty.head("/set/.zmetadata", forever=403)
    with pytest.raises(SourceError, match=r"/set/\.zmetadata: .*403.*-o type=zarr"):
        plan_remote(f"{faulty.url}/set/", OPTIONS)
    assert plan_remote(f"{faulty.url}/set/", Options(type="zarr", retries=0)).kind == "zarr"


@pytest.mark.parametrize("target", [".zmetadata", "nowhere"])
def test_a_zmetadata_that_cannot_be_opened_is_an_error(target: str, tmp_path: Path) -> None:
    (tmp_path / ".zmetadata").symlink_to(target)
    with pytest.raises(SourceError, match=r"/\.zmetadata: .*-o type=zarr"):
        plan_directory(str(tmp_path), str(tmp_path), OPTIONS)
    assert plan_directory(str(tmp_path), str(tmp_path), Options(type="zarr")).kind == "zarr"


def test_errors_show_no_secrets(nginx: Nginx) -> None:
    for place in (f"{nginx.plain.url}/nope", f"http://127.0.0.1:{free_port()}/x"):
        url = place.replace("http://", "http://user:secret@")
        for call in (plan_remote, plan_source):
            with pytest.raises(SourceError) as caught:
                call(url, OPTIONS)
            assert "secret" not in str(caught.value)

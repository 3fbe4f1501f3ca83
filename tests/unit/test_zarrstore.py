"""Zarr stores as sources: planning, documents behind URLs, and servers that list nothing or not all."""

from __future__ import annotations

import json
import os
import shutil
import tracemalloc
import zipfile
from pathlib import Path
from typing import Any

import fsspec
import pytest
import trio

from tests.conftest import DATA
from tests.servers import S3, Faulty, Nginx, Web, free_port
from tests.store_contract import Tree, children, directories, keys, listed
from zarrfs.errors import IsDirectory, NotDirectory, NotFound, ReadError, SourceError
from zarrfs.options import Options
from zarrfs.sources import open_plan, plan_source
from zarrfs.sources.fetching import read_document
from zarrfs.sources.unlisted import DOCUMENTS, UnlistedStore, consolidated_nodes, read_node
from zarrfs.sources.zarrstore import plan_directory, plan_remote
from zarrfs.store.api import Kind, Store
from zarrfs.store.filesystem import FileSystemStore
from zarrfs.store.remote import FsspecStore

OPTIONS = Options(retries=0)
TIME_NS = 1_234_567_890 * 10**9
SAMPLES = sorted(path.name for path in (DATA / "zarr").iterdir() if path.is_dir())


def tree_of(path: Path) -> Tree:
    """The files below a directory."""
    return {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}


def put(web: Web, name: str) -> str:
    """Copy a sample to a server; returns its URL."""
    shutil.copytree(DATA / "zarr" / name, web.root / name, dirs_exist_ok=True)
    return f"{web.url}/{name}"


def put_exact(server: Faulty, name: str, tree: Tree) -> str:
    """Put a store on a server that knows exact names only: no listings, no redirects."""
    for key, value in tree.items():
        server.put(f"/{name}/{key}", value)
    server.put(f"/{name}/", b"<h1>No listing here</h1>", forever="html")
    return f"{server.url}/{name}"


def with_store(url: str, check: Any, options: Options = OPTIONS) -> Any:
    """`check(store, plan)` of the store at `url`."""
    plan = plan_remote(url, options)

    async def main() -> Any:
        store = open_plan(plan, options)
        try:
            return await check(store, plan)
        finally:
            await store.aclose()

    return trio.run(main)


# -- directories


def test_a_directory(tmp_path: Path) -> None:
    plan = plan_directory(f"file://{tmp_path}", str(tmp_path), OPTIONS)
    assert (plan.kind, plan.path, plan.source) == ("zarr", str(tmp_path), str(tmp_path))
    assert isinstance(open_plan(plan, OPTIONS), FileSystemStore)


def test_a_directory_in_the_parquet_layout(tmp_path: Path) -> None:
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


def test_a_document_that_is_no_regular_file(tmp_path: Path) -> None:
    """A fifo would hold the mount forever, a device has no end."""
    os.mkfifo(tmp_path / ".zmetadata")
    assert plan_directory("x", str(tmp_path), OPTIONS).kind == "zarr"
    (tmp_path / ".zmetadata").unlink()
    (tmp_path / ".zmetadata").symlink_to("/dev/zero")
    assert plan_directory("x", str(tmp_path), OPTIONS).kind == "zarr"


def test_a_document_over_the_limit(tmp_path: Path) -> None:
    (tmp_path / ".zmetadata").write_text('{"metadata": {}, "record_size": 10000}')
    with pytest.raises(SourceError, match=r"zmetadata: more than 20 bytes \(-o document_limit="):
        plan_directory("x", str(tmp_path), Options(document_limit=20))
    assert plan_directory("x", str(tmp_path), Options(document_limit=20, type="zarr")).kind == "zarr"


def test_consolidated_metadata_is_not_held(tmp_path: Path) -> None:
    (tmp_path / ".zmetadata").write_text(json.dumps({"metadata": {"a": list(range(2_000_000))}}))
    tracemalloc.start()
    try:
        assert plan_directory("x", str(tmp_path), OPTIONS).kind == "zarr"
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("before", [0, (1 << 20) - 13, (1 << 20) - 8, (1 << 20) - 2, 1 << 20, 5 << 20])
def test_a_record_size_is_found_wherever_it_is(before: int, tmp_path: Path) -> None:
    (tmp_path / ".zmetadata").write_text(" " * before + '{"record_size": 10000, "metadata": {}}')
    assert plan_directory("x", str(tmp_path), OPTIONS).kind == "references"


def test_a_directory_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="no such file"):
        plan_directory("x", str(tmp_path / "x"), OPTIONS)


# -- servers that list


@pytest.mark.parametrize("name", SAMPLES)
def test_a_store_on_a_server_that_lists(nginx: Nginx, name: str) -> None:
    """nginx hides names with a dot; the metadata is shown all the same."""
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


# -- servers that do not


@pytest.mark.parametrize("name", SAMPLES)
@pytest.mark.parametrize("redirects", [True, False])
def test_a_store_on_a_server_that_does_not_list(
    nginx: Nginx, faulty: Faulty, name: str, redirects: bool
) -> None:
    tree = tree_of(DATA / "zarr" / name)
    url = put(nginx.plain, name) if redirects else put_exact(faulty, name, tree)

    async def check(store: Store, plan: Any) -> None:
        assert isinstance(store, UnlistedStore)
        assert not plan.lists
        assert len(plan.warnings) == 1
        for prefix in directories(tree):
            assert (await store.info(prefix)).kind is Kind.DIRECTORY, prefix
            with pytest.raises(IsDirectory):
                await store.get(prefix)
        for key, value in tree.items():
            assert bytes(await store.get(key)) == value
            assert (await store.info(key)).size == len(value)
            with pytest.raises(NotDirectory):
                await listed(store, key)
        for key in sorted(tree)[::7]:
            for absent in (key + "x", key + "/x", "nope", "nope/" + key):
                for call in (store.info, store.get):
                    with pytest.raises((NotFound, NotDirectory)):
                        await call(absent)
        shown = await keys(store)
        documents = {key for key in tree if key.rpartition("/")[2] in DOCUMENTS}
        assert set(shown) <= documents
        if name.endswith("_hier"):  # consolidated: every node is known
            assert set(shown) == documents

    with_store(url, check)


NESTED: Tree = {
    "zarr.json": b'{"zarr_format": 3, "node_type": "group"}',
    "g/zarr.json": b'{"zarr_format": 3, "node_type": "group"}',
    "g/a/zarr.json": json.dumps({
        "zarr_format": 3, "node_type": "array", "shape": [4, 4],
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
    }).encode(),
    "g/a/c/0/1": b"chunk",
    "flat/zarr.json": json.dumps({
        "zarr_format": 3, "node_type": "array", "shape": [4, 4],
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "."}},
    }).encode(),
    "scalar/zarr.json": b'{"zarr_format": 3, "node_type": "array", "shape": []}',
    "scalar/c": b"chunk",
    "two/.zgroup": b'{"zarr_format": 2}',
    "two/nested/.zarray": b'{"zarr_format": 2, "shape": [4, 4, 4], "dimension_separator": "/"}',
    "two/nested/0/1/2": b"chunk",
    "two/silent/.zarray": b'{"zarr_format": 2, "shape": [4, 4]}',
    "two/silent/0/1": b"chunk",
    "two/flat/.zarray": b'{"zarr_format": 2, "shape": [4, 4], "dimension_separator": "."}',
    "two/flat/0.0": b"chunk",
    "zero/__zmeta__": b'{"chunks": [4], "shape": [4], "dtype": "<i4"}',
    "zero/__zdata__/0.blosc": b"chunk",
    "pickled/__zmeta__": b"(dp0\nS'chunks'\np1\n(I4\ntp2\ns.",
    "pickled/__zdata__/0.blosc": b"chunk",
    "one/meta": b'{"zarr_format": 1, "chunks": [4], "shape": [4]}',
    "one/0": b"chunk",
}  # fmt: skip

ABSENT = [
    "g/a/0", "g/a/c/x", "g/a/c/0/2", "g/a/c/0/1/2", "g/a/c/01", "g/a/c/-1", "g/b", "flat/c", "flat/0",
    "scalar/c2", "two/nested/0/1/3", "two/nested/c", "two/nested/x", "two/flat/0", "two/flat/1",
    "zero/__zdata__/1.blosc", "zero/0", "one/1", "one/__zdata__", ".zattrs", "g/.zattrs", "g/a/zarr.json/x",
]  # fmt: skip


def test_directories_of_chunks(faulty: Faulty) -> None:
    async def check(store: Store, plan: Any) -> None:
        for prefix in directories(NESTED):
            assert (await store.info(prefix)).kind is Kind.DIRECTORY, prefix
        for key in ABSENT:
            with pytest.raises((NotFound, NotDirectory)):
                await store.info(key)
        assert [info.name for info in await listed(store, "g/a")] == ["zarr.json"]
        assert [info.name for info in await listed(store, "")] == ["zarr.json"]
        assert await listed(store, "g/a/c") == []

    with_store(put_exact(faulty, "nested", NESTED), check)


def test_a_missing_chunk_costs_one_request(faulty: Faulty) -> None:
    async def check(store: Store, plan: Any) -> None:
        await store.info("g/a/c/0/1")
        with pytest.raises(NotFound):
            await store.info("g/a/c/3/3")
        faulty.requests.clear()
        for number in range(3):
            with pytest.raises(NotFound):
                await store.info(f"g/a/c/2/{number}")
        assert len(faulty.requests) == 3

    with_store(put_exact(faulty, "nested", NESTED), check)


def test_a_missing_document_costs_one_request(faulty: Faulty) -> None:
    async def check(store: Store, plan: Any) -> None:
        await store.info("two")
        for key in (".zattrs", "two/.zattrs", "two/zarr.json"):
            faulty.requests.clear()
            with pytest.raises(NotFound):
                await store.info(key)
            assert faulty.requests == [("HEAD", f"/nested/{key}", None)]

    with_store(put_exact(faulty, "nested", NESTED), check)


def test_a_group_that_only_consolidated_metadata_knows(faulty: Faulty) -> None:
    array = b'{"zarr_format": 2, "shape": [4]}'
    tree = {
        ".zgroup": b'{"zarr_format": 2}', "a/b/.zarray": array, "a/b/0": b"chunk",
        ".zmetadata": b'{"metadata": {".zgroup": {}, "a/b/.zarray": ' + array + b"}}",
    }  # fmt: skip

    async def check(store: Store, plan: Any) -> None:
        assert (await store.info("a")).kind is Kind.DIRECTORY
        assert await keys(store) == [".zgroup", ".zmetadata", "a/b/.zarray"]
        with pytest.raises(NotFound):
            await store.info("b")

    with_store(put_exact(faulty, "implicit", tree), check)


def test_a_server_that_answers_everything_with_a_page(faulty: Faulty) -> None:
    """A page is no metadata, so it makes no directory."""
    tree = {"zarr.json": NESTED["zarr.json"], "a/zarr.json": b"<html>", "b/.zarray": b"[]", "c/meta": b"{}"}

    async def check(store: Store, plan: Any) -> None:
        for key in "abc":
            with pytest.raises(NotFound):
                await store.info(key)

    with_store(put_exact(faulty, "pages", tree), check)


def test_a_server_that_fails_is_no_evidence_of_absence(faulty: Faulty) -> None:
    url = put_exact(faulty, "failing", NESTED)

    async def check(store: Store, plan: Any) -> None:
        faulty.put("/failing/g/zarr.json", b"", forever=500)
        faulty.head("/failing/g/zarr.json", forever=500)
        for call in (store.info, store.get):
            with pytest.raises(ReadError):
                await call("g")

    try:
        with_store(url, check)
    finally:
        faulty.head("/failing/g/zarr.json")


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("zarr.json", b""), ("zarr.json", b"[]"), ("zarr.json", b"{}"), ("zarr.json", b'{"node_type": "array"}'),
        (".zarray", b'{"shape": 5}'), (".zgroup", b"{}"), ("meta", b'{"shape": []}'), ("__zmeta__", b"<html>."),
        ("zarr.json", b"[" * 100_000),
    ],
)  # fmt: skip
def test_documents_that_make_no_node(name: str, data: bytes) -> None:
    assert read_node(name, data) is None


def test_consolidated_metadata() -> None:
    two = b'{"metadata": {".zgroup": {}, "a/b/.zarray": {}, "a/b/.zattrs": {}, "c/.zgroup": {}}}'
    assert consolidated_nodes(".zmetadata", two) == {"", "a", "a/b", "c"}
    three = b'{"consolidated_metadata": {"metadata": {"a/b": {}, "c": {}}}}'
    assert consolidated_nodes("zarr.json", three) == {"", "a", "a/b", "c"}
    assert consolidated_nodes("zarr.json", b'{"node_type": "group"}') is None


# -- other places


def test_zip_files(nginx: Nginx, tmp_path: Path) -> None:
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


def test_memory_and_s3(s3: S3) -> None:
    tree = tree_of(DATA / "zarr/v3_hier")
    for key, value in tree.items():
        s3.client.put_object(Bucket=s3.bucket, Key=f"hier.zarr/{key}", Body=value)
    fsspec.filesystem("memory").pipe({f"/hier.zarr/{key}": value for key, value in tree.items()})

    async def check(store: Store, plan: Any) -> None:
        assert isinstance(store, FsspecStore)
        assert sorted(await keys(store)) == sorted(tree)

    options = Options(retries=0, storage={"s3": s3.options})
    for url in ("memory://hier.zarr", f"s3://{s3.bucket}/hier.zarr", f"s3://{s3.bucket}/hier.zarr/"):
        with_store(url, check, options)
        assert read_document(url, options) is None


# -- errors


@pytest.mark.parametrize(
    ("url", "rule"),
    [
        ("{listing}/nope", "404"),
        ("{plain}/nope", "404"),
        ("{plain}/empty", "no Zarr metadata there, and the server shows no listing"),
        ("{listing}/file", "404"),
        ("http://127.0.0.1:{free}/x", "Cannot connect"),
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


def test_errors_show_no_secrets(nginx: Nginx) -> None:
    for place in (f"{nginx.plain.url}/nope", f"http://127.0.0.1:{free_port()}/x"):
        url = place.replace("http://", "http://user:secret@")
        for call in (plan_remote, plan_source):
            with pytest.raises(SourceError) as caught:
                call(url, OPTIONS)
            assert "secret" not in str(caught.value)

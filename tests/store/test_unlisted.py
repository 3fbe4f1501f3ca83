"""Servers that do not list: directories follow from evidence, chunks from the grid of their array."""

from __future__ import annotations

import json
import time
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from tests.conftest import DATA
from tests.servers import Faulty, Nginx
from tests.sources.zarrstores import SAMPLES, put, put_exact, tree_of, with_store
from tests.store.contract import Tree, directories, keys, listed
from zarrfs.config.options import Options
from zarrfs.errors import AccessDenied, IsDirectory, NotDirectory, NotFound, ReadError
from zarrfs.store.api import Info, Kind, Store
from zarrfs.store.remote import FsspecStore
from zarrfs.store.unlisted import UnlistedStore

# -- directories by evidence


# groups of the experimental v3 need no document, so there is no evidence of them
STORES = [name for name in SAMPLES if name != "v3_draft"]


@pytest.mark.parametrize("redirects", [True, False])
@pytest.mark.parametrize("name", STORES)
def test_a_store_on_a_server_that_does_not_list_has_all_its_keys(
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
        if name == "v2_odd":  # a group without consolidated metadata
            with pytest.raises(ReadError, match="nothing says what is in it"):
                await keys(store)
            return
        shown = await keys(store)
        assert set(shown) <= set(tree)
        if name.endswith("_hier") or "/" not in "".join(tree):
            assert set(shown) == set(tree)

    with_store(url, check)


def three(shape: list[int], separator: str = "/", **more: Any) -> bytes:
    """Return the zarr.json of an array with one item in each chunk."""
    return json.dumps({
        "zarr_format": 3, "node_type": "array", "shape": shape, "data_type": "uint8", "fill_value": 0,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [1] * len(shape)}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": separator}},
        "codecs": [{"name": "bytes"}], "attributes": {},
    } | more).encode()  # fmt: skip


def two(shape: list[int], **more: Any) -> bytes:
    """Return the .zarray of an array with one item in each chunk."""
    return json.dumps({
        "zarr_format": 2, "shape": shape, "chunks": [1] * len(shape), "dtype": "|u1", "compressor": None,
        "fill_value": 0, "filters": None, "order": "C",
    } | more).encode()  # fmt: skip


GROUP = b'{"zarr_format": 3, "node_type": "group", "attributes": {}}'
NESTED: Tree = {
    "zarr.json": GROUP,
    "g/zarr.json": GROUP,
    "g/a/zarr.json": three([4, 4]),
    "g/a/c/0/1": b"1",
    "flat/zarr.json": three([4, 4], "."),
    "scalar/zarr.json": three([]),
    "scalar/c": b"1",
    "strange/zarr.json": three([4, 4], codecs=[{"name": "new", "must_understand": True}], storage={"a": "b"}),
    "strange/c/0/1": b"1",
    "two/.zgroup": b'{"zarr_format": 2}',
    "two/nested/.zarray": two([4, 4, 4], dimension_separator="/"),
    "two/nested/0/1/2": b"1",
    "two/silent/.zarray": two([4, 4]),
    "two/silent/3/3": b"1",
    "two/flat/.zarray": two([4, 4], dimension_separator="."),
    "two/flat/0.0": b"1",
    "zero/__zmeta__": (DATA / "zarr/v0_int32_01/__zmeta__").read_bytes(),
    "zero/__zdata__/0.0.blosc": b"chunk",
    "one/meta": (DATA / "zarr/v1_int32_01/meta").read_bytes(),
    "one/0.0": b"chunk",
}

ABSENT = [
    "g/a/0", "g/a/c/x", "g/a/c/0/2", "g/a/c/0/1/2", "g/a/c/01", "g/a/c/-1", "g/a/c/4", "g/b", "flat/c", "flat/0",
    "scalar/c2", "two/nested/0/1/3", "two/nested/c", "two/nested/x", "two/nested/4", "two/flat/0", "two/flat/1",
    "zero/__zdata__/x.blosc", "zero/0", "one/9.9", "one/__zdata__", ".zattrs", "g/.zattrs", "g/a/zarr.json/x",
]  # fmt: skip


def test_directories_of_chunks_follow_from_the_grid(faulty: Faulty) -> None:
    async def check(store: Store, plan: Any) -> None:
        for prefix in directories(NESTED):
            assert (await store.info(prefix)).kind is Kind.DIRECTORY, prefix
        for key in ABSENT:
            with pytest.raises((NotFound, NotDirectory)):
                await store.info(key)
        assert [info.name for info in await listed(store, "g/a")] == ["zarr.json", "c"]

    with_store(put_exact(faulty, "nested", NESTED), check)


def test_a_group_with_unknown_members_is_an_error(faulty: Faulty) -> None:
    """A reader would take an empty directory for an empty data set."""

    async def unknown(store: Store, plan: Any) -> None:
        for prefix in ("", "g", "two"):
            with pytest.raises(ReadError, match="members=a,b"):
                await listed(store, prefix)
        assert bytes(await store.get("g/a/c/0/1")) == b"1"

    async def named(store: Store, plan: Any) -> None:
        assert names(await listed(store, "")) == ["flat", "g", "zarr.json"]
        assert names(await listed(store, "g")) == ["a", "zarr.json"]
        assert await keys(store) == ["flat/zarr.json", "g/a/zarr.json", "g/a/c/0/1", "g/zarr.json", "zarr.json"]

    url = put_exact(faulty, "nested", NESTED)
    with_store(url, unknown)
    with_store(url, named, Options(retries=0, members=("g/a", "flat")))


def test_documents_are_not_read_again_for_each_chunk_with_a_short_metadata_ttl(faulty: Faulty) -> None:
    """They count for a second at least, although no answer of a slow server is valid when it comes."""

    async def check(store: Store, plan: Any) -> None:
        await store.info("g/a/c/0/1")
        counts = [100]
        with trio.move_on_after(60):
            while min(counts) > 4:
                faulty.requests.clear()
                for number in range(2):
                    with pytest.raises(NotFound):
                        await store.info(f"g/a/c/2/{number}")
                counts.append(len(faulty.requests))
        assert min(counts) <= 4

    with_store(put_exact(faulty, "nested", NESTED), check, Options(retries=0, metadata_ttl=0.0))


def test_a_group_that_only_consolidated_metadata_shows_is_a_directory(faulty: Faulty) -> None:
    array = two([4])
    tree = {
        ".zgroup": b'{"zarr_format": 2}', "a/b/.zarray": array, "a/b/0": b"chunk",
        ".zmetadata": b'{"metadata": {".zgroup": {}, "a/b/.zarray": ' + array + b"}}",
    }  # fmt: skip

    async def check(store: Store, plan: Any) -> None:
        assert (await store.info("a")).kind is Kind.DIRECTORY
        assert await keys(store) == [".zgroup", ".zmetadata", "a/b/.zarray", "a/b/0"]
        with pytest.raises(NotFound):
            await store.info("b")

    with_store(put_exact(faulty, "implicit", tree), check)


@pytest.mark.parametrize("status", [403, 404])
def test_listing_an_array_without_its_document_is_an_error(faulty: Faulty, status: int) -> None:
    name, array = f"lost-{status}", two([4, 4], dimension_separator="/")
    tree = {
        ".zgroup": b'{"zarr_format": 2}', "a/.zarray": array, "a/0/0": b"1", "empty/.zgroup": b'{"zarr_format": 2}',
        ".zmetadata": b'{"metadata": {".zgroup": {}, "empty/.zgroup": {}, "a/.zarray": ' + array + b"}}",
    }  # fmt: skip
    url = put_exact(faulty, name, tree)
    refused(faulty, f"/{name}/a/.zarray", status=status)

    async def check(store: Store, plan: Any) -> None:
        assert names(await listed(store, "")) == [".zgroup", ".zmetadata", "a", "empty"]
        assert names(await listed(store, "empty")) == [".zgroup"]
        assert (await store.info("a")).kind is Kind.DIRECTORY
        error, message = (AccessDenied, "403") if status == 403 else (ReadError, "says what is in it")
        with pytest.raises(error, match=message):
            await listed(store, "a")
        assert bytes(await store.get("a/0/0")) == b"1"
        # if the document is refused, a/0 may be a directory: NotFound would make a reader fill in its chunks
        with pytest.raises(AccessDenied if status == 403 else NotFound):
            await store.info("a/0")

    with_store(url, check)


def test_listing_a_directory_does_not_take_time_for_each_node_of_the_store(faulty: Faulty) -> None:
    url = put_exact(faulty, "wide", {"zarr.json": GROUP, "g7/zarr.json": GROUP, "g7/a/zarr.json": three([1])})

    async def check(store: Store, plan: Any) -> None:
        assert names(await listed(store, "g7")) == ["a", "zarr.json"]
        began = time.process_time()
        for _ in range(50):
            await listed(store, "g7")
        assert time.process_time() - began < 1.5

    with_store(url, check, Options(retries=0, members=tuple(f"g{number}/a" for number in range(100_000))))


def of_two(*arrays: str) -> Tree:
    """Return a store of version 2 whose consolidated metadata names `arrays`."""
    named = b"".join(b', "%s/.zarray": %s' % (name.encode(), two([1])) for name in arrays)
    nodes = {f"{name}/.zarray": two([1]) for name in arrays} | {f"{name}/0": b"1" for name in arrays}
    group = b'{"zarr_format": 2}'
    return {".zgroup": group, ".zmetadata": b'{"metadata": {".zgroup": ' + group + named + b"}}"} | nodes


def test_consolidated_metadata_of_both_versions_is_merged(faulty: Faulty) -> None:
    """A node has each document that one of the two names."""
    tree = of_two("a")
    tree["a/zarr.json"] = b'{"zarr_format": 3, "node_type": "group"}'
    named = {"metadata": {"a": json.loads(tree["a/zarr.json"])}, "kind": "inline", "must_understand": False}
    tree["zarr.json"] = json.dumps({"zarr_format": 3, "node_type": "group", "consolidated_metadata": named}).encode()
    url = put_exact(faulty, "both", tree)

    async def check(store: Store, plan: Any) -> None:
        assert bytes(await store.get("a/zarr.json")) == tree["a/zarr.json"]
        assert bytes(await store.get("a/.zarray")) == tree["a/.zarray"]

    with_store(url, check)


def test_consolidated_metadata_of_v3_says_nothing_about_the_documents_of_v2_beside_it(faulty: Faulty) -> None:
    """Migration to v3 leaves the documents of v2 where they are."""
    named = {"metadata": {"a": json.loads(three([1]))}, "kind": "inline", "must_understand": False}
    root = json.dumps({"zarr_format": 3, "node_type": "group", "consolidated_metadata": named}).encode()
    tree = of_two("a") | {"zarr.json": root, "a/zarr.json": three([1]), "a/.zattrs": b"{}"}
    del tree[".zmetadata"]

    async def check(store: Store, plan: Any) -> None:
        for key, value in tree.items():
            assert bytes(await store.get(key)) == value
        assert {*names(await listed(store, "a"))} >= {".zarray", ".zattrs", "zarr.json", "0"}

    with_store(put_exact(faulty, "migrated", tree), check)


def test_documents_that_were_refused_once_are_requested_again(faulty: Faulty, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without its document, all chunks of an array would be absent."""
    monkeypatch.setattr("zarrfs.store.unlisted._REFUSED", 0.0)
    tree = of_two("a") | {"b/zarr.json": three([4]), "b/c/0": b"1"}
    url = put_exact(faulty, "late", tree)
    refused(faulty, "/late/.zmetadata", "/late/b/zarr.json")

    async def check(store: Store, plan: Any) -> None:
        with pytest.raises(ReadError, match="nothing says what is in it"):
            await listed(store, "")
        with pytest.raises((NotFound, ReadError)):
            await store.info("b/c")
        put_exact(faulty, "late", tree)
        assert (await store.info("b/c")).kind is Kind.DIRECTORY
        assert names(await listed(store, "")) == [".zgroup", ".zmetadata", "a"]

    with_store(url, check)


def test_hidden_nodes_are_listed_if_consolidated_metadata_names_them(faulty: Faulty) -> None:
    """Apache's listings hide RCS and README*. A hidden node that is not named can still be opened."""
    array = two([4])
    tree = {
        ".zgroup": b'{"zarr_format": 2}', "RCS/.zarray": array, "RCS/0": b"1", "a/.zarray": array, "a/0": b"2",
        "README_x/.zarray": array, "README_x/0": b"3",
        ".zmetadata": b'{"metadata": {".zgroup": {}, "RCS/.zarray": ' + array + b', "a/.zarray": ' + array + b"}}",
    }  # fmt: skip
    url = put_exact(faulty, "apache", tree)
    for directory, shown in (("", "a/"), ("RCS/", "0"), ("a/", "0"), ("README_x/", "0")):
        page = f"<title>Index of /apache/{directory}</title><a href='{shown}'>{shown}</a>"
        faulty.put(f"/apache/{directory}", page.encode(), forever="html")

    faulty.put("/apache/README_x", b"<title>Index of /apache/README_x</title>", forever="html")
    faulty.head("/apache/README_x", forever="unsized")

    async def check(store: Store, plan: Any) -> None:
        assert plan.lists
        assert names(await listed(store, "")) == [".zgroup", ".zmetadata", "RCS", "a"]
        for key in ("RCS", "README_x"):
            assert (await store.info(key)).kind is Kind.DIRECTORY
        assert await keys(store, "RCS") == ["RCS/.zarray", "RCS/0"]
        for key in ("RCS/0", "README_x/.zarray", "README_x/0"):
            assert bytes(await store.get(key)) == tree[key]
        with pytest.raises(NotFound):
            await store.info("RCS2")

    with_store(url, check)


def test_a_directory_of_chunks_that_may_not_be_listed_is_an_error(
    faulty: Faulty, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If it were listed as empty, a copy would lack its chunks."""
    url = put_exact(faulty, "denied", {"zarr.json": three([4]), "c/0": b"1"})

    async def denied(self: FsspecStore, prefix: str) -> list[Info]:
        raise AccessDenied(prefix, "refused", 403)

    monkeypatch.setattr(FsspecStore, "listed", denied)

    async def main() -> None:
        async with aclosing(UnlistedStore(FsspecStore(url, Options(retries=0)), lists=True)) as store:
            with pytest.raises(AccessDenied):
                await listed(store, "c")

    trio.run(main)


def test_an_invalid_document_is_no_evidence_of_a_directory(faulty: Faulty) -> None:
    """Some servers answer every request with a web page."""
    documents = [
        ("zarr.json", b""), ("zarr.json", b"[]"), ("zarr.json", b"{}"), ("zarr.json", b'{"node_type": "array"}'),
        ("zarr.json", b"[" * 100_000), ("zarr.json", b"<html>"), (".zarray", b'{"shape": 5}'), (".zarray", b"[]"),
        (".zgroup", b"{}"), ("meta", b'{"shape": []}'), ("meta", b"{}"), ("__zmeta__", b"<html>."),
    ]  # fmt: skip
    tree = {"zarr.json": GROUP, **{f"{number}/{name}": data for number, (name, data) in enumerate(documents)}}

    async def check(store: Store, plan: Any) -> None:
        for key in map(str, range(len(documents))):
            with pytest.raises(NotFound):
                await store.info(key)

    with_store(put_exact(faulty, "pages", tree), check)


def test_a_failure_of_the_server_does_not_mean_absence(faulty: Faulty) -> None:
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


# -- chunks by the grid


def names(infos: list[Info]) -> list[str]:
    return [info.name for info in infos]


ALL = [f"{number}" for number in range(4)]


def test_a_listing_resumes_after_any_of_its_names(faulty: Faulty) -> None:
    async def check(store: Store, plan: Any) -> None:
        for prefix in ("flat", "g/a", "g/a/c", "g/a/c/2", "two/silent", "two/flat", "zero", "one"):
            whole = names(await listed(store, prefix))
            for at, after in enumerate(whole):
                assert names([info async for info in store.list_dir(prefix, after)]) == whole[at + 1 :]

    with_store(put_exact(faulty, "nested", NESTED), check)


def test_only_chunks_that_the_server_has_are_listed(faulty: Faulty) -> None:
    """Each chunk is looked up, so its size is known."""

    async def check(store: Store, plan: Any) -> None:
        assert names(await listed(store, "flat")) == ["zarr.json"]
        [chunk] = await listed(store, "g/a/c/0")
        assert chunk == Info("1", Kind.FILE, 1, identity=chunk.identity)
        groups = {"g/zarr.json", "two/.zgroup"}
        strange = {key for key in NESTED if key.startswith("strange/")}
        for prefix in ("strange", "strange/c", "strange/c/0"):  # a copy would lack its chunks
            with pytest.raises(ReadError, match="exact names work"):
                await listed(store, prefix)
        for key in set(NESTED) - strange - groups:
            if "/" in key:
                prefix, _, name = key.rpartition("/")
                assert name in names(await listed(store, prefix)), key

    with_store(put_exact(faulty, "nested", NESTED), check)


def test_a_chunk_that_two_documents_of_an_array_name_is_listed_once(faulty: Faulty) -> None:
    """`zarr migrate` writes a zarr.json beside the .zarray, with the same chunk keys."""
    same = three([2, 2], chunk_key_encoding={"name": "v2", "separator": "."})
    url = put_exact(faulty, "migrated", {".zarray": two([2, 2]), "zarr.json": same, "0.0": b"0", "1.1": b"1"})

    async def check(store: Store, plan: Any) -> None:
        assert names(await listed(store, "")) == [".zarray", "zarr.json", "0.0", "1.1"]
        assert names([info async for info in store.list_dir("", "0.0")]) == ["1.1"]

    with_store(url, check)


def refused(server: Faulty, *paths: str, status: int = 403) -> None:
    for path in paths:
        server.put(path, b"", forever=status)
        server.head(path, forever=status)


def test_a_refused_chunk_is_listed(faulty: Faulty) -> None:
    """If it were left out, checks and copies would lack it, and readers of a copy would get the fill value."""
    url = put_exact(faulty, "refusing", {".zarray": two([3]), "0": b"0", "1": b"1", "2": b"2"})
    refused(faulty, "/refusing/1", "/refusing/.zattrs")

    async def check(store: Store, plan: Any) -> None:
        shown = await listed(store, "")
        assert names(shown) == [".zarray", "0", "1", "2"]
        assert [info.size for info in shown] == [len(two([3])), 1, None, 1]
        assert "403" in shown[2].unreadable

    async def absent(store: Store, plan: Any) -> None:
        assert names(await listed(store, "")) == [".zarray", "0", "2"]

    with_store(url, check)
    with_store(url, absent, Options(retries=0, missing_status=(404, 403)))


def test_missing_keys_are_remembered(faulty: Faulty) -> None:
    url = put_exact(faulty, "nested", NESTED)

    async def asked(store: Store, plan: Any) -> int:
        await store.info("g/a/c/0/1")
        faulty.requests.clear()
        with pytest.raises(NotFound):
            await store.info("g/a/c/3/3")
        assert len(faulty.requests) == 1 or store.lower.names.ttl == 0.0
        faulty.requests.clear()
        for call in (store.info, store.get, store.info):
            with pytest.raises(NotFound):
                await call("g/a/c/3/3")
        return len(faulty.requests)

    assert with_store(url, asked) == 0
    assert with_store(url, asked, Options(retries=0, metadata_ttl=0.0)) >= 3


# -- documents that change


Check = Callable[[UnlistedStore, FsspecStore, MockClock], Awaitable[None]]


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, Check], None]:
    """Return a function that runs check(store, store beneath, clock) for a URL, with metadata_ttl=100."""

    def run_timed(url: str, check: Check) -> None:
        clock, began = MockClock(), time.time()
        monkeypatch.setattr(time, "time", lambda: began + clock.current_time())

        async def main() -> None:
            beneath = FsspecStore(url, Options(retries=0, metadata_ttl=100.0))
            async with aclosing(UnlistedStore(beneath)) as store:
                await check(store, beneath, clock)

        trio.run(main, clock=clock)

    return run_timed


@pytest.mark.parametrize("tags", [True, False])
def test_new_chunks_of_an_array_that_has_grown_are_found_once_its_document_is_read(
    faulty: Faulty, timed: Callable[[str, Check], None], tags: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a reader that has the new document would read fill values."""
    url = put_exact(faulty, "grown", {"zarr.json": three([1]), "c/0": b"0"})
    monkeypatch.setattr(faulty, "tell_tags", tags)

    async def check(store: UnlistedStore, beneath: FsspecStore, clock: MockClock) -> None:
        assert bytes(await store.get("zarr.json")) == three([1])
        faulty.put("/grown/zarr.json", three([2]), tag="2")
        faulty.put("/grown/c/1", b"1")
        clock.jump(80)  # less than metadata_ttl: the grid is that of the document read before
        assert names(await listed(store, "c")) == ["0"]
        clock.jump(70)
        beneath.files.blocks.cache.drop(lambda key: True)  # without tags, old bytes count as long as they are cached
        assert bytes(await store.get("zarr.json")) == three([2])
        assert (await store.info("c/1")).size == 1
        assert names(await listed(store, "c")) == ["0", "1"]

    timed(url, check)


def test_a_document_that_is_read_in_another_version_replaces_the_grid(
    faulty: Faulty, timed: Callable[[str, Check], None]
) -> None:
    url = put_exact(faulty, "replaced", {"zarr.json": three([1]), "c/0": b"0"})

    async def check(store: UnlistedStore, beneath: FsspecStore, clock: MockClock) -> None:
        assert names(await listed(store, "c")) == ["0"]
        faulty.put("/replaced/zarr.json", three([2]), tag="2")
        faulty.put("/replaced/c/1", b"1")
        beneath.names.forget("zarr.json")  # as after a read that returned bytes of another version
        assert bytes(await store.get("zarr.json")) == three([2])
        assert (await store.info("c/1")).size == 1
        assert names(await listed(store, "c")) == ["0", "1"]
        faulty.requests.clear()
        for _ in range(3):  # no more requests while the document stays the same
            await store.get("zarr.json")
            await store.info("c/1")
        assert faulty.requests == []

    timed(url, check)


def test_consolidated_metadata_is_no_older_than_its_document(
    faulty: Faulty, timed: Callable[[str, Check], None]
) -> None:
    url = put_exact(faulty, "aging", of_two("a"))

    async def check(store: UnlistedStore, beneath: FsspecStore, clock: MockClock) -> None:
        await store.get(".zmetadata")
        grown = of_two("a", "b") | {"a/.zattrs": b"{}"}
        grown[".zmetadata"] = grown[".zmetadata"].removesuffix(b"}}") + b', "a/.zattrs": {}}}'
        for key, value in grown.items():
            faulty.put(f"/aging/{key}", value, tag="2")
        clock.jump(80)
        assert names(await listed(store, "")) == [".zgroup", ".zmetadata", "a"]
        clock.jump(70)
        assert names(await listed(store, "")) == [".zgroup", ".zmetadata", "a", "b"]
        assert names(await listed(store, "a")) == [".zarray", ".zattrs", "0"]

    timed(url, check)


def test_documents_that_are_refused_all_of_a_sudden_stay_in_listings(faulty: Faulty) -> None:
    """Credentials may have expired; a listing without them would be that of other data."""
    tree = {"zarr.json": GROUP, "a/.zarray": two([1]), "a/.zattrs": b"{}", "a/0": b"0"}
    url = put_exact(faulty, "expiring", tree)

    async def check(store: Store, plan: Any) -> None:
        whole = [".zarray", ".zattrs", "0"]
        for _ in range(20):
            assert names(await listed(store, "a")) == whole
            refused(faulty, "/expiring/a/.zarray", "/expiring/a/.zattrs")
            try:
                assert names(await listed(store, "a")) == whole
                break
            except ReadError:  # more than a second has passed since the documents were read
                put_exact(faulty, "expiring", tree)
        else:
            raise AssertionError("the machine is too slow for this test")

    with_store(url, check, Options(retries=0, metadata_ttl=0.0))


def test_a_directory_expires_with_the_document_that_is_its_evidence(
    faulty: Faulty, timed: Callable[[str, Check], None]
) -> None:
    url = put_exact(faulty, "removed", {"zarr.json": GROUP, "g/zarr.json": GROUP})

    async def check(store: UnlistedStore, beneath: FsspecStore, clock: MockClock) -> None:
        await store.get("g/zarr.json")
        del faulty.values["/removed/g/zarr.json"]
        clock.jump(80)
        assert (await store.info("g")).kind is Kind.DIRECTORY
        clock.jump(70)
        with pytest.raises(NotFound):
            await store.info("g")

    timed(url, check)


def test_a_new_array_is_found_once_the_absence_of_its_document_is_too_old(
    faulty: Faulty, timed: Callable[[str, Check], None]
) -> None:
    url = put_exact(faulty, "created", {"zarr.json": GROUP})

    async def check(store: UnlistedStore, beneath: FsspecStore, clock: MockClock) -> None:
        for key, pause in (("a/zarr.json", 80), ("a/c", 30)):
            with pytest.raises(NotFound):
                await store.info(key)
            clock.jump(pause)
        faulty.put("/created/a/zarr.json", three([1]))
        clock.jump(1)
        assert (await store.info("a/c")).kind is Kind.DIRECTORY

    timed(url, check)

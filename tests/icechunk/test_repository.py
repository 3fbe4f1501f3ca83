"""Snapshots of Icechunk repositories as stores: the same keys and bytes as icechunk's own store has."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import shutil
import urllib.parse
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import icechunk
import pytest
import trio

from tests.icechunk.repositories import NUMBERS, Repository, contents, write, write_virtual
from tests.servers import S3, Faulty, faulty, s3
from tests.sources.opening import open_source
from zarrfs.config import urls
from zarrfs.config.options import parse
from zarrfs.errors import ReadError, SourceError, UsageError
from zarrfs.icechunk import files
from zarrfs.icechunk.flatbuffers import DamagedBuffer
from zarrfs.icechunk.repository import BadLocation, virtual_url

__all__ = ["faulty", "s3"]
FORMAT2 = Path(__file__).parents[1] / "data/icechunk/format2"  # written by icechunk 2.3


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Repository:
    return write(tmp_path_factory.mktemp("icechunk"))


@pytest.fixture
def own(shared: Repository, tmp_path: Path) -> Path:
    """Return a copy of the repository that the test may change."""
    shutil.copytree(shared.path, tmp_path / "repo")
    return tmp_path / "repo"


async def _all(store: Any) -> dict[str, bytes]:
    found = {}
    async for key in store.list_prefix(""):
        found[key] = bytes(await store.get(key))
        assert (await store.info(key)).size == len(found[key])
    return found


def read(source: Path | str, *options: str) -> dict[str, bytes]:
    """Return every key and value of a source."""

    async def main() -> dict[str, bytes]:
        store = open_source(str(source), parse(options).options, child=False)
        try:
            return await _all(store)
        finally:
            await store.aclose()

    return trio.run(main)


def get(source: Path | str, key: str, *options: str) -> bytes:
    """Return one value of a source."""

    async def main() -> bytes:
        store = open_source(str(source), parse(options).options, child=False)
        try:
            return bytes(await store.get(key))
        finally:
            await store.aclose()

    return trio.run(main)


def test_all_keys_and_bytes_equal_those_of_icechunk(shared: Repository) -> None:
    main, tagged = contents(shared, branch="main"), contents(shared, tag="v1")
    assert main != tagged
    assert read(shared.path) == read(shared.path, "branch=main", "type=icechunk") == main
    assert read(shared.path, f"snapshot={shared.second}") == main
    assert read(shared.path, "tag=v1") == read(shared.path, "branch=dev") == tagged
    assert {"c", "c/0/0"} <= {key.partition("/")[2] for key in main} | {key.partition("er/n/")[2] for key in main}


def test_an_array_may_refer_to_one_manifest_for_several_extents(
    shared: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    parsed = files.snapshot

    def split(buffer: bytes, limit: int) -> files.Snapshot:
        """Return the snapshot with a reference to each manifest for each chunk of its extents along the last axis."""
        found = parsed(buffer, limit)
        nodes = []
        for node in found.nodes:
            manifests = [
                (ident, (*extents[:-1], (at, at + 1))) for ident, extents in node.manifests if extents
                for at in range(*extents[-1])
            ]
            nodes.append(node._replace(manifests=tuple(manifests)) if manifests else node)
        return found._replace(nodes=tuple(nodes))

    monkeypatch.setattr(files, "snapshot", split)
    assert read(shared.path, "tag=v1") == contents(shared, tag="v1")


def test_format_2_with_compressed_urls() -> None:
    expected = json.loads((FORMAT2.parent / "expected.json").read_text())
    for options, name in ((), "main"), (("tag=v1",), "v1"):
        async def main(options: tuple[str, ...] = options) -> tuple[dict[str, str], Any]:
            store = open_source(str(FORMAT2), parse(options).options, child=False)
            try:
                digests = {
                    key: hashlib.sha256(bytes(await store.get(key))).hexdigest()
                    async for key in store.list_prefix("") if not key.startswith("virtual/c/")
                }
                return digests, await store.locate("virtual/c/99")
            finally:
                await store.aclose()

        digests, place = trio.run(main)
        assert digests == expected[name]
        url = "s3://bucket/archive/year 1999/month-of-the-year/file-99.nc"
        assert place == {"url": url, "offset": 396, "length": 4}


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        (["branch=nope"], "no branch 'nope'"),
        (["tag=nope"], "no tag 'nope'"),
        (["branch=../tag.v1"], "no name of one has a '/'"),
        (["snapshot=1CECHNKREP0F1RSTCMT1"], "no snapshot 1CECHNKREP0F1RSTCMT1: unknown, or expired"),
        (["snapshot=../../etc/passwd"], "an id has 20 characters"),
        (["tag=v1", "branch=main"], "options branch and tag exclude each other"),
        (["type=zarr"], None),
    ],
)
def test_unknown_refs_are_errors_of_one_line(shared: Repository, options: list[str], rule: str | None) -> None:
    if rule is None:  # type=zarr reads a repository as a plain directory
        assert "refs/branch.main/ref.json" in read(shared.path, *options)
        return
    for path in (shared.path, FORMAT2) if "/" not in options[0] else (shared.path,):
        with pytest.raises(SourceError) as raised:
            read(path, *options)
        assert rule in str(raised.value)
        assert "\n" not in str(raised.value)


@pytest.mark.parametrize("name", ["müll [2]~#1", "50%", "a%20b"])
def test_names_that_icechunk_encodes(shared: Repository, own: Path, name: str) -> None:
    repo = icechunk.Repository.open(icechunk.local_filesystem_storage(str(own)))
    repo.create_tag(name, shared.second)
    before = {*os.listdir(own / "refs")}
    repo.create_branch(name, shared.first)
    first, second = read(shared.path, "tag=v1"), read(shared.path)
    assert (read(own, f"branch={name}"), read(own, f"tag={name}")) == (first, second)
    [written] = {*os.listdir(own / "refs")} - before
    (own / "refs" / written).rename(own / "refs" / f"branch.{name}")  # the name that it has in S3
    assert read(own, f"branch={name}") == first
    repo.delete_tag(name)
    with pytest.raises(SourceError, match="it was deleted"):
        read(own, f"tag={name}")


def test_other_sources_refuse_the_options_of_repositories(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"option branch=: .* is no Icechunk repository"):
        read(tmp_path, "branch=main")
    with pytest.raises(SourceError, match="is no Icechunk repository"):
        read(tmp_path, "type=icechunk")


def test_missing_newer_or_damaged_files_are_errors(shared: Repository, own: Path, tmp_path: Path) -> None:
    snapshot = own / "snapshots" / shared.first
    whole = snapshot.read_bytes()
    snapshot.write_bytes(whole[:36] + b"\3" + whole[37:])
    with pytest.raises(SourceError, match=f"snapshots/{shared.first}: has format 3 of Icechunk"):
        read(own, "tag=v1")
    snapshot.write_bytes(whole[:-9])
    with pytest.raises(SourceError, match="damaged"):
        read(own, "tag=v1")
    snapshot.write_bytes((own / "snapshots" / shared.second).read_bytes())
    with pytest.raises(SourceError, match=f"damaged: is snapshot {shared.second}"):
        read(own, "tag=v1")
    snapshot.unlink()
    with pytest.raises(SourceError, match=f"tag 'v1': no snapshot {shared.first}: unknown, or expired"):
        read(own, "tag=v1")
    (own / "refs/tag.v1/ref.json.deleted").touch()
    with pytest.raises(SourceError, match="no tag 'v1': it was deleted"):
        read(own, "tag=v1")
    next((own / "manifests").iterdir()).unlink()
    for name in os.listdir(own / "manifests"):
        (own / "manifests" / name).unlink()
    with pytest.raises(SourceError, match=r"manifests/.*: the repository lacks this file"):
        read(own)


def test_a_chunk_without_its_file_is_an_error(shared: Repository, own: Path) -> None:
    read(own)
    for name in os.listdir(own / "chunks"):
        (own / "chunks" / name).unlink()
    with pytest.raises(ReadError, match="chunks/"):
        get(own, "rain/c/1/1")
    assert get(own, "deep/er/n/c") == contents(shared, branch="main")["deep/er/n/c"]


def test_allow_path_limits_virtual_chunks_alone(shared: Repository, tmp_path: Path) -> None:
    numbers = shared.numbers.read_bytes()
    assert get(shared.path, "virtual/c/1", f"allow_path={shared.numbers.parent}") == numbers[40:]
    assert get(shared.path, "rain/c/1/1", f"allow_path={tmp_path}")  # a native chunk
    with pytest.raises(ReadError, match="lies not beneath") as raised:
        get(shared.path, "virtual/c/0", f"allow_path={tmp_path}")
    assert type(raised.value) is ReadError  # which becomes EIO


def test_virtual_chunks_of_a_changed_file_are_errors(shared: Repository) -> None:
    before = os.stat(shared.numbers)
    try:
        os.utime(shared.numbers, ns=(before.st_atime_ns, before.st_mtime_ns + 5 * 10**9))
        with pytest.raises(ReadError, match="has changed since the repository was written"):
            get(shared.path, "virtual/c/1")
        assert get(shared.path, "virtual/c/0")  # the repository has no version for this chunk
    finally:
        os.utime(shared.numbers, ns=(before.st_atime_ns, before.st_mtime_ns))


class Place(NamedTuple):
    """A directory in a bucket: URL, options for reading, and a function that stores a value and returns its ETag."""

    url: str
    options: list[str]
    put: Callable[[str, bytes], str]


@pytest.fixture
def place(s3: S3) -> Place:
    def on_s3(name: str, value: bytes) -> str:
        return str(s3.client.put_object(Bucket=s3.bucket, Key=f"ice/{name}", Body=value)["ETag"])

    return Place(f"s3://{s3.bucket}/ice", [f"s3.{name}={value}" for name, value in s3.options.items()], on_s3)


def upload(root: Path, place: Place, below: str) -> str:
    """Store a repository at `place`, under the name `below`, and return its URL."""
    for path in root.rglob("*"):
        if path.is_file():
            place.put(f"{below}/{path.relative_to(root)}", path.read_bytes())
    return f"{place.url}/{below}"


def test_a_repository_on_a_server(shared: Repository, place: Place) -> None:
    url, expected = upload(shared.path, place, "repo"), contents(shared, branch="main")
    assert read(url, *place.options, f"allow_path={shared.numbers.parent}") == expected
    with pytest.raises(ReadError, match="a set from the network reaches no local file"):
        get(url, "virtual/c/0", *place.options)
    with pytest.raises(SourceError, match="no branch 'nope'"):
        read(url, *place.options, "branch=nope")


@pytest.mark.parametrize("rest", ["", "?sig=a/b", "#a/b"])
def test_chunks_of_a_repository_need_the_query_of_its_url(own: Path, faulty: Faulty, rest: str) -> None:
    query = rest if rest.startswith("?") else ""
    for file in own.rglob("*"):
        if file.is_file():
            faulty.put(f"/ice/{file.relative_to(own)}{query}", file.read_bytes())
    assert get(f"{faulty.url}/ice{rest}", "rain/c/1/0") == get(own, "rain/c/1/0")
    asked = [path for method, path, _ in faulty.requests if method == "GET" and "/chunks/" in path]
    assert asked
    assert all(path.endswith(query) for path in asked)


def test_virtual_chunks_on_a_server(place: Place, tmp_path: Path) -> None:
    """They are read only while they have the ETag that is recorded in the repository."""
    numbers = NUMBERS.tobytes()
    tag = place.put("numbers.bin", numbers)
    written = write_virtual(tmp_path / "repo", f"{place.url}/numbers.bin", tag)
    url = upload(written, place, "virtual")
    allow = [*place.options, "allow=private"]  # the server is on this machine
    assert get(url, "virtual/c/0", *allow) + get(url, "virtual/c/1", *allow) == numbers

    async def twice() -> None:
        store = open_source(url, parse(allow).options, child=False)
        try:
            assert bytes(await store.get("virtual/c/0")) == numbers[:40]
            assert place.put("numbers.bin", numbers[::-1]) != tag
            store_after = open_source(url, parse(allow).options, child=False)
            with pytest.raises(ReadError, match="the repository was written for"):
                await store_after.get("virtual/c/1")
            await store_after.aclose()
            with pytest.raises(ReadError, match=r"changed|version"):
                await store.get("virtual/c/1")
        finally:
            await store.aclose()

    trio.run(twice)


@pytest.mark.parametrize("name", [b"nl\n7", b"dat\xff.bin", b"per%0Acent", b"a::b", b"a\xff::b"])
def test_virtual_chunks_in_files_of_unusual_names(tmp_path: Path, name: bytes) -> None:
    file = os.fsencode(tmp_path) + b"/" + name
    Path(os.fsdecode(file)).write_bytes(NUMBERS.tobytes())
    (tmp_path / "nl").write_bytes(bytes(80))  # the part before the line break names another file
    status = os.stat(file)
    for tag in (None, f"{status.st_ino:x}-{status.st_mtime_ns // 1000:x}-{status.st_size:x}"):
        repo = write_virtual(tmp_path / f"repo{tag}", "file://" + urllib.parse.quote(file, safe="/:"), tag)
        assert get(repo, "virtual/c/0") == NUMBERS[:10].tobytes()


@pytest.mark.parametrize("location", [
    "http://h/x::file:///etc/passwd", "http://x::file:///etc/passwd", "zip://x::file:///a.zip", "s3://b/x::memory://y",
    "s3://x::file:///etc/passwd", "s3://b/x%3A%3Amemory://y", "file:///a%FF::memory://y", "http://[2001:db8::1]:80/a::b",
])  # fmt: skip
def test_the_location_of_a_virtual_chunk_never_becomes_a_chain(location: str) -> None:
    with contextlib.suppress(BadLocation):
        assert len(urls.protocols(virtual_url(location))) == 1


@pytest.mark.parametrize(
    ("location", "rule"),
    [
        *((f"s3://bucket/{name}", f'{name}: its key is not UTF-8, or has a line break or "::"')
          for name in ("nl%0A7", "dat%FF.bin", "a%3A%3Ab")),
        ("vcc://archive/numbers.bin", "virtual chunk container"),
        ("memory://archive/numbers.bin", "records its version, and its protocol sends none"),
    ],
)  # fmt: skip
def test_a_virtual_chunk_with_an_unreadable_location_fails_alone(tmp_path: Path, location: str, rule: str) -> None:
    write_virtual(tmp_path / "repo", location, "1")
    assert get(tmp_path / "repo", "virtual/zarr.json")
    with pytest.raises(ReadError, match=rule):
        get(tmp_path / "repo", "virtual/c/0")


def test_damaged_buffers_raise_nothing_but_damaged(shared: Repository) -> None:
    chance = random.Random(0)
    sources = [(path, files.SNAPSHOT) for path in (shared.path / "snapshots").iterdir()]
    for root in shared.path, FORMAT2:
        sources += [(path, files.MANIFEST) for path in (root / "manifests").iterdir()]
    sources.append((FORMAT2 / "repo", files.REPOSITORY))
    for path, kind in sources:
        whole = files.payload(path.read_bytes(), kind, 1 << 20)
        for _ in range(150):
            buffer = bytearray(whole)
            for _ in range(chance.choice((1, 3))):
                buffer[chance.randrange(len(buffer))] = chance.choice((0, 1, 127, 255))
            del buffer[chance.choice((len(buffer), len(buffer), chance.randrange(len(buffer)))) :]
            try:
                if kind == files.SNAPSHOT:
                    files.snapshot(bytes(buffer), 1 << 20)
                elif kind == files.REPOSITORY:
                    files.repository(bytes(buffer))
                else:
                    for _, references in files.manifest(bytes(buffer)):
                        assert sum(1 for _ in references) < 1 << 20
            except DamagedBuffer:
                pass

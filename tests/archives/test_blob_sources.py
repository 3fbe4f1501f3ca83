"""Blob sources other than directories: the bytes that they return, and how they fail."""

from __future__ import annotations

import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import conftest
from tests.archives.blobreading import DATA, REF, URL, fails, run, whole
from tests.archives.compiled import blobref, file, put
from tests.fakeflux import FakeFlux, content_db, dump_tar
from tests.servers import S3, Faulty, Nginx
from zarrfs.archives import blob_sources, content_database, flux_blobs, source_kinds
from zarrfs.archives.blob_reader import BlobReader
from zarrfs.archives.blobrefs import sized
from zarrfs.archives.source_kinds import check_sources
from zarrfs.config.options import Options
from zarrfs.errors import AccessDenied, OutOfRange, ReadError, SourceError, TargetMissing, UsageError, WrongHash
from zarrfs.metrics.counters import PLACE_METRICS
from zarrfs.sources import prepare
from zarrfs.system.processes import is_running

OTHER = b"another blob" * 30
LARGE = os.urandom((5 << 20) + 3)


@pytest.fixture
def flux(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeFlux:
    """Return a fake Flux instance whose flux command is on PATH."""
    found = FakeFlux(tmp_path / "flux")
    monkeypatch.setenv("PATH", found.environment()["PATH"])
    return found


def archive_of(*blobs: bytes) -> list[dict[str, Any]]:
    """Return an archive with one file for each blob."""
    return [
        file([[0, len(data), blobref(data)]], path=f"f{number}", encoding="blobvec", size=len(data))
        for number, data in enumerate(blobs)
    ]


# -- the same blobs from every kind of source


def make_url(path: Path, blobs: list[bytes], nginx: Nginx) -> str:
    place = Path(tempfile.mkdtemp(dir=nginx.plain.root))
    place.chmod(0o755)
    for data in blobs:
        put(place, data)
        put(place, data, "sha256")
    return f"{nginx.plain.url}/{place.name}"


def make_database(path: Path, blobs: list[bytes], nginx: Nginx) -> str:
    content_db(path / "content.sqlite", blobs)
    with sqlite3.connect(path / "content.sqlite") as db:
        content_db(path / "256", blobs, "sha256")
        db.execute("ATTACH ? AS other", (str(path / "256"),))
        db.execute("INSERT INTO objects SELECT * FROM other.objects")
    return str(path / "content.sqlite")


def make_dump(path: Path, blobs: list[bytes], nginx: Nginx) -> str:
    dump_tar(path / "dump.tar", {"main": (archive_of(*blobs), blobs)})
    return str(path / "dump.tar")


def make_remote_dump(path: Path, blobs: list[bytes], nginx: Nginx) -> str:
    name = f"{Path(tempfile.mktemp()).name}.tar"
    shutil.copy(make_dump(path, blobs, nginx), nginx.plain.root / name)
    return f"{nginx.plain.url}/{name}"


def make_flux(path: Path, blobs: list[bytes], nginx: Nginx) -> str:
    flux = FakeFlux(path / "instance")
    os.environ["PATH"] = flux.environment()["PATH"]
    for data in blobs:
        flux.store(data)
        flux.store(data, "sha256")
    return "flux:"


MAKERS = {
    "url": make_url, "database": make_database, "dump": make_dump, "dump-url": make_remote_dump, "flux": make_flux,
}  # fmt: skip


@pytest.mark.parametrize("kind", MAKERS)
def test_blobs_are_read_from_every_kind_of_source(
    kind: str, tmp_path: Path, nginx: Nginx, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", os.environ["PATH"])
    place = MAKERS[kind](tmp_path, [DATA, OTHER, LARGE, b""], nginx)
    check_sources([place])

    async def body(reader: BlobReader) -> None:
        assert reader.remote is (kind != "dump")
        assert reader.whole(URL) is None
        for algorithm in ("sha1", "sha256"):
            for data in (LARGE, OTHER, DATA, b""):
                for url in (sized(blobref(data, algorithm), len(data)), blobref(data, algorithm)):
                    assert await whole(reader, url, len(data)) == data
                    assert bytes(await reader.read(url, len(data) // 2, len(data) // 3, 0, 9)) == data[
                        len(data) // 2 : len(data) // 2 + len(data) // 3
                    ]
                assert await reader.size(url) == len(data)
        with pytest.raises(OutOfRange):
            await reader.read(URL, len(DATA), 1, 0, 1)
        with pytest.raises(TargetMissing):
            await whole(reader, blobref(b"nobody's"), 1)
        assert REF in reader.resolve(URL)
        counts = reader.stats()
        assert {metric.path[0] for metric in PLACE_METRICS} <= counts.keys()
        if kind == "dump":  # sha1 blobs are read in place, where the document locates them; sha256 ones are searched
            assert (counts["blobs_fetched"], counts["blobs_verified"]) == ({"dump": 4}, 8)
            assert reader.whole(URL) == DATA
            return
        assert counts["blobs_fetched"] == {"url" if kind == "dump-url" else kind: 8}
        assert sum(counts["blob_bytes_fetched"].values()) == 2 * len(DATA + OTHER + LARGE)

    run(place, body)
    assert not caplog.messages
    error = TargetMissing if kind.startswith("dump") else OutOfRange  # a tar is searched by length
    fails(place, error, "bytes|no such blob", sized(blobref(OTHER, "sha256"), 5))
    fails(place, TargetMissing, "no such blob", blobref(b"nobody's"))


@settings(max_examples=25, deadline=None)
@given(st.lists(st.binary(max_size=600), max_size=12), st.sets(st.integers(0, 11)), st.sets(st.integers(0, 11)))
def test_a_blob_is_read_if_any_source_has_it(blobs: list[bytes], first: set[int], second: set[int]) -> None:
    """The sources are a database and a dump tar with random blobs."""
    with tempfile.TemporaryDirectory() as name:
        base = Path(name)
        has = [[data for at, data in enumerate(blobs) if at in chosen] for chosen in (first, second)]
        content_db(base / "db", has[0])
        dump_tar(base / "tar", {"x": (archive_of(*has[1]), has[1])})

        async def body(reader: BlobReader) -> None:
            for data in blobs:
                if data in has[0] or data in has[1]:
                    assert await whole(reader, sized(blobref(data), len(data)), len(data)) == data
                else:
                    with pytest.raises(TargetMissing):
                        await reader.size(sized(blobref(data), len(data)))

        run((base / "db", base / "tar"), body)


# -- behind URLs


def test_blobs_below_an_s3_prefix(s3: S3, tmp_path: Path) -> None:
    s3.client.put_object(Bucket=s3.bucket, Key=f"blobs/{REF}", Body=DATA)
    place, options = f"s3://{s3.bucket}/blobs/", {"storage": {"s3": s3.options}}
    assert run(place, whole, **options) == DATA
    fails(place, TargetMissing, "no such blob", blobref(b"none"), **options)


def test_urls_of_blobs() -> None:
    assert blob_sources.blob_url("https://h/a/?sig=x", REF) == f"https://h/a/{REF}?sig=x"
    assert blob_sources.blob_url("zip://in::https://h/a.zip", REF) == f"zip://in/{REF}::https://h/a.zip"


def served(faulty: Faulty, *faults: object, **more: Any) -> str:
    return faulty.put(f"/{REF}", DATA, *faults, **more).rpartition("/")[0]


def test_transient_errors_of_a_server_are_retried(faulty: Faulty) -> None:
    assert run(served(faulty, 500, "reset", "truncate"), whole) == DATA


LIES: dict[str, tuple[Callable[[], bytes], type[ReadError], str]] = {
    "other bytes": (lambda: DATA[::-1], WrongHash, "another hash"),
    "less": (lambda: DATA[:-1], OutOfRange, f"has {len(DATA) - 1} bytes, not {len(DATA)}"),
    "more": (lambda: DATA + b"x", OutOfRange, f"has {len(DATA) + 1} bytes, not {len(DATA)}"),
}


@pytest.mark.parametrize("lie", LIES)
def test_wrong_bytes_from_a_server_are_refused(
    faulty: Faulty, tmp_path: Path, lie: str, caplog: pytest.LogCaptureFixture
) -> None:
    made, error, match = LIES[lie]
    place = faulty.put(f"/{REF}", made()).rpartition("/")[0]
    fails(place, error, match)
    put(tmp_path, DATA)
    assert run((place, tmp_path), whole) == DATA
    assert len([text for text in caplog.messages if "instead" in text]) == 1
    caplog.clear()
    assert run((tmp_path, place), whole) == DATA
    assert not caplog.messages


def test_a_server_that_fails(faulty: Faulty, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    place = served(faulty, forever=500)
    error = fails(place, ReadError, "500", retries=0)
    assert faulty.url in str(error)
    put(tmp_path, DATA)
    put(tmp_path, OTHER)

    async def both(reader: BlobReader) -> None:
        assert await whole(reader) == DATA
        assert await whole(reader, blobref(OTHER), len(OTHER)) == OTHER

    caplog.clear()
    faulty.put(f"/{blobref(OTHER)}", OTHER, forever=500)
    run((place, tmp_path), both, retries=0)
    assert len(caplog.messages) == 1  # one for the server, not one for each blob
    fails(served(faulty, forever=403), AccessDenied, "403", retries=0)
    fails("http://127.0.0.1:1/blobs", ReadError, "127.0.0.1:1", retries=0)


def test_a_server_that_hangs(faulty: Faulty) -> None:
    place = served(faulty, forever="slow")
    fails(place, ReadError, "read_timeout", read_timeout=0.3)
    faulty.release()


@pytest.mark.parametrize("more", [512, 1 << 20, 1 << 40])
def test_a_tar_whose_server_reports_too_large_a_length(more: int, faulty: Faulty, tmp_path: Path) -> None:
    """A tar of zarrfs is read from its end: reading fails quickly, with an error that names the size and the range.

    A tar of Flux is read from its start up to its end-of-archive blocks, so it needs no length.
    """
    (tmp_path / "f").write_bytes(DATA)
    done = conftest.run("archive", "create", "-C", tmp_path, "-O", tmp_path / "own.tar", "--inline-threshold=0", "f")
    assert done.returncode == 0, done.stderr
    dump = Path(make_dump(tmp_path, [DATA, OTHER], None))  # type: ignore[arg-type]
    for path, right in (tmp_path / "own.tar", False), (dump, True):
        url = faulty.put(f"/{path.name}", path.read_bytes())
        faulty.head(f"/{path.name}", forever=("longer", more))
        began = time.monotonic()
        if right:
            assert run(url, whole) == DATA
        else:
            fails(url, OutOfRange, r"has (at most )?\d+ bytes, bytes \[\d+, \d+\) were asked for")
        assert time.monotonic() - began < 30
        assert faulty.gets() < 12


def test_a_url_prefix_that_ends_in_tar(faulty: Faulty) -> None:
    """A prefix that ends in .tar may still be a directory of blobs."""
    faulty.put(f"/x.tar/{REF}", DATA)
    assert run(f"{faulty.url}/x.tar", whole) == DATA


# -- content.sqlite


def test_uncompressed_objects(tmp_path: Path) -> None:
    content_db(tmp_path / "db", [DATA], compressed=False)
    assert run(tmp_path / "db", whole) == DATA


def test_without_lz4_only_compressed_objects_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content_db(tmp_path / "db", [DATA, b"short"])
    monkeypatch.setitem(sys.modules, "lz4.block", None)
    fails(tmp_path / "db", ReadError, r"LZ4.*the package lz4: /.*/python\S* -m pip install 'zarrfs\[flux\]'")
    assert run(tmp_path / "db", lambda reader: whole(reader, blobref(b"short"), 5)) == b"short"


DAMAGE = {
    "lz4": ("UPDATE objects SET object = substr(object, 1, 9)", WrongHash, "damaged"),
    "size": ("UPDATE objects SET size = 1 << 40", OutOfRange, f"{1 << 40} bytes"),
    "raw": ("UPDATE objects SET size = -1", OutOfRange, "where the archive says"),
    "bomb": ("UPDATE objects SET object = zeroblob(4)", WrongHash, "cannot be"),
    "text": ("UPDATE objects SET object = 'text'", ReadError, "not as Flux writes"),
    "null": ("UPDATE objects SET size = NULL", ReadError, "not as Flux writes"),
    "other": ("UPDATE objects SET size = -1, object = zeroblob(10240)", WrongHash, "another hash"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_object(tmp_path: Path, damage: str) -> None:
    content_db(tmp_path / "db", [DATA])
    statement, error, match = DAMAGE[damage]
    with sqlite3.connect(tmp_path / "db") as db:
        db.execute(statement)
    fails(tmp_path / "db", error, match)


def test_a_damaged_database(tmp_path: Path) -> None:
    content_db(tmp_path / "db", [os.urandom(1000) for _ in range(100)] + [DATA])
    raw = bytearray((tmp_path / "db").read_bytes())
    raw[4096:] = b"\xff" * (len(raw) - 4096)
    (tmp_path / "db").write_bytes(raw)
    fails(tmp_path / "db", ReadError, "malformed|not a database|corrupt")
    (tmp_path / "db").write_bytes(raw[:50])
    with pytest.raises(UsageError, match="not of Flux's blobs"):
        check_sources([str(tmp_path / "db")])


def test_a_database_that_is_removed_under_a_reader(tmp_path: Path) -> None:
    content_db(tmp_path / "db", [DATA, OTHER])

    async def body(reader: BlobReader) -> None:
        await whole(reader)
        (tmp_path / "db").unlink()
        assert await whole(reader, blobref(OTHER), len(OTHER)) == OTHER

    run(tmp_path / "db", body)


LOCKER = """
import sqlite3, sys
db = sqlite3.connect(sys.argv[1], isolation_level=None)
db.execute("PRAGMA locking_mode=EXCLUSIVE")
db.execute("PRAGMA journal_mode=" + sys.argv[2])
db.execute("INSERT INTO objects VALUES ('x', -1, x'00', 0)")
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("journal", ["OFF", "WAL", "DELETE"])
def test_the_database_of_a_running_instance_is_refused(tmp_path: Path, journal: str) -> None:
    content_db(tmp_path / "db", [DATA])
    command = [sys.executable, "-c", LOCKER, str(tmp_path / "db"), journal]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        with pytest.raises(UsageError, match=r"blobs=.*db: in use.*blobs=flux:, or stop it first"):
            check_sources([str(tmp_path / "db")])
        process.communicate("")
    check_sources([str(tmp_path / "db")])
    assert content_database.fault_of(str(tmp_path / "db")) == ""


@pytest.mark.parametrize("suffix", ["-wal", "-journal"])
def test_a_database_with_a_leftover_journal_is_refused(tmp_path: Path, suffix: str) -> None:
    content_db(tmp_path / "db", [DATA])
    (tmp_path / f"db{suffix}").write_bytes(b"")
    check_sources([str(tmp_path / "db")])
    (tmp_path / f"db{suffix}").write_bytes(b"unwritten")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/link").symlink_to("../db")
    for name in "db", "elsewhere/link":
        with pytest.raises(UsageError, match=f"left open by one \\({suffix}\\)"):
            check_sources([str(tmp_path / name)])


# -- dump tars


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the offsets of the members that a search has read."""
    real, found = blob_sources.DumpSource._read, []

    async def counting(self: Any, offset: int, length: int) -> Any:
        found.append(offset)
        return await real(self, offset, length)

    monkeypatch.setattr(blob_sources.DumpSource, "_read", counting)
    return found


def test_a_dump_whose_document_lists_its_members_in_order(tmp_path: Path, reads: list[int]) -> None:
    blobs = [bytes([at]) * 1000 for at in range(40)]
    dump_tar(tmp_path / "x.tar", {"main": (archive_of(*blobs), blobs), "other": ([], [])})
    assert run(tmp_path / "x.tar", lambda reader: whole(reader, blobref(blobs[20]), 1000)) == blobs[20]
    assert not reads


def test_a_dump_whose_members_are_in_another_order(tmp_path: Path, reads: list[int]) -> None:
    """Appended archives number their regions differently: blobs are found by hashing each member once."""
    blobs = [bytes([at]) * 1000 for at in range(40)]
    dump_tar(tmp_path / "x.tar", {"main": (archive_of(*blobs[::-1]), blobs)})

    async def body(reader: BlobReader) -> None:
        for at in (30, 3, 17, 39, 0):
            assert await whole(reader, sized(blobref(blobs[at]), 1000), 1000) == blobs[at]
        for absent in (b"none", b"neither", b"nor this"):
            with pytest.raises(TargetMissing):
                await reader.size(sized(blobref(absent), 1000))

    run(tmp_path / "x.tar", body)
    assert len(reads) < 3 * len(blobs)


def test_a_dump_that_is_cut_short(tmp_path: Path) -> None:
    blobs = [os.urandom(3000) for _ in range(3)]
    dump_tar(tmp_path / "x.tar", {"main": ([], blobs)})
    whole_tar = (tmp_path / "x.tar").read_bytes()
    with tarfile.open(tmp_path / "x.tar") as tar:
        second = tar.getmembers()[2]
    for size in (second.offset_data + 100, second.offset_data, second.offset + 100, second.offset_data + 3000):
        (tmp_path / "x.tar").write_bytes(whole_tar[:size])
        assert run(tmp_path / "x.tar", lambda reader: reader.size(blobref(blobs[2]))) == 3000
        fails(tmp_path / "x.tar", ReadError, "not in the tar, which is cut short", sized(blobref(blobs[0]), 3000))
    (tmp_path / "x.tar").write_bytes(whole_tar[: second.offset] + b"\xff" * 5000)
    fails(tmp_path / "x.tar", ReadError, "damaged at byte", sized(blobref(blobs[0]), 3000))


def test_long_names_in_a_dump(tmp_path: Path) -> None:
    """Extended headers, as libarchive and GNU tar write them."""
    for form in (tarfile.PAX_FORMAT, tarfile.GNU_FORMAT):
        name = "a" * 150 + ".é"
        patch = pytest.MonkeyPatch()
        patch.setattr(tarfile, "PAX_FORMAT", form)
        dump_tar(tmp_path / "x.tar", {name: ([], [DATA])})
        patch.undo()
        assert run(tmp_path / "x.tar", whole) == DATA


# -- the running instance


def helpers(flux: FakeFlux) -> list[int]:
    """Return the pids of all helpers started so far."""
    return [int(call.removeprefix("open ")) for call in flux.calls() if call.startswith("open ")]


@pytest.mark.parametrize("a_round", [0, 4 << 20])
def test_one_helper_loads_all_blobs(flux: FakeFlux, a_round: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """_ROUND bounds the bytes received before other tasks run; its value makes no difference."""
    monkeypatch.setattr(flux_blobs, "_ROUND", a_round)
    blobs = [os.urandom(size) for size in (100, 4096, 70_000, 3 << 20) for _ in range(15)] + [b""]
    for data in blobs:
        flux.store(data)
    flux.store(OTHER, "sha256")
    flux.delay(1)

    async def body(reader: BlobReader) -> None:
        assert flux.calls() == []  # no helper starts before the first read
        began = trio.current_time()
        async with trio.open_nursery() as nursery:
            for data in blobs * 3:
                nursery.start_soon(whole, reader, sized(blobref(data), len(data)), len(data))
        assert trio.current_time() - began < 50  # not 61 times the delay
        assert await whole(reader, blobref(OTHER, "sha256"), len(OTHER)) == OTHER
        with pytest.raises(TargetMissing):
            await reader.size(blobref(b"none"))
        assert reader.stats()["blobs_fetched"] == {"flux": 62}

    run("flux:", body, host_requests=40, request_timeout=60)
    (helper,) = helpers(flux)
    assert not is_running(helper)


def test_a_helper_that_dies_is_replaced_once(flux: FakeFlux) -> None:
    flux.store(DATA)
    flux.store(OTHER)
    other = sized(blobref(OTHER), len(OTHER))

    async def killing(numbers: range, then: float = 60) -> None:
        for number in numbers:
            while len(helpers(flux)) <= number:  # noqa: ASYNC110
                await trio.sleep(0.01)
            await trio.sleep(0.05)  # until the helper has a request in flight
            if number == numbers[-1]:
                flux.delay(then)
            os.kill(helpers(flux)[number], signal.SIGKILL)

    async def body(reader: BlobReader) -> None:
        flux.delay(60)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(killing, range(1), 0)
            assert await whole(reader) == DATA
        dead = helpers(flux)[1]
        os.kill(dead, signal.SIGKILL)  # while nothing is in flight
        while is_running(dead):  # noqa: ASYNC110
            await trio.sleep(0.01)
        await trio.testing.wait_all_tasks_blocked(0.05)
        flux.delay(60)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(killing, range(2, 4))
            with pytest.raises(ReadError, match="helper in Flux's Python was killed by signal 9"):
                await whole(reader, other, len(OTHER))
        flux.delay(0)
        assert await whole(reader, other, len(OTHER)) == OTHER
        assert len(helpers(flux)) == 5

    run("flux:", body)


def test_a_helper_of_another_version(flux: FakeFlux, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a partial update, the helper is refused by its file before mounting, and by its greeting afterwards."""
    flux.store(DATA)
    flux.put("archive.main", archive_of(DATA))
    newer = tmp_path / "flux_helper.py"
    newer.write_text(Path(source_kinds.HELPER).read_text().replace("PROTOCOL = 1 ", "PROTOCOL = 2 "))
    monkeypatch.setattr(flux_blobs, "HELPER", str(newer))
    said = "flux_helper.py speaks version 2 of its protocol, zarrfs version 1; install zarrfs again"
    fails("flux:", ReadError, said)
    monkeypatch.setattr(source_kinds, "HELPER", str(newer))
    with pytest.raises(UsageError, match=f"blobs=flux:: .*{said}"):
        check_sources(["flux:"])
    with pytest.raises(SourceError, match=f"flux:main: .*{said}"):
        prepare._fetch_flux("flux:main", Options())


def test_errors_of_flux_are_reported(flux: FakeFlux, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flux.store(DATA)
    (flux.root / "content" / REF).write_bytes(DATA[::-1])
    fails("flux:", WrongHash, "another hash")
    (flux.root / "content" / REF).write_bytes(DATA[1:])
    fails("flux:", OutOfRange, f"a blob of {len(DATA) - 1} bytes")
    flux.delay(600)
    fails("flux:", ReadError, "flux:sha1.*: content.load: no answer within 0.2 s", request_timeout=0.2)
    flux.delay(0)
    flux.stop()
    put(tmp_path, DATA)
    fails("flux:", ReadError, "status 1: cannot reach the Flux instance: no such file or directory")
    assert run(("flux:", tmp_path), whole) == DATA
    (flux.binding / "_flux/_core.py").write_text("import nothing_of_this_name")
    fails("flux:", ReadError, "Flux's Python binding cannot be imported: No module named 'nothing_of_this_name'")
    flux.path.joinpath("flux").write_text("#!/bin/sh\necho 'flux: `python` is not a flux command' >&2\nexit 3\n")
    fails("flux:", ReadError, "ended with status 3: flux: `python` is not a flux command")
    monkeypatch.setenv("PATH", "/nonexistent")
    fails("flux:", ReadError, "flux python: cannot run flux: no such file")


# -- invalid sources


def test_invalid_blob_sources(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "text").write_text("{}")
    dump_tar(tmp_path / "x.tar.gz", {"main": ([], [DATA])}, "w:gz")
    sqlite3.connect(tmp_path / "db").execute("CREATE TABLE other(x)").connection.close()
    for name, rule in {
        "fifo": "not a directory", "text": "not a directory, nor a content.sqlite", "absent": "no such file",
        "x.tar.gz": "is compressed.*decompress it first",
        "db": "a database of SQLite, but not of Flux's blobs: no such table: objects",
    }.items():  # fmt: skip
        with pytest.raises(UsageError, match=f"option blobs=.*{name}: {rule}") as caught:
            check_sources([str(tmp_path), str(tmp_path / name)])
        assert "\n" not in str(caught.value)
    with pytest.raises(UsageError, match="blobs=flux:main: the running Flux instance is named flux: alone"):
        check_sources(["flux:main"])
    check_sources(["flux:", "http://host/x", "s3://bucket/y", tmp_path.as_uri()])

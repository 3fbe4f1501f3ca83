"""BlobReader: returns only bytes with the hash in their blobref, from every kind of place, cached and prefetched."""

from __future__ import annotations

import gc
import logging
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

import fsspec
import pytest
import trio

from tests.archives.compiled import blobref, file, opened, put
from tests.conftest import open_descriptors
from tests.fakeflux import FakeFlux
from tests.servers import Faulty, Nginx
from zarrfs.archives.blob_reader import BlobReader, blob_url
from zarrfs.archives.blobrefs import sized
from zarrfs.config.options import Options
from zarrfs.errors import AccessDenied, Loop, OutOfRange, ReadError, TargetMissing, WrongHash, to_errno
from zarrfs.metrics.counters import COUNTS, counters
from zarrfs.store.index import IndexStore
from zarrfs.system.own_mount import OWN_MOUNT

T = TypeVar("T")
Places = tuple[Path | str, ...] | Path | str
DATA = bytes(range(256)) * 40
REF = blobref(DATA)
OTHER = b"another blob" * 30
LARGE = os.urandom((5 << 20) + 3)
MIB = 1 << 20


def url_of(data: bytes, algorithm: str = "sha1") -> str:
    return sized(blobref(data, algorithm), len(data))


URL = url_of(DATA)


def run(places: Places, body: Callable[[BlobReader], Awaitable[T]], **options: Any) -> T:
    """Run `body` on trio with a BlobReader of `places`. If all places are local, check that no descriptor leaks."""
    places = places if isinstance(places, tuple) else (places,)

    async def main() -> T:
        reader = BlobReader(tuple(map(str, places)), Options(**options))
        try:
            return await body(reader)
        finally:
            await reader.aclose()

    before = len(open_descriptors())
    result = trio.run(main)
    if len(open_descriptors()) > before and not any("://" in str(place) for place in places):
        gc.collect()  # exceptions raised on the way keep their frames, and the open files in them, alive
        assert len(open_descriptors()) <= before
    return result


async def whole(reader: BlobReader, data: bytes = DATA, algorithm: str = "sha1") -> bytes:
    """Read the blob `data`."""
    return bytes(await reader.read(url_of(data, algorithm), 0, len(data), 0, len(data)))


def fails(places: Places, error: type[ReadError], match: str, url: str = URL, **options: Any) -> ReadError:
    """Check that reading `url` raises exactly `error`, not as ENOENT, ENOTDIR or EISDIR, and return the exception."""
    with pytest.raises(ReadError, match=match or None) as caught:
        run(places, lambda reader: reader.read(url, 0, 1, 0, 1), **options)
    assert type(caught.value) is error
    assert to_errno(caught.value) not in (2, 20, 21)
    return caught.value


@pytest.fixture
def flux(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeFlux:
    """Return a fake Flux instance whose flux command is on PATH."""
    found = FakeFlux(tmp_path / "flux")
    monkeypatch.setenv("PATH", found.environment()["PATH"])
    return found


# -- every kind of place

BLOBS = [DATA, OTHER, LARGE, b""]


def make_directory(path: Path, nginx: Nginx, flux: FakeFlux) -> str:
    for data in BLOBS:
        put(path, data)
        put(path, data, "sha256")
    (path / REF).rename(path / "elsewhere")
    (path / REF).symlink_to("elsewhere")
    return str(path)


def make_url(path: Path, nginx: Nginx, flux: FakeFlux) -> str:
    place = Path(tempfile.mkdtemp(dir=nginx.plain.root))
    place.chmod(0o755)
    make_directory(place, nginx, flux)
    return f"{nginx.plain.url}/{place.name}"


def make_flux(path: Path, nginx: Nginx, flux: FakeFlux) -> str:
    for data in BLOBS:
        flux.store(data)
        flux.store(data, "sha256")
    return "flux:"


@pytest.mark.parametrize("make", [make_directory, make_url, make_flux])
def test_blobs_are_read_from_every_kind_of_place(
    make: Callable[[Path, Nginx, FakeFlux], str], tmp_path: Path, nginx: Nginx, flux: FakeFlux,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    place = make(tmp_path, nginx, flux)

    async def body(reader: BlobReader) -> None:
        assert reader.remote is (make is not make_directory)
        for algorithm in ("sha1", "sha256"):
            for data in BLOBS:
                assert await whole(reader, data, algorithm) == data
                for at, length in [(len(data) // 2, len(data) // 3), (0, min(1, len(data))), (len(data), 0)]:
                    part = await reader.read(url_of(data, algorithm), at, length, 0, 9)
                    assert bytes(part) == data[at : at + length]
        with pytest.raises(OutOfRange):
            await reader.read(URL, len(DATA), 1, 0, 1)
        with pytest.raises(TargetMissing):
            await whole(reader, b"nobody's")
        assert REF in reader.resolve(URL)

    run(place, body)
    (tmp_path / "empty").mkdir()
    run((tmp_path / "empty", place), lambda reader: whole(reader, OTHER))  # no place needs to have every blob
    assert not caplog.messages
    fails(place, OutOfRange, "bytes", sized(blobref(OTHER, "sha256"), 5))
    error = fails(place, TargetMissing, r"no such blob: in none of these places \(.+\)$", url_of(b"nobody's"))
    assert blobref(b"nobody's") in str(error)


def test_urls_of_blobs() -> None:
    assert blob_url("https://h/a/?sig=x", REF) == f"https://h/a/{REF}?sig=x"
    assert blob_url("zip://in::https://h/a.zip", REF) == f"zip://in/{REF}::https://h/a.zip"


# -- bad blobs and places


def test_a_source_directory_that_was_removed_or_replaced(tmp_path: Path) -> None:
    """The place fails: whether it has the blob is not known."""
    fails(tmp_path / "absent", ReadError, "absent")
    (tmp_path / "file").write_text("")
    fails(tmp_path / "file", ReadError, "file")
    (tmp_path / "empty").mkdir()
    fails((tmp_path / "absent", tmp_path / "empty"), ReadError, "absent")
    assert fails((), TargetMissing, "no blobs= given").where == REF


def _flip(path: Path) -> None:
    path.write_bytes(DATA[:-1] + bytes([DATA[-1] ^ 1]))


@pytest.mark.parametrize(
    ("make", "failure"),
    [
        (_flip, WrongHash),
        (lambda path: path.write_bytes(DATA[:-1]), OutOfRange),
        (lambda path: path.symlink_to("absent"), TargetMissing),
        (lambda path: path.symlink_to(path.name), ReadError),
        (lambda path: path.mkdir(), ReadError),
        (os.mkfifo, ReadError),
    ],
)
def test_a_bad_blob_is_named(tmp_path: Path, make: Callable[[Path], object], failure: type[ReadError]) -> None:
    make(tmp_path / REF)
    assert REF in str(fails(tmp_path, failure, ""))


def test_a_blob_in_the_mount_that_reads_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path, DATA)

    async def body(reader: BlobReader) -> None:
        monkeypatch.setattr(OWN_MOUNT, "device", os.stat(tmp_path).st_dev)
        with pytest.raises(Loop):
            await whole(reader)

    run(tmp_path, body)


UNREADABLE = """
import os, sys, trio
from zarrfs.errors import AccessDenied
from zarrfs.archives.blob_reader import BlobReader

if os.geteuid() == 0:
    os.setgid(65534)
    os.setuid(65534)
for place in sys.argv[2:]:
    try:
        trio.run(BlobReader((place,)).read, sys.argv[1], 0, 1, 0, 1)
    except AccessDenied as exc:
        print("denied:", exc.where)
"""


def test_a_blob_or_directory_without_read_permission() -> None:
    with tempfile.TemporaryDirectory() as name:  # another session of pytest would close tmp_path to other users
        (base := Path(name)).chmod(0o755)
        blob, place = base / "blob", base / "place"
        for directory in (blob, place):
            directory.mkdir()
            put(directory, DATA)
        (blob / REF).chmod(0)
        place.chmod(0)
        command = [sys.executable, "-c", UNREADABLE, URL, str(blob), str(place)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        place.chmod(0o755)
    assert done.stdout == f"denied: {blob / REF}\ndenied: {place / REF}\n", done.stderr


def test_the_second_source_is_read_if_the_first_has_a_wrong_blob(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    one, two = tmp_path / "1", tmp_path / "2"
    one.mkdir()
    two.mkdir()
    put(two, DATA)

    async def twice(reader: BlobReader) -> bytes:
        await whole(reader)
        return await whole(reader)

    with caplog.at_level(logging.WARNING):
        (one / REF).write_bytes(DATA[::-1])
        assert run((one, two), twice) == DATA
    assert caplog.messages == [
        f"{one / REF}: its bytes have another hash than its name says; read from {two / REF} instead"
    ]
    assert BlobReader((str(one), str(two))).resolve(URL) == str(one / REF)
    (two / REF).unlink()
    fails((one, two), WrongHash, "another hash")
    (one / REF).unlink()
    assert BlobReader((str(one), str(two))).resolve(URL) == str(one / REF)


def test_only_bytes_that_were_hashed_are_served(tmp_path: Path) -> None:
    """A blob that changes in place: readers get the right bytes, or an error, and the right ones once it is mended."""
    blobs = [bytes([at]) * 1000 for at in range(8)]
    paths = [tmp_path / put(tmp_path, data) for data in blobs]

    async def body(reader: BlobReader) -> None:
        for at, (path, data) in enumerate(zip(paths, blobs, strict=True)):
            url = sized(path.name, len(data))
            if at % 2:  # a part, so that the blob is kept
                assert await reader.read(url, 1, len(data) - 1, 0, len(data)) == data[1:]
            before = path.stat()
            with path.open("r+b") as file:
                file.write(b"x")
            os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))  # the file looks the same
            if not at % 2:
                with pytest.raises(WrongHash):
                    await whole(reader, data)
                path.write_bytes(data)
            assert await whole(reader, data) == data

    run(tmp_path, body)


# -- servers


def served(faulty: Faulty, *faults: object, **more: Any) -> str:
    return faulty.put(f"/{REF}", DATA, *faults, **more).rpartition("/")[0]


LIES: dict[str, tuple[Callable[[], bytes], type[ReadError], str]] = {
    "other bytes": (lambda: DATA[::-1], WrongHash, "another hash"),
    "less": (lambda: DATA[:-1], OutOfRange, f"{len(DATA) - 1} bytes"),
    "more": (lambda: DATA + b"x", OutOfRange, f"{len(DATA) + 1} bytes"),
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
        assert await whole(reader, OTHER) == OTHER

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


# -- the running instance


def test_one_helper_loads_all_blobs_of_an_instance(flux: FakeFlux) -> None:
    """A bad blob spoils no other, and a helper that was killed is replaced."""
    good = [os.urandom(size) for size in (100, 4096, 70_000, 3 << 20) for _ in range(15)] + [b""]
    missing, longer = b"missing", b"longer"
    for data in good:
        flux.store(data)
    (flux.root / "content" / blobref(longer)).write_bytes(longer + b"!")

    async def body(reader: BlobReader) -> None:
        failures = []

        async def read(data: bytes) -> None:
            try:
                assert await whole(reader, data) == data
            except ReadError as exc:
                failures.append(type(exc))

        assert flux.calls() == []  # no command runs before the first read
        async with trio.open_nursery() as nursery:
            for data in [*good, missing, longer, *good]:
                nursery.start_soon(read, data)
        assert sorted(failures, key=str) == [OutOfRange, TargetMissing]
        (helper,) = flux.helpers()
        os.kill(helper, signal.SIGKILL)
        (flux.root / "content" / blobref(longer)).write_bytes(longer)
        with trio.fail_after(60):
            while failures:
                failures.clear()
                await read(longer)
        assert len(flux.helpers()) == len(flux.calls()) == 2

    run("flux:", body, read_timeout=300)


def test_a_helper_that_has_ended_gets_no_signal(flux: FakeFlux, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process may have its process ID by then."""
    killed: list[tuple[int, int]] = []

    async def body(reader: BlobReader) -> None:
        with pytest.raises(ReadError):
            await whole(reader)
        monkeypatch.setattr(os, "killpg", lambda *arguments: killed.append(arguments))

    flux.stop()
    run("flux:", body)
    assert not killed


def test_errors_of_flux_are_reported(flux: FakeFlux, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flux.store(DATA)
    (flux.root / "content" / REF).write_bytes(DATA[::-1])
    fails("flux:", WrongHash, "another hash")
    (flux.root / "content" / REF).write_bytes(DATA[1:])
    fails("flux:", OutOfRange, f"a blob of {len(DATA) - 1} bytes")
    flux.delay(600)
    fails("flux:", ReadError, "flux:sha1.*: no answer within 0.2 s", read_timeout=1)
    flux.delay(0)
    flux.stop()
    put(tmp_path, DATA)
    fails("flux:", ReadError, "cannot reach the Flux instance: no such file")
    assert run(("flux:", tmp_path), whole) == DATA
    monkeypatch.setenv("PATH", "/nonexistent")
    fails("flux:", ReadError, "cannot run flux: no such file")


# -- in memory


def remote(place: Path, blobs: Iterable[bytes]) -> None:
    """Put blobs behind the URL memory:/PLACE."""
    for data in blobs:
        fsspec.filesystem("memory").pipe(f"{place}/{blobref(data)}", data)


def pieces(count: int, size: int) -> list[bytes]:
    return [at.to_bytes(4, "big") * (size // 4) for at in range(count)]


def test_readers_of_one_blob_fetch_it_once(faulty: Faulty) -> None:
    place = faulty.put(f"/{REF}", DATA).rpartition("/")[0]

    async def body(reader: BlobReader) -> None:
        async with trio.open_nursery() as nursery:
            for at in range(50):
                nursery.start_soon(reader.read, URL, at, 5, 0, len(DATA))
        assert faulty.gets() == 1

    run(place, body)


def test_blobs_in_memory_are_bounded_by_memory_limit(tmp_path: Path) -> None:
    blobs = pieces(64, MIB)
    remote(tmp_path / "db", blobs)

    async def body(reader: BlobReader) -> None:
        async with trio.open_nursery() as nursery:
            for data in blobs:
                nursery.start_soon(whole, reader, data)
        for data in [*blobs, *blobs[-3:]]:
            assert await whole(reader, data) == data
            assert counters()["memory_kept_bytes"] <= 8 * MIB
        assert counters()["memory_kept_bytes"] >= 6 * MIB
        fetched = COUNTS["memory_misses_total"]
        assert await whole(reader, blobs[-1]) == blobs[-1]
        assert COUNTS["memory_misses_total"] == fetched

    run(f"memory:/{tmp_path}/db", body, memory_limit=8 * MIB)


def test_a_blob_larger_than_memory_limit_is_an_error(tmp_path: Path) -> None:
    data = bytes(3 * MIB)
    remote(tmp_path / "db", [data])

    async def body(reader: BlobReader) -> None:
        with pytest.raises(ReadError, match="memory_limit="):
            await whole(reader, data)

    run(f"memory:/{tmp_path}/db", body, memory_limit=2 * MIB)


def test_regions_of_a_file_read_in_order_are_prefetched(faulty: Faulty) -> None:
    blobs = pieces(40, 4096)
    for data in blobs:
        place = faulty.put(f"/{blobref(data)}", data).rpartition("/")[0]
    regions = [[at * MIB, 4096, blobref(data)] for at, data in enumerate(blobs)]
    document = {"f": file(regions, encoding="blobvec", size=40 * MIB)}

    def settled(store: IndexStore) -> bool:
        found = counters()
        return not (found["requests_in_flight"] or found["requests_waiting"])

    async def fetched(store: IndexStore, offsets: list[int], least: int) -> int:
        for at in offsets:
            await store.get("f", at, MIB)
        with trio.fail_after(60):
            while faulty.gets() < least:  # noqa: ASYNC110
                await trio.sleep(0.01)
        before = -1
        while before != faulty.gets() or not settled(store):
            before = faulty.gets()
            await trio.sleep(0.1)
        return before

    with opened(document, blobs=(place,)) as (store, _):
        assert trio.run(fetched, store, [0], 2) == 2  # read-ahead fetches as much as was read
    faulty.requests.clear()
    with opened(document, blobs=(place,)) as (store, _):
        assert 12 <= trio.run(fetched, store, [at * MIB for at in range(8)], 12) <= 16
    faulty.requests.clear()
    with opened(document, blobs=(place,)) as (store, _):
        assert trio.run(fetched, store, [30 * MIB, 20 * MIB, 10 * MIB], 3) <= 6


# -- on disk


def cached(tmp_path: Path, *blobs: bytes, place: str = "db") -> None:
    """Read `blobs` through a disk cache."""

    async def body(reader: BlobReader) -> None:
        for data in blobs:
            assert await whole(reader, data) == data

    run(f"memory:/{tmp_path}/{place}", body, cache_dir=str(tmp_path / "cache"))


def test_a_blob_on_disk_is_read_from_there_and_a_damaged_one_fetched_again(tmp_path: Path) -> None:
    blobs = [DATA, b"", b"short"]
    remote(tmp_path / "db", blobs)
    remote(tmp_path / "empty", [])
    cached(tmp_path, *blobs)
    for _ in range(2):
        cached(tmp_path, *blobs, place="empty")
    files = list((tmp_path / "cache").glob("*/*"))
    assert len(files) == len(blobs)
    for path in files:
        path.write_bytes(path.read_bytes()[:-1] + b"?")
    with pytest.raises(ReadError):
        cached(tmp_path, DATA, place="empty")
    cached(tmp_path, *blobs)
    cached(tmp_path, *blobs, place="empty")


def test_a_blob_on_disk_is_an_error_if_the_archive_says_another_length(tmp_path: Path) -> None:
    """Its hash is right; its bytes would be a file that ends too early."""
    remote(tmp_path / "db", [DATA])
    cached(tmp_path, DATA)
    url, cache = sized(REF, len(DATA) + 1), str(tmp_path / "cache")
    fails(f"memory:/{tmp_path}/db", OutOfRange, "archive says", url, cache_dir=cache)

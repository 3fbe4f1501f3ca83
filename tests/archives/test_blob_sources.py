"""Blob sources other than directories: the bytes that they return, and how they fail."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.archives.blobreading import DATA, REF, URL, fails, run, whole
from tests.archives.compiled import blobref, file, put
from tests.fakeflux import FakeFlux
from tests.servers import S3, Faulty, Nginx
from zarrfs.archives.blob_reader import BlobReader, blob_url
from zarrfs.archives.blobrefs import sized
from zarrfs.archives.source_kinds import check_sources
from zarrfs.errors import AccessDenied, OutOfRange, ReadError, TargetMissing, UsageError, WrongHash

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


def make_flux(path: Path, blobs: list[bytes], nginx: Nginx) -> str:
    flux = FakeFlux(path / "instance")
    os.environ["PATH"] = flux.environment()["PATH"]
    for data in blobs:
        flux.store(data)
        flux.store(data, "sha256")
    return "flux:"


MAKERS = {"url": make_url, "flux": make_flux}


@pytest.mark.parametrize("kind", MAKERS)
def test_blobs_are_read_from_every_kind_of_source(
    kind: str, tmp_path: Path, nginx: Nginx, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", os.environ["PATH"])
    place = MAKERS[kind](tmp_path, [DATA, OTHER, LARGE, b""], nginx)
    check_sources([place])

    async def body(reader: BlobReader) -> None:
        assert reader.remote
        for algorithm in ("sha1", "sha256"):
            for data in (LARGE, OTHER, DATA, b""):
                url = sized(blobref(data, algorithm), len(data))
                assert await whole(reader, url, len(data)) == data
                assert (
                    bytes(await reader.read(url, len(data) // 2, len(data) // 3, 0, 9))
                    == data[len(data) // 2 : len(data) // 2 + len(data) // 3]
                )
        with pytest.raises(OutOfRange):
            await reader.read(URL, len(DATA), 1, 0, 1)
        with pytest.raises(TargetMissing):
            await whole(reader, sized(blobref(b"nobody's"), 1), 1)
        assert REF in reader.resolve(URL)

    run(place, body)
    assert not caplog.messages
    fails(place, OutOfRange, "bytes", sized(blobref(OTHER, "sha256"), 5))
    fails(place, TargetMissing, r"no such blob: in none of these places \(.+\)$", sized(blobref(b"nobody's"), 1))


@settings(max_examples=25, deadline=None)
@given(st.lists(st.binary(max_size=600), max_size=12), st.sets(st.integers(0, 11)), st.sets(st.integers(0, 11)))
def test_a_blob_is_read_if_any_source_has_it(blobs: list[bytes], first: set[int], second: set[int]) -> None:
    """The sources are two directories with random blobs."""
    with tempfile.TemporaryDirectory() as name:
        base = Path(name)
        has = [[data for at, data in enumerate(blobs) if at in chosen] for chosen in (first, second)]
        for directory, held in zip("ab", has, strict=True):
            (base / directory).mkdir()
            for data in held:
                put(base / directory, data)

        async def body(reader: BlobReader) -> None:
            for data in blobs:
                if data in has[0] or data in has[1]:
                    assert await whole(reader, sized(blobref(data), len(data)), len(data)) == data
                else:
                    with pytest.raises(TargetMissing):
                        await whole(reader, sized(blobref(data), len(data)), len(data))

        run((base / "a", base / "b"), body)


# -- behind URLs


def test_blobs_below_an_s3_prefix(s3: S3, tmp_path: Path) -> None:
    s3.client.put_object(Bucket=s3.bucket, Key=f"blobs/{REF}", Body=DATA)
    place, options = f"s3://{s3.bucket}/blobs/", {"storage": {"s3": s3.options}}
    assert run(place, whole, **options) == DATA
    fails(place, TargetMissing, "no such blob", sized(blobref(b"none"), 1), **options)


def test_urls_of_blobs() -> None:
    assert blob_url("https://h/a/?sig=x", REF) == f"https://h/a/{REF}?sig=x"
    assert blob_url("zip://in::https://h/a.zip", REF) == f"zip://in/{REF}::https://h/a.zip"


def served(faulty: Faulty, *faults: object, **more: Any) -> str:
    return faulty.put(f"/{REF}", DATA, *faults, **more).rpartition("/")[0]


def test_transient_errors_of_a_server_are_retried(faulty: Faulty) -> None:
    assert run(served(faulty, 500, "reset", "truncate"), whole) == DATA


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
        assert await whole(reader, sized(blobref(OTHER), len(OTHER)), len(OTHER)) == OTHER

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


def test_an_instance_loads_many_blobs_with_few_commands(flux: FakeFlux) -> None:
    blobs = [os.urandom(size) for size in (100, 4096, 70_000, 3 << 20) for _ in range(15)] + [b""]
    for data in blobs:
        flux.store(data)
    flux.store(OTHER, "sha256")

    async def body(reader: BlobReader) -> None:
        assert flux.calls() == []  # no command runs before the first read
        async with trio.open_nursery() as nursery:
            for data in blobs * 3:
                nursery.start_soon(whole, reader, sized(blobref(data), len(data)), len(data))
        assert len(flux.calls()) < len(blobs) // 2
        assert await whole(reader, sized(blobref(OTHER, "sha256"), len(OTHER)), len(OTHER)) == OTHER
        with pytest.raises(TargetMissing):
            await whole(reader, sized(blobref(b"none"), 1), 1)

    run("flux:", body, host_requests=40, read_timeout=300)


def test_a_bad_blob_of_an_instance_spoils_no_other(flux: FakeFlux) -> None:
    good = [os.urandom(100) for _ in range(40)]
    missing, longer = b"missing", b"longer"
    for data in good:
        flux.store(data)
    (flux.root / "content" / blobref(longer)).write_bytes(longer + b"!")

    async def body(reader: BlobReader) -> None:
        failures = []

        async def read(data: bytes) -> None:
            try:
                assert await whole(reader, sized(blobref(data), len(data)), len(data)) == data
            except ReadError as exc:
                failures.append(type(exc))

        async with trio.open_nursery() as nursery:
            for data in [*good[:20], missing, longer, *good[20:]]:
                nursery.start_soon(read, data)
        assert sorted(failures, key=str) == [OutOfRange, TargetMissing]

    run("flux:", body)


def test_errors_of_flux_are_reported(flux: FakeFlux, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flux.store(DATA)
    (flux.root / "content" / REF).write_bytes(DATA[::-1])
    fails("flux:", WrongHash, "another hash")
    (flux.root / "content" / REF).write_bytes(DATA[1:])
    fails("flux:", OutOfRange, f"a blob of {len(DATA) - 1} bytes")
    flux.delay(600)
    fails("flux:", ReadError, "flux:sha1.*: flux content load: no answer within 0.2 s", read_timeout=1)
    flux.delay(0)
    flux.stop()
    put(tmp_path, DATA)
    fails("flux:", ReadError, "Unable to connect to Flux")
    assert run(("flux:", tmp_path), whole) == DATA
    monkeypatch.setenv("PATH", "/nonexistent")
    fails("flux:", ReadError, "cannot run flux: no such file")


# -- invalid sources


def test_invalid_blob_sources(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "text").write_text("{}")
    for name, rule in {"fifo": "not a directory", "text": "not a directory", "absent": "no such file"}.items():
        with pytest.raises(UsageError, match=f"option blobs=.*{name}: {rule}") as caught:
            check_sources([str(tmp_path), str(tmp_path / name)])
        assert "\n" not in str(caught.value)
    with pytest.raises(UsageError, match="blobs=flux:main: the running Flux instance is named flux: alone"):
        check_sources(["flux:main"])
    check_sources(["flux:", "http://host/x", "s3://bucket/y", tmp_path.as_uri()])

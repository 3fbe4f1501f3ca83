"""The identity of a value is the same from every method that returns it."""

from __future__ import annotations

from contextlib import aclosing

import pytest
import trio

from tests.servers import GCS, S3, Nginx, Sftp
from zarrfs.config.options import Options
from zarrfs.store.api import Info
from zarrfs.store.remote import FsspecStore


def identities(url: str, options: Options) -> list[int | None]:
    """Of the value k: from its own question, from a listing, and again."""

    async def body() -> list[int | None]:
        store, found = FsspecStore(url, options), list[Info]()
        async with aclosing(store):
            for _ in range(2):
                found.append(await store.info("k"))
                found += [info async for info in store.list_dir("") if info.name == "k"]
                found.append(await store.info("k"))
                store.names.ttl = 0.0  # nothing is believed from here on
                found.append((await store.open("k")).info)
                store.names.ttl = 300.0
        return [info.identity for info in found]

    return trio.run(body)


@pytest.mark.usefixtures("either_client")
def test_on_s3(s3: S3) -> None:
    options, found = Options(storage={"s3": s3.options}), list[int | None]()
    for value in (b"one", b"two"):
        s3.client.put_object(Bucket=s3.bucket, Key="identities/k", Body=value)
        first, *more = identities(f"s3://{s3.bucket}/identities", options)
        assert {*more} == {first}
        found.append(first)
    assert None not in found
    assert found[0] != found[1]


@pytest.mark.usefixtures("either_client")
def test_on_gcs(gcs: GCS) -> None:
    """obstore's tags are not those of listings: from the first listing on, times count."""
    gcs.put("identities%2Fk", b"one")
    _first, *more = identities(f"gs://{gcs.bucket}/identities", Options(storage={"gcs": gcs.options}))
    assert len({*more}) == 1
    assert None not in more


def test_on_sftp(sftp: Sftp) -> None:
    (sftp.root / "identities").mkdir()
    (sftp.root / "identities/k").write_bytes(b"one")
    first, *more = identities(f"{sftp.url}/identities", Options(storage={"sftp": sftp.options}))
    assert {*more} == {first} != {None}


def test_on_a_web_server(nginx: Nginx) -> None:
    """Its listings tell no sizes, so nothing of versions."""
    (nginx.listing.root / "identities").mkdir()
    (nginx.listing.root / "identities/k").write_bytes(b"one")
    found = identities(f"{nginx.listing.url}/identities", Options())
    assert len({*found} - {None}) == 1

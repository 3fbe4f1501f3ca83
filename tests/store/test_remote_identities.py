"""The identity of a value is the same from every method that returns it."""

from __future__ import annotations

from contextlib import aclosing

import trio

from tests.servers import GCS, S3, Nginx
from zarrfs.config.options import Options
from zarrfs.store.api import Info
from zarrfs.store.remote import FsspecStore


def identities(url: str, options: Options) -> list[int | None]:
    """Return the identities of the value k from info(), list_dir(), info() again and open(), twice."""

    async def body() -> list[int | None]:
        store, found = FsspecStore(url, options), list[Info]()
        async with aclosing(store):
            for _ in range(2):
                found.append(await store.info("k"))
                found += [info async for info in store.list_dir("") if info.name == "k"]
                found.append(await store.info("k"))
                store.names.ttl = 0.0  # the table of names is not used for open()
                found.append((await store.open("k")).info)
                store.names.ttl = 300.0
        return [info.identity for info in found]

    return trio.run(body)


def test_an_identity_on_s3_changes_with_the_value(s3: S3) -> None:
    options, found = Options(storage={"s3": s3.options}), list[int | None]()
    for value in (b"one", b"two"):
        s3.client.put_object(Bucket=s3.bucket, Key="identities/k", Body=value)
        first, *more = identities(f"s3://{s3.bucket}/identities", options)
        assert {*more} == {first}
        found.append(first)
    assert None not in found
    assert found[0] != found[1]


def test_an_identity_on_gcs_is_stable_from_the_first_listing_on(gcs: GCS) -> None:
    """Google's listings have no ETags, so after the first listing modification times are compared."""
    gcs.put("identities%2Fk", b"one")
    _first, *more = identities(f"gs://{gcs.bucket}/identities", Options(storage={"gcs": gcs.options}))
    assert len({*more}) == 1
    assert None not in more


def test_an_identity_on_a_web_server_is_stable_or_unknown(nginx: Nginx) -> None:
    """Its listings have no sizes, so they say nothing about versions."""
    (nginx.listing.root / "identities").mkdir()
    (nginx.listing.root / "identities/k").write_bytes(b"one")
    found = identities(f"{nginx.listing.url}/identities", Options())
    assert len({*found} - {None}) == 1

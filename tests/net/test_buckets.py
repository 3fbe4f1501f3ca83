"""Reads of buckets: bytes, tags, names, listings, credentials."""

from __future__ import annotations

import functools
import gzip
import json
import subprocess
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import pytest
import trio
from trio.testing import MockClock

from tests.conftest import PROGRAM
from tests.servers import GCS, S3, Answer, Azure, Faulty, SignedS3, serving, serving_by_headers
from zarrfs.config.keywords import as_items
from zarrfs.config.options import parse
from zarrfs.errors import AccessDenied, ReadError, TargetMissing, ZarrfsError
from zarrfs.net.credentials import Access, Credentials
from zarrfs.net.responses import Entry, Fetched, System, Transient
from zarrfs.net.services import SERVICES
from zarrfs.sources import plan_source
from zarrfs.store.remotefiles import RemoteFiles

VALUE = bytes(range(256)) * 40


def with_system(options: list[str], url: str, function: Callable[[System, str], Any]) -> Any:
    """Run `function` on the system that serves `url` and the path in it; return its result."""

    async def main() -> Any:
        files = RemoteFiles(parse(["retries=0", *options]).options)
        try:
            return await function(*await files.find(url))
        finally:
            await files.aclose()

    return trio.run(main)


def fetch(options: list[str], url: str, start: int, stop: int) -> Fetched:
    found = with_system(options, url, lambda system, path: system.fetch(path, start, stop))
    assert isinstance(found, Fetched)
    return found._replace(data=bytes(found.data))


def told(family: str, options: dict[str, object]) -> list[str]:
    return as_items({family: options})


# -- all providers


class Place(NamedTuple):
    """A bucket that can be read with these options."""

    scheme: str
    bucket: str
    options: list[str]
    put: Callable[[str, bytes], Any]


def place_on(who: str, request: pytest.FixtureRequest) -> Place:
    provider, _, access = who.partition(" ")
    if provider == "s3":
        s3: S3 = request.getfixturevalue("s3")
        options = request.getfixturevalue("signed_s3").options if access else s3.options
        put = lambda key, value: s3.client.put_object(Bucket=s3.bucket, Key=key, Body=value)  # noqa: E731
        return Place("s3", s3.bucket, told("s3", options), put)
    if provider == "gs":
        gcs: GCS = request.getfixturevalue("gcs")
        return Place("gs", gcs.bucket, told("gcs", gcs.options), lambda key, value: gcs.put(quote(key, ""), value))
    azure: Azure = request.getfixturevalue("azure")
    container = azure.public if access == "anonymous" else azure.private
    return Place("az", container, told("abfs", azure.options[access]), functools.partial(azure.put, container))


@pytest.mark.parametrize("who", ["s3", "s3 signed", "gs", "az key", "az sas", "az anonymous"])
def test_values_are_read_and_listed(who: str, request: pytest.FixtureRequest) -> None:
    """Tags in attributes and listings are those of ranges; neither failures nor missing buckets are absent values."""
    place, names = place_on(who, request), ["a key%20+ä", "plain"]
    for name in names:
        place.put(f"clients/d/{name}", VALUE)

    async def look(system: System, path: str) -> None:
        bucket, entries = place.bucket, {}
        for name in names:
            at = f"{path}/{name}"
            found, entries[name] = await system.fetch(at, 100, 300), await system.stat(at)
            assert (bytes(found.data), found.total) == (VALUE[100:300], len(VALUE))
            assert entries[name][:3] == (name, False, len(VALUE))
            assert found.tag
            assert entries[name].tag == found.tag
            beyond = await system.fetch(at, len(VALUE) + 5, len(VALUE) + 9)
            assert (bytes(beyond.data), beyond.total) == (b"", len(VALUE))
        listed = {entry.name: entry for entry in await system.listing(path) or ()}
        if place.scheme == "gs":  # its interface for listings has tags of its own
            assert [(entry.size, entry.tag) for entry in listed.values()] == 2 * [(len(VALUE), None)]
        else:
            assert listed == entries
        assert sorted(listed) == names
        assert (await system.stat(path)).directory
        above = [entry for entry in await system.listing(f"{bucket}/clients") or () if entry.name == "d"]
        assert [entry.directory for entry in above] == [True]
        if system.flat:
            assert [name for name, _ in (await system.page(path, "")).entries] == names
            assert [name for name, _ in (await system.page(path, names[0])).entries] == names[1:]
        for question in (system.stat, system.listing, lambda at: system.fetch(at, 0, 10)):
            with pytest.raises(TargetMissing):
                await question(f"{path}/none")
        # Google's server says in the body of the answer to fetch() that the bucket is missing; the emulator does not
        missing: list[Callable[[], Any]] = [lambda: system.stat("nowhere/store/a")]
        missing += [] if place.scheme == "gs" else [lambda: system.fetch("nowhere/store/a", 0, 4)]
        if who != "az anonymous":  # Azure hides it
            await check_errors([*missing, *([lambda: system.page("nowhere/store", "")] if system.flat else [])])

    with_system(place.options, f"{place.scheme}://{place.bucket}/clients/d", look)


async def check_errors(questions: list[Callable[[], Any]]) -> None:
    for question in questions:
        with pytest.raises(ReadError, match="the bucket does not exist") as found:
            await question()
        assert type(found.value) is ReadError


# -- S3


@pytest.fixture
def on_s3(s3: S3) -> tuple[list[str], str]:
    """Store VALUE on S3; return (options, its URL)."""
    s3.client.put_object(Bucket=s3.bucket, Key="clients/a key%20+ä", Body=VALUE)
    return told("s3", s3.options), f"s3://{s3.bucket}/clients/a key%20+ä"


@pytest.mark.parametrize(
    ("name", "anonymous", "words"),
    [
        ("none.zarr", False, "not found"), ("none.json", False, "not found"), ("private.json", True, "s3.profile="),
        ("data.bin", False, "is a file"),
    ],
)  # fmt: skip
def test_a_misspelt_or_private_name_is_an_error_not_an_empty_store(
    s3: S3, name: str, anonymous: bool, words: str
) -> None:
    s3.client.put_object(Bucket=s3.bucket, Key="private.json", Body=b"{}")
    s3.client.put_object(Bucket=s3.bucket, Key="data.bin", Body=b"data")
    options = {"endpoint_url": s3.endpoint, "anon": True} if anonymous else s3.options
    with pytest.raises(ZarrfsError, match=f"^s3://{s3.bucket}/{name}: .*{words}"):
        plan_source(f"s3://{s3.bucket}/{name}", parse(told("s3", options)).options, child=False)


def test_a_refused_listing_says_how_to_log_in() -> None:
    rule = r"^s3://b/none: .* 403 .*\(.*s3.profile="
    with serving(lambda method, path: (403, {}, b"no")) as endpoint, pytest.raises(ZarrfsError, match=rule):
        plan_source("s3://b/none", parse([f"s3.endpoint_url={endpoint}", "s3.anon"]).options, child=False)


def test_an_empty_bucket_is_an_empty_store(s3: S3) -> None:
    s3.client.create_bucket(Bucket="emptied")
    s3.client.put_object(Bucket="emptied", Key="marker/", Body=b"")
    for url in "s3://emptied/marker", "s3://emptied":
        assert plan_source(url, parse(told("s3", s3.options)).options, child=False).kind == "zarr"
        s3.client.delete_object(Bucket="emptied", Key="marker/")


def test_bytes_of_s3_are_those_that_are_stored(s3: S3) -> None:
    """A reference counts bytes of the value as it is stored, whatever its Content-Encoding says."""
    s3.client.put_object(Bucket=s3.bucket, Key="encoded", Body=VALUE, ContentEncoding="gzip")

    async def look(system: System, path: str) -> tuple[bytes, bytes, int | None]:
        whole, part = await system.fetch(path, 0, None), await system.fetch(path, 100, 300)
        return bytes(whole.data), bytes(part.data), (await system.stat(path)).size

    found = with_system(told("s3", s3.options), f"s3://{s3.bucket}/encoded", look)
    assert found == (VALUE, VALUE[100:300], len(VALUE))


@pytest.mark.parametrize("key", ["a//b", "/a", "a/", "a+b %2F?#~*'", "é\u2028"])
def test_unusual_keys_are_not_confused_with_others(signed_s3: SignedS3, s3: S3, key: str) -> None:
    s3.client.put_object(Bucket=s3.bucket, Key="other/a", Body=b"another value")
    s3.client.put_object(Bucket=s3.bucket, Key="other/a/b", Body=b"another value")
    s3.client.put_object(Bucket=s3.bucket, Key=f"other/{key}", Body=VALUE)
    assert fetch(told("s3", signed_s3.options), f"s3://{s3.bucket}/other/{key}", 5, 9).data == VALUE[5:9]


@pytest.mark.parametrize("key", ["a/../b", "./a", "a/."])
def test_keys_that_no_url_has_are_errors(s3: S3, key: str) -> None:
    with pytest.raises(ReadError, match="cannot be requested") as found:
        fetch(told("s3", s3.options), f"s3://{s3.bucket}/{key}", 0, 1)
    assert type(found.value) is ReadError


@pytest.mark.parametrize("headers", [{"Content-Type": "application/xml"}, {"x-amz-request-id": "1"}])
def test_values_of_a_deleted_bucket_over_http_are_errors(headers: dict[str, str]) -> None:
    """Only the body says that the bucket is gone, and the answer to HEAD has none."""

    def answer(method: str, path: str) -> tuple[int, dict[str, str], bytes]:
        if method == "HEAD":
            return 404, headers, b""
        code = "NoSuchBucket" if path.startswith("/gone") else "NoSuchKey"
        return 404, {"Content-Type": "application/xml"}, f"<Error><Code>{code}</Code></Error>".encode()

    async def check(system: System, path: str) -> None:
        await check_errors([lambda: system.fetch(path, 0, 4), lambda: system.stat(path)])
        with pytest.raises(TargetMissing):
            await system.stat(path.replace("gone", "there"))

    with serving(answer) as endpoint:
        with_system([], f"{endpoint}/gone/store/a", check)


def test_a_403_keeps_its_status(faulty: Faulty) -> None:
    """It must not look like a network failure, and -o missing_status=403 needs the status."""
    storage = told("s3", {"anon": True, "endpoint_url": faulty.url})
    faulty.put("/b/v", VALUE, forever=403)
    faulty.head("/b/v", forever=403)
    for question in (lambda at, path: at.fetch(path, 0, 10), lambda at, path: at.stat(path)):
        with pytest.raises(AccessDenied) as caught:
            with_system(storage, "s3://b/v", question)
        assert caught.value.status == 403


def test_keys_are_found_in_the_environment_and_by_botocore(
    signed_s3: SignedS3, s3: S3, on_s3: tuple[list[str], str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A profile that an option names goes before the environment; a role's session token is signed, too."""
    for name in ("AWS_SESSION_TOKEN", "AWS_PROFILE", "AWS_DEFAULT_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_ENDPOINT_URL", str(signed_s3.options["endpoint_url"]))
    with pytest.raises(AccessDenied, match=r"s3\.anon=true"):
        fetch([], on_s3[1], 0, 10)
    answer = json.dumps({"Version": 1, "AccessKeyId": "reader", "SecretAccessKey": "right", "SessionToken": "t/+="})
    (tmp_path / "answer").write_text(answer)
    (tmp_path / "credentials").write_text("[file]\naws_access_key_id = reader\naws_secret_access_key = right\n")
    (tmp_path / "config").write_text(
        f"[profile role]\ncredential_process = cat {tmp_path}/answer\n"
        f"[profile elsewhere]\nendpoint_url = http://127.0.0.1:1\ncredential_process = cat {tmp_path}/answer\n"
    )
    script = tmp_path / "rotated"  # the first key is one that is not valid any more
    old, seen = f"sed s/right/old/ {tmp_path}/answer", f"{tmp_path}/seen"
    script.write_text(f"#!/bin/sh\nif [ -e {seen} ]; then cat {tmp_path}/answer; else touch {seen}; {old}; fi\n")
    script.chmod(0o755)
    with (tmp_path / "config").open("a") as file:
        file.write(f"[profile rotated]\ncredential_process = {script}\n")
    signed_s3.denied.clear()
    assert fetch(["s3.profile=rotated"], on_s3[1], 100, 300).data == VALUE[100:300]
    assert len(signed_s3.denied) == 1
    signed_s3.denied.clear()
    for profile in ("file", "role"):
        assert fetch([f"s3.profile={profile}"], on_s3[1], 100, 300).data == VALUE[100:300]
    with pytest.raises(AccessDenied, match="names an endpoint"):
        fetch(["s3.profile=elsewhere"], on_s3[1], 0, 10)
    script = tmp_path / "hanging"  # it hangs once
    hang = f"[ -e {tmp_path}/hung ] || {{ touch {tmp_path}/hung; sleep 60; }}"
    script.write_text(f"#!/bin/sh\n{hang}\ncat {tmp_path}/answer\n")
    script.chmod(0o755)
    with (tmp_path / "config").open("a") as file:
        file.write(f"[profile hanging]\ncredential_process = {script}\n")

    async def patiently(system: System, path: str) -> Fetched:
        with trio.fail_after(30):
            while True:
                try:
                    return await system.fetch(path, 100, 300)
                except Transient:
                    await trio.sleep(0.5)

    found = with_system(["s3.profile=hanging", "read_timeout=5s"], on_s3[1], patiently)
    assert found.data == VALUE[100:300]
    with (tmp_path / "config").open("a") as file:
        file.write(f"[profile failing]\ncredential_process = sh -c 'echo >> {tmp_path}/tried; exit 1'\n")

    async def often(system: System, path: str) -> None:
        for _ in range(3):
            with pytest.raises(AccessDenied):
                await system.fetch(path, 0, 10)

    with_system(["s3.profile=failing"], on_s3[1], often)
    assert (tmp_path / "tried").read_text().count("\n") == 1
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "reader")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    assert fetch(["s3.profile=role"], on_s3[1], 100, 300).data == VALUE[100:300]
    assert signed_s3.denied == []
    with pytest.raises(AccessDenied):
        fetch([], on_s3[1], 0, 10)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "right")
    assert fetch([], on_s3[1], 100, 300).data == VALUE[100:300]


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        (["s3.token=t"], "s3.key="),
        (["s3.key=k", "s3.token=t"], "s3.secret="),
        (["s3.key=k", "s3.secret=s", "s3.verify=/etc/ca.pem"], "SSL_CERT_FILE"),
        (['s3.client_kwargs={"verify": "ca.pem"}'], "SSL_CERT_FILE"),
        (["az.account_name=a", "az.account_key=no key"], "account_key="),
    ],
)
def test_options_that_cannot_be_used_are_errors(options: list[str], rule: str) -> None:
    with pytest.raises(ReadError, match=rule):
        fetch(options, f"{options[0].partition('.')[0]}://b/k", 0, 1)


@pytest.mark.parametrize(
    ("environment", "options", "region"),
    [
        ({}, {}, "us-east-1"),
        ({"AWS_REGION": "eu-west-1"}, {}, "eu-west-1"),
        ({"AWS_DEFAULT_REGION": "eu-west-2", "AWS_PROFILE": "two"}, {}, "eu-west-2"),
        ({"AWS_PROFILE": "two"}, {}, "ap-south-1"),
        ({}, {"profile": "two"}, "ap-south-1"),
        ({"AWS_PROFILE": "two"}, {"region": "eu-west-1"}, ""),
        ({}, {"profile": "china"}, ""),
    ],
)
def test_the_region_of_a_bucket_is_asked_within_the_own_region(
    environment: dict[str, str], options: dict[str, str], region: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """From within a network, maybe only the servers of its own region can be reached."""
    path = tmp_path / "config"
    path.write_text("[profile two]\nregion = ap-south-1\ns3 =\n  x = 1\n[profile china]\nregion=cn-north-1\n")
    names = "AWS_REGION", "AWS_DEFAULT_REGION", "AWS_PROFILE", "AWS_DEFAULT_PROFILE", "AWS_ENDPOINT_URL"
    for name in names:
        monkeypatch.delenv(name, raising=False)
    for name, value in {"AWS_CONFIG_FILE": str(path), **environment}.items():
        monkeypatch.setenv(name, value)
    asked = SERVICES["s3"](options).region_url("b")
    assert asked == (f"https://s3.{region}.amazonaws.com/b" if region else "")


def test_requests_to_buckets_use_the_proxy_of_http(faulty: Faulty) -> None:
    """A proxy is requested with the whole URL."""
    faulty.put("http://bucket.invalid/b/k", VALUE)
    options = ["s3.anon=true", "s3.endpoint_url=http://bucket.invalid", f"http.proxy={faulty.url}"]
    assert fetch(options, "s3://b/k", 5, 9).data == VALUE[5:9]


async def trio_value(value: Any) -> Any:
    return value


def test_a_wrong_secret_is_an_error_that_says_so(signed_s3: SignedS3, on_s3: tuple[list[str], str]) -> None:
    signed_s3.denied.clear()
    wrong = told("s3", {**signed_s3.options, "secret": "wrong"})
    with pytest.raises(AccessDenied, match=r"^s3://tests/clients/[^\n]*(403|not match)[^\n<]*$"):
        fetch(wrong, on_s3[1], 0, 10)
    assert 1 <= len(signed_s3.denied) <= 3


# -- credentials that a library finds


def test_access_holds_while_the_library_fails() -> None:
    answers: list[Any] = [
        ConnectionError("no route"), Access("a", "s"), ConnectionError("no route"), ValueError("logged out"),
        ValueError("logged out"), Access(), Access("b", "s"),
    ]  # fmt: skip

    def find() -> Access:
        found = answers.pop(0)
        if isinstance(found, Exception):
            raise found
        assert isinstance(found, Access)
        return found

    async def main() -> None:
        credentials = Credentials(lambda: find, 60)
        clock = trio.lowlevel.current_clock()
        assert isinstance(clock, MockClock)
        with pytest.raises(Transient, match="no route"):  # not yet any
            await credentials.get("x")
        clock.jump(10)
        first = Access("a", "s")
        for _ in range(2):  # the network fails, then the library
            assert await credentials.get("x") == first
            clock.jump(61)
            assert await credentials.get("x") == first
        with pytest.raises(AccessDenied, match="logged out"):  # nobody knows whether the key has expired
            await credentials.get("x", first)
        assert await credentials.get("x") == first
        clock.jump(61)
        assert await credentials.get("x", first) == first  # not anonymous
        clock.jump(61)
        assert await credentials.get("x", first) == Access("b", "s")
        assert answers == []

    trio.run(main, clock=MockClock(rate=1e-9))


def test_a_refused_key_does_not_stall_others_while_the_library_logs_in() -> None:
    begun, go = threading.Event(), threading.Event()
    keys = iter((Access("a", "s"), Access("b", "s")))

    def make() -> Callable[[], Access]:
        key = next(keys)
        if key.key == "b":
            begun.set()
            go.wait(20)
        return lambda: key

    async def main() -> None:
        credentials = Credentials(make, 60)
        first = await credentials.get("x")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(credentials.get, "x", first)
            await trio.to_thread.run_sync(begun.wait)
            with trio.move_on_after(10) as late:
                assert await credentials.get("x") == first
            go.set()
        assert not late.cancelled_caught
        assert await credentials.get("x") == Access("b", "s")

    trio.run(main)


# -- Google Cloud Storage


def encoding(method: str, path: str, asked: Mapping[str, str]) -> Answer:
    """Answer as Google: what is stored as gzip is decompressed, without ranges, unless the request accepts gzip."""
    accepts, status = "gzip" in asked.get("Accept-Encoding", ""), 200
    body, headers = gzip.compress(VALUE, mtime=0), {"ETag": '"1"'}
    if path.startswith("/storage"):
        item = {"name": "d/k", "size": "1", "updated": "2026-01-01T00:00:00Z"}
        answer = json.dumps({"kind": "storage#objects", "items": [item]}).encode()
        body = gzip.compress(answer) if accepts else answer
    elif path.startswith("/b/plain"):  # a proxy encodes it
        headers["x-goog-stored-content-encoding"] = "identity"
    elif not accepts:
        body = VALUE
    elif "Range" in asked:
        first, last = map(int, asked["Range"].removeprefix("bytes=").split("-"))
        status, headers["Content-Range"] = 206, f"bytes {first}-{last}/{len(body)}"
        body = body[first : last + 1]
    return status, {**headers, "Content-Encoding": "gzip" if accepts else ""}, body


def test_values_on_gcs_are_read_as_they_are_stored() -> None:
    async def look(system: System, path: str) -> tuple[bytes, bytes, int | None, list[str], bytes]:
        whole, part = await system.fetch(path, 0, None), await system.fetch(path, 10, 30)
        listed = [entry.name for entry in await system.listing("b/d") or ()]
        plain = await system.fetch("b/plain", 0, None)
        return bytes(whole.data), bytes(part.data), (await system.stat(path)).size, listed, bytes(plain.data)

    stored = gzip.compress(VALUE, mtime=0)
    with serving_by_headers(encoding) as endpoint:
        found = with_system(["gcs.token=anon", f"gcs.endpoint_url={endpoint}"], "gs://b/stored", look)
    assert found == (stored, stored[10:30], len(stored), ["k"], VALUE)


@pytest.mark.parametrize("provider", ["google", "azure"])
def test_a_token_of_the_machine_is_found_and_sent(
    provider: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """One server is the metadata service of the machine, and a bucket that needs its token."""
    asked: list[str] = []

    def answer(method: str, path: str, headers: Mapping[str, str]) -> Answer:
        asked.append(path)
        about = {"Metadata-Flavor": "Google", "Content-Type": "application/json"}
        if "token" in path:
            found = {"access_token": "found", "expires_in": 3600, "expires_on": "4102444800", "resource": "x"}
            return 200, about, json.dumps({**found, "token_type": "Bearer"}).encode()
        if "computeMetadata" in path:
            return 200, about, json.dumps({"email": "me", "scopes": ["x"], "aliases": []}).encode()
        if path.endswith("/v"):
            status = 206 if headers["Authorization"] == "Bearer found" else 403
            return status, {"Content-Range": f"bytes 0-99/{len(VALUE)}", "ETag": '"1"'}, VALUE[:100]
        return 200, about, b"{}"

    monkeypatch.setenv("HOME", str(tmp_path))
    with serving_by_headers(answer) as url:
        if provider == "google":
            monkeypatch.delenv("GOOGLE_APPLICATION_CREDENTIALS", raising=False)
            for name in ("GCE_METADATA_HOST", "GCE_METADATA_ROOT", "GCE_METADATA_IP"):
                monkeypatch.setenv(name, url.removeprefix("http://"))
            option, target = f"gcs.endpoint_url={url}", "gs://b/v"
        else:
            monkeypatch.setenv("IDENTITY_ENDPOINT", f"{url}/token")
            monkeypatch.setenv("IDENTITY_HEADER", "x")
            option, target = f"abfs.connection_string=AccountName=a;BlobEndpoint={url}/a", "az://b/v"
        (tmp_path / "set.json").write_text(json.dumps({"k": [target, 0, 100]}))
        command = [PROGRAM, "cat", "-o", option, tmp_path / "set.json", "k"]
        done = subprocess.run(command, capture_output=True, check=False)
        assert (done.returncode, done.stdout) == (0, VALUE[:100]), done.stderr
    assert sum("token" in path for path in asked) == 1


# -- Azure


def test_a_blob_that_marks_a_directory_on_azure_is_a_directory(azure: Azure) -> None:
    """blobfuse and Hadoop write such blobs; an empty blob without the mark is an empty value."""
    azure.put("private", "marked/group/zarr.json", b"{}")
    azure.put("private", "marked/group/empty", b"")
    mark = azure.service.get_blob_client("private", "marked/group")
    mark.upload_blob(b"", metadata={"hdi_isfolder": "true"}, overwrite=True)

    async def look(system: System, path: str) -> tuple[list[Any], set[Any]]:
        found = [await system.stat(f"{path}/{name}") for name in ("group", "group/zarr.json", "group/empty")]
        listed = await system.listing(path) or ()
        return [(entry.directory, entry.size) for entry in found], {(entry.name, entry.directory) for entry in listed}

    found, listed = with_system(told("abfs", azure.options["key"]), "az://private/marked", look)
    assert found == [(True, None), (False, 2), (False, 0)]
    assert listed == {("group", True)}


@pytest.mark.parametrize(
    ("string", "options", "url", "host"),
    [
        ("AccountName=aaa;BlobEndpoint=http://127.0.0.1:1/aaa", ["az.account_name=bbb"], "az://c/k", "bbb."),
        ("AccountName=aaa;BlobEndpoint=http://127.0.0.1:1/aaa", [], "abfs://c@bbb.dfs.core.windows.net/k", "bbb."),
        ("BlobEndpoint=https://aaa.blob.other.net;SharedAccessSignature=sig=x", ["az.account_name=bbb"], "az://c/k",
         "bbb."),
        ("BlobEndpoint=https://aaa.blob.other.net;SharedAccessSignature=sig=x", ["az.account_name=aaa"], "az://c/k",
         "aaa.blob.other.net"),
        ("BlobEndpoint=http://127.0.0.1:1/aaa", ["az.account_name=aaa"], "az://c/k", "127.0.0.1:1"),
        ("AccountName=aaa;BlobEndpoint=http://127.0.0.1:1/aaa", [], "az://c/k", "127.0.0.1:1"),
    ],
)  # fmt: skip
def test_a_connection_string_counts_only_for_its_account(
    monkeypatch: pytest.MonkeyPatch, string: str, options: list[str], url: str, host: str
) -> None:
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", string)
    found = with_system(options, url, lambda system, path: trio_value(system.host(path)))
    assert found.partition(" at ")[2].startswith(host)


# -- answers that only some servers give


def azure_page(names: str, token: str = "", more: str = "") -> tuple[int, bytes]:
    """Return the answer of Azure that lists the blobs in `names`, each of three bytes."""
    blob = "<Blob><Name>{}</Name><Properties><Content-Length>3</Content-Length></Properties>{}</Blob>"
    blobs = "".join(blob.format(name, more) for name in names.split())
    page = f"<EnumerationResults><Blobs>{blobs}</Blobs><NextMarker>{token}</NextMarker></EnumerationResults>"
    return 200, page.encode()


ABSENT, DENIED = (404, b""), (403, b"")
_MARK = "<Metadata><hdi_isfolder>true</hdi_isfolder></Metadata>"


def by_marker(path: str) -> tuple[int, bytes]:
    return azure_page("d/x") if "marker=t" in path else azure_page("", "t")


def endless(path: str) -> tuple[int, bytes]:
    return azure_page("", f"{path.partition('marker=')[2].partition('&')[0]}t")


def of_empty_directory(path: str) -> tuple[int, bytes]:
    return azure_page("") if "prefix=d%2F" in path else azure_page("d", "", _MARK)


def ask_scripted(get: Callable[[str], tuple[int, bytes]], head: tuple[int, bytes], method: str) -> Any:
    """Return the result of a method for c/d on a server of Azure with these answers, or the name of its error."""

    def answer(command: str, path: str) -> tuple[int, dict[str, str], bytes]:
        status, body = head if command == "HEAD" else get(path)
        return status, {}, body

    with serving(answer) as endpoint:
        options = [f"abfs.connection_string=AccountName=a;BlobEndpoint={endpoint}/a", "abfs.anon=true"]
        try:
            found = with_system(options, "az://c/d", lambda at, path: getattr(at, method)(path))
        except ReadError as exc:
            return type(exc).__name__
        return found.directory if isinstance(found, Entry) else [entry.name for entry in found]


@pytest.mark.parametrize(
    ("get", "head", "method", "expected"),
    [
        (by_marker, ABSENT, "stat", True),
        (by_marker, ABSENT, "listing", ["x"]),
        (lambda path: azure_page(""), ABSENT, "stat", "TargetMissing"),
        (lambda path: azure_page(""), ABSENT, "listing", "TargetMissing"),
        (endless, ABSENT, "stat", "ReadError"),
        (lambda path: DENIED, ABSENT, "stat", "AccessDenied"),
        (lambda path: DENIED, (200, b""), "stat", "AccessDenied"),
        (of_empty_directory, (200, b""), "stat", True),
        (of_empty_directory, (200, b""), "listing", []),
        (lambda path: azure_page("d/x", "", " " * (17 << 20)), ABSENT, "stat", "ReadError"),
    ],
    ids=["page", "page", "absent", "absent", "endless", "denied", "denied", "directory", "directory", "large"],
)
def test_what_a_listing_says_of_a_directory(
    get: Callable[[str], tuple[int, bytes]], head: tuple[int, bytes], method: str, expected: object
) -> None:
    """Neither a page without names nor a refused listing means absence; an empty directory has a mark."""
    assert ask_scripted(get, head, method) == expected


def test_the_region_of_a_bucket_is_asked_again_after_a_failure(
    faulty: Faulty, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A 503 of the server that knows all regions must not make a bucket unreadable for the life of the mount."""
    for name in ("AWS_REGION", "AWS_DEFAULT_REGION", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"):
        monkeypatch.delenv(name, raising=False)
    faulty.put("/v", VALUE)
    faulty.head("/v", 503)
    asked: list[str] = []

    def value(self: object, method: str, bucket: str, key: str, access: object, region: str) -> str:
        asked.append(region)
        return f"{faulty.url}/v"

    monkeypatch.setattr(SERVICES["s3"], "region_url", lambda self, bucket: f"{faulty.url}/v")
    monkeypatch.setattr(SERVICES["s3"], "value", value)

    async def twice(system: System, path: str) -> None:
        with pytest.raises(Transient):
            await system.fetch(path, 0, 4)
        await system.fetch(path, 0, 4)
        await system.fetch(path, 0, 4)

    with_system(["s3.anon=true"], "s3://b/v", twice)
    assert asked == ["", ""]
    assert [method for method, _, _ in faulty.requests].count("HEAD") == 3


def test_a_private_container_that_azure_hides_is_denied_and_not_absent() -> None:
    async def check(system: System, path: str) -> None:
        for question in (system.stat, system.listing, lambda at: system.fetch(at, 0, 10)):
            with pytest.raises(AccessDenied):
                await question(path)

    with serving(lambda method, path: (404, {"x-ms-error-code": "ResourceNotFound"}, b"")) as at:
        with_system(["az.anon=true", f"az.connection_string=BlobEndpoint={at}/a"], "az://c/d/k", check)
        with_system([], f"{at}/c/d/k", lambda system, path: check_denied(system.fetch(path, 0, 10)))


async def check_denied(question: Any) -> None:
    with pytest.raises(AccessDenied):
        await question

"""Reads of buckets through fsspec's clients and through obstore: the same bytes, tags and names."""

from __future__ import annotations

import http.server
import json
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import botocore.session
import pytest
import trio

from tests.servers import GCS, S3, Azure, Faulty, Sftp, SignedS3
from zarrfs.config.keywords import as_items
from zarrfs.config.options import parse
from zarrfs.errors import AccessDenied, ReadError, TargetMissing
from zarrfs.net.http import HttpSystem
from zarrfs.net.obstores import available
from zarrfs.net.responses import Entry, Fetched, System
from zarrfs.net.storeoptions import Unserved, bucket
from zarrfs.net.web import Hop, Response, Web
from zarrfs.store.remotefiles import RemoteFiles

VALUE = bytes(range(256)) * 40


def with_system(
    options: list[str], url: str, function: Callable[[System, str], Any], client: str = "obstore"
) -> Any:  # fmt: skip
    """Run `function` on the system that serves `url` and the path in it; return its result.

    `client`: "obstore" if it is installed, "fsspec" if it is not.
    """

    async def main() -> Any:
        files = RemoteFiles(parse(["retries=0", *options]).options)
        try:
            return await function(*await files.find(url))
        finally:
            await files.aclose()

    with pytest.MonkeyPatch.context() as patch:
        if client == "fsspec":
            patch.setitem(sys.modules, "obstore", None)
        return trio.run(main)


def fetch(options: list[str], url: str, start: int, stop: int, client: str = "obstore") -> Fetched:
    found = with_system(options, url, lambda system, path: system.fetch(path, start, stop), client)
    assert isinstance(found, Fetched)
    return found._replace(data=bytes(found.data))


def told(family: str, options: dict[str, object]) -> list[str]:
    return as_items({family: options})


def names(options: list[str], url: str, client: str = "obstore") -> tuple[str, str, str]:
    async def of(system: System, path: str) -> tuple[str, str, str]:
        return system.host(path), system.identity(path), system.shown(path)

    found: tuple[str, str, str] = with_system(options, url, of, client)
    return found


# -- S3


@pytest.fixture
def on_s3(s3: S3) -> tuple[list[str], str]:
    """Store VALUE on S3; return (options, its URL)."""
    s3.client.put_object(Bucket=s3.bucket, Key="clients/a key%20+ä", Body=VALUE)
    return told("s3", s3.options), f"s3://{s3.bucket}/clients/a key%20+ä"


def test_s3_is_the_same_with_either_client(on_s3: tuple[list[str], str]) -> None:
    options, url = on_s3
    one, other = (fetch(options, url, 100, 300, client) for client in ("fsspec", "obstore"))
    assert one == other
    assert other.data == VALUE[100:300]
    assert other.total == len(VALUE)
    assert other.tag
    one_name, other_name = (names(options, url, client) for client in ("fsspec", "obstore"))
    assert one_name == other_name


@pytest.mark.parametrize("client", ["fsspec", "obstore"])
def test_values_of_a_deleted_bucket_are_errors_and_not_absent(s3: S3, client: str) -> None:
    """A Zarr reader would use fill values for absent chunks."""
    s3.client.create_bucket(Bucket="going")
    s3.client.put_object(Bucket="going", Key="store/a", Body=VALUE)
    options = told("s3", s3.options)

    async def check(system: System, path: str) -> None:
        async def fetch() -> object:
            return await system.fetch(path, 0, 4)

        async def page() -> object:
            return await system.page("going/store", "")

        questions = [fetch, lambda: system.stat(path), page]
        for question in questions:
            assert await question()
        s3.client.delete_object(Bucket="going", Key="store/a")
        for question in questions[:2]:
            with pytest.raises(TargetMissing):
                await question()
        s3.client.delete_bucket(Bucket="going")
        await check_errors(questions)

    with_system(options, "s3://going/store/a", check, client)


async def check_errors(questions: list[Callable[[], Any]]) -> None:
    for question in questions:
        with pytest.raises(ReadError, match="the bucket does not exist") as found:
            await question()
        assert type(found.value) is ReadError


def test_values_of_a_missing_bucket_of_google_and_azure_are_errors(gcs: GCS, azure: Azure) -> None:
    async def check(system: System, path: str) -> None:
        listed = [lambda: system.page("nowhere/store", "")] if system.flat else []
        await check_errors([lambda: system.fetch(path, 0, 4), lambda: system.stat(path), *listed])

    async def check_key(system: System, path: str) -> None:
        for question in (lambda: system.fetch(path, 0, 4), lambda: system.stat(path)):
            with pytest.raises(TargetMissing):
                await question()

    for family, scheme, options, there in [
        ("gcs", "gs", gcs.options, gcs.bucket),
        ("abfs", "abfs", azure.options["key"], azure.private),
        ("abfs", "abfs", azure.options["sas"], azure.private),
    ]:
        with_system(told(family, options), f"{scheme}://nowhere/store/a", check, "fsspec")
        with_system(told(family, options), f"{scheme}://{there}/nothing/a", check_key, "fsspec")


@pytest.mark.parametrize("headers", [{"Content-Type": "application/xml"}, {"x-amz-request-id": "1"}])
def test_values_of_a_deleted_bucket_over_http_are_errors(headers: dict[str, str]) -> None:
    """Only the body says that the bucket is gone, and the answer to HEAD has none."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.answer(b"", headers)

        def do_GET(self) -> None:
            code = "NoSuchBucket" if self.path.startswith("/gone") else "NoSuchKey"
            self.answer(f"<Error><Code>{code}</Code></Error>".encode(), {"Content-Type": "application/xml"})

        def answer(self, body: bytes, headers: dict[str, str]) -> None:
            self.send_response(404)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

    async def check(system: System, path: str) -> None:
        await check_errors([lambda: system.fetch(path, 0, 4), lambda: system.stat(path)])
        with pytest.raises(TargetMissing):
            await system.stat(path.replace("gone", "there"))

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with_system([], f"http://127.0.0.1:{server.server_port}/gone/store/a", check)
        server.shutdown()


def test_sizes_and_listings_of_s3_are_the_same(on_s3: tuple[list[str], str]) -> None:
    options, url = on_s3

    async def look(system: System, path: str) -> tuple[Entry, Entry, list[Entry] | None]:
        above = path.rpartition("/")[0]
        return await system.stat(path), await system.stat(above), await system.listing(above)

    one, other = (with_system(options, url, look, client) for client in ("fsspec", "obstore"))
    assert one == other
    assert other[0].size == len(VALUE)
    assert other[1].directory


@pytest.mark.parametrize("client", ["fsspec", "obstore"])
def test_absent_keys_and_ranges_beyond_the_end_on_s3(client: str, on_s3: tuple[list[str], str]) -> None:
    options, url = on_s3
    with pytest.raises(TargetMissing):
        fetch(options, url + "x", 0, 10, client)
    if client == "obstore":
        beyond = fetch(options, url, len(VALUE) + 5, len(VALUE) + 9)
        assert (beyond.data, beyond.total) == (b"", len(VALUE))


@pytest.mark.parametrize(
    ("options", "url", "path"),
    [
        ({"s3": {"anon": True}}, "s3://b/v", "/b/v"),
        ({"gcs": {"token": "anon"}}, "gs://b/v", "/download/storage/v1/b/b/o/v?alt=media"),
    ],
)
def test_a_403_raised_by_fsspec_s_clients_keeps_its_status(
    faulty: Faulty, options: dict[str, dict[str, object]], url: str, path: str
) -> None:
    """It must not look like a network failure, and -o missing_status=403 needs the status."""
    [(family, given)] = options.items()
    storage = told(family, {**given, "endpoint_url": faulty.url})
    faulty.put(path, VALUE, forever=403)
    faulty.head(path, forever=403)
    with pytest.raises(AccessDenied) as caught:
        fetch(storage, url, 0, 10, "fsspec")
    assert caught.value.status == 403
    if family == "s3":
        with pytest.raises(AccessDenied) as caught:
            with_system(storage, url, lambda system, at: system.stat(at), "fsspec")
        assert caught.value.status == 403


def test_s3_is_read_by_obstore_if_all_options_are_known(on_s3: tuple[list[str], str]) -> None:
    assert loaded([*on_s3[0]], on_s3[1]) == {"obstore"}


def test_s3_is_read_by_fsspec_if_obstore_lacks_an_option(on_s3: tuple[list[str], str]) -> None:
    assert "s3fs" in loaded([*on_s3[0], "s3.version_aware=true"], on_s3[1])


def test_obstore_uses_environment_keys(s3: S3, on_s3: tuple[list[str], str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "x")
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3.endpoint)
    assert loaded([], on_s3[1]) == {"obstore"}
    monkeypatch.setenv("AWS_SKIP_SIGNATURE", "true")  # only obstore reads it
    assert "s3fs" in loaded([], on_s3[1])


def test_obstore_uses_the_credentials_file(
    s3: S3, on_s3: tuple[list[str], str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "credentials"
    file.write_text("[other]\naws_access_key_id = a\naws_secret_access_key = b\n")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    options = told("s3", {"endpoint_url": s3.endpoint, "profile": "other"})
    assert loaded(options, on_s3[1]) == {"obstore"}
    file.write_text(file.read_text() + "endpoint_url = http://127.0.0.1:1\n")
    with pytest.raises(Unserved, match="profile other has endpoint_url"):
        bucket("s3", {"endpoint_url": s3.endpoint, "profile": "other"}, s3.bucket)
    with pytest.raises(Unserved, match="no keys are written down"):
        bucket("s3", {"endpoint_url": s3.endpoint}, s3.bucket)


def test_the_profile_is_the_one_that_botocore_chooses(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "credentials"
    file.write_text("".join(f"[{name}]\naws_access_key_id = {name}\naws_secret_access_key = x\n" for name in "ab"))
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    for name in ("AWS_CA_BUNDLE", "REQUESTS_CA_BUNDLE"):  # perhaps set on this machine
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_PROFILE", "a")
    monkeypatch.setenv("AWS_DEFAULT_PROFILE", "b")
    session = botocore.session.Session()
    assert (session.profile, bucket("s3", {}, "bucket").config["access_key_id"]) == ("b", "b")


def test_s3_is_read_by_signed_urls(s3: S3, on_s3: tuple[list[str], str]) -> None:
    """A public object is read without keys, by an unsigned URL."""
    options, url = on_s3
    s3.client.put_object_acl(Bucket=s3.bucket, Key="clients/a key%20+ä", ACL="public-read")
    asked: list[tuple[str, str, str]] = []
    send = Web._send

    async def noted(self: Web, method: str, hops: list[Hop], more: str, where: str) -> Response:
        asked.append((method, hops[-1].target.partition("?")[0], hops[-1].target.partition("?")[2]))
        return await send(self, method, hops, more, where)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Web, "_send", noted)
        assert fetch(options, url, 100, 300).data == VALUE[100:300]
        anonymous = told("s3", {"endpoint_url": s3.endpoint, "anon": True})
        assert fetch(anonymous, url, 100, 300).data == VALUE[100:300]
        with pytest.raises(TargetMissing, match=r"s3://.*/none: HTTP status 404"):
            fetch(options, url.rpartition("/")[0] + "/none", 0, 10)
    at = f"/{s3.bucket}/clients/a%20key%2520%2B%C3%A4"
    assert [(method, target) for method, target, _ in asked[:2]] == 2 * [("GET", at)]
    assert "X-Amz-Signature=" in asked[0][2]
    assert asked[1][2] == ""


def test_a_value_whose_signed_url_is_denied_is_read_by_obstore(s3: S3, on_s3: tuple[list[str], str]) -> None:
    options, url = on_s3
    with pytest.MonkeyPatch.context() as patch:

        async def denied(self: HttpSystem, path: str, start: int, stop: int | None) -> Fetched:
            raise AccessDenied(path, "HTTP status 403", 403)

        patch.setattr(HttpSystem, "fetch", denied)
        found = fetch(options, url, 100, 300)
    assert found.data == VALUE[100:300]


@pytest.mark.parametrize("client", ["fsspec", "obstore"])
def test_signatures_are_right(s3: S3, signed_s3: SignedS3, client: str) -> None:
    """Signatures of URLs and of requests, also for special characters; a wrong secret is an error that says so."""
    for name in ("plain", "a key%20+ä"):
        s3.client.put_object(Bucket=s3.bucket, Key=f"signed/{name}", Body=VALUE)

    async def look(system: System, path: str) -> tuple[set[bytes], int | None, list[str]]:
        data = {bytes((await system.fetch(f"{path}/{name}", 100, 300)).data) for name in ("plain", "a key%20+ä")}
        page = await system.page(path, "")
        return data, (await system.stat(f"{path}/plain")).size, [name for name, _ in page.entries]

    signed_s3.denied.clear()
    options, url = told("s3", signed_s3.options), f"s3://{s3.bucket}/signed"
    assert with_system(options, url, look, client) == ({VALUE[100:300]}, len(VALUE), ["a key%20+ä", "plain"])
    assert signed_s3.denied == []
    wrong = told("s3", {**signed_s3.options, "secret": "wrong"})
    with pytest.raises(AccessDenied, match=r"^s3://tests/signed/plain: [^\n]*(403|not match)[^\n<]*$"):
        fetch(wrong, f"{url}/plain", 0, 10, client)
    assert 1 <= len(signed_s3.denied) <= 3


# -- Google Cloud Storage


def test_gcs_is_the_same_with_either_client(gcs: GCS) -> None:
    gcs.put("clients%2Fk", VALUE)
    options, url = told("gcs", gcs.options), f"gs://{gcs.bucket}/clients/k"
    one, other = (fetch(options, url, 100, 300, client) for client in ("fsspec", "obstore"))
    assert one.data == other.data == VALUE[100:300]
    assert other.total == len(VALUE)
    assert names(options, url, "fsspec") == names(options, url)
    # stat() and listings give the tag that fetch() gives, or none
    found: Entry = with_system(options, url, lambda system, path: system.stat(path))
    assert (found.size, found.tag) == (len(VALUE), other.tag)
    listing = with_system(options, url, lambda system, path: system.listing(path.rpartition("/")[0]))
    assert [(entry.name, entry.size, entry.tag) for entry in listing] == [("k", len(VALUE), None)]
    assert loaded(options, url) == {"obstore"}


# -- Azure


@pytest.mark.parametrize(("who", "container"), [("key", "private"), ("sas", "private"), ("anonymous", "public")])
def test_azure_is_the_same_with_either_client(azure: Azure, who: str, container: str) -> None:
    """One of the names is quoted differently by Azure's signatures and by obstore."""
    for name in ("plain", "a key%20+ä"):
        azure.put(container, f"clients/d/{name}", VALUE)
    options = told("abfs", azure.options[who])

    async def look(system: System, path: str) -> Any:
        data = [bytes((await system.fetch(f"{path}/{name}", 100, 300)).data) for name in ("plain", "a key%20+ä")]
        entries = [await system.stat(f"{path}/plain"), *(await system.listing(path) or ())]
        above = await system.listing(path.rpartition("/")[0]) or ()
        sizes = [(entry.name, entry.size, entry.mtime_ns, entry.directory) for entry in (*entries, *above)]
        with pytest.raises(TargetMissing):
            await system.fetch(f"{path}/none", 0, 10)
        return data, sizes, entries[0].tag, system.identity(path), system.host(path)

    one, other = (
        with_system(options, f"az://{container}/clients/d", look, client) for client in ("fsspec", "obstore")
    )
    assert one == other
    assert one[0] == [VALUE[100:300]] * 2
    assert fetch(options, f"az://{container}/clients/d/plain", 0, 10).tag == one[2]


@pytest.mark.parametrize("client", ["fsspec", "obstore"])
def test_a_blob_that_marks_a_directory_on_azure_is_a_directory(azure: Azure, client: str) -> None:
    """blobfuse and Hadoop write such blobs; an empty blob without the mark is an empty value."""
    azure.put("private", "marked/group/zarr.json", b"{}")
    azure.put("private", "marked/group/empty", b"")
    mark = azure.service.get_blob_client("private", "marked/group")
    mark.upload_blob(b"", metadata={"hdi_isfolder": "true"}, overwrite=True)

    async def look(system: System, path: str) -> tuple[list[Any], set[Any]]:
        found = [await system.stat(f"{path}/{name}") for name in ("group", "group/zarr.json", "group/empty")]
        listed = await system.listing(path) or ()
        return [(entry.directory, entry.size) for entry in found], {(entry.name, entry.directory) for entry in listed}

    found, listed = with_system(told("abfs", azure.options["key"]), "az://private/marked", look, client)
    assert found == [(True, None), (False, 2), (False, 0)]
    assert listed == {("group", True)}


@pytest.mark.parametrize("client", ["fsspec", "obstore"])
def test_an_anonymous_read_of_a_private_azure_container_is_denied(azure: Azure, client: str) -> None:
    azure.put("private", "clients/k", VALUE)
    with pytest.raises(AccessDenied, match=r"^az://private/clients/k: HTTP status 403 [^<]{9,200}$"):
        fetch(told("abfs", azure.options["anonymous"]), "az://private/clients/k", 0, 10, client)


# -- SFTP


def test_sftp_values_are_read(sftp: Sftp) -> None:
    (sftp.root / "k").write_bytes(VALUE)
    options = ["allow=sftp", *told("sftp", sftp.options)]
    assert fetch(options, f"{sftp.url}/k", 100, 300).data == VALUE[100:300]
    with pytest.raises(TargetMissing):
        fetch(options, f"{sftp.url}/none", 0, 10)
    host, name, _ = names(options, f"{sftp.url}/k")
    assert host == sftp.url
    assert "secret" not in name


# -- which clients are imported

_SCRIPT = """
import json, sys, trio
from zarrfs.config.keywords import as_items
from zarrfs.config.options import parse
from zarrfs.store.remotefiles import RemoteFiles

async def main():
    files = RemoteFiles(parse(json.loads(sys.argv[1])).options)
    data = bytes(await files.read(sys.argv[2], 3, 8, 0, 100))
    await files.aclose()
    assert data == bytes(range(256))[3:11], data

trio.run(main)
print(json.dumps([name for name in ("obstore", "aiohttp", "s3fs", "gcsfs", "botocore") if name in sys.modules]))
"""


def loaded(options: list[str], url: str) -> set[str]:
    """Return the client packages that a new process has imported after reading a range of `url`."""
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT, json.dumps(options), url], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout))


def test_http_imports_no_client_library(faulty: Faulty) -> None:
    for options in ([], ['http.headers={"A": "b"}']):
        assert loaded(options, faulty.put("/v?q", VALUE)) == set()


# -- HTTP


def test_a_body_that_is_too_long_is_cut_to_the_range(faulty: Faulty) -> None:
    assert fetch([], faulty.put("/v", VALUE, forever="long"), 5, 15).data == VALUE[5:15]


@pytest.mark.parametrize(
    ("version", "enough"), [("0.12.0", True), ("0.13b1", True), ("1.0rc1", True), ("0.11.2", False), ("other", False)]
)
def test_which_versions_of_obstore_are_used(version: str, enough: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda name: version)
    assert available() is enough

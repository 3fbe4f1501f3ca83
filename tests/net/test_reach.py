"""Access rules for the targets of a set, except over HTTP: local files, other protocols, buckets, credentials."""

from __future__ import annotations

import dataclasses
import os
import socket
import threading
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import trio

from tests.conftest import open_descriptors
from tests.net.recording import VALUE, Recorder, recording
from tests.servers import S3
from zarrfs.config.options import Options, parse
from zarrfs.errors import AccessDenied, ReadError, SourceError, TargetMissing
from zarrfs.net.http import HttpSystem
from zarrfs.net.reach import Trust
from zarrfs.net.responses import Fetched
from zarrfs.sources import plan_source
from zarrfs.store.remotefiles import RemoteFiles
from zarrfs.store.targets import Targets
from zarrfs.system.localfiles import LocalFiles

REMOTE = "http://data.test/dir/set.json"


def read(url: str, base: str = "", origin: str = REMOTE, options: Options | None = None) -> bytes:
    """Read eight bytes of a target."""

    async def main() -> bytes:
        targets = Targets(Options(retries=0) if options is None else options, base, origin)
        try:
            return bytes(await targets.read(url, 3, 8, 0, len(VALUE)))
        finally:
            await targets.aclose()

    return trio.run(main)


def said(*items: str, **more: Any) -> Options:
    return dataclasses.replace(parse(["retries=0", *items]).options, **more)


# -- local files


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Create data/ (with links out of and within it), files and an archive beside it, and out, a link to data."""
    data = tmp_path / "data"
    (data / "sub").mkdir(parents=True)
    for path in (data / "f", data / "sub/f", tmp_path / "secret", tmp_path / "data2"):
        path.write_bytes(VALUE)
    (data / "escape").symlink_to(tmp_path / "secret")
    (data / "up").symlink_to("..")
    (data / "inside").symlink_to("sub/f")
    (tmp_path / "out").symlink_to(data)
    for archive, name in (data / "a.zip", "f"), (tmp_path / "a.zip", "f"):
        with zipfile.ZipFile(archive, "w") as file:
            file.writestr(name, VALUE)
    return tmp_path


INSIDE = ["data/f", "data/sub/../f", "data/inside", "out/f", "data/up/data/sub/f"]
OUTSIDE = ["secret", "data/../secret", "data/escape", "data/up/secret", "out/escape", "data2", "out/up/data2"]
FORMS = ["{path}", "file://{path}", "file:{path}", "local://{path}", "FILE://{path}"]


def forms(tree: Path, name: str) -> Iterator[str]:
    path = f"{tree}/{name}"
    for form in FORMS:
        yield form.format(path=path)


@pytest.mark.parametrize("name", [*INSIDE, *OUTSIDE])
def test_a_set_from_the_network_reaches_no_local_file(name: str, tree: Path) -> None:
    for url in forms(tree, name):
        with pytest.raises(AccessDenied, match=r"reaches no local file \(-o allow=file, or allow_path=DIR\)"):
            read(url)
    for options in (said("allow=file"), said("allow=all")):
        for url in forms(tree, name):
            assert read(url, options=options) == VALUE[3:11]
        assert read(f"zip://f::{tree}/a.zip", options=options) == VALUE[3:11]


def test_missing_files_are_refused_like_existing_ones(tree: Path) -> None:
    """A set from the network cannot find out which files exist on this machine."""
    for name in ("nothing", "data/f/below", "data"):
        with pytest.raises(AccessDenied):
            read(f"{tree}/{name}")


@pytest.mark.parametrize("archive", ["a.zip", "data/a.zip", "none.zip"])
@pytest.mark.parametrize("form", ["zip://f::{path}", "zip://f::file://{path}", "zip://f::local://{path}", "zip://f::FILE:{path}"])
def test_a_set_from_the_network_reaches_no_local_archive(archive: str, form: str, tree: Path) -> None:
    with pytest.raises((AccessDenied, ReadError)) as caught:
        read(form.format(path=f"{tree}/{archive}"))
    assert isinstance(caught.value, AccessDenied) == ("FILE:" not in form or "://" in form), str(caught.value)


def test_files_beneath_a_base_named_by_the_user_are_reached(tree: Path) -> None:
    for base in (f"{tree}/data/", f"file://{tree}/data/", f"{tree}/out/"):
        for name in ("f", "sub/f", "./sub/../f", "inside", "file://sub/f"):
            assert read(name, base) == VALUE[3:11]
        for name in ("../secret", "escape", "up/secret", f"{tree}/secret", f"file://{tree}/secret", "../data2"):
            with pytest.raises(AccessDenied, match="lies not beneath"):
                read(name, base)
        assert read("../secret", base, options=said("allow=file")) == VALUE[3:11]


def test_allow_path_admits_only_files_beneath_it(tree: Path) -> None:
    for origin in (REMOTE, ""):
        for root in ("data", "out"):
            options = said(f"allow_path={tree}/{root}", "allow=file")
            for name in INSIDE:
                for url in forms(tree, name):
                    assert read(url, origin=origin, options=options) == VALUE[3:11]
            for name in OUTSIDE:
                for url in forms(tree, name):
                    with pytest.raises(AccessDenied, match=rf"lies not beneath {tree}/data \(-o allow_path=DIR\)"):
                        read(url, origin=origin, options=options)
    both = said(f"allow_path={tree}/data", f"allow_path={tree}")
    assert read(f"{tree}/secret", options=both) == VALUE[3:11]
    assert read(f"{tree}/secret", options=said("allow_path=/")) == VALUE[3:11]


@pytest.mark.skipif(os.geteuid() != 0, reason="is about root")
@pytest.mark.parametrize("origin", ["", REMOTE])
@pytest.mark.parametrize("allow", [[], ["allow=file"], ["allow=all"]])
def test_a_mount_by_root_for_others_needs_allow_path(origin: str, allow: list[str], tree: Path) -> None:
    rule = "a mount by root for others reaches local files only beneath -o allow_path=DIR"
    options = said("allow_other", *allow)
    with pytest.raises(AccessDenied, match=rule):
        read(f"{tree}/data/f", origin=origin, options=options)
    with pytest.raises(AccessDenied, match=rule):
        read("f", f"{tree}/data/", origin, options)
    with pytest.raises(AccessDenied, match=rule):
        read(f"zip://f::{tree}/data/a.zip", origin=origin, options=options)
    options = said("allow_other", f"allow_path={tree}/data", *allow)
    assert read(f"{tree}/data/f", origin=origin, options=options) == VALUE[3:11]
    assert read("f", f"{tree}/data/", origin, options) == VALUE[3:11]
    assert read(f"zip://f::{tree}/data/a.zip", origin=origin, options=options) == VALUE[3:11]
    for url in (f"{tree}/secret", f"{tree}/data/escape", f"zip://f::{tree}/a.zip", f"file://{tree}/data/../data2"):
        with pytest.raises(AccessDenied, match=rule):
            read(url, origin=origin, options=options)


def test_local_sets_and_plain_users_may_read_any_path(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert read(f"{tree}/data/f", origin="") == VALUE[3:11]
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert read(f"{tree}/data/f", origin="", options=said("allow_other")) == VALUE[3:11]


def test_a_link_that_changes_while_it_is_opened(tree: Path) -> None:
    """The link flips between a permitted file and the secret; a read gets the file or is refused, never the secret."""
    (tree / "secret").write_bytes(b"secret" * 100)
    root, link = str(tree / "data"), tree / "data/flip"

    async def main() -> tuple[int, int]:
        good = denied = 0
        async with trio.open_nursery() as nursery:

            def flip() -> None:
                for number in range(300):
                    new = tree / "data/new"
                    new.symlink_to(tree / "secret" if number % 2 else tree / "data/f")
                    new.rename(link)

            nursery.start_soon(trio.to_thread.run_sync, flip)
            while nursery.child_tasks:
                files = LocalFiles((root,), "no")
                try:
                    assert bytes(await files.read(str(link), 0, 8)) == VALUE[:8]
                    good += 1
                except AccessDenied:
                    denied += 1
                except TargetMissing:
                    pass
                await files.aclose()
        return good, denied

    good, denied = trio.run(main)
    assert good
    assert denied


def test_files_outside_are_not_even_opened(tree: Path) -> None:
    """If the FIFO were opened for reading, the thread that waits to write to it would continue."""
    os.mkfifo(tree / "fifo")
    writer = threading.Thread(target=lambda: (tree / "fifo").open("wb").close(), daemon=True)
    writer.start()
    time.sleep(0.2)  # give the writer time to block
    with pytest.raises(AccessDenied):
        read(f"{tree}/fifo", options=said(f"allow_path={tree}/data"))
    writer.join(0.2)
    assert writer.is_alive()
    while writer.is_alive():  # release the writer, which may have blocked only now
        os.close(os.open(tree / "fifo", os.O_RDONLY | os.O_NONBLOCK))
        writer.join(0.05)
    before = len(open_descriptors())
    for url in (f"{tree}/secret", f"{tree}/data/f", f"{tree}/data"):
        with pytest.raises(ReadError):
            read(url, options=said(f"allow_path={tree}/data/sub"))
    assert len(open_descriptors()) <= before


# -- protocols


@pytest.mark.parametrize("url", ["memory://x", "memory:x", "zip://a::memory://x"])
def test_memory_urls_need_allow_memory(url: str) -> None:
    with pytest.raises(AccessDenied, match=r"reaches no memory: URL \(-o allow=memory\)"):
        read(url)
    fsspec.filesystem("memory").pipe("/trust", VALUE)
    for options in (said("allow=memory"), said("allow=all")):
        assert read("memory://trust", options=options) == VALUE[3:11]
    assert read("memory://trust", origin="") == VALUE[3:11]
    assert read("memory://trust", origin="memory://dir/set.json") == VALUE[3:11]


def test_other_protocols_must_be_enabled() -> None:
    def keyed(place: str) -> Options:  # said() refuses options of unknown protocols
        return dataclasses.replace(said(), storage={place: {"key": 5}})

    with pytest.raises(AccessDenied, match=r"'nosuch' is not enabled for targets \(-o allow=nosuch\)"):
        read("nosuch://h/x")
    with pytest.raises(AccessDenied, match="not enabled"):  # options do not enable it for a remote set
        read("nosuch://h/x", options=keyed("nosuch"))
    with pytest.raises(AccessDenied, match="not enabled"):
        read("nosuch://h/x", options=said("allow=all"))
    for origin in (REMOTE, ""):
        with pytest.raises(ReadError, match="unknown"):
            read("nosuch://h/x", origin=origin, options=said("allow=nosuch"))
        with pytest.raises(ReadError, match="unknown"):
            read("nosuch://user@h/x", origin=origin, options=keyed("nosuch://h"))
        with pytest.raises(AccessDenied, match="not enabled"):
            read("nosuch://h2/x", origin=origin, options=keyed("nosuch://h"))
    with pytest.raises(ReadError, match="unknown"):  # the set's own server
        read("nosuch://u:p@H/x", origin="nosuch://h/set.json")
    with pytest.raises(AccessDenied, match="not enabled"):
        read("nosuch://h2/x", origin="nosuch://h/set.json")
    with pytest.raises(ReadError, match=r"^ftp://127\.0\.0\.1/x: FTP is not supported: use HTTP or SFTP"):
        read("ftp://me:hush@127.0.0.1/x", options=said("allow=ftp"))
    for protocol in ("reference", "simplecache", "generic", "dir"):
        with pytest.raises(AccessDenied, match=r"not enabled for targets$"):
            read(f"{protocol}://x", options=said(f"allow={protocol}", "allow=all"))


@pytest.mark.parametrize(
    ("origin", "remote"),
    {
        "": False, "/x/set.json": False, "file:///x": False, "memory://x": False, "zip://set.json::/x.zip": False,
        "zip://set.json::file:///x.zip": False, "http://h/x": True, "s3://b/x": True, "nosuch://x": True,
        "zip://set.json::https://h/x.zip": True, "http://[::1]/x": True,
    }.items(),
)  # fmt: skip
def test_sets_from_the_network_are_told_apart_from_local_ones(origin: str, remote: bool) -> None:
    assert Trust(Options(), origin).remote is remote


# -- buckets


@pytest.fixture
def asked(s3: S3) -> Iterator[Recorder]:
    """Record the requests to the S3 server, which has the buckets tests, theirs and named."""
    for bucket in ("tests", "theirs", "named"):
        s3.client.create_bucket(Bucket=bucket)
        s3.client.put_object(Bucket=bucket, Key="v", Body=VALUE, ACL="public-read")
        s3.client.put_object(Bucket=bucket, Key="private", Body=VALUE)
    with recording("127.0.0.1", behind=s3.endpoint) as server:
        yield server


@pytest.mark.parametrize(
    ("origin", "more", "signed"),
    [
        ("", [], {"tests", "theirs", "named"}),
        ("s3://tests/set.json", [], {"tests"}),
        ("s3a://tests/set.json", [], {"tests"}),
        (REMOTE, [], set()),
        (REMOTE, ["s3://named.requester_pays=false"], {"named"}),
        (REMOTE, ["s3a://named.anon=false"], {"named"}),
        (REMOTE, ["base=s3://named/dir"], {"named"}),
        (REMOTE, ["allow=credentials"], {"tests", "theirs", "named"}),
        ("s3://tests/set.json", ["s3://theirs.anon=true", "allow=all"], {"tests", "named"}),
    ],
)
@pytest.mark.parametrize("given", [True, False])
def test_credentials_go_to_buckets_that_the_user_named(
    origin: str, more: list[str], signed: set[str], given: bool, asked: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = [f"s3.endpoint_url={asked.url}", *more]
    if given:
        options += ["s3.key=a", "s3.secret=b"]
    else:
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "b")
    for bucket in ("tests", "theirs", "named"):
        for protocol in ("s3", "s3a"):
            assert read(f"{protocol}://{bucket}/v", origin=origin, options=said(*options)) == VALUE[3:11]
            path, _, query = asked.requests[-1][0].partition("?")
            assert path == f"/{bucket}/v"
            assert ("authorization" in asked.headers() or "X-Amz-Signature=" in query) == (bucket in signed), bucket


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("ACCOUNT_KEY", "aHVzaA=="),
        ("SAS_TOKEN", "sv=2020&se=2030&sig=hush"),
        ("CONNECTION_STRING", "AccountName=mine;AccountKey=aHVzaA=="),
        ("CONNECTION_STRING", "BlobEndpoint=https://mine.blob.core.windows.net/?sv=2020&sig=hush"),
    ],
)
@pytest.mark.parametrize(
    ("url", "origin", "items", "host"),
    [
        ("abfs://c@theirs.dfs.core.windows.net/x", REMOTE, [], "theirs"),
        ("az://c/x", REMOTE, ["abfs.account_name=theirs"], "theirs"),
        ("az://c/x", REMOTE, [], "mine"),
        ("az://c/x", "", ["abfs.account_name=theirs", "abfs.anon=true"], "theirs"),
        ("abfs://c@theirs.dfs.core.windows.net/x", "", ["abfs.account_name=mine", "abfs.anon=true"], "theirs"),
        ("az://c@theirs/x", REMOTE, [], "theirs"),
        ("az://c/x", "", [], "with keys"),
        ("az://c/x", REMOTE, ["allow=credentials"], "with keys"),
    ],
)
def test_no_key_of_the_environment_goes_to_azure_anonymously(
    variable: str, value: str, url: str, origin: str, items: list[str], host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "mine")
    monkeypatch.setenv(f"AZURE_STORAGE_{variable}", value)
    asked = azure_url(url, origin, *items)
    if host == "with keys":
        assert asked.startswith("https://mine.blob.core.windows.net/c/x?")
        assert "sig=" in asked
    else:
        assert asked == f"https://{host}.blob.core.windows.net/c/x"


def test_an_anonymous_read_of_azure_needs_an_account(monkeypatch: pytest.MonkeyPatch) -> None:
    """An account name that would inject another endpoint is refused, too."""
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", "UseDevelopmentStorage=true")
    for url in ("az://c/x", "abfs://c@theirs;BlobEndpoint=other.dfs.core.windows.net/x"):
        with pytest.raises(ReadError, match=r"no account of Azure is named|host is not one of Azure"):
            azure_url(url, REMOTE)


@pytest.mark.parametrize(
    ("origin", "more", "reached"),
    [(REMOTE, [], False), (REMOTE, ["allow=credentials"], False), (REMOTE, ["allow=private"], True), ("", [], True)],
)
@pytest.mark.parametrize("end", ["", "?.core.windows.net", "#.core.windows.net"])
def test_a_set_from_the_network_names_no_private_host_as_that_of_azure(
    origin: str, more: list[str], reached: bool, end: str
) -> None:
    """A ReadError without AccessDenied: the server that was reached speaks no TLS."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0)
        url = f"abfs://c@127.0.0.1:{server.getsockname()[1]}{end}/x"
        with pytest.raises(ReadError) as caught:
            read(url, origin=origin, options=said("abfs.anon=true", "read_timeout=1", *more))
        assert isinstance(caught.value, AccessDenied) != reached
        if not reached:
            with pytest.raises(BlockingIOError):
                server.accept()


def test_a_set_names_a_limited_number_of_accounts() -> None:
    """Each has a client with connections of its own."""

    async def main() -> None:
        files = RemoteFiles(Options(retries=0))
        try:
            for number in range(10_000):
                await files.find(f"abfs://c@a{number}.dfs.core.windows.net/x")
        finally:
            await files.aclose()

    with pytest.raises(ReadError, match="accounts"):
        trio.run(main)


def azure_url(url: str, origin: str, *items: str) -> str:
    """Return the URL that is requested for a target on Azure."""
    asked: list[str] = []

    async def fetch(self: HttpSystem, path: str, start: int, stop: int | None) -> Fetched:
        asked.append(path)
        return Fetched(VALUE[start:stop], '"1"', len(VALUE))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HttpSystem, "fetch", fetch)
        assert read(url, origin=origin, options=said(*items)) == VALUE[3:11]
    return asked[0]


def test_a_refused_anonymous_read_says_which_option_allows_credentials(asked: Recorder) -> None:
    options = [f"s3.endpoint_url={asked.url}", "s3.key=a", "s3.secret=b"]
    with pytest.raises(AccessDenied, match=r"requested anonymously: no option names its bucket; -o allow=credentials"):
        read("s3://theirs/private", options=said(*options))
    with pytest.raises(AccessDenied, match=r"Forbidden at .*s3.profile="):
        read("s3://theirs/private", options=said(*options, "s3://theirs.anon=true"))
    assert read("s3://theirs/private", options=said(*options, "s3://theirs.anon=false")) == VALUE[3:11]


@pytest.mark.parametrize("url", ["http://", "http://[::1]x/", "https://user:secret@/x"])
@pytest.mark.parametrize("form", ["{}", "zip://x::{}"])
def test_urls_without_a_host_are_read_errors(url: str, form: str) -> None:
    with pytest.raises(ReadError, match="not a URL: ") as found:
        read(form.format(url))
    assert "secret" not in str(found.value)
    with pytest.raises(SourceError, match="not a URL: "):
        plan_source(form.format(url), Options(retries=0), child=False)

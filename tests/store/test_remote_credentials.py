"""Stored tables of names: one for each set of credentials, because others may see other names."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio

from zarrfs.config.options import Options
from zarrfs.errors import NotFound
from zarrfs.store.remote import FsspecStore


class _Private(http.server.BaseHTTPRequestHandler):
    """A server that serves every key to clients with any credentials, and answers others with 404, as GitHub does."""

    def log_message(self, *arguments: object) -> None:
        """Print nothing."""

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        value = b"v" if self.headers.get("Authorization") else b""
        self.send_response(200 if value else 404)
        self.send_header("ETag", '"1"')
        self.send_header("Content-Length", str(len(value)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(value)


@pytest.fixture
def private() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Private) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def get(url: str, names: Path, options: Options) -> bytes:
    async def main() -> bytes:
        store = FsspecStore(url, options, str(names))
        try:
            return bytes(await store.get("k"))
        finally:
            await store.aclose()

    return trio.run(main)


@pytest.mark.parametrize("way", ["option", "URL", "netrc"])
def test_a_name_absent_without_credentials_is_found_with_credentials(
    private: str, way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(2):
        with pytest.raises(NotFound):
            get(private, tmp_path, Options(retries=0))
    assert len(list(tmp_path.glob("*.names"))) == 1
    options, url = Options(retries=0), private
    if way == "option":
        options = Options(retries=0, storage={"http": {"headers": {"Authorization": "Bearer T"}}})
    elif way == "URL":
        url = private.replace("//", "//user:secret@")
    else:
        (tmp_path / "netrc").write_text("machine 127.0.0.1 login user password secret\n")
        monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    assert get(url, tmp_path, options) == b"v"
    assert len(list(tmp_path.glob("*.names"))) == 2


@pytest.mark.parametrize("url", ["s3://bucket/x", "s3a://bucket/x"])
def test_access_keys_in_the_environment_select_the_table(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def path() -> str | None:
        async def main() -> str | None:
            store = FsspecStore(url, Options(), "/names")
            await store.find()
            await store.aclose()
            return store.names.path

        return trio.run(main)

    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "one")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    one = path()
    assert path() == one
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", "/other")
    assert path() == one
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "other")
    assert path() != one

"""Secrets in sources, options and targets: none of them appears where other users can look."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import stat
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.conftest import DATA, run
from tests.mounts.mounting import daemon_pid, mount_lines, until
from tests.servers import Answer, free_port, serving

MINE = {  # secrets of the user who mounts
    "the password in the source": "srcpassq1w2e3",
    "the signature in the source": "srcsigr4t5y6",
    "a header": "headeru7i8o9",
    "a storage option": "s3secretp0a1s2",
    "an access key": "s3keyd3f4g5",
    "a cookie": "jsonsecreth6j7k8",
    "a file": "filesecretl9z0x1",
}
THEIRS = {  # secrets of the author of the set, which its index has to contain
    "the password of a target": "tgtpassc2v3b4",
    "the token of a target": "tgttokenn5m6q7",
    "the token of a redirect": "redirtokenw8e9r0",
}
STATUSES = (401, 403, 404, 410, 429, 500)


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """Start a server with /set.json and others; it answers /N with status N, /away-N with a redirect with a token."""
    documents: dict[str, bytes] = {
        "/data": bytes(100), "/store.zarr/.zgroup": b'{"zarr_format": 2}',
        "/store.zarr/.zmetadata": b'{"metadata": {".zgroup": {"zarr_format": 2}}}',
    }  # fmt: skip

    def answer(method: str, path: str) -> Answer:
        path = urlsplit(path).path
        number = path.strip("/").rpartition("-")[2]
        if path in documents:
            return 200, {"ETag": '"1"'}, documents[path]
        if path.startswith("/away"):
            token = THEIRS["the token of a redirect"]
            return 302, {"Location": f"{url}/{number}?access_token={token}"}, b""
        return int(number) if number.isdigit() else 404, {"ETag": '"1"'}, b"no"

    with serving(answer) as url:
        port = int(url.rpartition(":")[2])
        documents["/set.json"] = json.dumps({"version": 1, "refs": refs(port)}).encode()
        yield f"127.0.0.1:{port}"


def refs(port: int) -> dict[str, object]:
    """Return the references of a set: most targets fail, each in another way, and a few do not."""
    password, token = THEIRS["the password of a target"], THEIRS["the token of a target"]
    user, query, closed = f"u:{password}@", f"?X-Amz-Signature={token}&a=1", free_port()
    base = f"http://{user}127.0.0.1:{port}"
    found: dict[str, object] = {f"s{n}": [f"{base}/{n}{query}", 0, 8] for n in STATUSES}
    found |= {f"r{n}": [f"{base}/away-{n}{query}", 0, 8] for n in STATUSES}
    found |= {f"w{n}": [f"{base}/w-{n}{query}"] for n in STATUSES}
    return found | {
        "inline": "text",
        "good": [f"{base}/data{query}", 0, 8],
        "short": [f"{base}/data{query}", 90, 80],
        "redirected": [f"{base}/away-200{query}", 0, 2],
        "closed": [f"http://{user}127.0.0.1:{closed}/x{query}", 0, 8],
        "nowhere": [f"http://{user}host.invalid/x{query}", 0, 8],
        "tls": [f"https://{user}127.0.0.1:{port}/x{query}", 0, 8],
        "malformed": [f"http://{user}[127.0.0.1:{port}/x{query}", 0, 8],
        "bucket": ["s3://bucket/x", 0, 8],
        "archive": [f"zip://member::{base}/data{query}", 0, 8],
        "protocol": [f"webdav://{user}host/x{query}", 0, 8],
        "ftp": [f"ftp://{user}127.0.0.1:{closed}/x{query}", 0, 8],
    }


def options(tmp_path: Path, retries: int = 1) -> list[str]:
    """Return options for all commands, with a secret in each kind of option that can contain one."""
    (tmp_path / "secret").write_text(MINE["a file"] + "\n")
    lines = [
        f"retries={retries}", "read_timeout=5s", "allow=all",
        f'http.headers={{"X-Token": "Bearer {MINE["a header"]}"}}',
        f'http.cookies={{"session": "{MINE["a cookie"]}"}}',
        f"s3.secret={MINE['a storage option']}", f"s3.key={MINE['an access key']}",
        f"s3.endpoint_url=http://127.0.0.1:{free_port()}", f"s3://other.secret=@{tmp_path}/secret",
        f"cache_dir={tmp_path}/cache", "log_level=debug",
    ]  # fmt: skip
    escaped = [line.replace(",", "\\,") for line in lines]
    return ["--option", ",".join(escaped)]


def bytes_of(path: Path) -> bytes:
    with contextlib.suppress(OSError):
        return path.read_bytes()
    return b""


def processes() -> bytes:
    """Return the command lines of all processes, as ps shows them."""
    done = subprocess.run(["ps", "axww", "-o", "pid,args"], capture_output=True, check=True)
    lines = b"".join(bytes_of(path) + b"\n" for path in Path("/proc").glob("[0-9]*/cmdline"))
    own = bytes_of(Path("/proc/self/cmdline"))
    return b"\n".join(line for line in [*done.stdout.split(b"\n"), *lines.split(b"\n")] if line != own)


def assert_hidden(where: str, data: bytes | str, secrets: dict[str, str] | None = None) -> None:
    """Check that `data` contains none of the secrets."""
    data = data.encode() if isinstance(data, str) else data
    for what, secret in (secrets or {**MINE, **THEIRS}).items():
        at = data.find(secret.encode())
        assert at < 0, f"{where}: shows {what}: ...{data[max(0, at - 200) : at + 40]!r}"


def test_secrets_are_shown_nowhere(server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "index"))
    user, signature = f"me:{MINE['the password in the source']}", MINE["the signature in the source"]
    source = f"http://{user}@{server}/set.json?sig={signature}"
    given = options(tmp_path)
    mnt = tmp_path / "mnt"
    mnt.mkdir()
    files = {name: str(tmp_path / name) for name in ("log",)}
    also = f"log_file={files['log']}"
    done = run("mount", source, mnt, *given, "--option", also)
    assert done.returncode == 0, done.stderr
    try:
        assert_hidden("zarrfs mount", done.stdout + done.stderr)
        assert_hidden("processes", processes())
        assert_hidden("mountinfo", "".join(mount_lines(mnt)))

        def fails(entry: str) -> bool:
            try:
                for name in [*os.listxattr(mnt / entry), "user.zarrfs.source"]:
                    assert_hidden(f"{name} of {entry}", os.getxattr(mnt / entry, name))
                (mnt / entry).read_bytes()
            except OSError:
                return True
            return False

        with ThreadPoolExecutor(16) as readers:  # concurrently: some wait for read_timeout=
            failed = sum(readers.map(fails, sorted(os.listdir(mnt))))
        assert failed >= 20, "what was to fail did not"
        assert (mnt / "inline").read_bytes() == b"text"
        until(lambda: not fails("good"))  # on a busy machine, a response may come too late
        assert (mnt / "good").read_bytes() == bytes(8)
        for name in os.listxattr(mnt):
            assert_hidden(name, os.getxattr(mnt, name))
        for words in ("stats", mnt), ("stats", "--json", mnt), ("stats", "--prometheus", mnt):
            done = run(*words)
            assert done.returncode == 0, done.stderr
            assert_hidden(str(words), done.stdout + done.stderr)
        assert_hidden("processes", processes())
        assert daemon_pid(mnt)
    finally:
        subprocess.run(["umount", mnt], check=True)
    log = bytes_of(Path(files["log"]))
    assert log.count(b"\n") > 20
    assert_hidden("the log", log)
    assert_hidden("the log, of file names", " ".join(map(str, tmp_path.rglob("*"))))
    for path in tmp_path.rglob("*"):
        if path.is_file() and path.name != "secret":
            assert_hidden(str(path), bytes_of(path), MINE)
            if "index" not in path.parts:  # the index contains the set's secrets; only its user may enter
                assert_hidden(str(path), bytes_of(path), THEIRS)
    assert stat.S_IMODE((tmp_path / "index/zarrfs/index").stat().st_mode) == 0o700


COMMANDS = [
    "info SOURCE", "info named", "info http://USER@SERVER/store.zarr?sig=SIG", "info --json SOURCE s403",
    "check --json SOURCE", "cat SOURCE s401 closed bucket", "copy SOURCE COPY", "run SOURCE -- true",
    "check --blobs http://USER@SERVER/401?sig=SIG ARCHIVE", "ls http://USER@SERVER/away-403?sig=SIG",
    "ls http://USER@CLOSED/x?sig=SIG", "ls http://USER@host.invalid/x?sig=SIG", "ls http://USER@[SERVER/x?sig=SIG",
    "ls zip://x::http://USER@SERVER/data?sig=SIG",
]  # fmt: skip


def test_commands_do_not_print_secrets(server: str, tmp_path: Path) -> None:
    """The source can also be a name in the configuration file, whose URL is not on the command line."""
    names = {
        "SOURCE": "http://USER@SERVER/set.json?sig=SIG", "USER": f"me:{MINE['the password in the source']}",
        "SERVER": server, "SIG": MINE["the signature in the source"], "CLOSED": f"127.0.0.1:{free_port()}",
        "COPY": str(tmp_path / "copy"),
        "ARCHIVE": str(DATA / "archives/flux-list.json"),
    }  # fmt: skip

    def filled(text: str) -> str:
        return functools.reduce(lambda found, name: found.replace(name, names[name]), names, text)

    (tmp_path / "secret.toml").write_text(f'[source.named]\nsource = "{filled("SOURCE")}"\n')
    (tmp_path / "secret.toml").chmod(0o600)
    environment = {**os.environ, "ZARRFS_CONFIG": str(tmp_path / "secret.toml")}
    for line in COMMANDS:
        command, *words = map(filled, line.split())
        done = run("-d", command, *options(tmp_path, retries=0), *words, env=environment)
        assert_hidden(line, done.stdout + done.stderr)
        assert "Usage:" not in done.stderr, done.stderr
        assert done.returncode == 0 or command != "info" or "s403" in words, done.stderr
    for path in tmp_path.rglob("*"):
        if path.is_file() and not path.name.startswith("secret") and "index" not in path.parts:
            assert_hidden(str(path), bytes_of(path))


def test_the_report_of_a_check_has_no_secret_of_an_option(tmp_path: Path) -> None:
    """Libraries quote the values of options in their messages."""
    (tmp_path / "set.json").write_text('{"version": 1, "refs": {"a": ["s3://bucket/key", 0, 4]}}')
    option = f"s3.endpoint_url=http://user:{MINE['a storage option']}@:port"
    done = run("check", "--json", "-o", option, "-o", "s3.anon=true", tmp_path / "set.json")
    assert done.returncode == 1
    assert "bucket/key" in done.stdout + done.stderr
    assert MINE["a storage option"] not in done.stdout + done.stderr

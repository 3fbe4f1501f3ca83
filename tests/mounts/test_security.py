"""Attacks by other users of the machine, by servers and by documents: see docs/security.md."""

from __future__ import annotations

import errno
import gzip
import os
import shutil
import socket
import stat
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.conftest import PROGRAM, run
from tests.mounts.mounting import daemon_pid, log_of, mount_lines, mounted
from tests.mounts.test_semantics import document, error_of
from tests.servers import Faulty, faulty

__all__ = ["faulty"]

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="becomes other users")
MALLORY = 65533  # a user and group that own nothing


@pytest.fixture
def place() -> Iterator[Path]:
    """Make a directory that every user can enter, unlike those of pytest; yield its path."""
    made = Path(f"/tmp/zarrfs-security-{os.getpid()}")
    made.mkdir(mode=0o755)
    yield made
    shutil.rmtree(made)


def as_mallory(*command: object) -> subprocess.CompletedProcess[str]:
    """Run a command as another user."""
    become = ["setpriv", f"--reuid={MALLORY}", f"--regid={MALLORY}", "--clear-groups", "--"]
    return subprocess.run(
        [*become, *map(str, command)], capture_output=True, text=True, timeout=60, check=False, cwd="/"
    )


# -- other users of the machine and a mount


def test_a_mount_for_others_is_not_controlled_by_them(place: Path) -> None:
    """With allow_other they read files, but cannot refresh the mount, write or unmount."""
    (place / "mnt").mkdir()
    with mounted(document(place, {"a": "for all"}), place / "mnt", "allow_other") as root:
        assert as_mallory("cat", root / "a").stdout == "for all"
        for name in ("user.zarrfs.refresh:token", "user.zarrfs.refresh:token:force"):
            done = as_mallory("getfattr", "-n", name, root)
            assert done.returncode != 0
            assert "not permitted" in done.stderr, done.stderr
        assert as_mallory("setfattr", "-n", "user.zarrfs.x", "-v", "1", root).returncode != 0
        assert as_mallory("touch", root / "b").returncode != 0
        assert as_mallory("fusermount3", "-u", root).returncode != 0
        assert as_mallory("cat", root / "a").returncode == 0


# -- other users and shared directories


@pytest.mark.parametrize("spoil", [lambda path: path.chmod(0o777), lambda path: os.chown(path, MALLORY, MALLORY)])
def test_a_directory_of_indexes_where_others_may_exchange_files_is_not_used(
    spoil: Callable[[Path], None], place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise another user could replace an index between its check and its use."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(place))
    (place / "zarrfs/index").mkdir(parents=True)
    spoil(place / "zarrfs/index")
    with mounted(document(place, {"a": "b"}), place / "mnt") as root:
        assert (root / "a").read_text() == "b"
    assert not list((place / "zarrfs/index").iterdir())


def test_links_that_another_user_has_planted_in_a_directory_of_blocks(place: Path, faulty: Faulty) -> None:
    """cache_dir= is in a directory like /tmp. Nothing is written through another user's symlinks; no read fails."""
    victim, blocks, value = place / "victim", place / "blocks", bytes(range(256)) * 100
    victim.mkdir()
    (victim / "file").write_text("as it was")
    blocks.mkdir()
    blocks.chmod(0o1777)
    assert as_mallory("ln", "-s", victim, blocks / "zarrfs-blocks-3").returncode == 0
    assert as_mallory("ln", "-s", victim, blocks / "blobs").returncode == 0
    source = document(place, {"a": [faulty.put("/data", value)]})
    with mounted(source, place / "mnt", f"cache_dir={blocks}") as root:
        assert (root / "a").read_bytes() == value
    assert {path.name: path.read_text() for path in victim.iterdir()} == {"file": "as it was"}


def test_modules_in_the_working_directory_are_not_imported(place: Path) -> None:
    """Root runs zarrfs in another user's directory; the child process that reads documents imports none either."""
    for name in ("json", "sqlite3", "orjson", "trio", "zarrfs", "click", "sitecustomize"):
        (place / f"{name}.py").write_text(f"open({str(place / 'ran')!r}, 'a').write({name!r})\n")
    (place / "mnt").mkdir()
    source = document(place, {"a": "b"})
    done = run("mount", source, place / "mnt", cwd=place)
    assert done.returncode == 0, done.stderr
    assert run("umount", place / "mnt", cwd=place).returncode == 0
    assert run("ls", source, cwd=place).stdout == "a\n"
    assert not (place / "ran").exists()


# -- names


@pytest.mark.parametrize("name", ["x,allow_other,suid,dev.json", "y\\,allow_other.json", "z\n0 allow_other.json"])
def test_the_name_of_a_source_adds_no_mount_option(name: str, tmp_path: Path) -> None:
    with mounted(document(tmp_path, {"a": "b"}, name), tmp_path / "mnt") as root:
        [line] = mount_lines(root)
        options = f"{line.split(' ')[5]},{line.split(' ')[-1].strip()}".split(",")
        assert "allow_other" not in options
        assert {"nosuid", "nodev", "ro"} <= set(options)


def test_names_forge_no_lines_and_move_no_cursor(tmp_path: Path) -> None:
    """Names of entries and targets cannot send control characters to the log or to a terminal."""
    evil = "a\n2026-01-01 00:00:00,000 zarrfs[1]: ERROR: forged \x1b[31m"
    source = document(tmp_path, {evil: ["file:///nonexistent/\x1b[2J\nforged", 0, 10], "\x1b]0;x\x07": ["x"] * 9})
    with mounted(source, tmp_path / "mnt") as root:
        assert error_of((root / evil).read_bytes) == errno.EIO
        log = log_of(root)
    assert all(line.startswith("20") and " zarrfs[" in line for line in log.splitlines())
    shown = [log, *(text for command in ("check", "ls", "info")
                    for done in [run(command, source)] for text in (done.stdout, done.stderr))]  # fmt: skip
    for text in shown:
        assert not {"\x1b", "\x07", "\r"} & set(text)
        assert "\nforged" not in text
        assert "\n2026-01-01" not in text


# -- servers


class Hostile:
    """A server that calls `answer` for each connection once it has received a request."""

    def __init__(self, answer: Callable[[socket.socket], None]) -> None:
        self._answer = answer
        self.connections = 0
        self._socket = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}/x"
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            self.connections += 1
            threading.Thread(target=self._one, args=(connection,), daemon=True).start()

    def _one(self, connection: socket.socket) -> None:
        try:
            connection.settimeout(20)
            connection.recv(65_536)
            self._answer(connection)
        except OSError:
            pass
        finally:
            connection.close()

    def close(self) -> None:
        """Stop accepting connections."""
        self._socket.close()


def endless_headers(connection: socket.socket) -> None:
    connection.sendall(b"HTTP/1.1 206 Partial Content\r\n")
    while True:
        connection.sendall(b"X-More: " + b"x" * 4000 + b"\r\n")


def endless_status(connection: socket.socket) -> None:
    connection.sendall(b"HTTP/1.1 200 ")
    while True:
        connection.sendall(b"K" * 4096)


def endless_interim(connection: socket.socket) -> None:
    while True:
        connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\n" * 100)


def one_byte_a_second(connection: socket.socket) -> None:
    for byte in b"HTTP/1.1 206 Partial Content\r\nContent-Length: 100\r\nContent-Range: bytes 0-99/100\r\n\r\n":
        connection.sendall(bytes([byte]))
        time.sleep(1)


def endless_redirects(connection: socket.socket) -> None:
    host, port = connection.getsockname()
    location = f"http://{host}:{port}/{time.monotonic_ns()}"
    connection.sendall(f"HTTP/1.1 302 Found\r\nLocation: {location}\r\nContent-Length: 0\r\n\r\n".encode())


def compressed_bomb(connection: socket.socket) -> None:
    body = gzip.compress(bytes(80 << 20), 1)
    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nETag: \"1\"\r\n"
                       b"Content-Length: %d\r\n\r\n" % len(body) + body)  # fmt: skip


ANSWERS = [endless_headers, endless_status, endless_interim, one_byte_a_second, endless_redirects, compressed_bomb]


def test_an_answer_without_end_is_an_error(tmp_path: Path) -> None:
    """Reads fail with EIO in time, memory is bounded, and other files can still be read.

    The compressed response ends, so it is read if it arrives in time.
    """
    servers = {answer: Hostile(answer) for answer in ANSWERS}
    refs: dict[str, object] = {"good": "good"}
    for answer, server in servers.items():
        refs |= {f"{answer.__name__}/part": [server.url, 0, 100], f"{answer.__name__}/whole": [server.url]}
    options = "read_timeout=2s,retries=1,memory_limit=16MiB"
    with mounted(document(tmp_path, refs), tmp_path / "mnt", options) as root:
        for answer, server in servers.items():
            expected = {errno.EIO, None} if answer is compressed_bomb else {errno.EIO}
            began = time.monotonic()
            for name in ("part", "whole"):
                assert error_of((root / answer.__name__ / name).read_bytes) in expected, (answer, name)
            assert time.monotonic() - began < 60
            assert (root / "good").read_text() == "good"
            assert server.connections < 100
            server.close()
        status = Path(f"/proc/{daemon_pid(root)}/status").read_text()
        assert int(status.split("VmHWM:")[1].split()[0]) < 200 << 10


@pytest.mark.parametrize("answer", [endless_headers, one_byte_a_second])
def test_a_document_without_end_is_an_error(answer: Callable[[socket.socket], None], tmp_path: Path) -> None:
    """The error message is one line, and nothing is mounted."""
    server = Hostile(answer)
    (tmp_path / "mnt").mkdir()
    try:
        options = "read_timeout=5s,retries=0,type=references"
        done = run("mount", server.url, tmp_path / "mnt", "-o", options)
        assert done.returncode != 0
        assert len(done.stderr.splitlines()) == 1, done.stderr
        assert not mount_lines(tmp_path / "mnt")
    finally:
        server.close()


# -- special files


def test_targets_that_are_no_files_do_not_hang(tmp_path: Path) -> None:
    """These are targets of the user's own sets; a set from the network may refer to no local file at all."""
    done, refs = threading.Event(), dict[str, object]()
    for number, target in enumerate(["/proc/self/mem", "/dev/zero", "/proc/kmsg", "/dev/stdin"]):
        refs |= {f"x{number}": [target, 0, 100], f"w{number}": [target]}
    with mounted(document(tmp_path, refs), tmp_path / "mnt") as root:

        def look() -> None:
            for name in refs:
                assert error_of((root / name).read_bytes) in (errno.EIO, errno.EACCES, errno.EPERM, None), name
            done.set()

        threading.Thread(target=look, daemon=True).start()
        assert done.wait(60)


def test_a_user_and_mode_of_what_is_made(tmp_path: Path) -> None:
    """Caches and indexes that zarrfs makes are for their user alone, even with umask 0."""
    (tmp_path / "mnt").mkdir()
    options = f"cache_dir={tmp_path}/blocks,retries=0"
    source = document(tmp_path, {"a": ["http://127.0.0.1:9/x", 0, 9]})
    command, own = [PROGRAM, "mount", source, tmp_path / "mnt", "-o", options], {"XDG_CACHE_HOME": str(tmp_path)}
    done = subprocess.run(command, umask=0, check=False, env={**os.environ, **own})
    assert done.returncode == 0
    error_of((tmp_path / "mnt/a").read_bytes)
    assert run("umount", tmp_path / "mnt").returncode == 0
    for name in ("zarrfs/index", "blocks"):
        if (tmp_path / name).exists():
            assert stat.S_IMODE(os.stat(tmp_path / name).st_mode) == 0o700


def test_a_long_url_does_not_freeze_the_mount(tmp_path: Path) -> None:
    """Messages about a URL of 60 kB are searched for secrets in linear time: reads fail soon, and others go on."""
    refs: dict[str, object] = {"good": "right"}
    for number, piece in enumerate([":a", "@:", "sig=", "%", "::", "?sig", "::zip://a"]):
        url = ("zip://a" if "zip" in piece else "http://") + piece * (60_000 // len(piece)) + "@/x"
        refs[f"bad{number}"] = [url, 0, 5]
    began = time.monotonic()
    with mounted(document(tmp_path, refs), tmp_path / "mnt", "retries=0") as root:
        for name in refs:
            if name != "good":
                assert error_of((root / name).read_bytes) == errno.EIO
            assert (root / "good").read_text() == "right"
    assert time.monotonic() - began < 60

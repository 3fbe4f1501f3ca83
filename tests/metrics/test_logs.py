"""Log lines and their destinations."""

from __future__ import annotations

import errno
import json
import logging
import os
import resource
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zarrfs.config.options import Options
from zarrfs.metrics import logs
from zarrfs.metrics.logs import Journal, LogFile, QueueingHandler, Syslog, json_line, priority, text_line

ABOUT = {"mountpoint": "/mnt/data", "source": "https://a.example/refs.json"}
FACTS = {
    "operation": "read", "key": "a/0", "url": "https://h/x", "offset": 5, "length": 6, "errno": "EIO", "attempt": 3,
    "kind": "unreadable",
}  # fmt: skip


def record(message: str = "read a/0: broken [EIO]", level: int = logging.ERROR, **more: Any) -> logging.LogRecord:
    about = {"levelno": level, "levelname": logging.getLevelName(level), "msg": message, **more}
    return logging.makeLogRecord(about | {"created": 1_700_000_000.25, "msecs": 250.0})


# -- lines


def test_a_text_line_has_pid_level_and_message() -> None:
    assert text_line(record()) == f"zarrfs[{os.getpid()}]: ERROR: read a/0: broken [EIO]"
    stamped = text_line(record(), stamped=True)
    assert stamped.startswith(time.strftime("%Y-%m-%d %H:%M:%S,250 zarrfs[", time.localtime(1_700_000_000)))


def test_a_json_line_has_all_facts() -> None:
    assert json.loads(json_line(record(facts=FACTS), ABOUT)) == {
        "time": "2023-11-14T22:13:20.250Z", "level": "error", "message": "read a/0: broken [EIO]", "pid": os.getpid(),
        **ABOUT, **FACTS,
    }  # fmt: skip


@given(st.text(max_size=50), st.text(max_size=50))
def test_any_name_is_logged_on_one_line(key: str, source: str) -> None:
    """A name must not forge log lines, or send control sequences to a terminal."""
    one = record(f"read {key}: broken", facts={"key": key})
    line = text_line(one)
    assert len(line.splitlines()) == 1
    assert not any(ord(char) < 32 or char == "\x7f" for char in line)
    found = json_line(one, {"source": source})
    assert len(found.splitlines()) == 1
    assert "://" in key or json.loads(found)["key"] == key
    assert json.loads(found)["source"] == source


def test_names_that_are_not_utf8_are_logged() -> None:
    name = os.fsdecode(b"a\xff")
    assert LogFile("/x", {}, False).line(record(name)).endswith(b": a\\xff\n")
    assert json.loads(LogFile("/x", {}, True).line(record("x", facts={"key": name})))["key"] == name
    assert b"a\\xff" in Journal("/x", {}, False).line(record(name))


def test_urls_have_no_secrets() -> None:
    """The log redacts URLs that its caller forgot to redact."""
    url = "https://user:hunter2@h/x?X-Amz-Signature=hunter2"
    for line in (
        text_line(record(f"{url}: broken")), json_line(record(f"{url}: broken", facts={"url": url}), {}),
        str(Journal("/x", {}, False).line(record("x", facts={"url": url}))),
    ):  # fmt: skip
        assert "hunter2" not in line


def test_a_traceback_stays_within_its_json_object() -> None:
    try:
        int("inner")
    except ValueError as exc:
        one = record("where it came from:", logging.DEBUG, exc_info=(type(exc), exc, exc.__traceback__))
    found = json_line(one, {})
    assert json.loads(found)["traceback"].endswith("base 10: 'inner'")
    assert "\n" not in found
    assert text_line(one).splitlines()[-1].endswith("base 10: 'inner'")


def test_a_long_message_is_cut() -> None:
    assert len(text_line(record("x" * 10**6))) < 8100


# -- the journal and syslog


def entry(data: bytes) -> dict[str, str]:
    """Parse a datagram as journald does."""
    found = {}
    while data:
        name, sign, rest = data.partition(b"\n")[0].partition(b"=")
        if sign:
            data = data[len(name) + len(rest) + 2 :]
        else:
            [length] = struct.unpack("<Q", data[len(name) + 1 : len(name) + 9])
            rest, data = data[len(name) + 9 : len(name) + 9 + length], data[len(name) + 10 + length :]
        found[name.decode()] = rest.decode()
    return found


def test_a_journal_entry_has_all_facts_and_cannot_be_forged() -> None:
    found = entry(Journal("/x", ABOUT, False).line(record(facts=FACTS)))
    assert found == {
        "MESSAGE": "read a/0: broken [EIO]", "PRIORITY": "3", "SYSLOG_IDENTIFIER": "zarrfs",
        "ZARRFS_MOUNTPOINT": "/mnt/data", "ZARRFS_SOURCE": "https://a.example/refs.json", "ZARRFS_OPERATION": "read",
        "ZARRFS_KEY": "a/0", "ZARRFS_URL": "https://h/x", "ZARRFS_OFFSET": "5", "ZARRFS_LENGTH": "6",
        "ZARRFS_ERRNO": "EIO", "ZARRFS_ATTEMPT": "3", "ZARRFS_KIND": "unreadable",
    }  # fmt: skip
    forged = entry(Journal("/x", {"source": "s"}, False).line(record("x", facts={"key": "a\nPRIORITY=0\nB=c"})))
    assert forged["ZARRFS_KEY"] == "a\nPRIORITY=0\nB=c"
    assert (forged["PRIORITY"], "B" in forged) == ("3", False)
    said = json.loads(entry(Journal("/x", ABOUT, True).line(record(facts=FACTS)))["MESSAGE"])
    assert said["key"] == "a/0"


def test_levels_map_to_syslog_priorities() -> None:
    names = ("CRITICAL", "ERROR", "WARNING", "INFO", "DEBUG")
    assert [priority(record(level=getattr(logging, name))) for name in names] == [2, 3, 4, 6, 7]


@pytest.fixture
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("s") / "log"  # short: the path of a socket has at most 107 bytes


@pytest.mark.parametrize("kind", [socket.SOCK_DGRAM, socket.SOCK_STREAM])
def test_syslog_works_over_either_socket_type_and_after_a_restart(kind: socket.SocketKind, place: Path) -> None:
    log = Syslog(str(place), ABOUT, False)
    line = log.line(record("hello"))
    assert line == f"<27>zarrfs[{os.getpid()}]: ERROR: hello".encode()
    with pytest.raises(FileNotFoundError):
        log.send(line)
    for _ in range(2):
        with socket.socket(socket.AF_UNIX, kind) as server:
            server.bind(str(place))
            if kind is socket.SOCK_STREAM:
                server.listen()
            log.send(line)
            taken = server if kind is socket.SOCK_DGRAM else server.accept()[0]
            with taken:
                assert taken.recv(1000).rstrip(b"\0") == line
        place.unlink()
    with pytest.raises(OSError, match=r"No such file|Connection refused"):
        log.send(line)
    assert Syslog("/x", ABOUT, True).line(record("hello")).startswith(f"<27>zarrfs[{os.getpid()}]: {{".encode())


# -- files


def test_a_log_file_that_was_moved_is_created_again(tmp_path: Path) -> None:
    log = LogFile(str(tmp_path / "log"), {}, False)
    log.send(b"one\n")
    (tmp_path / "log").rename(tmp_path / "log.1")
    log.send(b"two\n")
    (tmp_path / "log").unlink()
    log.send(b"three\n")
    assert ((tmp_path / "log.1").read_text(), (tmp_path / "log").read_text()) == ("one\n", "three\n")
    log.reopen()
    log.send(b"four\n")
    assert (tmp_path / "log").read_text() == "three\nfour\n"
    assert (tmp_path / "log").stat().st_mode & 0o7777 == 0o644


@pytest.fixture
def no_larger_files() -> Iterator[None]:
    """Limit files to 10 bytes, to imitate a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_file_whose_close_fails_is_closed_only_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second close could close another file that has been given the same descriptor."""
    place, close = tmp_path / "log", os.close
    log = logs.LogFile(str(place), {}, as_json=False)
    log.send(b"one\n")
    place.rename(tmp_path / "old")

    def failing(descriptor: int) -> None:
        close(descriptor)
        raise OSError(errno.EDQUOT, "quota")

    with monkeypatch.context() as patched:
        patched.setattr(os, "close", failing)
        log.send(b"two\n")
    other = os.open(tmp_path / "other", os.O_RDWR | os.O_CREAT)
    log.send(b"three\n")
    os.fstat(other)
    close(other)
    assert place.read_bytes() == b"two\nthree\n"


def test_a_truncated_line_is_terminated_before_the_next(tmp_path: Path, no_larger_files: None) -> None:
    log = LogFile(str(tmp_path / "log"), {}, False)
    log.send(b"12345\n")
    for _ in range(2):
        with pytest.raises(OSError, match="File too large"):
            log.send(b"67890\n")
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    log.send(b"abc\n")
    log.send(b"def\n")
    assert (tmp_path / "log").read_text() == "12345\n6789\nabc\ndef\n"


# -- the queue


class Slow:
    """A log destination that blocks until `free` is set, and fails if `fails` is true."""

    def __init__(self) -> None:
        self.free, self.sent, self.fails = threading.Event(), [], False
        self.waits = threading.Event()

    def line(self, record: logging.LogRecord) -> bytes:
        return record.getMessage().encode()

    def send(self, data: bytes) -> None:
        self.waits.set()
        self.free.wait()
        if self.fails:
            raise OSError(errno.ENOSPC, "full")
        self.sent.append(data.decode())

    def reopen(self) -> None:
        pass


def test_a_hanging_destination_loses_lines_and_blocks_no_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "_QUEUED", 10)
    monkeypatch.setattr(logs, "_PATIENCE", 0.1)
    place = Slow()
    handler = QueueingHandler(place)
    began = time.monotonic()
    handler.handle(record("first"))
    assert place.waits.wait(60)
    for number in range(1000):
        handler.handle(record(str(number)))
    handler.finish()
    assert time.monotonic() - began < 30
    assert handler.lost == 990
    place.free.set()
    until = time.monotonic() + 60
    while len(place.sent) < 12 and time.monotonic() < until:
        time.sleep(0.01)
    assert place.sent[:3] == ["first", "990 lines of the log are lost: they could not be written", "0"]
    assert place.sent[3:12] == [str(number) for number in range(1, 10)]


def test_a_process_without_descriptors_opens_its_log(tmp_path: Path) -> None:
    """The first line may be the one that reports the lack of descriptors."""
    script = """
import errno, logging, os, resource, sys
from zarrfs.config.options import Options
from zarrfs.metrics import logs
resource.setrlimit(resource.RLIMIT_NOFILE, (50, 50))
logs.configure(Options(log_file=sys.argv[1]), False)
try:
    while True:
        os.dup(0)
except OSError as exc:
    assert exc.errno == errno.EMFILE
    logs.log.warning("%s", exc)
logs.finish()
"""
    subprocess.run([sys.executable, "-c", script, tmp_path / "log"], check=True)
    assert "WARNING: [Errno 24] Too many open files" in (tmp_path / "log").read_text()


def test_lost_lines_are_counted_and_reported() -> None:
    place = Slow()
    place.free.set()
    place.fails = True
    handler = QueueingHandler(place)
    for number in range(3):
        handler.handle(record(str(number)))
    until = time.monotonic() + 60
    while handler.lost < 3 and time.monotonic() < until:
        time.sleep(0.01)
    place.fails = False
    handler.handle(record("again"))
    handler.finish()
    assert place.sent == ["again", "3 lines of the log are lost: they could not be written"]


def test_a_record_that_cannot_be_formatted_is_counted_as_lost() -> None:
    place = Slow()
    place.free.set()
    handler = QueueingHandler(place)
    handler.handle(record("%d", args=("x",)))
    handler.finish()
    assert handler.lost == 1


def test_a_log_without_a_destination_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(logs, "JOURNAL", str(tmp_path / "journal"))
    monkeypatch.setattr(logs, "SYSLOG", str(tmp_path / "syslog"))
    assert logs.note(Options()).startswith("no log: there is neither a journal nor ")
    assert (logs.note(Options(foreground=True)), logs.note(Options(log_file="x"))) == ("", "")
    (tmp_path / "syslog").touch()
    assert (logs.note(Options()), logs.destination(Options())) == ("", f"syslog ({tmp_path}/syslog)")

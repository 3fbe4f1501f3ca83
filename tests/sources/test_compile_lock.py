"""One process compiles a document; the others wait for its index, take over if it dies, or time out."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.servers import Faulty
from zarrfs.config.options import Options
from zarrfs.documents.document import Document
from zarrfs.sources import compile_lock, prepare
from zarrfs.sources.compile_lock import compiling
from zarrfs.store import indexfile

SECONDS = 40  # the timeout of every step of a process
# A program that plans a document. Before it compiles, it prints "compiles" and waits for the end of its input.
PLAN = """
import json, sys
from zarrfs.config.options import Options
from zarrfs.documents.document import Document
from zarrfs.errors import SourceError
from zarrfs.sources import prepare
write = prepare._write
def wait(*parts):
    print("compiles", flush=True)
    sys.stdin.read()
    return write(*parts)
prepare._write = wait
source, more = json.loads(sys.argv[1])
if (settled := more.pop("settled", None)) is not None:  # however long the process took to start
    Document.settled = lambda self: settled
try:
    print(prepare.prepare(source, Options(**more)).index)
except SourceError as exc:
    print(exc)
"""


LONG = '{{"refs": {{"k": "{}"}}}}' + " " * (64 << 10)  # a short document is compiled without a lock


class Planner(subprocess.Popen[str]):
    """A process that plans the document."""

    def __init__(self, source: str, **more: object) -> None:
        command = [sys.executable, "-c", PLAN, json.dumps([source, more])]
        super().__init__(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.stdin is not None
        assert self.stdout is not None
        self.input, self.lines = self.stdin, self.stdout

    def line(self) -> str:
        """Read a line; kill the process on a timeout."""
        with self._limited():
            return self.lines.readline().strip()

    def rest(self) -> str:
        """Read until the process exits; kill it on a timeout."""
        with self._limited():
            return self.lines.read()

    @contextlib.contextmanager
    def _limited(self) -> Iterator[None]:
        timer = threading.Timer(SECONDS, self.kill)
        timer.start()
        try:
            yield
        finally:
            timer.cancel()


@pytest.fixture(scope="module")
def settled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a document for `_planners(..., settled=True)`, which assumes that any change would alter its times."""
    document = tmp_path_factory.mktemp("settled") / "refs.json"
    document.write_text(LONG.format("v"))
    return document


@pytest.fixture(params=["settled", "fresh", "url"])
def planners(request: pytest.FixtureRequest, tmp_path: Path, settled: Path, faulty: Faulty) -> Iterator[list[Planner]]:
    """Return a process that has begun to compile, and two that wait for it and have printed nothing yet."""
    source, more = str(settled), {} if request.param == "url" else {"settled": request.param == "settled"}
    if request.param == "fresh":
        source = str(tmp_path / "refs.json")
        Path(source).write_text(LONG.format("w"))
    if request.param == "url":
        source = faulty.put("/refs.json", LONG.format("v").encode())
    yield _planners(source, tmp_path, **more)
    if request.param == "url":
        assert faulty.gets() <= 2  # for three processes, one of which may have been killed


def _planners(source: str, place: Path, **more: object) -> list[Planner]:
    more["index_dir"] = str(place / "index")
    first = Planner(source, **more)
    assert first.line() == "compiles"
    others = [Planner(source, **more), Planner(source, **more)]
    for other in others:
        _until_waiting(other, place / "index")
    return [first, *others]


def _until_waiting(planner: Planner, directory: Path) -> None:
    """Wait until a process has the lock file open."""
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        for number in os.listdir(f"/proc/{planner.pid}/fd"):
            try:
                if os.readlink(f"/proc/{planner.pid}/fd/{number}").startswith(f"{directory}/.zarrfs-"):
                    return
            except FileNotFoundError:
                pass
        time.sleep(0.02)
    raise AssertionError("does not wait")


def _end(planners: list[Planner]) -> list[str]:
    """Let all processes run to their end; return the remaining output of each."""
    for planner in planners:
        planner.input.close()
    said = [planner.rest() for planner in planners]
    assert [planner.wait(SECONDS) for planner in planners] == [0] * len(planners)
    return said


def test_the_others_use_the_index_of_the_first(planners: list[Planner], tmp_path: Path) -> None:
    said = _end(planners)
    assert len(set(said)) == 1  # only a path: the others did not compile
    assert said[0].strip() == str(next((tmp_path / "index").glob("*.index")))
    assert not list((tmp_path / "index").glob(".*"))


def test_one_process_takes_over_from_a_killed_compiler(planners: list[Planner], tmp_path: Path) -> None:
    planners[0].kill()
    planners[0].wait(60)
    said = _end(planners[1:])
    assert sorted(len(text.splitlines()) for text in said) == [1, 2]  # one of the two compiled
    assert not list((tmp_path / "index").glob(".*"))


def test_a_stopped_compiler_is_not_waited_for_beyond_mount_timeout(tmp_path: Path, settled: Path) -> None:
    more: dict[str, object] = {"index_dir": str(tmp_path / "index"), "mount_timeout": 2.0, "settled": True}
    first = Planner(str(settled), **more)
    assert first.line() == "compiles"
    first.send_signal(signal.SIGSTOP)
    began = time.monotonic()
    others = [Planner(str(settled), **more), Planner(str(settled), **more)]
    try:
        assert others[0].line() == "compiles"
        assert 2 <= time.monotonic() - began < 60
        assert all(".index" in text for text in _end(others))
    finally:
        first.send_signal(signal.SIGCONT)
        _end([first])


def test_a_wait_is_reported_once(
    tmp_path: Path, settled: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The line names the document and the process; with log_level=error (-q), no line is printed."""
    monkeypatch.setattr(compile_lock, "_REPORTED", 0.0)
    monkeypatch.setattr(Document, "settled", lambda _: True)
    first, *others = _planners(str(settled), tmp_path, settled=True)
    for level in ("error", "info"):
        prepare.prepare(str(settled), Options(index_dir=str(tmp_path / "index"), mount_timeout=1.5, log_level=level))
        (made,) = (tmp_path / "index").glob("*.index")
        made.unlink()
    rule = f"waiting for process {first.pid}, which compiles the same document (up to 1.5 s, mount_timeout=)"
    assert capsys.readouterr().err == f"zarrfs: {settled}: {rule}\n"
    _end([first, *others])


def test_after_a_failure_all_waiting_processes_compile_concurrently(tmp_path: Path) -> None:
    (tmp_path / "refs.json").write_text('{"refs": ' + " " * (64 << 10))
    first, *others = _planners(str(tmp_path / "refs.json"), tmp_path, settled=False)
    assert ".index" not in _end([first])[0]
    assert [other.line() for other in others] == ["compiles", "compiles"]  # before either ends
    _end(others)


def test_without_locks_each_compiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> bool:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(compile_lock, "try_lock", refuse)
    (tmp_path / "refs.json").write_text(LONG.format("v"))
    made = prepare.prepare(str(tmp_path / "refs.json"), Options(index_dir=str(tmp_path / "index")))
    assert made.index is not None
    assert indexfile.read_notes(made.index)["kind"] == "references"


def test_a_lock_file_of_another_user_is_not_waited_for(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    lock.touch()
    os.chown(lock, 65534, 65534)
    with compiling(str(lock), lambda: None, 20.0) as found:
        assert found is None
    assert lock.exists()

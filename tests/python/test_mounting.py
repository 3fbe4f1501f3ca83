"""mounted(): a mount that lasts as long as its with block, and never longer."""

from __future__ import annotations

import errno
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import zarrfs
from tests.conftest import run
from tests.mounts.mounting import alive
from zarrfs.python import mounting
from zarrfs.system import mounts

PROGRAM = """
import sys, time, zarrfs
with zarrfs.mounted({source!r}) as path:
    file = open(path / "a/b")
    print(path, flush=True)
    time.sleep(600)
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> str:
    place = tmp_path_factory.mktemp("mounted")
    refs = {"a/b": "hello", "gone": [str(place / "none.bin"), 0, 4]}
    (place / "set.json").write_text(json.dumps({"version": 1, "refs": refs}))
    return str(place / "set.json")


def daemons(parent: int) -> list[int]:
    found = subprocess.run(["pgrep", "-P", str(parent), "-f", "zarrfs.python.mount_process"], capture_output=True)
    return [int(pid) for pid in found.stdout.split()]


def wait_until_gone(path: Path, pid: int) -> None:
    deadline = time.monotonic() + 60
    while (mounts.mount_at(str(path)) or alive(pid)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert mounts.mount_at(str(path)) is None
    assert not alive(pid)


def test_the_mount_exists_within_its_block_only(source: str, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ZeroDivisionError), zarrfs.mounted(source, read_timeout=30) as path:  # noqa: PT012
        assert path.name == "set.json"
        assert (path / "a/b").read_text() == "hello"
        [daemon] = daemons(os.getpid())
        assert os.environ.get("XDG_CACHE_HOME", "") not in Path(f"/proc/{daemon}/cmdline").read_text()
        with pytest.raises(OSError, match="Input/output error"):
            (path / "gone").read_bytes()
        deadline = time.monotonic() + 60
        while "none.bin" not in caplog.text and time.monotonic() < deadline:
            time.sleep(0.01)
        assert "gone: " in caplog.text
        assert {record.levelno for record in caplog.records} == {logging.WARNING}
        raise ZeroDivisionError
    assert daemons(os.getpid()) == []
    assert mounts.mount_at(str(path)) is None
    with pytest.raises(OSError, match="symbolic links") as caught:  # Zarr readers take ENOENT for a missing chunk
        (path / "a/b").read_text()
    assert caught.value.errno == errno.ELOOP


def test_a_file_still_open_after_the_block_stays_readable(source: str, tmp_path: Path) -> None:
    with zarrfs.mounted(source, tmp_path) as path:
        assert path == tmp_path
        file = open(path / "a/b", "rb", buffering=0)  # noqa: SIM115
        [daemon] = daemons(os.getpid())
    assert mounts.mount_at(str(path)) is None
    assert list(tmp_path.iterdir()) == []
    assert file.read() == b"hello"
    file.close()
    wait_until_gone(path, daemon)


def test_the_mount_ends_when_the_interpreter_is_killed(source: str) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM.format(source=source)], stdout=subprocess.PIPE, text=True
    ) as program:
        assert program.stdout is not None
        path = Path(program.stdout.readline().strip())
        assert (path / "a/b").read_text() == "hello"
        [daemon] = daemons(program.pid)
        program.send_signal(signal.SIGKILL)
    wait_until_gone(path, daemon)
    assert not path.parent.exists()


def test_a_mount_in_use_outlives_a_killed_interpreter(source: str) -> None:
    """A reader that opens by path would otherwise find an empty directory."""
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM.format(source=source)], stdout=subprocess.PIPE, text=True
    ) as program:
        assert program.stdout is not None
        path = Path(program.stdout.readline().strip())
        [daemon] = daemons(program.pid)
        with (path / "a/b").open():
            program.send_signal(signal.SIGKILL)
            program.wait()
            time.sleep(1)
            assert (path / "a/b").read_text() == "hello"
    wait_until_gone(path, daemon)


def test_a_forked_process_leaves_the_mount_alone(source: str) -> None:
    pid = -1
    try:
        with zarrfs.mounted(source) as path:
            pid = os.fork()
            if not pid:
                return  # the child leaves the block
            assert os.waitpid(pid, 0)[1] == 0
            assert (path / "a/b").read_text() == "hello"
    finally:
        if not pid:
            os._exit(0)


def test_a_thread_that_ends_does_not_end_its_mount(source: str) -> None:
    entered = []
    block = zarrfs.mounted(source)
    thread = threading.Thread(target=lambda: entered.append(block.__enter__()))
    thread.start()
    thread.join()
    time.sleep(0.1)
    assert (entered[0] / "a/b").read_text() == "hello"
    block.__exit__(None, None, None)
    assert mounts.mount_at(str(entered[0])) is None


def test_errors_have_the_messages_of_the_mount_command(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tmp_path / "tmp"
    own.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(own))
    for kind, rule, wrong, options in (
        (zarrfs.SourceError, r"/none\.json: no such file or directory", "/none.json", {}),
        (zarrfs.UsageError, r"^unknown option 'retrys' \(did you mean retries\?\)$", source, {"retrys": 1}),
        (zarrfs.UsageError, "^option owner: not for mounted", source, {"owner": 1}),
        (zarrfs.MountError, "none: no such file or directory", source, {"mountpoint": tmp_path / "none"}),
    ):
        with pytest.raises(kind, match=rule), zarrfs.mounted(wrong, **options):  # type: ignore[arg-type]
            pytest.fail("there is no mount")
    assert daemons(os.getpid()) == []
    assert os.listdir(own) == []


def test_a_mount_that_is_left_behind_loses_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mount may be writable, so the clean-up of its temporary directory must not delete files through it."""
    (tmp_path / "s.zarr").mkdir()
    (tmp_path / "s.zarr/.zgroup").write_text('{"zarr_format": 2}')
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    mountpoints = []

    def start(request: dict[str, Any]) -> None:
        mountpoints.append(request["mountpoint"])
        assert run("mount", tmp_path / "s.zarr", request["mountpoint"], "-o", "rw").returncode == 0
        raise KeyboardInterrupt

    monkeypatch.setattr(mounting, "_start", start)
    try:
        with pytest.raises(KeyboardInterrupt), zarrfs.mounted(tmp_path / "s.zarr", rw=True):
            pass
        assert (tmp_path / "s.zarr/.zgroup").exists()
    finally:
        assert run("umount", *mountpoints).returncode == 0

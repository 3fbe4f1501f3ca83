"""Commands whose standard streams are closed or full."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

from tests.conftest import PROGRAM


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    """Return an archive of the file `in/a`, which is written too."""
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a").write_text("text")
    path = tmp_path / "a.json"
    path.write_text(json.dumps([{"path": "a", "mode": 0o100644, "data": "text", "encoding": "utf-8"}]))
    return path


def closed(redirection: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run zarrfs from a shell, with `redirection`."""
    words = ["sh", "-c", f'exec "$@" {redirection}', "sh", PROGRAM, *map(str, arguments)]
    return subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)


def test_a_closed_output_is_an_error(archive: Path) -> None:
    into = ["archive", "create", "--inline", "-C", archive.parent / "in", "."]
    for command in (["ls", archive], ["cat", archive, "a"], into, ["info", archive]):
        done = closed(">&-", *command)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1), command
        assert done.stderr.startswith("zarrfs: ")
        assert "bad file descriptor" in done.stderr


def test_commands_without_output_work_with_a_closed_output(archive: Path) -> None:
    out = archive.parent / "out"
    done = closed("<&- >&-", "copy", archive, out)
    assert (done.returncode, done.stderr, (out / "a").read_text()) == (0, "", "text")
    done = closed("<&- 2>&-", "ls", archive)
    assert (done.returncode, done.stdout) == (0, "a\n")
    assert closed("<&- >&- 2>&-", "ls", archive.parent / "none.json").returncode == 1


def test_a_closed_standard_input_is_named_in_the_error(archive: Path) -> None:
    done = closed("<&-", "copy", "-", archive.parent / "out")
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert "zarrfs: standard input: " in done.stderr
    assert "bad file descriptor" in done.stderr
    done = closed("<&-", "archive", "create", "--inline", "-C", archive.parent / "in", "--files-from", "-")
    assert (done.returncode, done.stderr) == (2, "zarrfs: --files-from -: bad file descriptor\n")


@pytest.mark.parametrize(("command", "unbuffered"), [(["ls"], True), (["cat"], False), (["--help"], False)])
def test_a_full_standard_output_is_an_error(command: list[str], unbuffered: bool, tmp_path: Path) -> None:
    source = tmp_path / "a.json"
    source.write_text('[{"path": "a", "mode": 33188, "data": "x"}]')
    words = [*command, *([str(source)] if command != ["--help"] else []), *(["a"] if command == ["cat"] else [])]
    environment = {name: text for name, text in os.environ.items() if name != "PYTHONUNBUFFERED"}
    if unbuffered:
        environment["PYTHONUNBUFFERED"] = "1"
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [PROGRAM, *words], stdout=full, stderr=subprocess.PIPE, text=True, check=False, env=environment, timeout=60
        )
    assert done.returncode == 1
    assert done.stderr == "zarrfs: standard output: cannot be written: no space left on device\n"


def test_output_to_a_pipe_that_does_not_block_is_complete(tmp_path: Path) -> None:
    (tmp_path / "big").write_bytes(data := os.urandom(1 << 20))
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    with subprocess.Popen([PROGRAM, "cat", str(tmp_path), "big"], stdout=writer, stderr=subprocess.PIPE) as process:
        os.close(writer)
        with open(reader, "rb") as output:
            until = time.monotonic() + 60
            while not _is_full(reader) and process.poll() is None and time.monotonic() < until:
                time.sleep(0.02)
            assert output.read() == data
        assert (process.wait(60), process.stderr and process.stderr.read()) == (0, b"")


@pytest.mark.parametrize("command", ["ls -lR SOURCE", "cat SOURCE 0/big", "archive create --inline -C SOURCE 0"])
def test_ctrl_c_ends_a_command_whose_output_nobody_reads(command: str, tmp_path: Path) -> None:
    for number in range(20):
        (tmp_path / str(number)).mkdir()
        for name in range(100):
            (tmp_path / str(number) / f"{name}{'x' * 100}").touch()
    (tmp_path / "0/big").write_bytes(bytes(1 << 20))
    words = [word.replace("SOURCE", str(tmp_path)) for word in command.split()]
    with subprocess.Popen([PROGRAM, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        until = time.monotonic() + 60
        while not _is_full(process.stdout.fileno()) and time.monotonic() < until:
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == -signal.SIGINT
        assert process.stderr.read() == b""


def _is_full(pipe: int) -> bool:
    waiting = fcntl.ioctl(pipe, termios.FIONREAD, bytes(4))
    return int.from_bytes(waiting, sys.byteorder) >= fcntl.fcntl(pipe, fcntl.F_GETPIPE_SZ) - 4096


def test_ctrl_c_while_modules_are_imported_prints_nothing() -> None:
    code = (
        "import sys, signal, importlib.abc\nfrom zarrfs.cli import main\n"
        "class Finder(importlib.abc.MetaPathFinder):\n"
        "    def find_spec(self, name, path, target=None):\n"
        "        if name.startswith('zarrfs.cli.ls'): signal.raise_signal(signal.SIGINT)\n"
        "sys.meta_path.insert(0, Finder())\nsys.argv = ['zarrfs', 'ls', '--help']\nmain()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")

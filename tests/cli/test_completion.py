"""Completion in real shells: bash and zsh on a pseudo-terminal, fish with `complete -C`."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import PROGRAM, run

START = {
    "bash": ["bash", "--norc", "--noprofile", "-i"],
    "zsh": ["zsh", "-f", "-i"],
}
READY = {
    "bash": "PS1='> '; bind 'set show-all-if-ambiguous on'; bind 'set bell-style none'; source completion.bash",
    "zsh": "PS1='> '; autoload -Uz compinit; compinit -u -D; source completion.zsh; unsetopt beep",
}


class Terminal:
    """An interactive shell on a pseudo-terminal, in `directory`."""

    def __init__(self, shell: str, directory: Path) -> None:
        self.pid, self.descriptor = pty.fork()
        if not self.pid:
            path = f"{os.path.dirname(PROGRAM)}:{os.environ['PATH']}"
            os.chdir(directory)
            environment = {**os.environ, "PATH": path, "TERM": "dumb", "COLUMNS": "200", "LC_ALL": "C.UTF-8"}
            os.execvpe(START[shell][0], START[shell], environment)
        self.typed(READY[shell] + "; echo READY''NOW\n", "READYNOW")

    def typed(self, text: str, wanted: str, timeout: float = 30.0) -> str:
        """Type `text` and return the terminal's content once it matches `wanted`."""
        os.write(self.descriptor, text.encode())
        seen, deadline = "", time.monotonic() + timeout
        while not re.search(wanted, seen) and time.monotonic() < deadline:
            if select.select([self.descriptor], [], [], 0.1)[0]:
                seen += os.read(self.descriptor, 65536).decode(errors="replace").replace("\a", "")
        assert re.search(wanted, seen), seen
        return seen

    def close(self) -> None:
        """Kill the shell."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        os.close(self.descriptor)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Return a directory with the completion script of each shell, a source, and a mount of it."""
    directory = tmp_path_factory.mktemp("shells")
    for shell in ("bash", "zsh", "fish"):
        (directory / f"completion.{shell}").write_text(run("completion", shell).stdout)
    (directory / "combined.json").write_text(json.dumps({"version": 1, "refs": {"a": "x"}}))
    mnt = directory / "mounted hère 数"
    mnt.mkdir()
    assert run("mount", directory / "combined.json", mnt).returncode == 0
    yield directory
    assert run("umount", mnt).returncode == 0


@pytest.fixture(scope="module", params=["bash", "zsh"])
def terminal(request: pytest.FixtureRequest, place: Path) -> Iterator[Terminal]:
    """Start a shell with its completion script loaded."""
    if shutil.which(request.param) is None:
        pytest.fail(f"{request.param} is not installed: scripts/setup --test")
    made = Terminal(request.param, place)
    yield made
    made.close()


@pytest.mark.parametrize(
    ("typed", "completed"),
    [
        ("zarrfs umou\t", "zarrfs umount "),
        ("zarrfs archive verif\t", "zarrfs archive verify "),
        ("zarrfs mount --allow-ot\t", "zarrfs mount --allow-other "),
        ("zarrfs mount -o idle_t\t", "zarrfs mount -o idle_timeout="),
        ("zarrfs mount -o ro,view=arr\t", "zarrfs mount -o ro,view=arrays"),
        ("zarrfs mount comb\t", "zarrfs mount combined.json "),
        ("zarrfs mount --view v\t", "v2.*v3"),
        ("zarrfs mount -o ro,log_file=comb\t", "-o ro,log_file=combined.json"),
        ("zarrfs info --html comb\t", "--html combined.json "),
    ],
)
def test_tab_completes_a_command_line(terminal: Terminal, typed: str, completed: str) -> None:
    terminal.typed(typed, completed)
    terminal.typed("\x15\n", "> ")  # Ctrl-U clears the line


def test_tab_completes_a_mount_point(terminal: Terminal, place: Path) -> None:
    terminal.typed(f"zarrfs umount {place}/mou\t", re.escape(f"{place}/mounted\\ hère\\ 数") + "[/ ]")
    terminal.typed("\x15\n", "> ")


def fish(place: Path, line: str) -> list[str]:
    """Return the completions of `line` in fish."""
    path = f"{os.path.dirname(PROGRAM)}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "HOME": str(place), "TERM": "dumb"}
    words = ["fish", "--no-config", "-c", f"source completion.fish; complete -C {line!r}"]
    done = subprocess.run(words, cwd=place, env=environment, capture_output=True, text=True, timeout=60, check=True)
    return [one.partition("\t")[0] for one in done.stdout.splitlines()]


def test_fish_completes_commands_options_and_paths(place: Path) -> None:
    assert fish(place, "zarrfs umou") == ["umount"]
    assert fish(place, "zarrfs archive verif") == ["verify"]
    assert fish(place, "zarrfs mount -o idle_t") == ["idle_timeout="]
    assert sorted(fish(place, "zarrfs mount --view v")) == ["v2", "v3"]
    assert "combined.json" in fish(place, "zarrfs ls comb")
    assert f"{place}/mounted hère 数" in fish(place, "zarrfs stats /")
    assert fish(place, "zarrfs mount -o ro,log_file=comb") == ["ro,log_file=combined.json"]
    assert fish(place, f"zarrfs mount -o blobs={place}/mou") == [f"blobs={place}/mounted hère 数/"]


def test_command_names_are_completed_without_importing_commands() -> None:
    program = (
        "import os, sys\n"
        "os.environ.update(_ZARRFS_COMPLETE='bash_complete', ZARRFS_LINE='zarrfs ', ZARRFS_WORD='')\n"
        "from zarrfs.cli import main\n"
        "try: main(prog_name='zarrfs')\n"
        "except SystemExit: pass\n"
        "sys.exit(any(name in sys.modules for name in ('trio', 'pyfuse3', 'numpy', 'zarrfs.cli.mount')))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "plain,mount\n" in done.stdout


@pytest.mark.parametrize(
    ("line", "word", "offered"),
    [
        ("zarrfs mount -o view=", "=", ["v2", "v3", "arrays", "netcdf"]),
        ("zarrfs mount -o view=v", "v", ["v2", "v3"]),
        ("zarrfs mount -o 'ro,vi", "ro,vi", ["ro,view="]),
        ("zarrfs --ver", "--ver", ["--verbose", "--version"]),
        ("zarrfs mount -o no_such=", "=", []),
    ],
)
def test_words_that_bash_splits_are_completed(line: str, word: str, offered: list[str]) -> None:
    environment = {**os.environ, "_ZARRFS_COMPLETE": "bash_complete", "ZARRFS_LINE": line, "ZARRFS_WORD": word}
    done = subprocess.run([PROGRAM], env=environment, capture_output=True, text=True, timeout=60, check=False)
    found = [one.removeprefix("plain,") for one in done.stdout.splitlines()]
    assert [one for one in found if one] == offered

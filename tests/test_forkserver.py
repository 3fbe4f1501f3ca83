"""tests/forked/zarrfs: the fork server runs the command if that is equivalent, else the program is started."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import forkserver
from tests.conftest import DATA, PROGRAM

SOURCE = DATA / "zarr/v2_hier"
FORKED = (
    "zarrfs --version",
    "exec zarrfs --version </dev/null",
    "LC_ALL=C.UTF-8 zarrfs --version",
    "unshare --mount --pid --net --fork --mount-proc zarrfs --version",
)
STARTED = (
    "umask 077; zarrfs --version",
    "ulimit -n 100; zarrfs --version",
    "nice -n 3 zarrfs --version",
    "trap '' HUP; zarrfs --version",
    "zarrfs --version & wait $!",
    "set -m; zarrfs --version; true",
    "setsid --wait zarrfs --version",
    "unshare --uts zarrfs --version",
    "setpriv --no-new-privs zarrfs --version",
    "setpriv --groups=1234 zarrfs --version",
    "zarrfs --version 9</dev/null",
    "zarrfs --version <&-",
    "PYTHONDEVMODE=1 zarrfs --version",
    "LC_ALL=de_DE.UTF-8 zarrfs --version",
    "LANG=de_DE.UTF-8 zarrfs --version",
    "COVERAGE_PROCESS_START=x zarrfs --version",
    "ZARRFS_TESTS_EXEC=1 zarrfs --version",
    "TESTS_ZARRFS_SERVER=/nowhere zarrfs --version",
)


def shell(script: str, path: str = os.path.dirname(PROGRAM), **more: str) -> subprocess.CompletedProcess[str]:
    variables = os.environ | forkserver.variables(f"{path}:{os.environ['PATH']}") | more
    return subprocess.run(
        ["bash", "-c", script], env=variables, capture_output=True, text=True, timeout=60, check=False
    )


@pytest.fixture(scope="module", autouse=True)
def _new_server() -> Iterator[None]:
    """Start a server for this module: earlier tests of this process may have changed what a child inherits."""
    patch = pytest.MonkeyPatch()
    patch.setattr(forkserver, "_SERVERS", {})
    yield
    patch.undo()


@pytest.fixture
def programs(tmp_path: Path) -> str:
    """Return a directory with an interpreter and, beside it, a program zarrfs that prints "started"."""
    (tmp_path / "python3").symlink_to(sys.executable)
    (tmp_path / "zarrfs").write_text("#!/bin/sh\necho started\n")
    (tmp_path / "zarrfs").chmod(0o755)
    tmp_path.chmod(0o755)
    return str(tmp_path)


@pytest.mark.skipif(os.geteuid() != 0, reason="makes namespaces")
@pytest.mark.skipif("ZARRFS_TESTS_EXEC" in os.environ, reason="every test starts programs")
@pytest.mark.parametrize("script", FORKED)
def test_a_command_is_forked_if_that_is_equivalent(script: str, programs: str) -> None:
    done = shell(script, programs)
    assert (done.returncode, done.stdout.split()[0], done.stderr) == (0, "zarrfs", "")


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes members of a group, makes namespaces")
@pytest.mark.parametrize("script", STARTED)
def test_the_program_is_started_if_a_fork_would_differ(script: str, programs: str) -> None:
    assert shell(script, programs).stdout == "started\n"


def test_a_forked_command_has_the_directory_arguments_variables_and_streams_of_the_shell(tmp_path: Path) -> None:
    (tmp_path / "a b").mkdir()
    done = shell(
        f"cd '{tmp_path}/a b' && X='1\n2' zarrfs run {SOURCE} -- "
        "sh -c 'pwd; echo \"$X\"; printf \"<%s>\" \"$@\"; cat; echo err >&2; exit 7' sh '' ' ' é <<<text >out; echo $?"
    )
    assert (done.stdout, done.stderr) == ("7\n", "err\n")
    assert (tmp_path / "a b/out").read_text() == f"{tmp_path}/a b\n1\n2\n<>< ><é>text\n"


@pytest.mark.skipif(os.geteuid() != 0, reason="makes namespaces")
@pytest.mark.parametrize("space", ["", "unshare --pid --fork --mount-proc --mount "])
def test_the_shell_sees_that_a_forked_command_was_killed(space: str) -> None:
    done = shell(f"{space}bash -c \"zarrfs run {SOURCE} -- sh -c 'kill -KILL \\$PPID'; echo \\$?\"")
    assert done.stdout == "137\n"


@pytest.mark.skipif(os.geteuid() != 0, reason="makes namespaces")
def test_a_forked_command_runs_in_the_namespaces_of_the_shell(tmp_path: Path) -> None:
    """The mount is visible only in the shell's mount namespace, and its daemon is in the shell's pid namespace."""
    point = tmp_path / "mnt"
    point.mkdir()
    done = shell(
        f"unshare --mount --pid --fork --kill-child --mount-proc bash -c "
        f"'zarrfs mount {SOURCE} {point} && ls -A {point}/.zgroup && pgrep -x zarrfs'"
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.split()[0] == f"{point}/.zgroup"
    assert int(done.stdout.split()[1]) < 50  # the daemon's pid in that namespace
    assert os.listdir(point) == []


@pytest.mark.skipif("ZARRFS_TESTS_EXEC" in os.environ, reason="every test starts programs")
def test_a_server_that_was_killed_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forkserver, "_SERVERS", {})  # other tests keep their server
    address = forkserver.address(os.environ)
    (server,) = forkserver._SERVERS.values()
    server._process.kill()
    server._process.wait()
    done = forkserver.run(("zarrfs", "--version"), None, os.environ, 60)
    assert done is not None
    assert done.stdout.startswith("zarrfs")
    shutil.rmtree(address.parent)
    (server,) = forkserver._SERVERS.values()
    server._requests.close()
    server._process.wait()

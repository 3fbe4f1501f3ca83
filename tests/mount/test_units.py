"""The units in systemd/: systemd takes them, and their command lines do what they are there for."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import DATA, PROGRAM
from tests.mount.mounting import mount_lines
from zarrfs.fuse import mounts

UNITS = Path(__file__).parents[2] / "systemd"
INSTALLED = "/opt/zarrfs/.venv/bin/zarrfs"  # what the units name


def command(unit: str, setting: str, variables: dict[str, str]) -> list[str]:
    """The words of a command line as systemd makes them: ${NAME} is one word, whatever is in it."""
    (line,) = re.findall(rf"^{setting}=-?(.*)$", (UNITS / unit).read_text(), re.MULTILINE)
    words = [re.sub(r"\$\{(\w+)\}", lambda name: variables.get(name[1], ""), word) for word in shlex.split(line)]
    return [word.replace(INSTALLED, PROGRAM) for word in words]


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="there is no systemd-analyze")
def test_systemd_takes_the_units(tmp_path: Path) -> None:
    for unit in UNITS.iterdir():
        (tmp_path / unit.name).write_text(unit.read_text().replace(INSTALLED, PROGRAM))
    names = ["zarrfs@data.service", "zarrfs-unstage.service", "zarrfs-unstage.timer"]
    verify = ["systemd-analyze", "verify", *names]
    done = subprocess.run(verify, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@contextlib.contextmanager
def started(variables: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    """The service as systemd starts it: it has said READY=1 when this enters."""
    parent = os.path.dirname(variables["MOUNTPOINT"])
    path = f"{parent}/notify{len(os.listdir(parent))}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notified:
        notified.bind(path)
        notified.settimeout(30)
        subprocess.run(command("zarrfs@.service", "ExecStartPre", variables), check=False)
        environment = {"NOTIFY_SOCKET": path, "XDG_CACHE_HOME": os.environ["XDG_CACHE_HOME"]}
        words = command("zarrfs@.service", "ExecStart", variables)
        with subprocess.Popen(words, cwd="/", env=environment, text=True, stderr=subprocess.PIPE) as service:
            try:
                assert notified.recv(100) == b"READY=1"
                yield service
            finally:
                service.kill()
                subprocess.run(["umount", "-l", variables["MOUNTPOINT"]], capture_output=True, check=False)


@pytest.fixture
def variables(tmp_path: Path) -> dict[str, str]:
    """What /etc/zarrfs/NAME.conf says."""
    source = tmp_path / "a name with blanks.json"
    shutil.copy(DATA / "archives/flux-list.json", source)
    options = f"blobs={DATA}/archives/blobs,file_mode=0444"
    return {"SOURCE": str(source), "MOUNTPOINT": str(tmp_path / "mnt"), "OPTIONS": options}


def stop(variables: dict[str, str]) -> subprocess.CompletedProcess[str]:
    words = command("zarrfs@.service", "ExecStop", variables)
    return subprocess.run(words, env={}, capture_output=True, text=True, timeout=30, check=False)


@pytest.mark.parametrize("options", [None, ""])
def test_a_data_set_is_mounted_and_unmounted(variables: dict[str, str], options: str | None) -> None:
    variables |= {} if options is None else {"OPTIONS": options}
    mountpoint = Path(variables["MOUNTPOINT"])
    with started(variables) as service:
        mode = (mountpoint / "job/bin/run.sh").stat().st_mode & 0o777
        assert mode == (0o444 if options is None else 0o755)
        with (mountpoint / "job/bin/run.sh").open():
            done = stop(variables)
            assert (done.returncode, "in use by" in done.stderr) == (1, True)
            service.send_signal(signal.SIGTERM)
            assert os.listdir(mountpoint) == ["job"]
        assert stop(variables).returncode == 0
        assert service.wait(30) == 0
    assert not mount_lines(mountpoint)


def test_a_killed_daemon_leaves_an_error_and_is_started_again(variables: dict[str, str]) -> None:
    with started(variables) as service:
        service.kill()
        service.wait(30)
        assert mounts.is_dead(variables["MOUNTPOINT"])
        with started(variables):
            assert os.listdir(variables["MOUNTPOINT"]) == ["job"]
            assert stop(variables).returncode == 0


def test_the_sweep_has_nothing_to_do(tmp_path: Path) -> None:
    words = command("zarrfs-unstage.service", "ExecStart", {})
    done = subprocess.run(words, env={"ZARRFS_STATE_DIR": str(tmp_path)}, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")

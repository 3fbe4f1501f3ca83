"""The units in systemd/: systemd accepts them, and their command lines mount, unmount and sweep."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import DATA, PROGRAM, run
from tests.mounts.mounting import mount_lines
from zarrfs.system import mounts

UNITS = Path(__file__).parents[2] / "systemd"
INSTALLED = "/usr/bin/zarrfs"  # the path of the program in the units


def command(unit: str, setting: str, variables: dict[str, str]) -> list[str]:
    """Return the words of a unit's command line as systemd splits it: ${NAME} stays one word, even with blanks."""
    (line,) = re.findall(rf"^{setting}=[-+]?(.*)$", (UNITS / unit).read_text(), re.MULTILINE)
    words = [re.sub(r"\$\{(\w+)\}", lambda name: variables.get(name[1], ""), word) for word in shlex.split(line)]
    return [word.replace(INSTALLED, PROGRAM) for word in words]


needs_systemd = pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="there is no systemd-analyze")


@needs_systemd
def test_systemd_accepts_the_units(tmp_path: Path) -> None:
    """A template is verified as one of its instances."""
    groups = {"--system": [*UNITS.glob("*.timer"), *UNITS.glob("*.service"), *UNITS.glob("examples/*")]}
    groups["--user"] = list(UNITS.glob("user/*"))
    for option, units in groups.items():
        directory = tmp_path / option
        directory.mkdir()
        for unit in units:
            name = unit.name.replace("@.", "@data.")
            (directory / name).write_text(unit.read_text().replace(INSTALLED, PROGRAM))
        names = sorted(path.name for path in directory.iterdir())
        assert "zarrfs@data.service" in names
        command = ["systemd-analyze", option, "verify", *names]
        environment = os.environ | {"XDG_RUNTIME_DIR": str(tmp_path)}
        done = subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, "")
    assert len(groups["--system"]) >= 5


@needs_systemd
def test_the_exposure_of_the_service_is_within_the_documented_bound(tmp_path: Path) -> None:
    """The bound is in docs/systemd.md."""
    shutil.copy(UNITS / "zarrfs@.service", tmp_path)
    unit = "./zarrfs@.service"
    command = ["systemd-analyze", "--no-pager", "security", "--offline=yes", "--threshold=47", unit]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert "zarrfs@i.service: 4.7 OK" in done.stdout


# Settings that imply a mount namespace: systemd.exec(5), and exec_needs_mount_namespace() of systemd 252
NAMESPACES = (
    "Private(?!Network|Users)", "Protect(?!Clock|Hostname)", "ReadWritePaths", "ReadOnlyPaths", "InaccessiblePaths",
    "ExecPaths", "NoExecPaths", "TemporaryFileSystem", "Bind", "Root", "Mount(?!POINT)", "DynamicUser", "LogNamespace",
    "ExtensionImages", "ExtensionDirectories", "ProcSubset", "(RuntimeDirectory|StateDirectory|CacheDirectory)=",
    "LoadCredential", "SetCredential", "JoinsNamespaceOf", "NetworkNamespacePath", "PAMName",
)  # fmt: skip


def test_the_services_have_no_mount_namespace() -> None:
    """A service with its own mount namespace would mount only for itself."""
    for unit in ("zarrfs@.service", "user/zarrfs@.service"):
        text = (UNITS / unit).read_text()
        assert not re.findall(rf"^(?:{'|'.join(NAMESPACES)})\w*=?.*$", text, re.MULTILINE)
    assert "NoNewPrivileges" not in re.sub("#.*", "", (UNITS / "user/zarrfs@.service").read_text())


# Forbid new executable memory, as MemoryDenyWriteExecute= does, and run a command. prctl(2): PR_SET_MDWE, Linux 6.3
NO_NEW_CODE = "import ctypes, os, sys; ctypes.CDLL(None).prctl(65, 1, 0, 0, 0); os.execvp(sys.argv[1], sys.argv[1:])"


def confined(words: list[str]) -> list[str]:
    """Return a command line with the unit's capabilities, no new privileges, and no new executable memory."""
    (line,) = re.findall(r"^CapabilityBoundingSet=(.*)$", (UNITS / "zarrfs@.service").read_text(), re.MULTILINE)
    kept = ",".join(f"+{name.removeprefix('CAP_').lower()}" for name in line.split())
    return [sys.executable, "-c", NO_NEW_CODE, "setpriv", f"--bounding-set=-all,{kept}", "--no-new-privs", *words]


@contextlib.contextmanager
def started(variables: dict[str, str], said: list[str] | None = None) -> Iterator[subprocess.Popen[str]]:
    """Start the service as systemd does and wait for READY=1; append its later notifications to `said`."""
    parent = os.path.dirname(variables["MOUNTPOINT"])
    path = f"{parent}/notify{len(os.listdir(parent))}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notified:
        notified.bind(path)
        notified.settimeout(30)
        subprocess.run(command("zarrfs@.service", "ExecStartPre", variables), check=False)
        environment = {"NOTIFY_SOCKET": path, "XDG_CACHE_HOME": os.environ["XDG_CACHE_HOME"]}
        words = confined(command("zarrfs@.service", "ExecStart", variables))
        with subprocess.Popen(words, cwd="/", env=environment, text=True, stderr=subprocess.PIPE) as service:
            try:
                assert notified.recv(100) == b"READY=1"
                yield service
                if said is not None:
                    notified.settimeout(1)
                    with contextlib.suppress(TimeoutError):
                        said += iter(lambda: notified.recv(1000).decode(), "STOPPING=1")
                        said.append("STOPPING=1")
            finally:
                service.kill()
                subprocess.run(["umount", "-l", variables["MOUNTPOINT"]], capture_output=True, check=False)


@pytest.fixture
def variables(tmp_path: Path) -> dict[str, str]:
    """Return the variables of /etc/zarrfs/NAME.conf."""
    source = tmp_path / "a name with blanks.json"
    shutil.copy(DATA / "archives/flux-list.json", source)
    options = f"blobs={DATA}/archives/blobs,file_mode=0444"
    return {"SOURCE": str(source), "MOUNTPOINT": str(tmp_path / "mnt"), "OPTIONS": options}


def stop(variables: dict[str, str]) -> subprocess.CompletedProcess[str]:
    words = command("zarrfs@.service", "ExecStop", variables)
    return subprocess.run(words, env={}, capture_output=True, text=True, timeout=100, check=False)


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
            assert service.stderr is not None
            assert any("cannot unmount: in use by" in line for line in service.stderr)
            assert os.listdir(mountpoint) == ["job"]
        assert stop(variables).returncode == 0
        assert service.wait(60) == 0
    assert not mount_lines(mountpoint)


def test_systemd_is_notified_of_readiness_and_status(variables: dict[str, str], tmp_path: Path) -> None:
    """A line feed in a name neither ends the status nor begins another assignment."""
    variables["MOUNTPOINT"] = str(tmp_path / "a\nMAINPID=1")
    said: list[str] = []
    with started(variables, said) as service:
        assert "unchanged" in run("refresh", variables["MOUNTPOINT"]).stdout
        assert stop(variables).returncode == 0
        assert service.wait(60) == 0
    where = variables["MOUNTPOINT"].replace("\n", "?")
    assert said[0] == f"STATUS={variables['SOURCE']} on {where}: nothing open"
    assert said[1].startswith("RELOADING=1\nMONOTONIC_USEC=")
    assert said[2:] == ["READY=1", "STOPPING=1"]


def test_a_killed_daemon_leaves_an_error_and_is_started_again(variables: dict[str, str]) -> None:
    with started(variables) as service:
        service.kill()
        service.wait(60)
        assert mounts.is_dead(variables["MOUNTPOINT"])
        with started(variables):
            assert os.listdir(variables["MOUNTPOINT"]) == ["job"]
            assert stop(variables).returncode == 0


def test_the_unstage_service_succeeds_with_nothing_to_unstage(tmp_path: Path) -> None:
    words = command("zarrfs-unstage.service", "ExecStart", {})
    done = subprocess.run(words, env={"ZARRFS_STATE_DIR": str(tmp_path)}, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")

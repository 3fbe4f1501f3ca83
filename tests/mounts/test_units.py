"""The units in systemd/: systemd accepts them, and their command lines mount, unmount and sweep."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.conftest import DATA, PROGRAM

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
    assert len(groups["--system"]) >= 3


@needs_systemd
def test_the_exposure_of_the_service_is_within_the_documented_bound(tmp_path: Path) -> None:
    """The bound is in docs/mounting.md."""
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
@pytest.fixture
def variables(tmp_path: Path) -> dict[str, str]:
    """Return the variables of /etc/zarrfs/NAME.conf."""
    source = tmp_path / "a name with blanks.json"
    shutil.copy(DATA / "archives/flux-list.json", source)
    options = f"blobs={DATA}/archives/blobs,umask=0333"
    return {"SOURCE": str(source), "MOUNTPOINT": str(tmp_path / "mnt"), "OPTIONS": options}

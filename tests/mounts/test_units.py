"""The units in systemd/: systemd accepts them, and their command lines mount, unmount and sweep."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.conftest import PROGRAM

UNITS = Path(__file__).parents[2] / "systemd"
INSTALLED = "/usr/bin/zarrfs"  # the path of the program in the units


def command(unit: str, setting: str, variables: dict[str, str]) -> list[str]:
    """Return the words of a unit's command line as systemd splits it: ${NAME} stays one word, even with blanks."""
    (line,) = re.findall(rf"^{setting}=[-+]?(.*)$", (UNITS / unit).read_text(), re.MULTILINE)
    words = [re.sub(r"\$\{(\w+)\}", lambda name: variables.get(name[1], ""), word) for word in shlex.split(line)]
    return [word.replace(INSTALLED, PROGRAM) for word in words]


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="there is no systemd-analyze")
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

"""The encoding of file names in programs and their children, and relative paths in a daemon's environment."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from zarrfs.system.processes import leave_directory

ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}  # not UTF-8, and needs no installed locale
SAYS = "import sys; print(sys.getfilesystemencoding(), ascii(sys.argv[1:]))"
AGAIN = f"from zarrfs.system.processes import use_utf8; use_utf8(); {SAYS}"


def said(*arguments: str) -> str:
    return subprocess.run(
        [sys.executable, *arguments], env={**os.environ, **ASCII}, capture_output=True, text=True, check=True
    ).stdout.strip()


def test_a_program_reads_names_as_utf8_in_any_locale() -> None:
    assert said("-c", SAYS, "é") == r"ascii ['\udcc3\udca9']"
    assert said("-c", AGAIN, "é") == r"utf-8 ['\xe9']"


@pytest.mark.parametrize("module", ["zarrfs", "zarrfs.cli.mount_helper"])
def test_the_programs_read_names_as_utf8(module: str) -> None:
    code = f"import runpy, sys; sys.argv[1:] = ['--help']; runpy.run_module({module!r}, run_name='__main__')"
    traced = f"import os; os.execv = lambda *command: print(command[1][1:3], flush=True) or os._exit(0); {code}"
    assert said("-c", traced) == "['-X', 'utf8']"


def test_files_that_the_environment_names_are_found_from_another_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, value in (("NETRC", "my/netrc"), ("SSL_CERT_FILE", "/etc/ca.pem"), ("AWS_CONFIG_FILE", "~/aws")):
        monkeypatch.setenv(name, value)
    leave_directory()
    assert os.getcwd() == "/"
    assert os.environ["NETRC"] == f"{tmp_path}/my/netrc"
    assert (os.environ["SSL_CERT_FILE"], os.environ["AWS_CONFIG_FILE"]) == ("/etc/ca.pem", "~/aws")

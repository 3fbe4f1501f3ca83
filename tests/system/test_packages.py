"""The command that installs an extra into the environment of the running program."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from zarrfs.system import packages
from zarrfs.system.packages import install_command


def test_with_pip_the_command_uses_the_running_python() -> None:
    assert install_command("netcdf") == f"{sys.executable} -m pip install 'zarrfs[netcdf]'"


def test_with_pipx_the_command_injects_the_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "zarrfs").mkdir()
    (tmp_path / "zarrfs/pipx_metadata.json").write_text("{}")
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "zarrfs"))
    assert install_command("netcdf") == "pipx inject zarrfs 'h5netcdf>=1.3' 'h5py>=3.10'"


def test_without_pip_the_command_uses_uv_or_builds_the_debian_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "find_spec", lambda name: None)
    assert install_command("flux") == f"uv pip install --python {sys.executable} 'lz4>=4.0'"
    monkeypatch.setattr(sys, "prefix", packages.DEBIAN)
    assert install_command("flux") == "scripts/build-deb --extras flux, and install that package"

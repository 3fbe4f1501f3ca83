"""The command that adds an optional package to the environment in which this program runs."""

from __future__ import annotations

import os
import re
import shlex
import sys
from importlib.util import find_spec

DEBIAN = "/usr/lib/zarrfs"  # the environment of the Debian package, which has no pip


def install_command(extra: str) -> str:
    """Return the command that installs the packages of an extra: with pipx, with pip, or with uv if pip is missing."""
    if sys.prefix == DEBIAN:
        return f"scripts/build-deb --extras {extra}, and install that package"
    if os.path.exists(os.path.join(sys.prefix, "pipx_metadata.json")):
        return shlex.join(["pipx", "inject", os.path.basename(sys.prefix), *_requirements(extra)])
    if find_spec("pip") is None:
        return shlex.join(["uv", "pip", "install", "--python", sys.executable, *_requirements(extra)])
    return f"{shlex.quote(sys.executable)} -m pip install 'zarrfs[{extra}]'"


def _requirements(extra: str) -> list[str]:
    """Return the requirements of an extra by name, because zarrfs itself may not be in any package index."""
    from importlib import metadata  # not at the top: this takes 20 ms, and many modules import this one

    found = []
    try:
        for line in metadata.requires("zarrfs") or ():
            requirement, _, marker = line.partition(";")
            if re.search(rf"""extra\s*==\s*['"]{extra}['"]""", marker):
                found.append(requirement.strip())
    except metadata.PackageNotFoundError:
        pass
    return found or [f"zarrfs[{extra}]"]

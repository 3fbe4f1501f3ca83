"""Real mounts for tests: made with the program itself, and checked to be gone at the end."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

from tests.conftest import run


def mount_lines(mountpoint: Path | str) -> list[str]:
    """The lines of mountinfo for exactly `mountpoint`."""
    with open("/proc/self/mountinfo") as file:
        return [line for line in file if line.split(" ")[4] == str(mountpoint)]


def daemon_pid(mountpoint: Path) -> int:
    """The process behind a mount."""
    return int(json.loads(os.getxattr(mountpoint, "user.zarrfs.mount"))["pid"])


def alive(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@contextlib.contextmanager
def mounted(source: Path | str, mountpoint: Path, *options: str) -> Iterator[Path]:
    """`source` mounted on `mountpoint`; unmounted afterwards, and the daemon seen to end."""
    mountpoint.mkdir(exist_ok=True)
    log = mountpoint.parent / f"{mountpoint.name}.log"
    arguments = [part for option in options for part in ("-o", option)]
    done = run("mount", source, mountpoint, "-o", f"log_file={log}", *arguments)
    assert done.returncode == 0, done.stderr
    pid = daemon_pid(mountpoint)
    try:
        yield mountpoint
    finally:
        done = run("umount", mountpoint)
        if done.returncode:
            subprocess.run(["umount", "-l", str(mountpoint)], check=False)
    assert done.returncode == 0, done.stderr
    assert not mount_lines(mountpoint)
    assert not alive(pid)


def log_of(mountpoint: Path) -> str:
    """What the daemon of a `mounted` mount has logged."""
    path = mountpoint.parent / f"{mountpoint.name}.log"
    return path.read_text() if path.exists() else ""

"""Real mounts for tests: made with the zarrfs program, and checked to be unmounted at the end."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.conftest import PROGRAM, run


def mount_lines(mountpoint: Path | str) -> list[str]:
    """Return the lines of mountinfo whose mount point is exactly `mountpoint`."""
    with open("/proc/self/mountinfo") as file:
        return [line for line in file if line.split(" ")[4] == str(mountpoint)]


def daemon_pid(mountpoint: Path) -> int:
    """Return the pid of the daemon of a mount."""
    return int(json.loads(os.getxattr(mountpoint, "user.zarrfs.mount"))["pid"])


def alive(pid: int) -> bool:
    """Return whether a process exists and has a thread that has not ended: until then its descriptors are open."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            state = file.read().rpartition(")")[2].split()[0]
        return state != "Z" or len(os.listdir(f"/proc/{pid}/task")) > 1
    except (FileNotFoundError, ProcessLookupError):  # the process ended, before the open or after it
        return False


@contextlib.contextmanager
def mounted(
    source: Path | str, mountpoint: Path, *options: str, program: Sequence[str] = (PROGRAM,)
) -> Iterator[Path]:
    """Mount `source` on `mountpoint` with `program`; on exit unmount it, and wait until its daemon has ended."""
    mountpoint.mkdir(exist_ok=True)
    log = mountpoint.parent / f"{mountpoint.name}.log"
    arguments = [part for option in options for part in ("-o", option)]
    done = run("mount", source, mountpoint, "-o", f"log_file={log}", *arguments, program=program)
    assert done.returncode == 0, done.stderr
    pid = daemon_pid(mountpoint)
    try:
        yield mountpoint
    finally:
        done = run("umount", mountpoint)
        if done.returncode:
            subprocess.run(["umount", "-l", str(mountpoint)], check=False)
    late = "but its daemon" in done.stderr  # unmounted, but the daemon did not end while umount waited
    assert done.returncode == 0 or late, done.stderr
    assert not mount_lines(mountpoint)
    until(lambda: not alive(pid))  # umount does not wait for a daemon that does not report its pid in time


def counters_of(mountpoint: Path) -> dict[str, Any]:
    """Return the counters of a mount."""
    return dict(json.loads(os.getxattr(mountpoint, "user.zarrfs.stats")))


def on_disk(directory: Path) -> int:
    """Return the bytes of the blocks in a cache directory."""
    files = [path for path in directory.rglob("*") if path.suffix not in (".lease", ".tmp")]
    with contextlib.suppress(FileNotFoundError):
        return sum(path.stat().st_size for path in files if path.is_file())
    return 0


def all_written(directory: Path) -> bool:
    """Return whether there are blocks in a cache directory, and none was added for half a second."""
    before = on_disk(directory)
    time.sleep(0.5)
    return 0 < before == on_disk(directory)


def until(condition: Callable[[], object], seconds: float = 60.0) -> None:
    """Wait until a condition holds. The default timeout allows for a busy machine."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited for in vain"
        time.sleep(0.01)


def log_of(mountpoint: Path) -> str:
    """Return the log of a mount made by `mounted`, after the log thread of its daemon has written all lines."""
    path = mountpoint.parent / f"{mountpoint.name}.log"
    until = time.monotonic() + 60
    with contextlib.suppress(OSError):  # unmounted: the daemon has written all lines
        while counters_of(mountpoint)["log_lines_waiting"] and time.monotonic() < until:
            time.sleep(0.005)
    return path.read_text() if path.exists() else ""


def eventually(condition: Callable[[], object], seconds: float = 60) -> bool:
    """Poll `condition`; return whether it becomes true."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


# The body of a loop in a program that reads a mount: list `root`, read a file in it, and count the results in `seen`
LIST_AND_READ = """
    for use in lambda: os.listdir(root), lambda: open(root + "/a/0.0", "rb").read():
        try:
            found = use()
            seen["right" if found in (["a"], b"the value") else f"wrong: {found}"] += 1
        except OSError as exc:
            seen[errno.errorcode[exc.errno]] += 1
"""

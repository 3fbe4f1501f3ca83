"""Mounts of zarrfs and its peers. A peer is a context manager that yields its mount point; MANY lists them."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from data import Data

HERE = Path(__file__).parent
ZARRFS = Path(sys.executable).parent / "zarrfs"
READ_AHEAD = 1 << 20  # bytes, of every mount if permitted


class Unavailable(Exception):
    """The peer cannot run here."""


@contextlib.contextmanager
def place(directory: Path) -> Iterator[Path]:
    """Make an empty directory to mount on."""
    made = Path(tempfile.mkdtemp(prefix="mnt-", dir=directory))
    try:
        yield made
    finally:
        made.rmdir()


def zarrfs_command(document: Path | str, mountpoint: Path, index: Path) -> list[str]:
    """Return the command that mounts `document`."""
    cache = ["env", f"XDG_CACHE_HOME={index}"]
    return [*cache, str(ZARRFS), "mount", str(document), str(mountpoint), "-o", f"log_file={index}/log"]


@contextlib.contextmanager
def zarrfs(document: Path, data: Data) -> Iterator[Path]:
    """Mount a document with zarrfs; its index is kept from one mount to the next."""
    index = data.directory / "index"
    index.mkdir(exist_ok=True)
    with place(data.directory) as mountpoint:
        subprocess.run(zarrfs_command(document, mountpoint, index), check=True)
        try:
            yield mountpoint
        finally:
            subprocess.run([ZARRFS, "umount", mountpoint], check=True)


@contextlib.contextmanager
def noop(shape: list[str], data: Data) -> Iterator[Path]:
    """Mount noop.py, which runs in the foreground."""
    with place(data.directory) as mountpoint:
        command = [sys.executable, HERE / "noop.py", mountpoint, *shape, data.target]
        with subprocess.Popen(command) as process:
            try:
                while not os.path.ismount(mountpoint):
                    if process.poll() is not None:
                        raise Unavailable("noop.py does not run")
                    time.sleep(0.01)
                os.listdir(mountpoint)  # wait until it answers
                _raise_read_ahead(mountpoint)
                yield mountpoint
            finally:
                unmount = ["umount", "-l"] if os.geteuid() == 0 else ["fusermount3", "-uz"]
                subprocess.run([*unmount, mountpoint], check=process.poll() is None)


# mounts of the large reference set
MANY = {
    "zarrfs": lambda data: zarrfs(data.many, data),
    "no-op": lambda data: noop(["many", str(data.entries)], data),
}
# mounts of one large file
BIG = {
    "zarrfs": lambda data: zarrfs(data.big, data),
    "no-op": lambda data: noop(["big"], data),
}


def _raise_read_ahead(mountpoint: Path) -> None:
    """Raise the kernel's read-ahead window, as zarrfs does for its own mounts."""
    device = os.stat(mountpoint).st_dev
    with contextlib.suppress(OSError):
        path = f"/sys/class/bdi/{os.major(device)}:{os.minor(device)}/read_ahead_kb"
        Path(path).write_text(str(READ_AHEAD >> 10))


def new_index(data: Data) -> Path:
    """Make an empty directory for an index."""
    index = data.directory / "cold"
    shutil.rmtree(index, ignore_errors=True)
    index.mkdir()
    return index


def free_ports(count: int) -> list[int]:
    """Return ports that are free at the moment."""
    probes = [socket.socket() for _ in range(count)]
    for probe in probes:
        probe.bind(("127.0.0.1", 0))
    ports = [int(probe.getsockname()[1]) for probe in probes]
    for probe in probes:
        probe.close()
    return ports

"""The contenders of `scripts/bench remote`: context managers that each yield a place where the tree can be read."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import peers
from remote_data import Server, Tree

GB = 1e9
READER_SECONDS = 300.0  # timeout of the readers
_TOUCHED = 3 << 30  # bytes of memory that settle() touches


class Place(NamedTuple):
    """A contender's view of the tree: `prefix` is a directory or a URL; `pid` the daemon's, if there is one."""

    prefix: str
    pid: int | None = None

    def cpu(self) -> float:
        """Return the CPU seconds that the daemon has used."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def peak(self) -> float:
        """Return the peak memory of the daemon in bytes."""
        for line in Path(f"/proc/{self.pid}/status").read_text().splitlines():
            if line.startswith("VmHWM"):
                return float(line.split()[1]) * 1024
        raise peers.Unavailable("no VmHWM")


Contender = Callable[[Tree, Server], contextlib.AbstractContextManager[Place]]


@contextlib.contextmanager
def direct(tree: Tree, server: Server) -> Iterator[Place]:
    """Yield the URL of the server, for clients without a mount."""
    yield Place(tree.urls[server])


def zarrfs(*options: str) -> Contender:
    """Return a contender that mounts references to the server with zarrfs and these -o options."""
    return lambda tree, server: mounted(tree, tree.document(tree.urls[server]), *options)


def zarrfs_of_files(tree: Tree, server: Server) -> contextlib.AbstractContextManager[Place]:
    """Mount references to local files with zarrfs."""
    return mounted(tree, tree.document(f"file://{tree.www}"))


@contextlib.contextmanager
def mounted(tree: Tree, document: Path | str, *options: str) -> Iterator[Place]:
    """Mount `document` with zarrfs."""
    with peers.place(tree.directory) as mountpoint:
        command = peers.zarrfs_command(document, mountpoint, tree.index)
        command[-1] = ",".join([command[-1], *options])
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        if done.returncode:
            raise peers.Unavailable(f"zarrfs mount: {done.stderr.strip()}")
        pid = int(json.loads(os.getxattr(mountpoint, "user.zarrfs.mount"))["pid"])
        try:
            yield Place(str(mountpoint), pid)
        finally:
            subprocess.run([peers.ZARRFS, "umount", mountpoint], check=True)


# -- reading


def settle() -> None:
    """Make the conditions of all samples the same: no dirty pages, and 3 GiB of memory that the host has provided.

    When a virtual machine touches memory for the first time, or for the first time in a while, its host must provide
    it, at a tenth of the speed. Another process touches and frees it, so readers, daemons and servers do not wait.
    """
    os.sync()
    available = int(Path("/proc/meminfo").read_text().split("MemAvailable:")[1].split()[0]) << 10
    size = min(_TOUCHED, available // 2)
    code = f"import mmap; mmap.mmap(-1, {size}, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE)"
    subprocess.run([sys.executable, "-I", "-c", code], check=True)


Piece = tuple[str, int, int]  # path in the tree, start, length


def read(tree: Tree, place: Place, jobs: list[list[Piece]]) -> float:
    """Read the pieces in threads; return the seconds. Raise peers.Unavailable for any wrong byte."""
    settle()
    named = [[(f"{place.prefix}/{name}", *at) for name, *at in thread] for thread in jobs]
    command = [sys.executable, "-I", str(peers.HERE / "remote_reader.py")]
    found = json.loads(_done(command, input=json.dumps(named)))
    for thread, digests in zip(jobs, found["digests"], strict=True):
        for piece, digest in zip(thread, digests, strict=True):
            if digest != tree.digest(*piece):
                raise peers.Unavailable(f"{place.prefix}: wrong bytes of {piece}")
    return float(found["seconds"])


def _done(command: list[str], input: str | None = None) -> str:
    """Run a reader; return its output. Raise peers.Unavailable if it fails or takes too long."""
    try:
        done = subprocess.run(
            command, input=input, capture_output=True, text=True, timeout=READER_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        raise peers.Unavailable(f"not read within {READER_SECONDS:g} s") from None
    if done.returncode:
        raise peers.Unavailable((done.stderr.strip().splitlines() or ["the reader failed"])[-1])
    return done.stdout


def total(jobs: list[list[Piece]]) -> int:
    """Return the number of bytes that the jobs read."""
    return sum(length for thread in jobs for _, _, length in thread)

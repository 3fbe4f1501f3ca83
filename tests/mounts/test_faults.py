"""Unexpected exceptions in handlers: the request fails, and the mount keeps serving."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests import caches
from tests.mounts.mounting import mount_lines

DAEMON = Path(__file__).with_name("faulty_daemon.py")

# handler: (a call that leads the kernel to it, the expected errno, or None if the kernel reports no error)
CALLS: dict[str, tuple[Callable[[Path], object], int | None]] = {
    "lookup": (lambda root: os.stat(root / "other"), errno.EIO),
    "getattr": (lambda root: os.stat(root), errno.EIO),
    "readlink": (lambda root: os.readlink(root / "link"), errno.EIO),
    "opendir": (lambda root: os.listdir(root), errno.EIO),
    "readdir": (lambda root: os.listdir(root), errno.EIO),
    "releasedir": (lambda root: os.listdir(root), None),
    "open": (lambda root: os.open(root / "file", os.O_RDONLY), errno.EIO),
    "read": (lambda root: read_anew(root / "file"), errno.EIO),
    "release": (lambda root: (root / "file").read_bytes(), None),
    "statfs": (lambda root: os.statvfs(root), errno.EIO),
    "getxattr": (lambda root: os.getxattr(root / "file", "user.zarrfs.source"), errno.EIO),
    "listxattr": (lambda root: os.listxattr(root / "file"), errno.EIO),
    "forget": (lambda root: caches.drop("2"), None),
}


@contextlib.contextmanager
def faulty(mountpoint: Path, handler: str) -> Iterator[Path]:
    mountpoint.mkdir(exist_ok=True)
    log = mountpoint.with_suffix(".log")
    with log.open("w") as file:
        daemon = subprocess.Popen(
            [sys.executable, str(DAEMON), str(mountpoint), handler], stdout=subprocess.PIPE, stderr=file
        )
    assert daemon.stdout is not None
    assert daemon.stdout.readline() == b"ready\n", log.read_text()
    try:
        yield mountpoint
    finally:
        daemon.send_signal(signal.SIGTERM)
        try:
            daemon.wait(60)
        except subprocess.TimeoutExpired:
            daemon.kill()
            subprocess.run(["umount", "-l", str(mountpoint)], check=False)
            raise
    assert not mount_lines(mountpoint)


def read_anew(path: Path) -> None:
    """Drop a file from the page cache, and read its first byte."""
    with path.open("rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        file.read(1)


def wait_for(root: Path, exception: str, again: Callable[[], object]) -> None:
    """Repeat a call until the daemon has raised an exception."""
    raised, deadline = Path(f"{root}.raised"), time.monotonic() + 60
    while not raised.exists() or raised.read_text() != exception:
        assert time.monotonic() < deadline, f"{exception} was not raised"
        os.stat(root / "file")  # an inode for the kernel to forget
        again()
        time.sleep(0.01)


@pytest.mark.parametrize("handler", CALLS)
def test_a_handler_that_raises_fails_its_request_only(handler: str, tmp_path: Path) -> None:
    call, code = CALLS[handler]
    with faulty(tmp_path / "mnt", handler) as root:
        fault, device = Path(f"{root}.fault"), os.lstat(tmp_path).st_dev
        for exception in ("ValueError", "OSError", "FileNotFoundError", "KeyError", "RecursionError"):
            Path(f"{fault}.new").write_text(exception)
            os.replace(f"{fault}.new", fault)
            if code is None:
                # the kernel does not wait for these handlers, so the test has to
                wait_for(root, exception, functools.partial(call, root))
            else:
                with pytest.raises(OSError) as caught:  # noqa: PT011 (the errno is checked below)
                    call(root)
                assert (exception, caught.value.errno) == (exception, code)
            # without the fault the mount works as before: it is still mounted, and shows the same files
            fault.unlink()
            assert os.stat(root).st_dev != device
            assert sorted(os.listdir(root)) == ["file", "link", "other"]
            assert (root / "file").read_bytes() == b"content"
            assert os.readlink(root / "link") == "file"
    log = (tmp_path / "mnt.log").read_text()
    for told in ("ValueError: (2, 'injected')", "[Errno 2] injected", "KeyError: ", "RecursionError: "):
        assert re.search(rf"^{handler} \S+: {re.escape(told)}.*\[EIO\]", log, re.MULTILINE), (told, log)


def test_an_error_is_logged_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "mnt.fault").write_text("ReadError")
    with faulty(tmp_path / "mnt", "read") as root, pytest.raises(OSError, match="Input/output error"):
        (root / "file").read_bytes()
    line, *more = [line for line in (tmp_path / "mnt.log").read_text().splitlines() if "read file" in line]
    assert line.endswith("file:///data/x: no luck [EIO]")
    assert all(" more like it since the last line" in other for other in more)  # the kernel reads twice

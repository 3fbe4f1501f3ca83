"""Whatever a handler raises, its one request fails and the mount lives on."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests import caches
from tests.mount.mounting import mount_lines

DAEMON = Path(__file__).with_name("faulty_daemon.py")

# handler: (what makes the kernel call it, the errno expected, or None where the caller is told nothing)
CALLS: dict[str, tuple[Callable[[Path], object], int | None]] = {
    "lookup": (lambda root: os.stat(root / "other"), errno.EIO),
    "getattr": (lambda root: os.stat(root), errno.EIO),
    "readlink": (lambda root: os.readlink(root / "link"), errno.EIO),
    "opendir": (lambda root: os.listdir(root), errno.EIO),
    "readdir": (lambda root: os.listdir(root), errno.EIO),
    "releasedir": (lambda root: os.listdir(root), None),
    "open": (lambda root: os.open(root / "file", os.O_RDONLY), errno.EIO),
    "read": (lambda root: (root / "file").read_bytes(), errno.EIO),
    "release": (lambda root: (root / "file").read_bytes(), None),
    "statfs": (lambda root: os.statvfs(root), errno.EIO),
    "getxattr": (lambda root: os.getxattr(root / "file", "user.zarrfs.source"), errno.EIO),
    "listxattr": (lambda root: os.listxattr(root / "file"), errno.EIO),
    "forget": (lambda root: caches.drop("2"), None),
}


@contextlib.contextmanager
def faulty(mountpoint: Path, handler: str, exception: str) -> Iterator[Path]:
    mountpoint.mkdir(exist_ok=True)
    log = mountpoint.with_suffix(".log")
    with log.open("w") as file:
        daemon = subprocess.Popen(
            [sys.executable, str(DAEMON), str(mountpoint), handler, exception], stdout=subprocess.PIPE, stderr=file
        )
    assert daemon.stdout is not None
    assert daemon.stdout.readline() == b"ready\n", log.read_text()
    try:
        yield mountpoint
    finally:
        daemon.send_signal(signal.SIGTERM)
        try:
            daemon.wait(10)
        except subprocess.TimeoutExpired:
            daemon.kill()
            subprocess.run(["umount", "-l", str(mountpoint)], check=False)
            raise
    assert not mount_lines(mountpoint)


def wait_for(log: Path, text: str, again: Callable[[], object]) -> None:
    """Repeat a call until the daemon has logged `text`."""
    deadline = time.monotonic() + 10
    while text not in log.read_text():
        assert time.monotonic() < deadline, f"no {text!r} in the log"
        os.stat(log.with_suffix("") / "file")  # something to forget
        again()
        time.sleep(0.01)


@pytest.mark.parametrize("exception", ["ValueError", "OSError", "FileNotFoundError", "KeyError", "RecursionError"])
@pytest.mark.parametrize("handler", CALLS)
@pytest.mark.promise("S17")
def test_handler_that_raises(handler: str, exception: str, tmp_path: Path) -> None:
    call, code = CALLS[handler]
    with faulty(tmp_path / "mnt", handler, exception) as root:
        device = os.lstat(tmp_path).st_dev
        (root / "..").resolve()
        if code is None:
            # the kernel does not wait for these handlers, so we do
            wait_for(tmp_path / "mnt.log", handler, lambda: call(root))
        else:
            with pytest.raises(OSError) as caught:  # noqa: PT011 (the errno is checked below)
                call(root)
            assert caught.value.errno == code
        # the fault goes away, and the mount is as good as new: it is still there, and nothing else
        Path(f"{root}.heal").write_text("")
        assert os.stat(root).st_dev != device
        assert sorted(os.listdir(root)) == ["file", "link", "other"]
        assert (root / "file").read_bytes() == b"content"
        assert os.readlink(root / "link") == "file"
    assert handler in (tmp_path / "mnt.log").read_text()


@pytest.mark.promise("S17")
def test_an_error_is_one_line(tmp_path: Path) -> None:
    with faulty(tmp_path / "mnt", "read", "ReadError") as root, pytest.raises(OSError, match="Input/output error"):
        (root / "file").read_bytes()
    line, *more = [line for line in (tmp_path / "mnt.log").read_text().splitlines() if "read file" in line]
    assert line.endswith("file:///data/x: no luck [EIO]")
    assert all(" more like it since the last line" in other for other in more)  # the kernel asks twice

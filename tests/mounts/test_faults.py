"""Unexpected exceptions in handlers: the request fails, and the mount keeps serving."""

from __future__ import annotations

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
from tests.mounts.mounting import mount_lines, until

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


# The entry that the line in the log names, other than the root
NAMED = {"lookup": "other", "readlink": "link"}
NAMED |= dict.fromkeys(("open", "read", "release", "getxattr", "listxattr"), "file")
EXCEPTIONS = {  # and the reason in the log
    "ValueError": "ValueError: (2, 'injected')", "FileNotFoundError": "[Errno 2] injected",
    "RecursionError": "RecursionError: ",
}  # fmt: skip


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Yield the mount point of a faulty daemon."""
    mountpoint = tmp_path_factory.mktemp("faults") / "mnt"
    mountpoint.mkdir()
    log = mountpoint.with_suffix(".log")
    with log.open("w") as file:
        daemon = subprocess.Popen([sys.executable, str(DAEMON), str(mountpoint)], stdout=subprocess.PIPE, stderr=file)
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


def wait_for(root: Path, fault: str, again: Callable[[], object]) -> None:
    """Repeat a call until the daemon has raised an exception."""
    raised, deadline = Path(f"{root}.raised"), time.monotonic() + 60
    while not raised.exists() or raised.read_text() != fault:
        assert time.monotonic() < deadline, f"{fault} was not raised"
        os.stat(root / "file")  # an inode for the kernel to forget
        again()
        time.sleep(0.01)


@pytest.mark.parametrize("handler", CALLS)
def test_a_handler_that_raises_fails_its_request_only(handler: str, root: Path) -> None:
    """The mount then works as before, and the log has a line with the reason."""
    call, code = CALLS[handler]
    fault, log = Path(f"{root}.fault"), root.with_suffix(".log")
    exceptions = list(EXCEPTIONS)[: None if code else 1]
    for exception in ["ReadError", *exceptions] if handler == "read" else exceptions:
        Path(f"{fault}.new").write_text(f"{handler} {exception}")
        os.replace(f"{fault}.new", fault)
        if code is None:
            # the kernel does not wait for these handlers, so the test has to
            wait_for(root, f"{handler} {exception}", functools.partial(call, root))
        else:
            with pytest.raises(OSError) as caught:  # noqa: PT011 (the errno is checked below)
                call(root)
            assert (exception, caught.value.errno) == (exception, code)
        fault.unlink()
        assert os.stat(root).st_dev != os.lstat(root.parent).st_dev
        assert sorted(os.listdir(root)) == ["file", "link", "other"]
        assert (root / "file").read_bytes() == b"content"
        assert os.readlink(root / "link") == "file"
    for exception in exceptions:
        line = rf"^{handler} {NAMED.get(handler, '/')}: {re.escape(EXCEPTIONS[exception])}.*\[EIO\]$"
        until(lambda line=line: re.search(line, log.read_text(), re.MULTILINE))  # type: ignore[misc]
    if handler == "read":
        lines = {line for line in log.read_text().splitlines() if "no luck" in line}
        assert lines == {"read file: file:///data/x: no luck [EIO]"}

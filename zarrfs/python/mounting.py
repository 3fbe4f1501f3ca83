"""mounted(): a source as a directory for the time of a with block, by a child process that ends with it."""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import re
import signal
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from zarrfs.config.keywords import as_items
from zarrfs.errors import MountError, SourceError, UsageError
from zarrfs.system import mounts
from zarrfs.system.processes import python

log = logging.getLogger(__name__)

READY = b"\n"
_ENDS = 10.0  # seconds that the child has to end after the unmount


@contextlib.contextmanager
def mounted(
    source: str | os.PathLike[str], mountpoint: str | os.PathLike[str] | None = None, **options: Any
) -> Iterator[Path]:
    """Mount `source`, give the path of its root, and unmount at the end of the block, whatever ends it.

    Without `mountpoint` a new directory in the temporary directory is used, which other users cannot enter (with
    allow_other=True they can) and which is removed. Options are those of `zarrfs mount`, as for open_store(). Lines of
    the mount's log, such as the reason of a failing read, go to the logger "zarrfs.python.mounting".

    Raises UsageError, SourceError or MountError before the block if there is no mount. Files that are still open at
    the end of the block stay readable until they are closed; the mount is gone all the same. A path that is used later
    is an error (ELOOP), not a missing file, which a Zarr reader would take for fill values. With `mountpoint` it is a
    missing file; with guard=True as well it is EACCES, except for root.

    The mount also ends when this interpreter dies.
    """
    items = as_items(options)
    if options.get("notify_pipe") is not None:
        raise UsageError("option notify_pipe: mounted() itself waits for the mount; leave it out")
    owner, private = os.getpid(), mountpoint is None
    if mountpoint is None:
        mountpoint = _new_directory(os.fspath(source), bool(options.get("allow_other")))
    place = mounts.canonical(os.fspath(mountpoint))
    request = {"source": os.fspath(source), "mountpoint": place, "items": items, "owner": owner, "private": private}
    try:
        child = _start(request)
    except BaseException:
        if private:
            with contextlib.suppress(OSError):  # empty directories: the mount may still be there, and be writable
                os.rmdir(place)
                os.rmdir(os.path.dirname(place))
        raise
    try:
        yield Path(place)
    finally:
        if os.getpid() == owner:  # not in a process that the block has forked
            _end(child, place)
            if private:
                _make_unusable(place)


def _new_directory(source: str, for_others: bool) -> str:
    """Make a directory in a new one; it has the name of the source, by which readers detect formats."""
    above = tempfile.mkdtemp(prefix="zarrfs-")
    if for_others:
        os.chmod(above, 0o755)
    name = re.sub(r"[^A-Za-z0-9._-]", "_", source.rstrip("/").rpartition("/")[2])[-100:].lstrip(".")
    place = os.path.join(above, name or "source")
    os.mkdir(place)
    return place


def _start(request: dict[str, Any]) -> subprocess.Popen[bytes]:
    """Start the child that mounts; return it once the mount answers. Raises its error, and ends it on Ctrl-C."""
    child = subprocess.Popen(
        python("zarrfs.python.mount_process"), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, start_new_session=True,  # Ctrl-C is for this process alone
    )  # fmt: skip
    assert child.stdin is not None
    assert child.stdout is not None
    assert child.stderr is not None
    threading.Thread(target=_pass_on, args=(child.stderr, child), name="zarrfs-log", daemon=True).start()
    try:
        with contextlib.suppress(BrokenPipeError), child.stdin:
            child.stdin.write(json.dumps(request).encode())
        with child.stdout:
            reply = child.stdout.read()
    except BaseException:
        child.send_signal(signal.SIGTERM)
        if not mounts.wait_for_end(child.pid, _ENDS):
            child.kill()
        with contextlib.suppress(MountError):
            mounts.clear_dead(request["mountpoint"])
        raise
    if reply == READY:
        return child
    error = json.loads(reply) if reply else {}
    if "usage" in error:
        raise UsageError(error["usage"])
    if "source" in error:
        raise SourceError(error["source"], error["rule"], error["entry"])
    place = request["mountpoint"]
    raise MountError(error.get("mount") or f"{place}: the mount ended with status {child.wait()} before it was ready")


def _pass_on(stream: IO[bytes], child: subprocess.Popen[bytes]) -> None:
    """Log what the mount writes to standard error, and take leave of the child at its end."""
    with stream:
        for line in stream:
            log.warning("%s", line.decode(errors="replace").strip().removeprefix("zarrfs: "))
    child.wait()


def _end(child: subprocess.Popen[bytes], mountpoint: str) -> None:
    """Unmount, lazily if files are open, and wait for the end of the daemon unless they are."""
    try:
        if mounts.mount_at(mountpoint) is not None:
            mounts.unmount(mountpoint)
    except MountError as exc:
        if mounts.mount_at(mountpoint) is not None:
            log.info("%s; files that are open stay readable", exc)
            mounts.unmount(mountpoint, lazy=True)
            return
    if not mounts.wait_for_end(child.pid, _ENDS):
        child.kill()
    child.wait()


_left: dict[str, int] = {}  # links of mounts that have ended, and the process that made them


def _make_unusable(place: str) -> None:
    """Put a link to itself in the place of the mount point, until this interpreter ends."""
    with contextlib.suppress(OSError):
        os.rmdir(place)
        os.symlink(os.path.basename(place), place)
        _left[place] = os.getpid()


@atexit.register
def _remove_left() -> None:
    for place, owner in _left.items():
        if owner == os.getpid():
            with contextlib.suppress(OSError):
                os.unlink(place)
                os.rmdir(os.path.dirname(place))

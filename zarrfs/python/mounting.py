"""mounted(): mount a source for the duration of a with block, in a child process that ends with the block."""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import pickle
import re
import signal
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from zarrfs.config.keywords import as_items
from zarrfs.errors import MountError
from zarrfs.system import mounts
from zarrfs.system.processes import python

log = logging.getLogger(__name__)

READY = b"\n"
_ENDS = 10.0  # seconds to wait for the child to end after the unmount


@contextlib.contextmanager
def mounted(
    source: str | os.PathLike[str], mountpoint: str | os.PathLike[str] | None = None, **options: Any
) -> Iterator[Path]:
    """Mount `source`, yield the path of its root, and unmount at the end of the block, even after an exception.

    Without `mountpoint`, a new directory in the temporary directory is used, which other users cannot enter (unless
    allow_other=True), and which is removed at the end. Options are those of `zarrfs mount`, given as keywords.
    Lines of the mount's log, such as the reason of a failed read, go to the logger "zarrfs.python.mounting".

    Raise UsageError, SourceError or MountError before the block if mounting fails. Files that are still open at the
    end of the block stay readable until they are closed, but the mount is removed from the directory tree. Using a
    path in it afterwards raises an OSError with ELOOP rather than FileNotFoundError, for which a Zarr reader would
    return fill values. That protection needs a directory made here: with `mountpoint` it is FileNotFoundError, or
    EACCES if guard=True as well, except for root.

    The mount also ends when this interpreter dies.
    """
    items = as_items(options)
    owner, private = os.getpid(), mountpoint is None
    if mountpoint is None:
        mountpoint = _new_directory(os.fspath(source), bool(options.get("allow_other")))
    place = mounts.canonical(os.fspath(mountpoint))
    request = {"source": os.fspath(source), "mountpoint": place, "items": items, "owner": owner, "private": private}
    try:
        child = _start(request)
    except BaseException:
        if private:
            with contextlib.suppress(OSError):  # only empty directories: the mount may still exist and be writable
                os.rmdir(place)
                os.rmdir(os.path.dirname(place))
        raise
    try:
        yield Path(place)
    finally:
        if os.getpid() == owner:  # not in a process forked within the block
            _end(child, place)
            if private:
                _make_unusable(place)


def _new_directory(source: str, for_others: bool) -> str:
    """Create a directory in a new temporary one, named after the source: readers detect formats by the name."""
    above = tempfile.mkdtemp(prefix="zarrfs-")
    if for_others:
        os.chmod(above, 0o755)
    name = re.sub(r"[^A-Za-z0-9._-]", "_", source.rstrip("/").rpartition("/")[2])[-100:].lstrip(".")
    place = os.path.join(above, name or "source")
    os.mkdir(place)
    return place


def _start(request: dict[str, Any]) -> subprocess.Popen[bytes]:
    """Start the child process; return it when the mount is ready. Raise its error; end it on Ctrl-C."""
    child = subprocess.Popen(
        python("zarrfs.python.mount_process"), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, start_new_session=True,  # Ctrl-C must not reach the child
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
    if reply:
        raise pickle.loads(reply)
    raise MountError(f"{request['mountpoint']}: the mount ended with status {child.wait()} before it was ready")


def _pass_on(stream: IO[bytes], child: subprocess.Popen[bytes]) -> None:
    """Log the standard error of the child, and reap the child when it ends."""
    with stream:
        for line in stream:
            log.warning("%s", line.decode(errors="replace").strip().removeprefix("zarrfs: "))
    child.wait()


def _end(child: subprocess.Popen[bytes], mountpoint: str) -> None:
    """Unmount, and wait for the end of the daemon. If files are open, unmount lazily and do not wait."""
    try:
        if mounts.mount_at(mountpoint) is not None:
            mounts.release(mountpoint)
            mounts.unmount(mountpoint)
    except MountError as exc:
        if mounts.mount_at(mountpoint) is not None:
            log.info("%s; files that are open stay readable", exc)
            mounts.unmount(mountpoint, lazy=True)
            return
    if not mounts.wait_for_end(child.pid, _ENDS):
        child.kill()
    child.wait()


_dead_links: dict[str, int] = {}  # {symbolic link in place of an ended mount: pid of the process that made it}


def _make_unusable(place: str) -> None:
    """Replace the mount point by a symbolic link to itself (ELOOP), until this interpreter ends."""
    with contextlib.suppress(OSError):
        os.rmdir(place)
        os.symlink(os.path.basename(place), place)
        _dead_links[place] = os.getpid()


@atexit.register
def _remove_dead_links() -> None:
    for place, owner in _dead_links.items():
        if owner == os.getpid():
            with contextlib.suppress(OSError):
                os.unlink(place)
                os.rmdir(os.path.dirname(place))

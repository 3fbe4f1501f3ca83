"""The mounts of a soak, which are mounted and unmounted by the zarrfs program."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tests.conftest import run
from tests.mounts.mounting import alive, daemon_pid, mount_lines

# Errors of a mount whose daemon was killed, and (ENOENT) of the empty directory below it until it is mounted again.
DEAD = (errno.ENOTCONN, errno.ECONNABORTED, errno.ENODEV, errno.ENOENT)
GRACE = 30.0  # seconds after the end of faults in which a read may still fail
_PATIENCE = 30.0  # seconds in which the last requests to a mount must have ended


class Weather:
    """The state of fault injection in the servers: active, recently active, or neither."""

    def __init__(self) -> None:
        self._stormy = False
        self._calm_since = -GRACE

    def set(self, stormy: bool) -> None:
        """Record that faults begin or end."""
        if self._stormy and not stormy:
            self._calm_since = time.monotonic()
        self._stormy = stormy

    @property
    def excuses(self) -> bool:
        """Return whether a read from a server may fail now."""
        return self._stormy or time.monotonic() - self._calm_since < GRACE


@dataclasses.dataclass
class Place:
    """One mount. `values` has the content of each file by key; `remote`: its server may inject faults."""

    name: str
    source: str
    directory: Path
    options: tuple[str, ...]
    values: Mapping[str, memoryview]
    weather: Weather
    remote: bool = False
    mortal: bool = False  # whether disturbances may unmount or kill it
    writable: bool = False
    epoch: int = 0  # incremented by unmount, kill and remount; odd in between
    logs: list[Path] = dataclasses.field(default_factory=list)
    pids: list[int] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        self.keys = list(self.values)
        self.mountpoint = self.directory / "mnt" / self.name
        self.mountpoint.mkdir(parents=True, exist_ok=True)
        self._changed = threading.Condition()
        self._users = 0
        self._alone = False

    # -- exclusion of operations and disturbances

    @contextlib.contextmanager
    def used(self) -> Iterator[None]:
        """Use the mount for one operation; wait while another thread has it alone()."""
        with self._changed:
            self._changed.wait_for(lambda: not self._alone)
            self._users += 1
        try:
            yield
        finally:
            with self._changed:
                self._users -= 1
                self._changed.notify_all()

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Have the mount exclusively: wait for operations to end, and let none begin."""
        with self._changed:
            self._changed.wait_for(lambda: not self._alone)
            self._alone = True
            self._changed.wait_for(lambda: not self._users)
        try:
            yield
        finally:
            with self._changed:
                self._alone = False
                self._changed.notify_all()

    def excuses(self, code: int | None, epoch: int) -> bool:
        """Return whether an operation that began in `epoch` may have failed with `code`."""
        if code in DEAD and (epoch != self.epoch or epoch % 2):
            return True
        return code == errno.EIO and self.remote and self.weather.excuses

    # -- the daemon

    def mount(self) -> None:
        """Mount the source, with a new log file; raise RuntimeError with the program's message if it fails."""
        log = self.directory / "logs" / f"{self.name}.{len(self.logs)}.log"
        log.parent.mkdir(exist_ok=True)
        arguments = [part for option in self.options for part in ("-o", option)]
        done = run("mount", self.source, self.mountpoint, "-o", f"log_file={log}", *arguments)
        if done.returncode:
            raise RuntimeError(f"{self.name}: mount: status {done.returncode}: {done.stderr.strip()}")
        self.logs.append(log)
        self.pids.append(daemon_pid(self.mountpoint))
        self.epoch += self.epoch % 2

    def unmount(self) -> None:
        """Unmount it, and wait for its daemon to exit; retry while the last requests of readers keep it in use."""
        deadline = time.monotonic() + _PATIENCE
        while (done := run("umount", self.mountpoint)).returncode and "but its daemon" not in done.stderr:
            if "in use" not in done.stderr or time.monotonic() > deadline:
                raise RuntimeError(f"{self.name}: umount: status {done.returncode}: {done.stderr.strip()}")
            time.sleep(0.1)
        self.epoch += 1
        while alive(self.pids[-1]) and time.monotonic() < deadline + _PATIENCE:  # zarrfs umount waits ten seconds
            time.sleep(0.01)
        if mount_lines(self.mountpoint) or alive(self.pids[-1]):
            raise RuntimeError(f"{self.name}: umount has left a mount or its daemon {self.pids[-1]}")

    def kill(self, program: str) -> None:
        """Kill the daemon with SIGKILL, then unmount with `program`; with "", the next mount() has to."""
        self.epoch += 1
        os.kill(self.pids[-1], signal.SIGKILL)
        while alive(self.pids[-1]):
            time.sleep(0.01)
        if not program:
            return
        deadline = time.monotonic() + _PATIENCE
        while (done := self._clean(program)).returncode:  # readers keep it in use until their calls have failed
            if time.monotonic() > deadline:
                raise RuntimeError(f"{self.name}: {program} does not clean a dead mount: {done.stderr.strip()}")
            time.sleep(0.1)

    def _clean(self, program: str) -> subprocess.CompletedProcess[str]:
        if program == "zarrfs":
            return run("umount", self.mountpoint)
        return subprocess.run(
            ["fusermount3", "-u", str(self.mountpoint)], capture_output=True, text=True, timeout=60, check=False
        )

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the daemon."""
        os.kill(self.pids[-1], number)

    def stats(self) -> dict[str, Any]:
        """Return the statistics of the daemon."""
        return dict(json.loads(os.getxattr(self.mountpoint, "user.zarrfs.stats")))

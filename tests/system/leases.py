"""A process that holds a lease on a file, and releases it soon after another process opens it (fcntl_locking(2))."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

_HOLDS = """
import fcntl, os, signal, sys, time
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGIO])
file = os.open(sys.argv[1], os.O_RDWR)
try:
    fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_WRLCK)
except OSError as exc:
    sys.exit(f"no leases here: {exc}")
print("held", flush=True)
signal.sigwait([signal.SIGIO])
time.sleep(0.1)
fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_UNLCK)
"""


@contextlib.contextmanager
def leased(path: Path) -> Iterator[None]:
    with subprocess.Popen(
        [sys.executable, "-c", _HOLDS, path], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        assert holder.stderr is not None
        try:
            if holder.stdout.readline() != "held\n":
                pytest.skip(holder.stderr.read())
            yield
        finally:
            holder.kill()

"""The child processes of the tests that decode for them (system/bounded.py)."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from zarrfs.system.processes import children


def decoders() -> list[int]:
    """Return their process ids."""
    return [child for child in children() if b"bounded.serve" in Path(f"/proc/{child}/cmdline").read_bytes()]


def kill_decoders() -> None:
    """Kill them, and wait until they have ended."""
    for child in decoders():
        os.kill(child, signal.SIGKILL)
        os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)

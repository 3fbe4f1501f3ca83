"""A mount command that gets a signal after its daemon has mounted (or with -f, itself), before that is ready.

interrupted_mount.py SIGNAL FILE PROGRAM ARGUMENT...; the daemon writes its pid to FILE.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

from zarrfs.cli import main, mount_helper
from zarrfs.system import fusemount

attach = fusemount.attach
number, pids, command = signal.Signals[sys.argv[1]], Path(sys.argv[2]), os.getpid()


def mount_and_signal(*arguments: Any) -> int:
    device = attach(*arguments)
    pids.write_text(str(os.getpid()))
    os.kill(command, number)
    return device


if __name__ == "__main__":
    fusemount.attach = mount_and_signal
    del sys.argv[:3]
    sys.exit(mount_helper.main() if sys.argv[0] == "mount.zarrfs" else main(prog_name="zarrfs"))

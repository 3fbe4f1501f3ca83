"""zarrfs in the foreground that gets a signal after it has mounted, before it serves requests.

early_signal.py SIGNAL SOURCE MOUNTPOINT
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

from zarrfs.cli.common import report_errors
from zarrfs.config.options import parse
from zarrfs.daemon import session
from zarrfs.system import fusemount

attach = fusemount.attach


def mount_and_signal(*arguments: Any) -> int:
    device = attach(*arguments)
    os.kill(os.getpid(), signal.Signals[sys.argv[1]])
    return device


if __name__ == "__main__":
    fusemount.attach = mount_and_signal
    with report_errors():
        session.mount(sys.argv[2], sys.argv[3], parse(["foreground"]))

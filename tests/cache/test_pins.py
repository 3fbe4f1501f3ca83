"""The pinned versions of targets, which the loop and the threads that read the disk decide together."""

from __future__ import annotations

import sys
import threading
from typing import cast

from zarrfs.cache.block_request import BlockRequest
from zarrfs.cache.pins import Pins
from zarrfs.config.options import Options
from zarrfs.net.http import HttpSystem
from zarrfs.net.reach import Trust
from zarrfs.net.request_queue import RequestQueue
from zarrfs.net.responses import Fetched
from zarrfs.net.versions import Pin

TARGETS = 4000


def test_a_thread_and_the_loop_never_use_two_versions_of_a_target() -> None:
    """A thread finds version 1 on the disk while version 2 comes from the server: one of them learns of the other."""
    system = HttpSystem(Options(), Trust(Options()))
    pins = Pins(cast("RequestQueue", None), lambda target: None)
    wanted = [BlockRequest(system, f"http://127.0.0.1/{number}", 0, 10) for number in range(TARGETS)]
    together, unnoticed = threading.Barrier(2), []

    def read_disk() -> None:
        for one in wanted:
            together.wait()
            changes = pins.changes
            found = pins.put(one.at, Pin('"1"', 10, certain=False))
            together.wait()
            if found.tag == '"1"' and pins.changes == changes:
                unnoticed.append(one)
            together.wait()

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        thread = threading.Thread(target=read_disk)
        thread.start()
        for one in wanted:
            together.wait()
            pins.check(one, Fetched(b"x" * 10, '"2"', 10))
            together.wait()
            together.wait()
        thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert not unnoticed

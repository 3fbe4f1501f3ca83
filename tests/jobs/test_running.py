"""Processes that a command leaves behind."""

from __future__ import annotations

import subprocess

from tests.jobs.staged import add_record
from zarrfs.jobs import processes, running


def test_an_earlier_child_is_not_waited_for(sleeper: subprocess.Popen[bytes]) -> None:
    left = running._find_left(add_record(), processes.children())
    assert left() == []
    with subprocess.Popen(["sleep", "100"]) as new:
        assert [who.pid for who in left()] == [new.pid]
        new.kill()

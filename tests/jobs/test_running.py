"""Processes that a command leaves behind."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator

import pytest

from tests.jobs.staged import add_record
from zarrfs.jobs import processes, running


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    """A child of this process: as one of a shell that has become zarrfs by exec."""
    child = subprocess.Popen(["sleep", "100"])
    yield child
    child.kill()
    child.wait()


def test_an_earlier_child_is_not_waited_for(sleeper: subprocess.Popen[bytes]) -> None:
    left = running._find_left(add_record(), processes.children())
    assert left() == []
    with subprocess.Popen(["sleep", "100"]) as new:
        assert [who.pid for who in left()] == [new.pid]
        new.kill()

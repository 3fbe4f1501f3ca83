"""Staging as a mount: cleaning up after a failure."""

from __future__ import annotations

import subprocess

import pytest

from tests.jobs.staged import add_record
from zarrfs.errors import MountError
from zarrfs.jobs import stagein


def test_an_earlier_child_is_not_killed(sleeper: subprocess.Popen[bytes]) -> None:
    new: list[subprocess.Popen[bytes]] = []

    def fail() -> None:
        with stagein.undone_on_failure(add_record()):
            new.append(subprocess.Popen(["sleep", "100"]))
            raise MountError("failed")

    with pytest.raises(MountError, match="failed"):
        fail()
    assert new[0].wait(60) < 0
    assert sleeper.poll() is None

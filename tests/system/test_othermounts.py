"""OtherMounts: the zarrfs mounts that a process sees."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from zarrfs.system import othermounts
from zarrfs.system.othermounts import OtherMounts

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system")


def test_a_forked_process_sees_a_mount_that_its_parent_has_seen_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel reports a change of the mount table once per open file, which a fork shares with its parent."""
    monkeypatch.setattr(othermounts, "_FSTYPE", b"tmpfs")
    others, (wait, go) = OtherMounts(), os.pipe()
    others.device = 1
    others.present()  # opens the table
    child = os.fork()
    if not child:
        found = False
        try:
            others.forked()
            others.present()
            os.read(wait, 1)
            found = others.device_of(os.open(tmp_path, os.O_PATH)) is not None
        finally:
            os._exit(0 if found else 1)
    subprocess.run(["mount", "-t", "tmpfs", "none", tmp_path], check=True)
    try:
        assert others.device_of(os.open(tmp_path, os.O_PATH)) == tmp_path.stat().st_dev
        os.write(go, b"x")
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    finally:
        subprocess.run(["umount", "-l", tmp_path], check=True)

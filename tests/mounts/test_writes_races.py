"""Changes to a file during its copy up, and the times of written files."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import threading
import time
from pathlib import Path

from tests.mounts.mounting import daemon_pid, mounted
from tests.mounts.remotevalues import wait_for
from tests.servers import Nginx, nginx

__all__ = ["nginx"]


def test_a_file_that_takes_the_name_during_a_copy_up_is_kept(nginx: Nginx, tmp_path: Path) -> None:
    """A reader of the old file reads the old bytes, or gets an error."""
    data = os.urandom(48 << 20)
    (nginx.late.root / "copied.bin").write_bytes(data)
    refs = {"big": [f"{nginx.late.url}/copied.bin", 0, len(data)], "small": "text"}
    (tmp_path / "refs.json").write_text(json.dumps({"version": 1, "refs": refs}))
    (tmp_path / "upper").mkdir()
    options = f"upperdir={tmp_path}/upper,memory_limit=64MiB,prefetch=0B"
    with mounted(tmp_path / "refs.json", tmp_path / "mnt", options) as root:
        reader = os.open(root / "big", os.O_RDONLY)
        outcomes: list[int] = []

        def write() -> None:
            try:
                os.close(os.open(root / "big", os.O_RDWR))
                outcomes.append(0)
            except OSError as exc:
                outcomes.append(exc.errno or 0)

        writer = threading.Thread(target=write)
        writer.start()

        def copying() -> bool:
            """Return whether the daemon has a file without a name open in the upper directory."""
            for path in Path(f"/proc/{daemon_pid(root)}/fd").iterdir():
                with contextlib.suppress(OSError):
                    if (target := os.readlink(path)).startswith(f"{tmp_path}/upper/") and target.endswith("(deleted)"):
                        return True
            return False

        wait_for(lambda: copying() or bool(outcomes))  # a slow test may miss the copy
        (root / "tmp").write_bytes(b"another")
        (root / "tmp").rename(root / "big")
        writer.join()
        assert outcomes in ([0], [errno.ESTALE], [errno.ENOENT])
        assert os.stat(root / "big").st_size == 7
        assert (root / "big").read_bytes() == b"another"
        with open(root / "big", "ab") as file:
            file.write(b" one")
        assert (root / "big").read_bytes() == b"another one"
        for at in (0, 20 << 20, len(data) - 4096):
            with contextlib.suppress(OSError):
                assert os.pread(reader, 4096, at) == data[at : at + 4096]
        os.close(reader)
    with mounted(tmp_path / "refs.json", tmp_path / "mnt", options) as root:
        assert (root / "big").read_bytes() == b"another one"


def test_times_are_the_same_after_a_remount(tmp_path: Path) -> None:
    """This holds also with the kernel's writeback cache, which writes later than the program."""
    (tmp_path / "refs.json").write_text(json.dumps({"version": 1, "refs": {"a": "text"}}))
    (tmp_path / "upper").mkdir()
    seen = {}
    with mounted(tmp_path / "refs.json", tmp_path / "mnt", f"upperdir={tmp_path}/upper") as root:
        for number in range(5):
            descriptor = os.open(root / f"new{number}", os.O_CREAT | os.O_WRONLY)
            os.write(descriptor, b"x" * 5000)
            time.sleep(0.1)
            os.close(descriptor)
        with open(root / "a", "ab") as file:
            file.write(b" and more")
        (root / "new0").rename(root / "renamed")
        for path in root.iterdir():
            seen[path.name] = path.stat().st_mtime_ns
    with mounted(tmp_path / "refs.json", tmp_path / "mnt", f"upperdir={tmp_path}/upper") as root:
        assert {path.name: path.stat().st_mtime_ns for path in root.iterdir()} == seen

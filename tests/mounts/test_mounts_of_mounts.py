"""Reference sets in, and with targets in, other zarrfs mounts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path

from tests.conftest import run
from tests.mounts.mounting import daemon_pid, mounted, until
from tests.mounts.test_semantics import document


def test_a_document_in_a_mount_is_read_again_after_the_mount_is_replaced(tmp_path: Path) -> None:
    """The two documents have the same inode number, size, mtime and ctime."""
    for value in "AAAA", "BBBB":
        entry = {"mode": 0o100644, "mtime": 1_000_000_000, "encoding": "utf-8", "data": json.dumps({"k": value})}
        (tmp_path / "archive.json").write_text(json.dumps({"refs.json": entry}))
        with mounted(tmp_path / "archive.json", tmp_path / "m"):
            assert run("cat", tmp_path / "m/refs.json", "k").stdout == value


def test_signals_are_handled_while_reads_from_a_dead_file_server_take_all_threads(tmp_path: Path) -> None:
    (tmp_path / "data").write_bytes(b"x" * 1000)
    names = [f"v{number}" for number in range(60)]
    served = document(tmp_path, {name: [str(tmp_path / "data"), 0, 9] for name in names}, "dead.json")
    with mounted(served, tmp_path / "dead") as dead:
        reading = document(tmp_path, {name: [str(dead / name), 0, 9] for name in names}, "reader.json")
        with mounted(reading, tmp_path / "reader") as reader:
            pid, stopped = daemon_pid(reader), daemon_pid(dead)
            for name in names:
                (dead / name).stat()  # the kernel need not look it up again
            os.kill(stopped, signal.SIGSTOP)
            try:
                waiting = [subprocess.Popen(["cat", reader / name], stdout=subprocess.DEVNULL) for name in names]
                time.sleep(2)
                for number, words in (signal.SIGUSR1, "statistics: "), (signal.SIGTERM, "cannot unmount: in use by"):
                    os.kill(pid, number)
                    until(lambda words=words: words in (tmp_path / "reader.log").read_text())  # type: ignore[misc]
            finally:
                os.kill(stopped, signal.SIGCONT)
            assert [each.wait(60) for each in waiting] == [0] * len(waiting)

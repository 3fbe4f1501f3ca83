"""Mounts of Icechunk repositories: values, errors, refreshes; and the transcript in docs/sources.md."""

from __future__ import annotations

import functools
import http.server
import os
import shutil
import subprocess
import threading
import time
from pathlib import Path

from tests.conftest import DATA, PROGRAM


def test_a_snapshot_is_compiled_once_by_all_processes_that_need_it(tmp_path: Path) -> None:
    shutil.copytree(DATA / "icechunk/format2", tmp_path / "repo")
    asked: list[str] = []

    class Slow(http.server.SimpleHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            time.sleep(1 if "/manifests/" in self.path else 0)
            super().do_GET()

        def list_directory(self, path: object) -> None:  # type: ignore[override]
            self.send_error(403)

        def log_message(self, *_: object) -> None:
            pass

    clients, environment = 4, {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Slow, directory=tmp_path)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        command = [PROGRAM, "ls", f"http://127.0.0.1:{server.server_port}/repo"]
        started = [subprocess.Popen(command, stdout=subprocess.DEVNULL, env=environment) for _ in range(clients)]
        assert [one.wait(120) for one in started] == [0] * clients
        server.shutdown()
    assert asked.count("/repo/repo") == clients
    manifests = [path for path in asked if "/manifests/" in path]
    assert manifests
    assert len(manifests) == len(set(manifests))
